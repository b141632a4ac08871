"""tf_keras' optimizers hand gradients of tables over to them."""

import functools

import tensorflow as tf
import tf_keras

from tf_layoutmap._tf_keras_private import (
    BaseOptimizer,
    LegacyOptimizer,
    Optimizer,
)


@functools.cache
def serve_self_trained(kind: type) -> None:
    """Makes optimizers hand the gradients of `kind` over to it.

    An optimizer makes no slot variables for such a weight, and neither clips
    nor decays nor averages it.

    Args:
      kind: Has a method `train(gradient)`; `train_summed(gradient,
        optimizer)` for one that was summed over the replicas before; and
        `missing_gradient()`, which returns what to say where there is none.
    """
    add_from_reference = Optimizer.add_variable_from_reference
    apply_gradients = Optimizer.apply_gradients
    finalize = BaseOptimizer.finalize_variable_values
    legacy_apply_gradients = LegacyOptimizer.apply_gradients
    legacy_create = LegacyOptimizer._create_all_weights

    def add_but_for_kind(self, model_variable, *args, **kwargs):
        if not isinstance(model_variable, kind):
            _refuse_late_slots(self, model_variable)
            return add_from_reference(self, model_variable, *args, **kwargs)
        # Optimizers count on one variable per weight. It is never used.
        return self.add_variable([], name="unused")

    def apply_but_to_kind(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        _refuse_whole_weights(self, pairs)
        if not any(isinstance(variable, kind) for _, variable in pairs):
            return apply_gradients(self, pairs, *args, **kwargs)
        with tf.init_scope():
            self.build([variable for _, variable in pairs])
        return _divide(
            self, functools.partial(apply_gradients, self), pairs,
            self.iterations.assign_add, *args, **kwargs)

    def legacy_apply_but_to_kind(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        _refuse_whole_weights(self, pairs)
        if not any(isinstance(variable, kind) for _, variable in pairs):
            return legacy_apply_gradients(self, pairs, *args, **kwargs)
        # What it returns must be of one kind: it is a branch of `tf.cond`.
        count = functools.partial(self.iterations.assign_add,
                                  read_value=tf.executing_eagerly())
        return _divide(
            self, functools.partial(legacy_apply_gradients, self), pairs,
            count, *args, **kwargs)

    def _divide(self, apply, pairs, count, *args, **kwargs):
        own = [pair for pair in pairs if isinstance(pair[1], kind)]
        others = [pair for pair in pairs if not isinstance(pair[1], kind)]
        for gradient, variable in own:
            if gradient is None:
                raise ValueError(variable.missing_gradient())
        if any(gradient is not None for gradient, _ in others):
            result = apply(others, *args, **kwargs)
        else:
            result = count(1)
        for gradient, variable in own:
            if _is_summed(self, args, kwargs):
                variable.train_summed(gradient, self)
            else:
                variable.train(gradient)
        return result

    def finalize_but_kind(self, var_list):
        finalize(self, [one for one in var_list if not isinstance(one, kind)])

    def legacy_create_but_for_kind(self, var_list):
        legacy_create(
            self, [one for one in var_list if not isinstance(one, kind)])

    Optimizer.add_variable_from_reference = add_but_for_kind
    Optimizer.apply_gradients = apply_but_to_kind
    BaseOptimizer.finalize_variable_values = finalize_but_kind
    LegacyOptimizer.apply_gradients = legacy_apply_but_to_kind
    LegacyOptimizer._create_all_weights = legacy_create_but_for_kind


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
    clipnorm = getattr(optimizer, "clipnorm", None)
    if not clipnorm and not isinstance(
            optimizer, tf_keras.optimizers.Adafactor):
        return
    for _, variable in pairs:
        owner = getattr(variable, "_sharded_container", lambda: None)()
        if owner is not None and len(owner.variables) > 1:
            what = f"clipnorm={clipnorm}" if clipnorm else "Adafactor"
            raise ValueError(
                "A model's optimizer that computes with a weight as a whole "
                "trains a table in one shard only; use num_shards=1, "
                "`global_clipnorm`, or an optimizer of the layer's own. "
                f"Received: {what} (table {owner.name!r}).")


def _refuse_late_slots(optimizer, model_variable) -> None:
    """Raises where slot variables of shards come after their checkpoint.

    A file holds those of all shards as one. tf_keras finds them by where they
    stand in the lists of a built optimizer, and else leaves them at zero.
    """
    owner = getattr(model_variable, "_sharded_container", lambda: None)()
    if owner is None or len(owner.variables) == 1 or (
            not optimizer._variables._deferred_dependencies):
        return
    raise RuntimeError(
        "Call `optimizer.build(model.trainable_variables)` before a "
        "checkpoint is restored: the slot variables of a table in shards "
        "cannot be restored when they are made afterwards. Received: a "
        f"restored optimizer {optimizer.name!r} that is not built (table "
        f"{owner.name!r}).")
