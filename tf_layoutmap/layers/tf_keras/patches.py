"""Patches with which tf_keras' optimizers pass gradients to tables."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap._core import patches
from tf_layoutmap._core.tf_keras_private import (
    LegacyOptimizer,
    learning_rate_of,
)
from tf_layoutmap.layers.base import model_optimizer, tables
from tf_layoutmap.layers.base.model_optimizer import ModelStep
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.mixin import table_of

# Attribute of a variable that an optimizer requires but does not use.
_UNUSED = "_tf_layoutmap_unused"


class SelfTrained:
    """A mixin for a variable that applies its gradients itself.

    An optimizer passes the gradient to a method of the variable. The optimizer
    creates no slot variables for the variable, and does not clip, decay or
    average the variable.
    """

    # Whether the variable is trained with the rule of the optimizer.
    follows_model = False

    def follow(self, optimizer: Any) -> None:
        """Prepares the variable for the model's optimizer, if it follows one.

        Raises:
          ValueError: If the variable does not support the optimizer.
        """

    def applying(
        self, step: ModelStep | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context in which gradients are applied as a step of the model."""
        del step
        return contextlib.nullcontext()

    def __init__(self, *args: Any, **kwargs: Any):
        patches.ensure("tf_keras_self_training")
        super().__init__(*args, **kwargs)

    def apply_gradient(self, gradient: Any) -> None:
        """Applies a step."""
        raise NotImplementedError

    def apply_summed_gradient(self, gradient: Any, optimizer: Any) -> None:
        """Applies a step with a gradient that was summed over the replicas."""
        raise NotImplementedError

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        raise NotImplementedError

    def unlisted_tables(self) -> str | None:
        """Returns why the tables are not weights; None if they are weights."""
        return None


def add_variable(
    original: Callable[..., Any],
    optimizer: Any,
    model_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Creates a scalar instead of a slot variable of a `SelfTrained` weight."""
    if not isinstance(model_variable, SelfTrained):
        _check_slots_can_restore(optimizer, model_variable)
        return original(optimizer, model_variable, *args, **kwargs)
    # Optimizers require one variable per weight. This variable is never used.
    unused = optimizer.add_variable([], name="unused")
    vars(unused)[_UNUSED] = True
    return unused


def _used_variables(optimizer: Any) -> list[Any]:
    return [
        variable
        for variable in optimizer.variables
        if _UNUSED not in vars(variable)
    ]


def save_own_variables(
    original: Callable[..., None], optimizer: Any, store: Any
) -> None:
    """Writes the variables of an optimizer that are used.

    If unused variables were written, the optimizer of a stock model could not
    read the file, because their shapes differ from its slot variables.
    """
    used = _used_variables(optimizer)
    if len(used) == len(optimizer.variables):
        original(optimizer, store)
        return
    for number, variable in enumerate(used):
        store[str(number)] = variable.numpy()


def load_own_variables(
    original: Callable[..., None], optimizer: Any, store: Any
) -> None:
    """Reads the variables of an optimizer that are used.

    If the file is from an optimizer with slot variables of tables, it is
    skipped with a warning, as tf_keras does for another number of variables.
    """
    used = _used_variables(optimizer)
    if len(used) == len(optimizer.variables):
        original(optimizer, store)
        return
    if len(store.keys()) == len(used) and all(
        tuple(store[str(number)].shape) == tuple(variable.shape)
        for number, variable in enumerate(used)
    ):
        for number, variable in enumerate(used):
            variable.assign(store[str(number)])
        return
    warnings.warn(
        f"The saved optimizer must have {len(used)} variables, where tables "
        f"have none. Received: {len(store.keys())}; optimizer "
        f"{optimizer.name!r} was not changed.",
        stacklevel=2,
    )


def apply_gradients(
    original: Callable[..., Any],
    optimizer: Any,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Passes gradients to tables, and applies all other gradients."""
    pairs = list(grads_and_vars)
    _check_supports_shards(optimizer, pairs)
    if not any(isinstance(variable, SelfTrained) for _, variable in pairs):
        return original(optimizer, pairs, *args, **kwargs)
    # tf_keras itself creates the slot variables in this name scope.
    with tf.name_scope(optimizer.name), tf.init_scope():
        optimizer.build([variable for _, variable in pairs])
    return _apply_separately(
        optimizer,
        functools.partial(original, optimizer),
        pairs,
        optimizer.iterations.assign_add,
        *args,
        **kwargs,
    )


def legacy_apply_gradients(
    original: Callable[..., Any],
    optimizer: Any,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Implements `apply_gradients` for legacy optimizers."""
    pairs = list(grads_and_vars)
    _check_supports_shards(optimizer, pairs)
    if not any(isinstance(variable, SelfTrained) for _, variable in pairs):
        return original(optimizer, pairs, *args, **kwargs)
    # tf_keras calls this function in a branch of `tf.cond`, in which all
    # branches must return the same type.
    count = functools.partial(
        optimizer.iterations.assign_add, read_value=tf.executing_eagerly()
    )
    return _apply_separately(
        optimizer,
        functools.partial(original, optimizer),
        pairs,
        count,
        *args,
        **kwargs,
    )


def finalize(
    original: Callable[..., Any], optimizer: Any, var_list: Any
) -> None:
    """Writes the moving averages to all weights that are not `SelfTrained`."""
    original(optimizer, _without_self_trained(var_list))


def legacy_create(
    original: Callable[..., Any], optimizer: Any, var_list: Any
) -> None:
    """Creates slot variables for weights that are not `SelfTrained`."""
    original(optimizer, _without_self_trained(var_list))


def legacy_weights(original: Callable[..., Any], layer: Any) -> list[Any]:
    """Returns the weights in a legacy .h5 file, which may be tables.

    tf_keras itself requires objects of `tf.Variable`. A table has the methods
    that tf_keras calls. As for all weights, a legacy file does not contain the
    state of an optimizer.

    Raises:
      NotImplementedError: If the file would omit tables of the layer.
    """
    for weight in getattr(layer, "weights", ()):
        missing = (
            weight.unlisted_tables()
            if isinstance(weight, SelfTrained)
            else None
        )
        if missing is not None:
            raise NotImplementedError(
                f"A table {missing} is not supported in legacy .h5 files; "
                "save to a checkpoint with save_format='tf', or to .weights.h5 "
                "or .keras if it is not sharded over processes. Received: "
                f"layer {layer.name!r}."
            )
    if not any(
        isinstance(weight, SelfTrained) and not isinstance(weight, tf.Variable)
        for weight in getattr(layer, "weights", ())
    ):
        return original(layer)
    return [*layer.trainable_weights, *layer.non_trainable_weights]


def _without_self_trained(variables: Any) -> list[Any]:
    return [
        variable
        for variable in variables
        if not isinstance(variable, SelfTrained)
    ]


def _apply_separately(
    optimizer: Any,
    apply: Callable[..., Any],
    pairs: list[Any],
    count: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    self_trained = [pair for pair in pairs if isinstance(pair[1], SelfTrained)]
    others = [pair for pair in pairs if not isinstance(pair[1], SelfTrained)]
    for gradient, variable in self_trained:
        if gradient is None:
            raise ValueError(variable.missing_gradient_error())
    step = None
    if any(variable.follows_model for _, variable in self_trained):
        # The step is computed before the optimizer counts it.
        step, self_trained, others = _model_step(
            optimizer, self_trained, others
        )
    if any(gradient is not None for gradient, _ in others):
        result = apply(others, *args, **kwargs)
    else:
        result = count(1)
    for gradient, variable in self_trained:
        with variable.applying(step):
            if _is_summed(optimizer, args, kwargs):
                variable.apply_summed_gradient(gradient, optimizer)
            else:
                variable.apply_gradient(gradient)
    return result


def _model_step(
    optimizer: Any, self_trained: list[Any], others: list[Any]
) -> tuple[ModelStep, list[Any], list[Any]]:
    """Returns the current step of an optimizer, with clipped gradients."""
    for _, variable in self_trained:
        variable.follow(optimizer)
    pairs = [*self_trained, *others]
    clipped, _ = model_optimizer.clip_all(
        optimizer,
        [gradient for gradient, _ in pairs],
        lambda index: (
            index >= len(self_trained) or pairs[index][1].follows_model
        ),
        scale=None,
        sums_equal_ids=False,
    )
    pairs = [
        (gradient, variable) for gradient, (_, variable) in zip(clipped, pairs)
    ]
    step = ModelStep(
        optimizer,
        tf.identity(tf.cast(learning_rate_of(optimizer), tf.float32)),
        tf.cast(optimizer.iterations + 1, tf.float32),
        sums_equal_ids=True,
        clips_sums=False,
    )
    return step, pairs[: len(self_trained)], pairs[len(self_trained) :]


def _is_summed(optimizer, args, kwargs) -> bool:
    """Returns whether the caller already summed the gradients over replicas.

    The second positional argument of `apply_gradients` has opposite meanings in
    legacy optimizers and in newer optimizers. The newer optimizers also accept
    the keyword argument of the legacy optimizers.
    """
    if not kwargs.get("experimental_aggregate_gradients", True):
        return True
    if len(args) > 1:
        return bool(args[1]) != isinstance(optimizer, LegacyOptimizer)
    return bool(kwargs.get("skip_gradients_aggregation", False))


def _check_supports_shards(optimizer, pairs) -> None:
    """Raises an error if the optimizer does not support shards as weights."""
    for _, variable in pairs:
        table = _table_in_shards(variable)
        if table is not None:
            tables.check_supports_shards(
                optimizer,
                tf_keras.optimizers.Adafactor,
                f"table {table.name!r}",
            )


def _table_in_shards(variable) -> ShardedVariable | None:
    """Returns the table if a weight is one of several shards of the table."""
    table = table_of(variable)
    return table if table is not None and len(table.variables) > 1 else None


def _check_slots_can_restore(optimizer, model_variable) -> None:
    """Raises an error if slot variables are created after a restore.

    A checkpoint contains the slot variables of all shards of a table as one
    array. tf_keras can restore this array only into the lists of an optimizer
    that is already built. Otherwise the slot variables would stay at zero.
    """
    table = _table_in_shards(model_variable)
    if table is None or not optimizer._variables._deferred_dependencies:
        return
    raise RuntimeError(
        "Call `optimizer.build(model.trainable_variables)` before a "
        "checkpoint is restored: slot variables of a sharded table are not "
        "restored if they are created afterwards. Received: a "
        f"restored optimizer {optimizer.name!r} that is not built (table "
        f"{table.name!r})."
    )
