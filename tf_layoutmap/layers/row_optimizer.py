"""Trains the rows of a table that a step has looked up, and no others."""

import copy
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.embedding.optimizers import (
    OptimizerSpec,
    SlotSpec,
    read_optimizer,
)
from tf_layoutmap.layers import table_store

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
    def slots(self) -> dict[str, Any]:
        """The slot variables by name: tables with the shards of the table."""
        return {slot.name: getattr(self, slot.name)
                for slot in self._spec.slots if hasattr(self, slot.name)}

    def create_slots(self, table: Any) -> None:
        """Makes the slot variables of `table`, a `HostTable` or `MeshTable`."""
        self._table = table
        for slot in self._spec.slots:
            # An attribute, because those are what a checkpoint holds.
            setattr(self, slot.name,
                    table.new_slot(slot.name, slot.initial_value))

    def update(self, gradient: tf.IndexedSlices | tf.Tensor) -> None:
        """Takes one step.

        Args:
          gradient: Of the loss by the table of `create_slots`. Rows that are
            not in it stay as they are.

        Raises:
          RuntimeError: Several replicas train.
          tf.errors.InvalidArgumentError: The learning rate is not a finite
            number of at least 0. Nothing is changed.
        """
        refuse_replicas(self._table.name)
        if isinstance(gradient, tf.IndexedSlices):
            ids, values = gradient.indices, gradient.values
        else:
            ids, values = tf.range(gradient.shape[0]), gradient
        learning_rate = tf.cast(self.learning_rate, tf.float32)
        self._table.update(
            list(self.slots.values()), ids, tf.cast(values, tf.float32),
            optimizer=self._spec.name, hyperparameters=tf.stack(
                [learning_rate, *self._spec.constants]))
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

    def _scalars(self) -> list[keras.Variable]:
        """The step count and the learning rate.

        Keras lists slot variables of a mesh with them, others not.
        """
        slots = self.slots.values()
        return [variable for variable in self.variables
                if not any(variable is slot for slot in slots)]

    # Saved beside the layer's table, each slot as one logical table.

    def save_own_variables(self, store):
        for i, variable in enumerate(self._scalars()):
            store[str(i)] = variable.numpy()
        for name, slot in self.slots.items():
            table_store.save(store, name, slot)

    def load_own_variables(self, store):
        scalars = self._scalars()
        names = {*map(str, range(len(scalars))), *self.slots}
        found = set(store.keys())
        if not found:
            # Weights saved without an optimizer, as of keras.layers.Embedding.
            self._iterations.assign(0)
            for slot in self._spec.slots:
                self._table.fill_slot(
                    getattr(self, slot.name), slot.initial_value)
            return
        if found != names:
            raise ValueError(
                f"The saved state of {self.name!r} must hold {sorted(names)}. "
                f"Received: {sorted(found)}. Load it into a layer with the "
                "optimizer it was saved with.")
        for name, slot in self.slots.items():
            table_store.load(store, name, slot)
        for i, variable in enumerate(scalars):
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
