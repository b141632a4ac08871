"""What weights with a `RowOptimizer` have in common, on host and mesh."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap._patches import engine as patches
from tf_layoutmap.layers.steps import missing_gradients


class TakesGradients:
    """A mixin for a `keras.Variable` whose gradient comes to its `assign`.

    That is so for all with `overwrite_with_gradient`; gradients of these are
    gradients, and are missed where there are none.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        patches.ensure("keras3_self_training")
        super().__init__(*args, **kwargs)

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        raise NotImplementedError


class TrainsItself(TakesGradients):
    """A mixin for a `keras.Variable` with an `_optimizer` and a `_write`.

    The model's optimizer hands over the gradient inside its `apply`, because
    of `overwrite_with_gradient`, and makes no slot variables. By then the tape
    has joined the gradients of all calls of the step, and the step is really
    taken: nothing trains while one only predicts, or looks at gradients.
    """

    _optimizer: Any

    if TYPE_CHECKING:
        path: str

        def _write(self, value: Any) -> Any: ...

    @property
    def overwrite_with_gradient(self) -> bool:
        """True: gradients come to `assign`, inside an optimizer's `apply`."""
        return True

    def assign(self, value: Any) -> Any:
        """Takes a step inside an optimizer's `apply`; else writes `value`."""
        optimizer = _keras_private.applying_optimizer()
        if optimizer is None:
            return self._write(value)
        scale = optimizer.loss_scale_factor
        self._optimizer.update(
            value if scale is None else _divide(value, scale)
        )
        return value

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return missing_gradients.message(self.path, ())

    def accumulate(self, gradient: Any, steps: int, is_last: Any) -> None:
        """Takes one of `steps` gradients; a step with their mean at the last.

        Args:
          gradient: Of the table.
          steps: The model's `gradient_accumulation_steps`.
          is_last: `[]` bool.
        """
        optimizer = _keras_private.applying_optimizer()
        assert optimizer is not None  # It is what calls.
        scale = optimizer.loss_scale_factor
        self._optimizer.accumulate(
            gradient if scale is None else _divide(gradient, scale),
            steps,
            is_last,
        )


def _divide(gradient: Any, divisor: float) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient / divisor
    return tf.IndexedSlices(
        gradient.values / divisor, gradient.indices, gradient.dense_shape
    )


def overwrites(
    original: Callable[..., Any], optimizer: Any, variable: Any
) -> bool:
    """Whether a loss scale stays in what a variable receives.

    `LossScaleOptimizer` takes what a variable with `overwrite_with_gradient`
    receives for a value.
    """
    return not isinstance(variable, TakesGradients) and (
        original(optimizer, variable)
    )


def check_finite(
    original: Callable[..., Any], optimizer: Any, grads: Any
) -> Any:
    """Looks for NaN in slices as they are, not in all of their variable."""
    return original(
        optimizer,
        [
            grad.values if isinstance(grad, tf.IndexedSlices) else grad
            for grad in grads
        ],
    )


def filter_empty(
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    """Refuses a step without a gradient for a table.

    Keras leaves it out, with a warning at most.
    """
    grads, variables = list(grads), list(trainable_variables)
    for gradient, variable in zip(grads, variables):
        if gradient is None and isinstance(variable, TakesGradients):
            raise ValueError(variable.missing_gradient())
    return original(optimizer, grads, variables)


def add_variable(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes no accumulator of gradients as large as a table."""
    if not isinstance(reference_variable, TrainsItself):
        return original(optimizer, reference_variable, *args, **kwargs)
    # Optimizers count on one variable per weight. It is never used.
    return optimizer.add_variable((), name="unused")


def overwrite_or_accumulate(
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    """Leaves the gradients that an optimizer accumulates to a table itself.

    Keras would keep the largest of several.
    """
    steps = optimizer.gradient_accumulation_steps
    if steps:
        is_last = tf.equal((optimizer._iterations.value + 1) % steps, 0)
        rest = []
        for gradient, variable in zip(grads, trainable_variables):
            if isinstance(variable, TrainsItself):
                variable.accumulate(gradient, steps, is_last)
            else:
                rest.append((gradient, variable))
        grads, trainable_variables = map(list, zip(*rest)) if rest else ([], [])
    return original(optimizer, grads, trainable_variables)
