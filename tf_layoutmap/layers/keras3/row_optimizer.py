"""`RowOptimizer` for Keras 3. A step trains only the rows in its gradient.

`TakesGradients` and `TrainsItself` are mixins for weights that get gradients
from the model's optimizer. The functions at the end of the module are patches
of Keras' optimizers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import tensorflow as tf

from tf_layoutmap._core import accumulation, keras_private, patches
from tf_layoutmap.embedding.configs.optimizer_specs import OptimizerSpec
from tf_layoutmap.layers.base import (
    mark_weights,
    model_optimizer,
    replica_steps,
)
from tf_layoutmap.layers.base.model_optimizer import FollowsModel, ModelStep
from tf_layoutmap.layers.base.row_optimizer import RowUpdates
from tf_layoutmap.layers.base.tables import HOST


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
    >>> import tensorflow as tf
    >>> layer = tlm.layers.ShardedEmbedding(
    ...     10, 2, optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
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

    @classmethod
    def _new_follower(cls) -> ModelRowOptimizer:
        """Returns an optimizer that follows the optimizer of a model."""
        return ModelRowOptimizer()


class ModelRowOptimizer(FollowsModel, RowOptimizer):
    """The optimizer of a table with `optimizer="model"`.

    The table is trained with the rule of the optimizer that is passed to
    `compile`, or that a custom training loop applies: with its
    hyperparameters, learning rate, weight decay and clipping. Only rows that a
    step looks up are updated.
    """

    def _uses_weight_decay(self, optimizer: Any) -> bool:
        return keras_private.uses_weight_decay(optimizer, self._table.variable)

    def _slot_device(self) -> contextlib.AbstractContextManager[Any]:
        return (
            tf.device(HOST)
            if self._table.has_slots_on_host
            else contextlib.nullcontext()
        )


# Results of `attributes_without_state`, by kind of object.
_without_state: dict[str, Any] = {}


def attributes_without_state(original: Callable[..., Any], kind: str) -> Any:
    """Returns the names of attributes that Keras does not save.

    Keras calls this function for each object that it saves or loads.

    Args:
      original: The replaced function of Keras.
      kind: Kind of the objects, such as `"Optimizer"`.
    """
    if kind not in _without_state:
        _without_state[kind] = original(kind)
    return _without_state[kind]


class TakesGradients:
    """A mixin for a `keras.Variable` that gets its gradient through `assign`.

    Keras passes gradients to `assign` if `overwrite_with_gradient` is true. In
    Keras, the value passed to `assign` then replaces the value of the variable.
    In this class, the value is an ordinary gradient, and a missing gradient
    raises an error.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        patches.ensure("keras3_self_training")
        super().__init__(*args, **kwargs)

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        raise NotImplementedError

    def accumulate(
        self, gradient: Any, steps: int, is_last: Any, position: Any
    ) -> None:
        """Accumulates a gradient; applies the mean after the last gradient.

        Args:
          gradient: Gradient of the weight.
          steps: The model's `gradient_accumulation_steps`.
          is_last: A bool or a `[]` bool tensor: whether this is the last of
            `steps` gradients.
          position: `[]` integer tensor, number of earlier gradients of these
            `steps`; None on parameter servers.
        """
        raise NotImplementedError


class TrainsItself(TakesGradients):
    """A mixin for a `keras.Variable` that a `RowOptimizer` trains.

    The class of the variable must define `_optimizer`, the `RowOptimizer`, and
    `_write`, a method that assigns a value. `overwrite_with_gradient` is true.
    The model's optimizer therefore creates no slot variables for the weight,
    and passes the gradient to `assign` in `apply`. This gradient is the sum
    over all calls of the layer in the step. The weight is not trained by
    predictions, or by gradients that are computed and not applied.
    """

    _optimizer: RowOptimizer

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
        if self.follows_model and not self._optimizer.slots:
            # Adam has the largest number of slot variables of common
            # optimizers.
            return 4 * rows * 2 * dim
        slots = self._optimizer._spec.slots
        return 4 * rows * sum(slot.dim(dim) for slot in slots)

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return mark_weights.missing_gradient_message(self.path, ())

    def accumulate(
        self, gradient: Any, steps: int, is_last: Any, position: Any
    ) -> None:
        """Accumulates a gradient; see `TakesGradients.accumulate`."""
        optimizer = keras_private.applying_optimizer()
        assert optimizer is not None  # An optimizer calls this method.
        scale = optimizer.loss_scale_factor
        self._optimizer.accumulate(
            unscaled(gradient, scale), steps, is_last, position
        )

    def follow(self, optimizer: Any) -> None:
        """Prepares the table for the model's optimizer, if it follows one."""
        if isinstance(self._optimizer, FollowsModel):
            self._optimizer.follow(optimizer)

    @property
    def follows_model(self) -> bool:
        """Whether the optimizer of the model determines the rule."""
        return self._optimizer._follows_model

    def applying(
        self, step: ModelStep | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context in which gradients are applied as a step of the model."""
        if step is None or not isinstance(self._optimizer, FollowsModel):
            return contextlib.nullcontext()
        return self._optimizer.applying(step)


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
    """Checks only the values of `tf.IndexedSlices`, without a dense copy.

    Keras uses the result of the first replica. If a table trains itself, the
    result is therefore the same in all replicas.
    """
    is_finite = original(
        optimizer,
        [
            grad.values if isinstance(grad, tf.IndexedSlices) else grad
            for grad in grads
        ],
    )
    if not any(
        isinstance(trainable_variable, TrainsItself)
        for trainable_variable in optimizer._trainable_variables
    ):
        return is_finite
    return replica_steps.is_true_in_all(is_finite)


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
    step = None
    if any(_follows_model(variable) for variable in trainable_variables):
        step, grads = _model_step(optimizer, grads, trainable_variables)
    if step is not None and not steps:
        rest = []
        for gradient, variable in zip(grads, trainable_variables):
            if _follows_model(variable):
                with variable.applying(step):
                    variable.assign(gradient)
            else:
                rest.append((gradient, variable))
        grads, trainable_variables = map(list, zip(*rest)) if rest else ([], [])
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
                with variable.applying(step):
                    variable.accumulate(gradient, steps, is_last, position)
            elif isinstance(variable, TakesGradients):
                variable.accumulate(gradient, steps, is_last, position)
            else:
                rest.append((gradient, variable))
        grads, trainable_variables = map(list, zip(*rest)) if rest else ([], [])
    return original(optimizer, grads, trainable_variables)


def _follows_model(variable: Any) -> bool:
    return isinstance(variable, TrainsItself) and variable.follows_model


def _model_step(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]
) -> tuple[ModelStep, list[Any]]:
    """Returns the current step of an optimizer, and its clipped gradients."""
    scale = optimizer.loss_scale_factor
    # Keras converts these gradients to dense tensors.
    is_dense = scale is not None or bool(optimizer.gradient_accumulation_steps)
    clipped, has_global_norm = model_optimizer.clip_all(
        optimizer,
        grads,
        lambda index: (
            _follows_model(variables[index])
            or not isinstance(variables[index], TakesGradients)
        ),
        scale=scale,
        sums_equal_ids=is_dense,
    )
    step = ModelStep(
        optimizer,
        tf.cast(optimizer.learning_rate, tf.float32),
        tf.cast(optimizer.iterations + 1, tf.float32),
        sums_equal_ids=is_dense or has_global_norm,
        clips_sums=is_dense,
    )
    return step, clipped


def build(original: Callable[..., Any], optimizer: Any, variables: Any) -> Any:
    """Builds an optimizer, and prepares the tables that follow it."""
    variables = list(variables)
    if not isinstance(optimizer, keras_private.NESTING_OPTIMIZERS):
        for variable in variables:
            if isinstance(variable, TrainsItself):
                variable.follow(optimizer)
    return original(optimizer, variables)


# A table that trains itself has no moving average. Keras would raise an error
# for such a variable.


def _has_missing_averages(optimizer: Any) -> bool:
    averages = getattr(optimizer, "_model_variables_moving_average", ())
    return any(average is None for average in averages)


@contextlib.contextmanager
def _averaged_variables(optimizer: Any, variables: Any) -> Iterator[list[Any]]:
    """Context in which an optimizer lists only variables with an average.

    Args:
      optimizer: An optimizer with `use_ema`.
      variables: Its variables, in the order of its averages.

    Yields:
      The variables that have a moving average.
    """
    averages = optimizer._model_variables_moving_average
    pairs = [pair for pair in zip(variables, averages) if pair[1] is not None]
    before = {
        "_model_variables_moving_average": averages,
        "_trainable_variables": optimizer._trainable_variables,
    }
    kept = [variable for variable, _ in pairs]
    # `vars` bypasses the tracking of attributes.
    vars(optimizer).update(
        _model_variables_moving_average=[average for _, average in pairs],
        _trainable_variables=kept,
    )
    try:
        yield kept
    finally:
        vars(optimizer).update(before)


def overwrite_with_averages(
    original: Callable[..., Any], optimizer: Any, variables: Any
) -> Any:
    """Writes the moving averages to the variables that have one."""
    if not _has_missing_averages(optimizer):
        return original(optimizer, variables)
    with _averaged_variables(optimizer, variables) as kept:
        return original(optimizer, kept)


def swap_averages(
    original: Callable[..., Any], callback: Any, optimizer: Any
) -> Any:
    """Exchanges variables and moving averages, for variables that have one."""
    if not _has_missing_averages(optimizer):
        return original(callback, optimizer)
    with (
        _averaged_variables(optimizer, optimizer._trainable_variables) as kept,
        keras_private.swapping_only(callback, kept),
    ):
        return original(callback, optimizer)
