"""A table whose rows tf.dtensor has divided, as one Keras weight."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, keras_private
from tf_layoutmap.layers.keras3.row_optimizer import RowOptimizer, TrainsItself
from tf_layoutmap.layout.keras3 import move_state
from tf_layoutmap.layout.keras3.context import MeshContext
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout
from tf_layoutmap.layout.mesh.variable import PaddedVariable

dtensor = tf.experimental.dtensor


class MeshTableWeight(TrainsItself, MeshVariable):
    """A whole table on a mesh, trained by a `RowOptimizer`."""

    pads_rows = True

    def __init__(
        self,
        context: MeshContext,
        owner: Any,
        initializer: Callable[..., Any],
        shape: tuple[int, int],
        *,
        optimizer: RowOptimizer,
        name: str = "embeddings",
    ):
        """Waits for its value like all weights of `context`.

        Args:
          context: Whose mesh and layouts.
          owner: Weak reference to the layer.
          initializer: `initializer(shape, dtype=)` gives the whole table.
          shape: `(num_rows, dim)`.
          optimizer: Trains it; its state moves to the mesh.
          name: Of the weight.
        """
        _belong(self, context, owner)
        self._optimizer = optimizer
        super().__init__(
            initializer, shape=shape, dtype="float32", autocast=False, name=name
        )
        for variable in optimizer.variables:
            move_state.move_variable(variable, context)
        optimizer.create_slots(MeshTable(self))

    @property
    def value(self) -> Any:
        """The DVariable; made here if this is the first need of it."""
        # The first that an optimizer's `build` asks for.
        steps = getattr(
            keras_private.applying_optimizer(),
            "gradient_accumulation_steps",
            None,
        )
        if steps:
            raise ValueError(
                "The model's optimizer must not accumulate gradients of a "
                "table that trains itself on a mesh; use bigger batches, or "
                "optimizer=None. Received: "
                f"gradient_accumulation_steps={steps} (weight {self.path!r})."
            )
        return super().value

    def assign(self, value: Any) -> Any:
        """Takes a step inside an optimizer's `apply`; else writes `value`."""
        if (
            keras_private.applying_optimizer() is not None
            and isinstance(self._value, PaddedVariable)
            and isinstance(value, tf.Tensor)
        ):
            value = value[: self.shape[0]]  # Not that of the padding.
        return super().assign(value)

    def _write(self, value: Any) -> Any:
        return MeshVariable.assign(self, value)


class MeshTable:
    """The table of a `MeshTableWeight`; `HostTable` is the same on the host."""

    def __init__(self, weight: MeshTableWeight):
        """Takes the weight."""
        self._weight = weight

    @property
    def name(self) -> str:
        """For messages."""
        return self._weight.path

    def new_slot(self, name: str, initial: float) -> MeshVariable:
        """Returns a slot variable with the layout of the table."""
        return _Slot(self._weight, name, initial)

    def fill_slot(self, slot: MeshVariable, value: float) -> None:
        """Starts a slot variable anew."""
        slot.fill(value)

    def update(
        self,
        slots: Sequence[MeshVariable],
        ids: tf.Tensor,
        gradients: tf.Tensor,
        *,
        optimizer: str,
        hyperparameters: tf.Tensor,
    ) -> None:
        """Takes one step, as `HostTable.update`."""
        weight = self._weight
        dtensor_ops.update_rows(
            weight.value,
            [slot.value for slot in slots],
            ids,
            gradients,
            optimizer=optimizer,
            name=weight.path,
            num_rows=weight.shape[0],
            hyperparameters=dtensor.relayout(
                hyperparameters, dtensor.Layout.replicated(weight.mesh, 1)
            ),
        )


class _Slot(MeshVariable):
    """Starts as one number everywhere, filled in on each device."""

    pads_rows = True

    def __init__(self, table: MeshTableWeight, name: str, initial: float):
        _belong(self, table._mesh_context, table._mesh_owner)
        self._slot_of = table
        super().__init__(
            keras.initializers.Constant(initial),
            shape=table.shape,
            dtype="float32",
            trainable=False,
            autocast=False,
            name=name,
        )

    # The layout of the table, which is known when both get their values.
    @property
    def _given_layout(self) -> Layout:
        return self._slot_of.layout

    @_given_layout.setter
    def _given_layout(self, layout: Layout) -> None:
        del layout

    def fill(self, value: float) -> None:
        """Writes `value` everywhere."""
        if self._value is None:
            self._initializer = keras.initializers.Constant(value)
            return
        shards = [
            tf.fill(shard.shape, tf.cast(value, shard.dtype))
            for shard in dtensor.unpack(transfer.read_divided(self._value))
        ]
        self._value.assign(dtensor.pack(shards, self._value.layout))


def _belong(variable: MeshVariable, context: MeshContext, owner: Any) -> None:
    """Does what Keras' own variables get from the scope."""
    variable._mesh_context = context
    variable._mesh_owner = owner
    variable._mesh_is_state = False


def layout_problems(layer: Any, axes: tuple[str | None, ...]) -> list[str]:
    """Returns why `layer` cannot train its table with the layout `axes`."""
    named = f"layer {layer.name!r} (ShardedEmbedding)"
    if len(axes) != 2:
        return []  # Said for every variable.
    rows_divided, columns_divided = (axis is not None for axis in axes)
    if layer.optimizer is None:
        return (
            []
            if not rows_divided
            else [
                f"{named} with optimizer=None would gather the table on each "
                "device: give it an optimizer of its own, such as "
                f'optimizer="adagrad", or use {(None, axes[0])}'
            ]
        )
    if rows_divided and not columns_divided:
        return []
    return [
        f"{named} has an optimizer of its own, which trains tables whose "
        "rows are divided and whose columns are whole: set the key "
        f'"{layer.name}.embeddings" to a layout such as ("model", '
        "None), or use optimizer=None"
    ]
