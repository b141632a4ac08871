"""Keras 3 weights for tables with rows that DTensor shards over a mesh."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private, tf_private
from tf_layoutmap.embedding.configs.optimizer_specs import (
    OptimizerSpec,
    SlotSpec,
)
from tf_layoutmap.layers.base import tables
from tf_layoutmap.layers.base.row_optimizer import rows_of_gradient
from tf_layoutmap.layers.keras3.mesh_accumulation import MeshAccumulators
from tf_layoutmap.layers.keras3.row_optimizer import (
    RowOptimizer,
    TrainsItself,
    unscaled,
)
from tf_layoutmap.layout.keras3 import embedding_rows, optimizers, row_updates
from tf_layoutmap.layout.keras3.context import MeshContext
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout
from tf_layoutmap.layout.mesh.variable import PaddedVariable
from tf_layoutmap.sharded.routing import checks as routing_checks

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
        optimizer._set_table(MeshTable(self))

    def assign(self, value: Any) -> Any:
        """Assigns a value, or applies a gradient in `Optimizer.apply`."""
        if keras_private.applying_optimizer() is not None:
            value = self._without_padding(value)
        return super().assign(value)

    def _without_padding(self, gradient: Any) -> Any:
        """Returns a gradient without the rows of padding."""
        is_padded = isinstance(self._value, PaddedVariable)
        if is_padded and isinstance(gradient, tf.Tensor):
            return gradient[: self.shape[0]]
        return gradient

    def _write(self, value: Any) -> Any:
        return MeshVariable.assign(self, value)

    def accumulate(
        self, gradient: Any, steps: int, is_last: Any, position: Any
    ) -> None:
        """Accumulates a gradient; applies the mean after the last gradient.

        Args:
          gradient: Gradient of the table.
          steps: The model's `gradient_accumulation_steps`.
          is_last: `[]` bool tensor: whether this is the last of `steps`
            gradients.
          position: `[]` integer tensor, number of earlier gradients of these
            `steps`.
        """
        model_optimizer = keras_private.applying_optimizer()
        assert model_optimizer is not None  # An optimizer calls this method.
        optimizer, mesh = self._optimizer, self.mesh
        optimizer._accumulators(self.shape[1])
        accumulators = optimizer._table.accumulators
        ids, values = rows_of_gradient(
            unscaled(
                self._without_padding(gradient),
                model_optimizer.loss_scale_factor,
            )
        )
        ids, values = accumulators.append(
            dtensor.relayout(
                tf.cast(ids, tf.int64), Layout.replicated(mesh, 1)
            ),
            dtensor.relayout(values, Layout.replicated(mesh, 2)),
            steps,
            position,
        )

        def update() -> tf.Tensor:
            with optimizer._table.skipping_unowned_ids():
                optimizer._update_rows(ids, values / steps)
            optimizer.iterations.assign_add(1)
            return tf.constant(True)

        tf.cond(
            accumulators.must_apply(ids, is_last),
            update,
            lambda: tf.constant(True),
        )
        accumulators.write(ids, values, is_last)


class MeshTable:
    """Table of a `MeshTableWeight`; `HostTable` is the version for the host."""

    is_local = False
    has_slots_on_host = False

    def __init__(self, weight: MeshTableWeight):
        """Creates the object for a weight."""
        self._weight = weight
        self._skips_unowned_ids = False
        self.accumulators = MeshAccumulators(weight)

    @property
    def name(self) -> str:
        """Path of the weight, for messages."""
        return self._weight.path

    def new_accumulator(self, initial_value: tf.Tensor, name: str) -> Any:
        """Returns the accumulated ids, or the accumulated gradients."""
        del name
        is_ids = initial_value.shape.rank == 1
        accumulators = self.accumulators
        return accumulators.ids if is_ids else accumulators.gradients

    def with_rule(self, rule: OptimizerSpec) -> "MeshTable":
        """Returns a table whose updates apply `rule`."""
        del rule  # Each update contains the name of its rule.
        return self

    @property
    def variable(self) -> MeshTableWeight:
        """The weight, by which optimizers identify the table."""
        return self._weight

    def new_slot(self, slot: SlotSpec) -> MeshVariable:
        """Creates a slot variable with the layout of the table."""
        return _Slot(self._weight, slot.name, slot.initial_value)

    def fill_slot(self, slot: MeshVariable, value: float) -> None:
        """Sets all values of a slot variable."""
        slot.fill(value)

    @contextlib.contextmanager
    def skipping_unowned_ids(self) -> Iterator[None]:
        """Context in which `update` ignores `embedding_rows.unowned_id`."""
        self._skips_unowned_ids = True
        try:
            yield
        finally:
            self._skips_unowned_ids = False

    def sum_equal_ids(
        self, ids: tf.Tensor, gradients: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns distinct ids and the sums of their gradients."""
        mesh = self._weight.mesh
        if embedding_rows.has_kernels(mesh):
            return tables.sum_equal_ids(ids, gradients)
        return row_updates.sum_equal_ids(ids, gradients, mesh)

    def constrain(
        self, ids: tf.Tensor, constraint: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        """Applies `constraint` to the rows of `ids`."""
        embedding_rows.apply_by_row(self._weight, ids, constraint)

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
        embedding_rows.update(
            self._weight,
            [slot.value for slot in slots],
            ids,
            gradients,
            optimizer=optimizer,
            hyperparameters=hyperparameters,
            skips_unowned_ids=self._skips_unowned_ids,
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
            self._pending_initializer = keras.initializers.Constant(value)
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


# Regularizers for which rows of zeros add nothing to the loss.
_SUMS_OF_ROWS = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
)


def check_regularizer(regularizer: Any, layer: str) -> None:
    """Checks that a table on a mesh supports a regularizer.

    Raises:
      ValueError: If rows of zeros could change the loss. A table with a
        separate optimizer replaces the repetitions of a row by zeros.
    """
    if type(regularizer) not in _SUMS_OF_ROWS:
        raise ValueError(
            "Argument `embeddings_regularizer` must be a "
            "keras.regularizers.L1, L2 or L1L2 on a mesh for a table with an "
            "`optimizer`. The number of distinct rows of a batch is unknown "
            "during tracing, and DTensor requires static sizes. Received: "
            f"{regularizer!r} (layer {layer!r}). Use optimizer=None."
        )


def check_not_vectorized(layer: str) -> None:
    """Checks that no training step calls a layer in `tf.vectorized_map`.

    Raises:
      NotImplementedError: If `tf.vectorized_map` calls the layer under a tape.
    """
    if routing_checks.in_vectorized_map() and (
        tf_private.could_possibly_record()
    ):
        raise NotImplementedError(
            "On a mesh, a layer with an `optimizer` must not be trained in "
            "`tf.vectorized_map` or `tape.jacobian`, because DTensor cannot "
            "run the gradient of its lookup in their loops; call the layer "
            "before the loop with the ids of all iterations, or use "
            f"optimizer=None. Received: layer {layer!r}."
        )


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
                f'optimizer="model", or use {(None, axes[0])}'
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
