"""One step of a rule on the rows of a gradient, for any Keras version."""

# DOC-MERGE: The step count, slot variables and settings of a `RowOptimizer`, saved.
import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import strategies
from tf_layoutmap.embedding.spec.optimizer_specs import (
    HostOptimizer,
    OptimizerSpec,
    SlotSpec,
    read_optimizer,
)
from tf_layoutmap.layers.base import weight_files
from tf_layoutmap.sharded.routing import checks as routing_checks


class RowOptimizerSaving:
    """A mixin for `RowUpdates`, whose attributes it writes and reads.

    It is saved along with the layer's table, each slot variable as one
    logical table.
    """

    _keras: Any
    _spec: OptimizerSpec
    _accumulated_ids: tf.Variable | None
    _accumulated_gradients_of_ids: tf.Variable | None
    _table: Any

    if TYPE_CHECKING:
        # Of `RowUpdates`, and of the optimizer class of one Keras version.
        name: str
        iterations: Any

        def _scalars(self) -> list[Any]: ...

        def _rate_config(self) -> Any: ...

        def _own_slots(self) -> dict[str, Any]: ...

        def _keep_gradients(self, dim: int) -> Any: ...

        def _set_accumulated(self, ids: Any, values: Any) -> tf.Tensor: ...

    def _kept(self) -> dict[str, tf.Variable]:
        """Gradients between two steps, if there are any."""
        ids, values = self._accumulated_ids, self._accumulated_gradients_of_ids
        if ids is None or values is None or not tf.size(ids):
            return {}
        return {"accumulated_ids": ids, "accumulated_gradients": values}

    def save_own_variables(self, store: Any) -> None:
        """Writes the step count, the learning rate and the slot variables."""
        for i, variable in enumerate(self._scalars()):
            store[str(i)] = variable.numpy()
        for name, slot in self._own_slots().items():
            weight_files.save_table(store, name, slot)
        for name, variable in self._kept().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote; from nothing, starts anew.

        Raises:
          ValueError: It is of another optimizer. Nothing is changed.
        """
        scalars = self._scalars()
        slots = self._own_slots()
        names = {*map(str, range(len(scalars))), *slots}
        found = set(store.keys())
        kept = {"accumulated_ids", "accumulated_gradients"} & found
        if found and found - kept != names:
            raise ValueError(
                f"The saved state of {self.name!r} must hold {sorted(names)}. "
                f"Received: {sorted(found)}. Load it into a layer with the "
                "optimizer it was saved with."
            )
        for name in found - kept:
            # One of another shape must not be found when others are written.
            weight_files.check_table(
                store,
                name,
                slots[name] if name in slots else scalars[int(name)],
            )
        if kept:
            values = store["accumulated_gradients"][...]
            self._keep_gradients(values.shape[-1])
            self._set_accumulated(store["accumulated_ids"][...], values)
        elif before := self._kept():
            self._set_accumulated(*(one[:0] for one in before.values()))
        if not found:
            # Weights saved without an optimizer, as of Keras' own Embedding.
            self.iterations.assign(0)
            for slot in self._spec.slots:
                if slot.name in slots:
                    self._table.fill_slot(slots[slot.name], slot.initial_value)
            return
        for name, slot in slots.items():
            weight_files.load_table(store, name, slot)
        for i, variable in enumerate(scalars):
            variable.assign(store[str(i)][()])

    def get_config(self) -> dict[str, Any]:
        """Returns plain values that `from_config` understands."""
        return {
            "name": self.name,
            "rule": self._spec.name,
            "learning_rate": self._rate_config(),
            "slots": {s.name: s.initial_value for s in self._spec.slots},
            "constants": list(self._spec.constants),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> Any:
        """Makes an optimizer from what `get_config` returned."""
        rate = config["learning_rate"]
        if isinstance(rate, dict):
            rate = cls._keras.optimizers.schedules.deserialize(
                rate, custom_objects=custom_objects
            )
        spec = OptimizerSpec(
            config["rule"],
            rate,
            slots=tuple(
                SlotSpec(name, initial)
                for name, initial in config["slots"].items()
            ),
            constants=tuple(config["constants"]),
        )
        return cast("Any", cls)(spec, name=config["name"])


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
            name = _core_checks.check_one_of(
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
                _core_checks.message("optimizer", _TAKEN, optimizer, where)
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
        if routing_checks.in_xla():
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
        if strategies.on_servers():
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
    if strategies.on_servers():
        raise NotImplementedError(
            "Argument `embeddings_constraint` must be None on parameter "
            "servers for a table with an optimizer of its own: a step that "
            f"runs again would not count once. Received: one of layer {name!r}"
            "."
        )


def refuse_replicas(name: str) -> None:
    """Raises where each replica would take a step of its own."""
    strategies.warn_of_wrong_sums()
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise RuntimeError(
            "A ShardedEmbedding must be trained by one replica; "
            "tlm.TPUEmbedding trains tables with several. Received: "
            f"{replicas} replicas ({name!r})."
        )
