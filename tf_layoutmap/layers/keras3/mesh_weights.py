"""Keras 3 weights for tables with rows that DTensor shards over a mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, keras_private
from tf_layoutmap.layers.base import tables
from tf_layoutmap.layers.keras3.row_optimizer import RowOptimizer, TrainsItself
from tf_layoutmap.layout.keras3 import optimizers
from tf_layoutmap.layout.keras3.context import MeshContext
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout
from tf_layoutmap.layout.mesh.variable import PaddedVariable

dtensor = tf.experimental.dtensor


class MeshTableWeight(TrainsItself, MeshVariable):
    """A table on a mesh, trained by a `RowOptimizer`."""

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
        """Creates the weight. The value is created later, by `context`.

        Args:
          context: Context with the mesh and the layouts.
          owner: Weak reference to the layer.
          initializer: `initializer(shape, dtype=)` returns the full table.
          shape: `(num_rows, dim)`.
          optimizer: Optimizer of the table. The variables of the optimizer are
            moved to the mesh.
          name: Name of the weight.
        """
        _set_mesh_attributes(self, context, owner)
        self._optimizer = optimizer
        super().__init__(
            initializer, shape=shape, dtype="float32", autocast=False, name=name
        )
        for variable in optimizer.variables:
            optimizers.move_variable(variable, context)
        optimizer.create_slots(MeshTable(self))

    @property
    def value(self) -> Any:
        """The DVariable of the weight, which the first access creates."""
        # The setting is checked in this property, because an optimizer's
        # `build` reads `value` before it creates variables.
        steps = getattr(
            keras_private.applying_optimizer(),
            "gradient_accumulation_steps",
            None,
        )
        if steps:
            raise ValueError(
                "The model's optimizer must not accumulate gradients of a "
                "table that has an `optimizer` on a mesh; use bigger batches, "
                "or optimizer=None. Received: "
                "optimizer=None. Received: "
                f"gradient_accumulation_steps={steps} (weight {self.path!r})."
            )
        return super().value

    def assign(self, value: Any) -> Any:
        """Assigns a value, or applies a gradient in `Optimizer.apply`."""
        if (
            keras_private.applying_optimizer() is not None
            and isinstance(self._value, PaddedVariable)
            and isinstance(value, tf.Tensor)
        ):
            value = value[: self.shape[0]]  # Without the padding.
        return super().assign(value)

    def _write(self, value: Any) -> Any:
        return MeshVariable.assign(self, value)


class MeshTable:
    """Table of a `MeshTableWeight`; `HostTable` is the version for the host."""

    def __init__(self, weight: MeshTableWeight):
        """Creates the object for a weight."""
        self._weight = weight

    @property
    def name(self) -> str:
        """Path of the weight, for messages."""
        return self._weight.path

    def new_accumulator(self, initial_value: tf.Tensor, name: str) -> Any:
        """Creates a variable on the host whose values have any first size."""
        return tables.new_host_accumulator(initial_value, name)

    def new_slot(self, name: str, initial: float) -> MeshVariable:
        """Creates a slot variable with the layout of the table."""
        return _Slot(self._weight, name, initial)

    def fill_slot(self, slot: MeshVariable, value: float) -> None:
        """Sets all values of a slot variable."""
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
        """Applies one step; see `HostTable.update` for the arguments."""
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
    """Slot variable with equal initial values, created on each device."""

    pads_rows = True

    def __init__(self, table: MeshTableWeight, name: str, initial: float):
        _set_mesh_attributes(self, table._mesh_context, table._mesh_owner)
        self._slot_of = table
        super().__init__(
            keras.initializers.Constant(initial),
            shape=table.shape,
            dtype="float32",
            trainable=False,
            autocast=False,
            name=name,
        )

    # The slot variable uses the layout of the table. The layout is known before
    # the two variables are initialized.
    @property
    def _given_layout(self) -> Layout:
        return self._slot_of.layout

    @_given_layout.setter
    def _given_layout(self, layout: Layout) -> None:
        del layout

    def fill(self, value: float) -> None:
        """Sets all values to `value`."""
        if self._value is None:
            self._initializer = keras.initializers.Constant(value)
            return
        shards = [
            tf.fill(shard.shape, tf.cast(value, shard.dtype))
            for shard in dtensor.unpack(transfer.read_divided(self._value))
        ]
        self._value.assign(dtensor.pack(shards, self._value.layout))


def _set_mesh_attributes(
    variable: MeshVariable, context: MeshContext, owner: Any
) -> None:
    """Sets the attributes that `layout_map_scope` sets on Keras' variables."""
    variable._mesh_context = context
    variable._mesh_owner = owner
    variable._mesh_is_state = False


def layout_problems(layer: Any, axes: tuple[str | None, ...]) -> list[str]:
    """Returns reasons why `layer` does not support the layout `axes`."""
    named = f"layer {layer.name!r} (ShardedEmbedding)"
    if len(axes) != 2:
        return []  # Layout maps report a wrong rank.
    rows_sharded, columns_sharded = (axis is not None for axis in axes)
    if layer.optimizer is None:
        return (
            []
            if not rows_sharded
            else [
                f"{named} with optimizer=None would gather the table on each "
                f"device: pass an optimizer to the layer, such as "
                f'optimizer="adagrad", or use {(None, axes[0])}'
            ]
        )
    if rows_sharded and not columns_sharded:
        return []
    return [
        f"{named} has an optimizer, which trains tables with sharded rows "
        "and unsharded columns: set the key "
        f'"{layer.name}.embeddings" to a layout such as ("model", '
        "None), or use optimizer=None"
    ]
