"""One step of a rule on the rows of a gradient, for any Keras version."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap import _checks, _strategies
from tf_layoutmap.embedding.spec.host_optimizer import HostOptimizer
from tf_layoutmap.embedding.spec.optimizer_specs import (
    OptimizerSpec,
    read_optimizer,
)
from tf_layoutmap.layers.shared.row_optimizer_saving import RowOptimizerSaving
from tf_layoutmap.sharded.routing import checks

_DEFAULTS = {
    "sgd": tf.tpu.experimental.embedding.SGD,
    "adagrad": tf.tpu.experimental.embedding.Adagrad,
}
_TAKEN = 'None, "sgd", "adagrad" or a tf.tpu.experimental.embedding optimizer'


class RowUpdates(RowOptimizerSaving):
    """A mixin for an optimizer class of one Keras version.

    That class has `_keras`, the module of its version, `learning_rate`,
    `iterations` (a variable) and `_rate_config()`, the learning rate as plain
    values; `_scalars()` lists its variables that are no slot variables.
    """

    _keras: Any
    _spec: OptimizerSpec
    # Applied to the rows that a step has changed; a layer sets it.
    row_constraint: Any = None
    # Of a table that the host engine trains: returns its slot variables.
    _engine_slots: Callable[[], dict[str, Any]] | None = None
    learning_rate: Any
    _accumulated_ids: tf.Variable | None = None
    _accumulated_gradients_of_ids: tf.Variable | None = None

    @classmethod
    def read(cls, optimizer: Any, layer: str) -> Any:
        """Returns the optimizer for what a layer was given.

        Args:
          optimizer: None, `"sgd"`, `"adagrad"`, a
            `tf.tpu.experimental.embedding` optimizer, or one of this class
            that no layer uses yet.
          layer: Name of the layer, for messages.

        Raises:
          TypeError: It is something else.
          ValueError: A setting is not carried out, or no number.
        """
        if optimizer is None:
            return None
        where = f"layer {layer!r}"
        if isinstance(optimizer, cls):
            if optimizer.slots:
                raise ValueError(
                    "Argument `optimizer` must not belong to another layer: "
                    f"its slot variables do. Received: {optimizer.name!r} "
                    f"({where})."
                )
            return optimizer
        if isinstance(optimizer, str):
            name = _checks.check_one_of(
                "optimizer", optimizer, tuple(_DEFAULTS), where=where
            )
            optimizer = _DEFAULTS[name]()
        if isinstance(optimizer, cls._keras.optimizers.Optimizer):
            raise TypeError(
                f"Argument `optimizer` must be {_TAKEN}; Keras' optimizers "
                "work on whole weights, and train the table of a layer with "
                f"optimizer=None. Received: {type(optimizer).__name__} "
                f"({where})."
            )
        if isinstance(optimizer, HostOptimizer):
            raise ValueError(
                "Argument `optimizer` must be a rule whose slot variables "
                "have the shape of the table. Received: "
                f"{type(optimizer).__name__} ({where}). It trains tables of "
                "TPUEmbedding."
            )
        if not hasattr(optimizer, "use_gradient_accumulation"):
            raise TypeError(
                _checks.message("optimizer", _TAKEN, optimizer, where)
            )
        rate = optimizer.learning_rate
        if isinstance(rate, cls._schedule()):
            # The engine would call it without a step; here steps are counted.
            optimizer = copy.copy(optimizer)
            optimizer.learning_rate = 1.0
        spec = read_optimizer(optimizer, table=layer)
        assert spec is not None  # As the optimizer is not.
        return cast("Any", cls)(
            dataclasses.replace(
                spec, learning_rate=rate if callable(rate) else float(rate)
            )
        )

    @classmethod
    def _schedule(cls) -> type:
        return cls._keras.optimizers.schedules.LearningRateSchedule

    def _asked_rule(self) -> OptimizerSpec:
        """Returns the rule for an engine, which reads its learning rate."""
        return dataclasses.replace(
            self._spec,
            learning_rate=lambda: tf.cast(self.learning_rate, tf.float32),
        )

    # Slot variables.

    @property
    def slots(self) -> dict[str, Any]:
        """The slot variables by name: tables with the shards of the table."""
        if self._engine_slots is not None:
            return self._engine_slots()
        return self._own_slots()

    def _own_slots(self) -> dict[str, Any]:
        return {
            slot.name: getattr(self, slot.name)
            for slot in self._spec.slots
            if hasattr(self, slot.name)
        }

    def create_slots(self, table: Any) -> None:
        """Makes the slot variables of `table`, a `HostTable` or `MeshTable`."""
        self._table = table
        for slot in self._spec.slots:
            # An attribute, because those are what a checkpoint holds.
            setattr(
                self, slot.name, table.new_slot(slot.name, slot.initial_value)
            )

    # Steps.

    def update(self, gradient: tf.IndexedSlices | tf.Tensor) -> None:
        """Takes one step.

        Args:
          gradient: Of the loss by the table of `create_slots`. Rows that are
            not in it stay as they are.

        Raises:
          RuntimeError: Several replicas train, or XLA compiles the step.
          tf.errors.InvalidArgumentError: The learning rate is not a finite
            number of at least 0. Nothing is changed.
        """
        refuse_replicas(self._table.name)
        if checks.in_xla():
            raise RuntimeError(
                "A table with an optimizer of its own cannot be trained in a "
                "function that XLA compiles, which has no kernel for its step; "
                f"use jit_compile=False (table {self._table.name!r})."
            )
        ids, values = _rows_of(gradient)
        learning_rate = tf.cast(self.learning_rate, tf.float32)
        self._table.update(
            list(self.slots.values()),
            ids,
            values,
            optimizer=self._spec.name,
            hyperparameters=tf.stack([learning_rate, *self._spec.constants]),
        )
        if self.row_constraint is not None:
            self._table.constrain(ids, self.row_constraint)
        self.iterations.assign_add(1)

    def accumulate(
        self,
        gradient: tf.IndexedSlices | tf.Tensor,
        steps: int,
        is_last: tf.Tensor,
    ) -> None:
        """Keeps a gradient, or takes one step with the mean of `steps`.

        What is kept are the rows of the batches, not a table of zeros.

        Args:
          gradient: As for `update`.
          steps: Of how many gradients the mean is taken; those that are
            missing count as zeros.
          is_last: `[]` bool: whether to take the step now.

        Raises:
          As `update`.
        """
        if _strategies.on_servers():
            raise NotImplementedError(
                "The model's optimizer must not accumulate gradients over "
                "parameter servers: those of a table are applied where they "
                "are made. Received: gradient_accumulation_steps="
                f"{steps} (table {self._table.name!r})."
            )
        ids, values = _rows_of(gradient)
        kept_ids, kept = self._keep_gradients(cast("int", values.shape[-1]))
        ids = tf.concat([kept_ids, tf.cast(ids, tf.int64)], axis=0)
        values = tf.concat([kept, values], axis=0)

        def take() -> tf.Tensor:
            self.update(tf.IndexedSlices(values / steps, ids))
            return self._set_accumulated(ids[:0], values[:0])

        tf.cond(is_last, take, lambda: self._set_accumulated(ids, values))

    def _keep_gradients(self, dim: int) -> tuple[tf.Variable, tf.Variable]:
        """Returns ids and gradients of before; makes the variables first."""
        ids, gradients = (
            self._accumulated_ids,
            self._accumulated_gradients_of_ids,
        )
        if ids is not None and gradients is not None:
            return ids, gradients
        with tf.init_scope(), tf.device("/device:CPU:0"):
            # Attributes, so that a checkpoint holds them.
            ids = self._accumulated_ids = tf.Variable(
                tf.zeros([0], tf.int64),
                shape=[None],
                trainable=False,
                name="accumulated_ids",
            )
            gradients = self._accumulated_gradients_of_ids = tf.Variable(
                tf.zeros([0, dim]),
                shape=[None, dim],
                trainable=False,
                name="accumulated_gradients_of_ids",
            )
        return ids, gradients

    def _set_accumulated(self, ids: Any, values: Any) -> tf.Tensor:
        kept_ids, kept = (
            self._accumulated_ids,
            self._accumulated_gradients_of_ids,
        )
        assert kept_ids is not None and kept is not None
        kept_ids.assign(ids)
        kept.assign(values)
        return tf.constant(True)

    def build(self, variables: Any) -> None:
        """Refused: a table hands its gradients over by itself.

        Raises:
          RuntimeError: Always.
        """
        raise RuntimeError(
            f"{self.name!r} trains the table of its own layer only, by itself; "
            "give `compile` an optimizer for the other weights, such as "
            '"adam".'
        )


def _rows_of(
    gradient: tf.IndexedSlices | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns ids, and a float32 gradient for each."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.indices, tf.cast(gradient.values, tf.float32)
    return tf.range(gradient.shape[0]), tf.cast(gradient, tf.float32)


def refuse_constraint(name: str) -> None:
    """Raises where rows would be read and written beside their step."""
    if _strategies.on_servers():
        raise NotImplementedError(
            "Argument `embeddings_constraint` must be None on parameter "
            "servers for a table with an optimizer of its own: a step that "
            f"runs again would not count once. Received: one of layer {name!r}"
            "."
        )


def refuse_replicas(name: str) -> None:
    """Raises where each replica would take a step of its own."""
    _strategies.warn_of_wrong_sums()
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise RuntimeError(
            "A ShardedEmbedding must be trained by one replica; "
            "tlm.TPUEmbedding trains tables with several. Received: "
            f"{replicas} replicas ({name!r})."
        )
