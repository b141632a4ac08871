"""The step count, slot variables and settings of a `RowOptimizer`, saved."""

from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tf_layoutmap.embedding.spec.optimizer_specs import OptimizerSpec, SlotSpec
from tf_layoutmap.layers.shared import table_weights_file


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
            table_weights_file.save(store, name, slot)
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
            table_weights_file.check(
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
            table_weights_file.load(store, name, slot)
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
