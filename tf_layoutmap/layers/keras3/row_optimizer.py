"""`RowOptimizer` for Keras 3. A step trains only the rows in its gradient.

`TakesGradients` and `TrainsItself` are mixins for weights that get gradients
from the model's optimizer. The functions at the end of the module are patches
of Keras' optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import tensorflow as tf

from tf_layoutmap._core import accumulation, keras_private
from tf_layoutmap._patches import engine
from tf_layoutmap.embedding.spec.optimizer_specs import OptimizerSpec
from tf_layoutmap.layers.base import steps as base_steps
from tf_layoutmap.layers.base.row_optimizer import RowUpdates


@keras.saving.register_keras_serializable("tf_layoutmap")
class RowOptimizer(RowUpdates, keras.optimizers.Optimizer):
    """The optimizer of a `ShardedEmbedding` for the table of the layer.

    One native op sums the gradients of equal ids in the order of the ids, then
    applies one optimizer step to each row that was looked up. The duration of
    this op does not depend on the number of rows in the table.

    `RowOptimizer` is a Keras optimizer. The learning rate can be set or
    scheduled as in other Keras optimizers, and the variables are saved in the
    same way:

    >>> import tf_layoutmap as tlm
    >>> layer = tlm.layers.ShardedEmbedding(10, 2, optimizer="adagrad")
    >>> layer.optimizer.learning_rate = 0.5
    >>> float(layer.optimizer.learning_rate)
    0.5

    A `RowOptimizer` trains only the table of its layer, and must not be passed
    to `compile`.
    """

    _keras = keras

    def __init__(self, spec: OptimizerSpec, *, name: str | None = None):
        """Creates the optimizer. Only `ShardedEmbedding` calls this method.

        Args:
          spec: The rule. The learning rate may also be a
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
        # `variables` contains the slot variables only if the table is on a
        # mesh.
        slots = self.slots.values()
        return [
            variable
            for variable in self.variables
            if not any(variable is slot for slot in slots)
        ]

    def _rate_config(self) -> Any:
        return keras.optimizers.Optimizer.get_config(self)["learning_rate"]


class TakesGradients:
    """A mixin for a `keras.Variable` that gets its gradient through `assign`.

    Keras passes gradients to `assign` if `overwrite_with_gradient` is true. In
    Keras, the value passed to `assign` then replaces the value of the variable.
    In this class, the value is an ordinary gradient, and a missing gradient
    raises an error.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        engine.ensure("keras3_self_training")
        super().__init__(*args, **kwargs)

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        raise NotImplementedError

    def check_accumulation(self, optimizer: Any) -> None:
        """Raises an error if accumulated gradients are not supported."""


class TrainsItself(TakesGradients):
    """A mixin for a `keras.Variable` that a `RowOptimizer` trains.

    The class of the variable must define `_optimizer`, the `RowOptimizer`, and
    `_write`, a method that assigns a value. `overwrite_with_gradient` is true.
    The model's optimizer therefore creates no slot variables for the weight,
    and passes the gradient to `assign` in `apply`. This gradient is the sum
    over all calls of the layer in the step. The weight is not trained by
    predictions, or by gradients that are computed and not applied.
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
        """Assigns a value, or applies a gradient in `Optimizer.apply`."""
        optimizer = keras_private.applying_optimizer()
        if optimizer is None:
            return self._write(value)
        check_not_stateless(self.path)
        scale = optimizer.loss_scale_factor
        self._optimizer.update(unscaled(value, scale))
        return value

    def num_slot_bytes(self, local_shape: Sequence[int]) -> int:
        """Returns the bytes of the slot variables of a shard of the table.

        Args:
          local_shape: Number of rows of the shard, and the size of a row.
        """
        rows, dim = local_shape
        slots = self._optimizer._spec.slots
        return 4 * rows * sum(slot.dim(dim) for slot in slots)

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return base_steps.missing_gradient_message(self.path, ())

    def accumulate(
        self, gradient: Any, steps: int, is_last: Any, position: Any
    ) -> None:
        """Accumulates a gradient; applies the mean after the last gradient.

        Args:
          gradient: Gradient of the table.
          steps: The model's `gradient_accumulation_steps`.
          is_last: A bool or a `[]` bool tensor: whether this is the last of
            `steps` gradients.
          position: `[]` integer tensor, number of earlier gradients of these
            `steps`; None on parameter servers.
        """
        optimizer = keras_private.applying_optimizer()
        assert optimizer is not None  # An optimizer calls this method.
        scale = optimizer.loss_scale_factor
        self._optimizer.accumulate(
            unscaled(gradient, scale), steps, is_last, position
        )


def check_not_stateless(path: str) -> None:
    """Raises an error in a `StatelessScope`, which must change no variable."""
    if keras_private.in_stateless_scope():
        raise NotImplementedError(
            "An optimizer must not be applied in a keras.StatelessScope if a "
            "table trains itself, because the table is updated in place; apply "
            f"the gradients outside of the scope. Received: weight {path!r}."
        )


def unscaled(gradient: Any, scale: float | None) -> Any:
    """Divides a gradient by a loss scale, if there is one."""
    if scale is None:
        return gradient
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient / scale
    return tf.IndexedSlices(
        gradient.values / scale, gradient.indices, gradient.dense_shape
    )


def overwrites(
    original: Callable[..., Any], optimizer: Any, variable: Any
) -> bool:
    """Returns whether `overwrite_with_gradient` has Keras' meaning.

    If the function returns True, `LossScaleOptimizer` treats the gradient as a
    new value of the variable, and does not remove the loss scale. The result is
    False for `TakesGradients`, which requires an ordinary gradient.
    """
    return not isinstance(variable, TakesGradients) and (
        original(optimizer, variable)
    )


def check_finite(
    original: Callable[..., Any], optimizer: Any, grads: Any
) -> Any:
    """Checks only the values of `tf.IndexedSlices`, without a dense copy."""
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
    """Raises `ValueError` if a table has no gradient in a step.

    Keras itself skips a variable without a gradient, and does not always print
    a warning.
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
    """Creates a scalar instead of a gradient accumulator for a table."""
    if not isinstance(reference_variable, TakesGradients):
        return original(optimizer, reference_variable, *args, **kwargs)
    # Optimizers require one variable per weight. This variable is never used.
    return optimizer.add_variable((), name="unused")


def overwrite_or_accumulate(
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    """Passes gradients to tables. The tables accumulate the gradients.

    Without this patch, Keras would use only the largest of several gradients.
    """
    steps = optimizer.gradient_accumulation_steps
    if steps:
        is_last = accumulation.fixed_value()
        position = None
        if is_last is None:
            counter = keras_private.step_counter_of(optimizer)
            is_last = tf.equal((counter.value + 1) % steps, 0)
            position = counter.value % steps
        rest = []
        for gradient, variable in zip(grads, trainable_variables):
            if isinstance(variable, TrainsItself):
                variable.accumulate(gradient, steps, is_last, position)
                continue
            if isinstance(variable, TakesGradients):
                variable.check_accumulation(optimizer)
            rest.append((gradient, variable))
        grads, trainable_variables = map(list, zip(*rest)) if rest else ([], [])
    return original(optimizer, grads, trainable_variables)
