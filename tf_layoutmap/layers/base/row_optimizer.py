"""Base classes of `RowOptimizer` for both Keras versions.

`RowUpdates` applies an optimizer step to the rows that a gradient contains.
`RowOptimizerSaving` saves the step count, slot variables and settings of the
optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import strategies
from tf_layoutmap.embedding.configs.optimizer_specs import (
    HostOptimizer,
    OptimizerSpec,
    SlotSpec,
    read_optimizer,
    unsupported_optimizer,
)
from tf_layoutmap.embedding.tpu_program import ReplicatedProgram
from tf_layoutmap.layers.base import model_rules, replica_steps, weight_files
from tf_layoutmap.sharded.routing import checks as routing_checks

if TYPE_CHECKING:
    from tf_layoutmap._core.types import EmbeddingOptimizer, HasSlots, Weights
    from tf_layoutmap.layout.keras3.variable import MeshVariable
    from tf_layoutmap.sharded import ShardedVariable


class RowOptimizerSaving:
    """A mixin for `RowUpdates` that saves and loads its state.

    The state is saved together with the layer's table. Each slot variable is
    saved as one unsharded table.
    """

    _keras: Any
    _spec: OptimizerSpec
    _accumulated_ids: Any
    _accumulated_gradients_of_ids: Any
    _table: Any

    if TYPE_CHECKING:
        # `RowUpdates` or the optimizer class of a Keras version defines these
        # members.
        name: str
        iterations: Any

        def _scalars(self) -> list[Any]: ...

        def _rate_config(self) -> Any: ...

        def _own_slots(self) -> dict[str, Any]: ...

        def _accumulators(self, dim: int) -> Any: ...

        def _set_accumulated(self, ids: Any, values: Any) -> tf.Tensor: ...

    def _accumulated_by_name(self) -> dict[str, Any]:
        """Returns the accumulators; empty if no gradients are accumulated."""
        ids, values = self._accumulated_ids, self._accumulated_gradients_of_ids
        if ids is None or values is None or not ids.numpy().size:
            return {}
        return {"accumulated_ids": ids, "accumulated_gradients": values}

    def save_own_variables(self, store: Weights) -> None:
        """Writes the step count, the learning rate and the slot variables."""
        for i, variable in enumerate(self._scalars()):
            store[str(i)] = variable.numpy()
        for name, slot in self._own_slots().items():
            weight_files.save_table(store, name, slot)
        for name, variable in self._accumulated_by_name().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Weights) -> None:
        """Reads the state that `save_own_variables` wrote.

        An empty store resets the state.

        Raises:
          ValueError: If the state is from another optimizer. In this case, no
            variable is changed.
        """
        scalars = self._scalars()
        slots = self._own_slots()
        names = {*map(str, range(len(scalars))), *slots}
        saved = set(store.keys())
        kept = {"accumulated_ids", "accumulated_gradients"} & saved
        if saved and saved - kept != names:
            raise ValueError(
                f"The saved state of {self.name!r} must hold {sorted(names)}. "
                f"Received: {sorted(saved)}. Load it into a layer with the "
                "optimizer it was saved with."
            )
        for name in saved - kept:
            # All shapes are checked before any variable is written.
            weight_files.check_table(
                store,
                name,
                slots[name] if name in slots else scalars[int(name)],
            )
        if kept:
            values = store["accumulated_gradients"][...]
            self._accumulators(values.shape[-1])
            self._set_accumulated(store["accumulated_ids"][...], values)
        elif before := self._accumulated_by_name():
            self._set_accumulated(
                *(variable.numpy()[:0] for variable in before.values())
            )
        if not saved:
            # The file was written by a layer without an optimizer, such as
            # Keras' Embedding.
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
        """Returns the settings as plain values, the input of `from_config`."""
        return {
            "name": self.name,
            "rule": self._spec.name,
            "learning_rate": self._rate_config(),
            "slots": {s.name: s.initial_value for s in self._spec.slots},
            "constants": list(self._spec.constants),
        }

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        custom_objects: Mapping[str, object] | None = None,
    ) -> Self:
        """Creates an optimizer from the result of `get_config`."""
        saved: dict[str, Any] = dict(config)
        rate = saved["learning_rate"]
        if isinstance(rate, dict):
            rate = cls._keras.optimizers.schedules.deserialize(
                rate, custom_objects=custom_objects
            )
        spec = OptimizerSpec(
            saved["rule"],
            rate,
            slots=tuple(
                SlotSpec(name, initial)
                for name, initial in saved["slots"].items()
            ),
            constants=tuple(saved["constants"]),
        )
        return cast("Any", cls)(spec, name=saved["name"])


_DEFAULTS = {
    "sgd": tf.tpu.experimental.embedding.SGD,
    "adagrad": tf.tpu.experimental.embedding.Adagrad,
}
_ACCEPTED = (
    'None, "model", "sgd", "adagrad" or an object of '
    "tf.tpu.experimental.embedding"
)


class RowUpdates(RowOptimizerSaving):
    """A mixin for an optimizer class of one Keras version.

    The optimizer class must define `_keras`, the module of its Keras version;
    `learning_rate`; `iterations`, a variable; `_rate_config()`, which returns
    the learning rate as plain values; and `_scalars()`, which returns all
    variables except the slot variables.
    """

    _keras: Any
    _spec: OptimizerSpec
    # Constraint that is applied to the rows that a step changed. The layer sets
    # this attribute.
    row_constraint: Any = None
    # Function that returns the slot variables if the host engine trains the
    # table.
    _engine_slots: Callable[[], dict[str, Any]] | None = None
    learning_rate: Any
    _accumulated_ids: Any = None
    _accumulated_gradients_of_ids: Any = None
    # The learning rate in `_settings_on_host`.
    _rate_on_host: tf.Tensor | None = None
    # Whether the optimizer of the model determines the rule.
    _follows_model = False

    @classmethod
    def _new_follower(cls) -> Self:
        """Returns an optimizer that follows the optimizer of a model."""
        raise NotImplementedError

    @classmethod
    def read(
        cls, optimizer: EmbeddingOptimizer | RowUpdates | str | None, layer: str
    ) -> Self | None:
        """Returns the optimizer for a layer's `optimizer` argument.

        Args:
          optimizer: One of: None, `"model"`, `"sgd"`, `"adagrad"`, a
            `tf.tpu.experimental.embedding` optimizer, or an object of this
            class that no other layer uses.
          layer: Name of the layer, for messages.

        Raises:
          TypeError: If the type of the argument is not supported.
          ValueError: If a setting is not supported, or is not a number.
        """
        if optimizer is None:
            return None
        where = f"layer {layer!r}"
        if isinstance(optimizer, cls):
            if optimizer.slots:
                raise ValueError(
                    "Argument `optimizer` must not be the optimizer of another "
                    "layer. Received one with slot variables: "
                    f"{optimizer.name!r} "
                    f"({where})."
                )
            return optimizer
        if isinstance(optimizer, str):
            if optimizer == model_rules.MODEL:
                return cls._new_follower()
            if optimizer not in _DEFAULTS:
                raise ValueError(
                    unsupported_optimizer(
                        optimizer,
                        _ACCEPTED,
                        where,
                    )
                )
            optimizer = _DEFAULTS[optimizer]()
        if isinstance(optimizer, cls._keras.optimizers.Optimizer):
            raise TypeError(
                f"Argument `optimizer` must be {_ACCEPTED}; Keras' optimizers "
                "update full weights. To train the rows of a batch with the "
                'rule of the model\'s optimizer pass optimizer="model"; to '
                "train the full table pass optimizer=None. Received: "
                f"{type(optimizer).__name__} "
                f"({where})."
            )
        if isinstance(optimizer, HostOptimizer):
            raise ValueError(
                "Argument `optimizer` must be a rule whose slot variables "
                "have the shape of the table. Received: "
                f"{type(optimizer).__name__} ({where}), which trains tables of "
                "TPUEmbedding only."
            )
        if not hasattr(optimizer, "use_gradient_accumulation"):
            raise TypeError(
                _core_checks.message("optimizer", _ACCEPTED, optimizer, where)
            )
        rule = cast("Any", optimizer)
        rate = rule.learning_rate
        if isinstance(rate, cls._schedule()):
            # The engine would call the schedule without a step number. The
            # property `learning_rate` calls the schedule with `iterations`.
            rule = copy.copy(rule)
            rule.learning_rate = 1.0
        spec = read_optimizer(rule, table=layer)
        assert spec is not None  # `optimizer` is not None.
        return cast("Any", cls)(
            dataclasses.replace(
                spec, learning_rate=rate if callable(rate) else float(rate)
            )
        )

    @classmethod
    def _schedule(cls) -> type:
        return cls._keras.optimizers.schedules.LearningRateSchedule

    def _engine_rule(self) -> OptimizerSpec:
        """Returns the update rule, with a callable as its learning rate."""
        return dataclasses.replace(
            self._spec,
            learning_rate=lambda: tf.cast(self.learning_rate, tf.float32),
        )

    # Slot variables.

    @property
    def slots(self) -> dict[str, Any]:
        """The slot variables by name, sharded in the same way as the table."""
        if self._engine_slots is not None:
            return self._engine_slots()
        return self._own_slots()

    def _own_slots(self) -> dict[str, Any]:
        return {
            slot.name: getattr(self, slot.name)
            for slot in self._spec.slots
            if hasattr(self, slot.name)
        }

    def _set_table(self, table: HasSlots) -> None:
        """Sets the table, a `HostTable` or `MeshTable`, with new slots."""
        self.create_slots(table)

    def create_slots(self, table: HasSlots) -> None:
        """Creates the slot variables of a `HostTable` or `MeshTable`."""
        self._table = table
        for slot in self._spec.slots:
            # Checkpoints save attributes.
            setattr(self, slot.name, table.new_slot(slot))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    def describe(self) -> str:
        """Returns the rule and the learning rate as text."""
        rate = self._rate_config()
        return (
            f"{self._spec.name}, "
            f"{model_rules.describe_rate({'learning_rate': rate})}"
        )

    # Steps.

    def look_up(
        self, rows: ShardedVariable | MeshVariable, ids: tf.Tensor
    ) -> tf.Tensor:
        """Returns the rows of `ids`.

        Args:
          rows: The table.
          ids: Int32 or int64 tensor of any shape.
        """
        table = getattr(self, "_table", None)
        if table is None:  # Keras creates the weight later.
            return rows.sparse_read(ids)
        return table.look_up(ids, self._trained_table)

    def _trained_table(self) -> Any | None:
        """Returns the table on servers with the slot variables of updates.

        None if the rule is not known yet.
        """
        return self._table.trained(list(self.slots.values()))

    def update(self, gradient: tf.IndexedSlices | tf.Tensor) -> None:
        """Applies one step.

        If several replicas train, each replica calls this method, and all
        replicas apply one step together.

        Args:
          gradient: Gradient of the loss with respect to the table of
            `create_slots`. Rows that the gradient does not contain are not
            changed.

        Raises:
          RuntimeError: If XLA compiles the step, or if a replica calls this
            method where `replica_steps.apply_once` is not supported.
          tf.errors.InvalidArgumentError: If the learning rate is not a finite
            number of at least 0. In this case, no variable is changed.
        """
        self._update(gradient, is_summed=False)

    def _update(
        self, gradient: tf.IndexedSlices | tf.Tensor, *, is_summed: bool
    ) -> None:
        """Applies one step; see `update`.

        Args:
          gradient: As for `update`.
          is_summed: Whether the gradient was already summed over the replicas.
        """
        self._check_not_in_xla()
        replica_steps.apply_once(
            self._apply_step,
            *rows_of_gradient(gradient),
            self._table.name,
            is_summed=is_summed,
        )

    def _check_not_in_xla(self) -> None:
        if routing_checks.in_xla():
            raise RuntimeError(
                "A table with an `optimizer` must not be trained in a "
                "function that XLA compiles, because XLA has no kernel for its "
                f"step; use jit_compile=False (table {self._table.name!r})."
            )

    def _apply_step(self, ids: tf.Tensor, values: tf.Tensor) -> None:
        """Applies one step; see `_update_rows` for the arguments."""
        self._update_rows(ids, values)
        self.iterations.assign_add(1)

    @contextlib.contextmanager
    def _settings_on_host(self, program: ReplicatedProgram) -> Iterator[None]:
        """Context in which `_update_rows` is called beside a TPU program.

        The program computes the learning rate, which may read variables on the
        TPU, and returns it to the host.
        """
        rate = tf.cast(self.learning_rate, tf.float32)
        vars(self)["_rate_on_host"] = program.to_host(rate)[0]
        try:
            yield
        finally:
            vars(self)["_rate_on_host"] = None

    def _count_step(self) -> None:
        """Counts a step of all replicas; each replica calls this method."""
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            self.iterations.assign_add(1)
            return
        context.merge_call(lambda _: self.iterations.assign_add(1))

    def _update_rows(self, ids: tf.Tensor, values: tf.Tensor) -> None:
        """Applies the rule and the constraint to rows.

        Args:
          ids: `[num_ids]`, ids of the rows.
          values: `[num_ids, dim]` float32, their gradients.
        """
        rate = self._rate_on_host
        if rate is None:
            rate = tf.cast(self.learning_rate, tf.float32)
        self._apply_rule(ids, values, rate)
        if self.row_constraint is not None:
            self._table.constrain(ids, self.row_constraint)

    def _apply_rule(
        self, ids: tf.Tensor, values: tf.Tensor, learning_rate: tf.Tensor
    ) -> None:
        """Applies the rule to the rows of `ids`; `update` calls this method."""
        self._table.update(
            list(self.slots.values()),
            ids,
            values,
            optimizer=self._spec.name,
            hyperparameters=tf.stack([learning_rate, *self._spec.constants]),
        )

    def accumulate(
        self,
        gradient: tf.IndexedSlices | tf.Tensor,
        steps: int,
        is_last: bool | tf.Tensor,
        position: tf.Tensor | None = None,
    ) -> None:
        """Accumulates a gradient; applies the mean after the last gradient.

        The memory for the accumulation grows with the number of rows in the
        batches, not with the size of the table.

        Args:
          gradient: As for `update`.
          steps: Divisor of the mean: the number of gradients, including missing
            gradients, which count as zeros.
          is_last: A bool or a `[]` bool tensor: whether to apply the step now.
          position: `[]` integer tensor, number of earlier gradients of this
            step. If it is 0, gradients of an earlier optimizer are discarded.

        Raises:
          NotImplementedError: If the table is on parameter servers, and the
            caller is not `fit`.
          RuntimeError, tf.errors.InvalidArgumentError: As for `update`.
        """
        if strategies.on_servers() and not isinstance(is_last, bool):
            raise NotImplementedError(
                "The model's optimizer must not accumulate gradients over "
                "parameter servers, except in `fit`. Received: "
                f"gradient_accumulation_steps={steps} (table "
                f"{self._table.name!r})."
            )
        self._check_not_in_xla()
        ids, values = rows_of_gradient(gradient)
        self._accumulators(cast("int", values.shape[-1]))
        replica_steps.apply_once(
            functools.partial(self._accumulate_rows, steps, is_last, position),
            ids,
            values,
            self._table.name,
        )

    def _accumulate_rows(
        self,
        steps: int,
        is_last: bool | tf.Tensor,
        position: tf.Tensor | None,
        ids: tf.Tensor,
        values: tf.Tensor,
    ) -> None:
        """Accumulates the gradients of rows; see `accumulate`."""
        kept_ids, kept = self._accumulators(cast("int", values.shape[-1]))
        old_ids, old_values = kept_ids.value(), kept.value()
        if position is not None:
            num_kept = tf.where(tf.equal(position, 0), 0, tf.size(old_ids))
            old_ids, old_values = old_ids[:num_kept], old_values[:num_kept]
        ids = tf.concat([old_ids, tf.cast(ids, tf.int64)], axis=0)
        values = tf.concat([old_values, values], axis=0)

        def take() -> tf.Tensor:
            self._apply_step(ids, values / steps)
            return self._set_accumulated(ids[:0], values[:0])

        if not isinstance(is_last, bool):
            tf.cond(is_last, take, lambda: self._set_accumulated(ids, values))
        elif is_last:
            take()
        else:
            self._set_accumulated(ids, values)

    def _accumulators(self, dim: int) -> tuple[Any, Any]:
        """Returns the variables of accumulated gradients, created if needed."""
        ids, gradients = (
            self._accumulated_ids,
            self._accumulated_gradients_of_ids,
        )
        if ids is not None and gradients is not None:
            return ids, gradients
        with tf.init_scope():
            # Checkpoints save attributes.
            ids = self._accumulated_ids = self._table.new_accumulator(
                tf.zeros([0], tf.int64), "accumulated_ids"
            )
            gradients = self._accumulated_gradients_of_ids = (
                self._table.new_accumulator(
                    tf.zeros([0, dim]), "accumulated_gradients_of_ids"
                )
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

    def build(self, variables: object) -> NoReturn:
        """Raises an error, because a `RowOptimizer` trains no other weights.

        Raises:
          RuntimeError: Always.
        """
        raise RuntimeError(
            f"{self.name!r} trains the table of its layer only, and must not "
            "be passed to `compile`; pass an optimizer for the other weights, "
            'such as "adam".'
        )


def rows_of_gradient(
    gradient: tf.IndexedSlices | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the ids of a gradient, and a float32 gradient row for each id."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.indices, tf.cast(gradient.values, tf.float32)
    return tf.range(gradient.shape[0]), tf.cast(gradient, tf.float32)
