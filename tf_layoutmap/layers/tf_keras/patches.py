"""tf_keras' optimizers hand gradients of tables over to them."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap._core.tf_keras_private import LegacyOptimizer
from tf_layoutmap._patches import engine
from tf_layoutmap.layers.base import tables
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.mixin import table_of


class SelfTrained:
    """A mixin for a variable to which optimizers hand its gradients.

    An optimizer makes no slot variables for such a weight, and neither clips
    nor decays nor averages it.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        engine.ensure("tf_keras_self_training")
        super().__init__(*args, **kwargs)

    def train(self, gradient: Any) -> None:
        """Takes a step."""
        raise NotImplementedError

    def train_summed(self, gradient: Any, optimizer: Any) -> None:
        """The same, of a gradient that was summed over the replicas before."""
        raise NotImplementedError

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        raise NotImplementedError

    def missing_tables(self) -> str | None:
        """Which tables of its layer a list of weights does not have, if any."""
        return None


def add_variable(
    original: Callable[..., Any],
    optimizer: Any,
    model_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes no slot variables for a weight that trains itself."""
    if not isinstance(model_variable, SelfTrained):
        _refuse_late_slots(optimizer, model_variable)
        return original(optimizer, model_variable, *args, **kwargs)
    # Optimizers count on one variable per weight. It is never used.
    return optimizer.add_variable([], name="unused")


def apply_gradients(
    original: Callable[..., Any],
    optimizer: Any,
    grads_and_vars: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hands gradients of tables over; applies all others."""
    pairs = list(grads_and_vars)
    _refuse_whole_weights(optimizer, pairs)
    if not any(isinstance(variable, SelfTrained) for _, variable in pairs):
        return original(optimizer, pairs, *args, **kwargs)
    with tf.init_scope():
        optimizer.build([variable for _, variable in pairs])
    return _divide(
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
    """The same, of tf_keras' early optimizers."""
    pairs = list(grads_and_vars)
    _refuse_whole_weights(optimizer, pairs)
    if not any(isinstance(variable, SelfTrained) for _, variable in pairs):
        return original(optimizer, pairs, *args, **kwargs)
    # What it returns must be of one kind: it is a branch of `tf.cond`.
    count = functools.partial(
        optimizer.iterations.assign_add, read_value=tf.executing_eagerly()
    )
    return _divide(
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
    """Writes averages into weights that have one."""
    original(optimizer, _without_self_trained(var_list))


def legacy_create(
    original: Callable[..., Any], optimizer: Any, var_list: Any
) -> None:
    """Makes slot variables for weights that need them."""
    original(optimizer, _without_self_trained(var_list))


def legacy_weights(original: Callable[..., Any], layer: Any) -> list[Any]:
    """Refuses .h5 files of old for tables that are no weights."""
    weights = original(layer)
    for one in weights:
        missing = one.missing_tables() if isinstance(one, SelfTrained) else None
        if missing is not None:
            raise NotImplementedError(
                f"A table {missing} is not supported in the .h5 files of old; "
                "save to a checkpoint, by save_format='tf', or to .weights.h5 "
                "or .keras if it is not divided among processes. Received: "
                f"layer {layer.name!r}."
            )
    return weights


def _without_self_trained(variables: Any) -> list[Any]:
    return [one for one in variables if not isinstance(one, SelfTrained)]


def _divide(
    optimizer: Any,
    apply: Callable[..., Any],
    pairs: list[Any],
    count: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    own = [pair for pair in pairs if isinstance(pair[1], SelfTrained)]
    others = [pair for pair in pairs if not isinstance(pair[1], SelfTrained)]
    for gradient, variable in own:
        if gradient is None:
            raise ValueError(variable.missing_gradient())
    if any(gradient is not None for gradient, _ in others):
        result = apply(others, *args, **kwargs)
    else:
        result = count(1)
    for gradient, variable in own:
        if _is_summed(optimizer, args, kwargs):
            variable.train_summed(gradient, optimizer)
        else:
            variable.train(gradient)
    return result


def _is_summed(optimizer, args, kwargs) -> bool:
    """Whether the caller of `apply_gradients` has summed them over replicas.

    So says the argument behind the name; that of the early optimizers, which
    the later ones take by its name too, is the reverse.
    """
    if not kwargs.get("experimental_aggregate_gradients", True):
        return True
    if len(args) > 1:
        return bool(args[1]) != isinstance(optimizer, LegacyOptimizer)
    return bool(kwargs.get("skip_gradients_aggregation", False))


def _refuse_whole_weights(optimizer, pairs) -> None:
    """Raises where an optimizer would take each shard for a whole weight."""
    for _, variable in pairs:
        table = _table_in_shards(variable)
        if table is not None:
            tables.check_no_full_weights(
                optimizer,
                tf_keras.optimizers.Adafactor,
                f"table {table.name!r}",
            )


def _table_in_shards(variable) -> ShardedVariable | None:
    """The table that a weight is a shard of, if it has several."""
    table = table_of(variable)
    return table if table is not None and len(table.variables) > 1 else None


def _refuse_late_slots(optimizer, model_variable) -> None:
    """Raises where slot variables of shards come after their checkpoint.

    A file holds those of all shards as one. tf_keras finds them by where they
    stand in the lists of a built optimizer, and else leaves them at zero.
    """
    table = _table_in_shards(model_variable)
    if table is None or not optimizer._variables._deferred_dependencies:
        return
    raise RuntimeError(
        "Call `optimizer.build(model.trainable_variables)` before a "
        "checkpoint is restored: the slot variables of a table in shards "
        "cannot be restored when they are made afterwards. Received: a "
        f"restored optimizer {optimizer.name!r} that is not built (table "
        f"{table.name!r})."
    )
