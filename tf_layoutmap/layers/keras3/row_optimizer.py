"""Trains the rows of a table that a step has looked up, and no others."""

# DOC-MERGE: What weights with a `RowOptimizer` have in common, on host and mesh.
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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

    The gradients of equal ids are summed first, in the order of the ids; then
    each row that was looked up takes one step of the rule, in one native op.
    Neither depends on how many rows the table has.

    It is a Keras optimizer so that its learning rate, step count and slot
    variables are set, scheduled and saved as usual:

    >>> import tf_layoutmap as tlm
    >>> layer = tlm.layers.ShardedEmbedding(10, 2, optimizer="adagrad")
    >>> layer.optimizer.learning_rate = 0.5
    >>> float(layer.optimizer.learning_rate)
    0.5

    It trains its own table only, and cannot be given to `compile`.
    """

    _keras = keras

    def __init__(self, spec: OptimizerSpec, *, name: str | None = None):
        """Takes a rule; `ShardedEmbedding` makes it from its argument.

        Args:
          spec: The rule. Its learning rate may be a
            `keras.optimizers.schedules.LearningRateSchedule` as well.
          name: Name of the optimizer.
        """
        super().__init__(
            learning_rate=spec.learning_rate, name=name or f"row_{spec.name}"
        )
        self._spec = spec

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Refused, as `build`."""
        self.build(trainable_variables)

    def _scalars(self) -> list[keras.Variable]:
        # Keras lists slot variables of a mesh with them, others not.
        slots = self.slots.values()
        return [
            variable
            for variable in self.variables
            if not any(variable is slot for slot in slots)
        ]

    def _rate_config(self) -> Any:
        return keras.optimizers.Optimizer.get_config(self)["learning_rate"]


class TakesGradients:
    """A mixin for a `keras.Variable` whose gradient comes to its `assign`.

    That is so for all with `overwrite_with_gradient`; gradients of these are
    gradients, and are missed where there are none.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        engine.ensure("keras3_self_training")
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
        optimizer = keras_private.applying_optimizer()
        if optimizer is None:
            return self._write(value)
        scale = optimizer.loss_scale_factor
        self._optimizer.update(
            value if scale is None else _divide(value, scale)
        )
        return value

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return base_steps.missing_gradient_message(self.path, ())

    def accumulate(self, gradient: Any, steps: int, is_last: Any) -> None:
        """Takes one of `steps` gradients; a step with their mean at the last.

        Args:
          gradient: Of the table.
          steps: The model's `gradient_accumulation_steps`.
          is_last: `[]` bool.
        """
        optimizer = keras_private.applying_optimizer()
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
