"""Trains the rows of a table that a step has looked up, and no others."""

import copy
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _checks, _ops
from tf_layoutmap.embedding.optimizers import (
    OptimizerSpec,
    SlotSpec,
    read_optimizer,
)
from tf_layoutmap.layers import table_store
from tf_layoutmap.sharded import ShardedVariable

_DEFAULTS = {"sgd": tf.tpu.experimental.embedding.SGD,
             "adagrad": tf.tpu.experimental.embedding.Adagrad}
_Schedule = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable("tf_layoutmap")
class RowOptimizer(keras.optimizers.Optimizer):
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

    def __init__(self, spec: OptimizerSpec, *, name: str | None = None):
        """Takes a rule; `ShardedEmbedding` makes it from its argument.

        Args:
          spec: The rule. Its learning rate may be a
            `keras.optimizers.schedules.LearningRateSchedule` as well.
          name: Name of the optimizer.
        """
        super().__init__(learning_rate=spec.learning_rate,
                         name=name or f"row_{spec.name}")
        self._spec = spec

    @property
    def slots(self) -> dict[str, ShardedVariable]:
        """The slot variables by name: tables with the shards of the table."""
        return {slot.name: getattr(self, slot.name)
                for slot in self._spec.slots if hasattr(self, slot.name)}

    def create_slots(self, table: ShardedVariable) -> None:
        """Makes the slot variables of `table`, once."""
        for slot in self._spec.slots:
            name = f"{table.name}/{slot.name}"
            # An attribute, because those are what a checkpoint holds.
            setattr(self, slot.name, ShardedVariable(
                [tf.Variable(tf.fill(shard.shape, slot.initial_value),
                             trainable=False, name=f"{name}/part_{part}")
                 for part, shard in enumerate(table.variables)], name=name))

    def update(self, table: ShardedVariable,
               gradient: tf.IndexedSlices | tf.Tensor) -> None:
        """Takes one step.

        Args:
          table: The one given to `create_slots`.
          gradient: Of the loss by the table. Rows that are not in it stay as
            they are.

        Raises:
          RuntimeError: Several replicas train.
          tf.errors.InvalidArgumentError: The learning rate is not a finite
            number of at least 0. Nothing is changed.
        """
        refuse_replicas(table.name)
        if isinstance(gradient, tf.IndexedSlices):
            ids, values = gradient.indices, gradient.values
        else:
            ids, values = tf.range(table.partition.num_rows), gradient
        values = tf.cast(values, tf.float32)
        learning_rate = tf.cast(self.learning_rate, tf.float32)
        # Each gradient row is a sample of its own, with one id.
        row_splits = tf.range(tf.size(ids, tf.int64) + 1)
        gains, unique_rows, unique_splits, positions = _ops.find_unique_rows(
            ids=ids, row_splits=row_splits, weights=tf.zeros([0]),
            combiner="sum", num_rows=table.partition.num_rows,
            feature=table.name, table=table.name)
        _ops.apply_row_gradients(
            shards=[shard.handle for shard in table.variables],
            slots=[shard.handle for slot in self.slots.values()
                   for shard in slot.variables],
            offsets=tf.constant(table.partition.offsets, tf.int64),
            unique_rows=unique_rows, unique_splits=unique_splits,
            positions=positions, row_splits=row_splits, gains=gains,
            gradients=values,
            hyperparameters=tf.stack([learning_rate, *self._spec.constants]),
            placement=table.partition.placement, optimizer=self._spec.name,
            table=table.name)
        self._iterations.assign_add(1)

    def build(self, variables):
        """Refused: see `apply`."""
        self.apply((), variables)

    def apply(self, grads, trainable_variables=None):
        """Refused: a table hands its gradients over by itself.

        Raises:
          RuntimeError: Always.
        """
        raise RuntimeError(
            f"{self.name!r} trains the table of its own layer only, by itself; "
            "give `compile` an optimizer for the other weights, such as "
            '"adam".')

    # Saved beside the layer's table, each slot as one logical table.

    def save_own_variables(self, store):
        for i, variable in enumerate(self.variables):
            store[str(i)] = variable.numpy()
        for name, slot in self.slots.items():
            table_store.save(store, name, slot)

    def load_own_variables(self, store):
        names = {*map(str, range(len(self.variables))), *self.slots}
        found = set(store.keys())
        if not found:
            # Weights saved without an optimizer, as of keras.layers.Embedding.
            self._iterations.assign(0)
            for slot in self._spec.slots:
                for shard in getattr(self, slot.name).variables:
                    shard.assign(tf.fill(shard.shape, slot.initial_value))
            return
        if found != names:
            raise ValueError(
                f"The saved state of {self.name!r} must hold {sorted(names)}. "
                f"Received: {sorted(found)}. Load it into a layer with the "
                "optimizer it was saved with.")
        for name, slot in self.slots.items():
            table_store.load(store, name, slot)
        for i, variable in enumerate(self.variables):
            variable.assign(store[str(i)])

    def get_config(self):
        rate = super().get_config()["learning_rate"]
        return {
            "name": self.name, "rule": self._spec.name, "learning_rate": rate,
            "slots": {s.name: s.initial_value for s in self._spec.slots},
            "constants": list(self._spec.constants)}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        rate = config["learning_rate"]
        if isinstance(rate, dict):
            rate = keras.saving.deserialize_keras_object(
                rate, custom_objects=custom_objects)
        spec = OptimizerSpec(
            config["rule"], rate,
            slots=tuple(SlotSpec(name, initial)
                        for name, initial in config["slots"].items()),
            constants=tuple(config["constants"]))
        return cls(spec, name=config["name"])


def read(optimizer: Any, layer: str) -> RowOptimizer | None:
    """Returns the optimizer for what a layer was given.

    Args:
      optimizer: None, `"sgd"`, `"adagrad"`, a
        `tf.tpu.experimental.embedding` optimizer, or a `RowOptimizer` that no
        layer uses yet.
      layer: Name of the layer, for messages.

    Raises:
      TypeError: It is something else.
      ValueError: A setting is not carried out, or no number.
    """
    if optimizer is None:
        return None
    where = f"layer {layer!r}"
    if isinstance(optimizer, RowOptimizer):
        if optimizer.slots:
            raise ValueError(
                "Argument `optimizer` must not belong to another layer: its "
                f"slot variables do. Received: {optimizer.name!r} ({where}).")
        return optimizer
    if isinstance(optimizer, str):
        name = _checks.check_one_of(
            "optimizer", optimizer, tuple(_DEFAULTS), where=where)
        optimizer = _DEFAULTS[name]()
    if isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            'Argument `optimizer` must be None, "sgd", "adagrad" or a '
            "tf.tpu.experimental.embedding optimizer; Keras' optimizers "
            "work on whole weights, and train the table of a layer with "
            f"optimizer=None. Received: {type(optimizer).__name__} ({where}).")
    if not hasattr(optimizer, "use_gradient_accumulation"):
        raise TypeError(_checks.message(
            "optimizer", 'None, "sgd", "adagrad" or a '
            "tf.tpu.experimental.embedding optimizer", optimizer, where))
    rate = optimizer.learning_rate
    if isinstance(rate, _Schedule):
        # The engine would call it without a step; here steps are counted.
        optimizer = copy.copy(optimizer)
        optimizer.learning_rate = 1.0
    spec = read_optimizer(optimizer, table=layer)
    return RowOptimizer(dataclasses.replace(
        spec, learning_rate=rate if callable(rate) else float(rate)))


def refuse_replicas(name: str) -> None:
    """Raises where each replica would take a step of its own."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise RuntimeError(
            "A ShardedEmbedding must be trained by one replica; "
            "tlm.TPUEmbedding trains tables with several. Received: "
            f"{replicas} replicas ({name!r}).")
