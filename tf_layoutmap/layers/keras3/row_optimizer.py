"""`RowOptimizer` for Keras 3, which trains only the rows of a step.

`TakesGradients` and `TrainsItself` are the mixins of its weights, on host and
mesh. The functions at the end are patches of Keras' optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap._patches import engine
from tf_layoutmap.embedding.spec.optimizer_specs import OptimizerSpec
from tf_layoutmap.layers.base import steps as base_steps
from tf_layoutmap.layers.base.row_optimizer import RowUpdates


@keras.saving.register_keras_serializable("tf_layoutmap")
class RowOptimizer(RowUpdates, keras.optimizers.Optimizer):
    """The optimizer inside a `ShardedEmbedding`.

    It sums the gradients of equal ids in the order of the ids, then applies
    one step of the rule to each row that was looked up, in one native op. The
    time for the sum and for the step does not depend on the number of rows of
    the table.

    It is a Keras optimizer so that its learning rate, step count and slot
    variables are set, scheduled and saved as usual:

    >>> import tf_layoutmap as tlm
    >>> layer = tlm.layers.ShardedEmbedding(10, 2, optimizer="adagrad")
    >>> layer.optimizer.learning_rate = 0.5
    >>> float(layer.optimizer.learning_rate)
    0.5

    It trains its table only, and must not be passed to `compile`.
    """

    _keras = keras

    def __init__(self, spec: OptimizerSpec, *, name: str | None = None):
        """Creates the optimizer; `ShardedEmbedding` calls this.

        Args:
          spec: The rule. Its learning rate may also be a
            `keras.optimizers.schedules.LearningRateSchedule`.
          name: Name of the optimizer.
        """
        super().__init__(
            learning_rate=spec.learning_rate, name=name or f"row_{spec.name}"
        )
        self._spec = spec

    def apply(
        self, grads: object, trainable_variables: object = None
    ) -> NoReturn:
        """Raises `RuntimeError`, like `build`."""
        self.build(trainable_variables)

    def _scalars(self) -> list[keras.Variable]:
        # `variables` contains slot variables on a mesh, but no others.
        slots = self.slots.values()
        return [
            variable
            for variable in self.variables
            if not any(variable is slot for slot in slots)
        ]

    def _rate_config(self) -> Any:
        return keras.optimizers.Optimizer.get_config(self)["learning_rate"]


class TakesGradients:
    """A mixin for a `keras.Variable` that gets its gradient by `assign`.

    Keras passes gradients to `assign` if `overwrite_with_gradient` is true. In
    Keras, such a value replaces the variable. In this class it is a real
    gradient, and a missing gradient is an error.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        engine.ensure("keras3_self_training")
        super().__init__(*args, **kwargs)

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        raise NotImplementedError


class TrainsItself(TakesGradients):
    """A mixin for a `keras.Variable` with an `_optimizer` and a `_write`.

    Because of `overwrite_with_gradient`, the model's optimizer passes the
    gradient to `assign` inside its `apply` and creates no slot variables. At
    that time, the tape has already joined the gradients of all calls of the
    step. Predicting, or only computing gradients, trains nothing.
    """

    _optimizer: Any

    if TYPE_CHECKING:
        path: str

        def _write(self, value: Any) -> Any: ...

    @property
    def overwrite_with_gradient(self) -> bool:
        """True, so that an optimizer's `apply` passes gradients to `assign`."""
        return True

    def assign(self, value: Any) -> Any:
        """Applies a gradient inside an optimizer's `apply`, else writes."""
        optimizer = keras_private.applying_optimizer()
        if optimizer is None:
            return self._write(value)
        scale = optimizer.loss_scale_factor
        self._optimizer.update(
            value if scale is None else _divide(value, scale)
        )
        return value

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return base_steps.missing_gradient_message(self.path, ())

    def accumulate(self, gradient: Any, steps: int, is_last: Any) -> None:
        """Accumulates a gradient; with the last one applies the mean.

        Args:
          gradient: Gradient of the table.
          steps: The model's `gradient_accumulation_steps`.
          is_last: `[]` bool: whether this is the last of `steps` gradients.
        """
        optimizer = keras_private.applying_optimizer()
        assert optimizer is not None  # An optimizer calls this method.
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
    """Returns whether the loss scale is kept in a variable's gradient.

    `LossScaleOptimizer` treats the gradient of a variable with
    `overwrite_with_gradient` as a new value, and does not unscale it.
    """
    return not isinstance(variable, TakesGradients) and (
        original(optimizer, variable)
    )


def check_finite(
    original: Callable[..., Any], optimizer: Any, grads: Any
) -> Any:
    """Checks for NaN in the values of slices, without a dense copy."""
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
    """Raises `ValueError` for a step without a gradient for a table.

    Keras skips such a variable, with a warning at most.
    """
    grads, variables = list(grads), list(trainable_variables)
    for gradient, variable in zip(grads, variables):
        if gradient is None and isinstance(variable, TakesGradients):
            raise ValueError(variable.missing_gradient_error())
    return original(optimizer, grads, variables)


def add_variable(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Creates no gradient accumulator of the size of a table."""
    if not isinstance(reference_variable, TrainsItself):
        return original(optimizer, reference_variable, *args, **kwargs)
    # Optimizers require one variable per weight. This one is never used.
    return optimizer.add_variable((), name="unused")


def overwrite_or_accumulate(
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    """Passes gradients to tables, which accumulate them.

    Keras would keep the largest of several gradients.
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
