"""Keras 3 weights for tables that are stored on the host.

`TableWeight` is one Keras variable for the full table of a layer that has an
optimizer, and `TableWeightOnTPU` is this variable beside a TPU. `ShardWeight`
is a Keras variable for one shard of a table that the model's optimizer trains.
`CopiedWeight` is a Keras variable for such a table if each replica has a copy
of all weights. Keras handles objects of these classes like other variables, and
a tape computes one gradient for each object.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private, placeholders, tf_private
from tf_layoutmap.layers.base import tables
from tf_layoutmap.layers.base.program_steps import ProgramSteps
from tf_layoutmap.layers.base.tables import HOST
from tf_layoutmap.layers.keras3.row_optimizer import (
    RowOptimizer,
    TrainsItself,
    check_not_stateless,
    unscaled,
)
from tf_layoutmap.layers.keras3.shard_slots import ShardOfTable
from tf_layoutmap.layout.keras3.context import is_planning
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.gradient import ShardedVariableGradient


class SavedAsTable:
    """A mixin for a `keras.Variable` that is saved like its table."""

    if TYPE_CHECKING:

        @property
        def table(self) -> Any: ...

    # With these methods, tf.train.Checkpoint and tf.saved_model handle a weight
    # like its table.

    def _gather_saveables_for_checkpoint(self):
        return self.table._gather_saveables_for_checkpoint()

    def _checkpoint_adapter(self, path):
        return self.table._checkpoint_adapter(path)

    def _copy_trackable_to_cpu(self, object_map):
        self.table._copy_trackable_to_cpu(object_map)
        object_map[self] = object_map[self.table]

    def _export_to_saved_model_graph(
        self, object_map, tensor_map, options, **kwargs
    ):
        handles = self.table._export_to_saved_model_graph(
            object_map, tensor_map, options, **kwargs
        )
        object_map[self] = object_map[self.table]
        return handles

    @property
    def _shared_name(self):
        return self.table._shared_name


class TableWeight(SavedAsTable, TrainsItself, keras.Variable):
    """A full table, trained by a `RowOptimizer`."""

    # Layout maps read this attribute before the mesh exists. The attribute has
    # no effect without a mesh.
    pads_rows = True

    def __init__(
        self,
        make_table: Callable[[], ShardedVariable],
        shape: tuple[int, int],
        *,
        optimizer: RowOptimizer,
        name: str = "embeddings",
    ):
        """Creates the weight.

        `make_table` is called now, or by Keras after tracing.
        """
        self._make_table = make_table
        self._optimizer = optimizer
        super().__init__(
            make_table, shape=shape, dtype="float32", autocast=False, name=name
        )

    def _initialize_with_initializer(self, initializer):
        del initializer
        self._value = self._make_table()
        # Optimizers identify variables by this name.
        self._value._unique_id = f"{self.path}_{id(self)}"
        with tf.init_scope(), tf.device(HOST):
            self._optimizer._set_table(
                tables.table_for_strategy(self._value, self._optimizer._spec)
            )

    @property
    def table(self) -> ShardedVariable | None:
        """The table, or None before Keras initializes the weight."""
        return self._value

    def _write(self, value):
        self._value.assign(value)
        return value

    def assign_add(self, value):
        if isinstance(value, tf.IndexedSlices):
            self._value.scatter_add(value)
        else:
            self._value.assign_add(value)

    def assign_sub(self, value):
        if isinstance(value, tf.IndexedSlices):
            self._value.scatter_sub(value)
        else:
            self._value.assign_sub(value)

    # The next properties return the sharded value without a cast or a full
    # copy.

    @property
    def value(self):
        passed = keras_private.stateless_value(self)
        if passed is not None:
            return passed
        # The planner passes a placeholder.
        if self._value is None or is_planning.get():
            return super().value
        return self._value

    @property
    def handle(self):
        # A tape watches the object that this property returns.
        in_export = tf_private.in_save_context()
        return self._value.handle if in_export else self._value

    def __repr__(self) -> str:
        return f"<TableWeight path={self.path} table={self._value!r}>"


class TableWeightOnTPU(SavedAsTable, TrainsItself, keras.Variable):
    """A full table on the host, whose weight in a TPU program is a mark.

    The value of the weight is a scalar on the TPU, whose gradient is the mark
    of the step; see `ProgramSteps`.
    """

    def __init__(
        self, steps: ProgramSteps, table: ShardedVariable, optimizer: Any
    ):
        """Creates the weight of a table, and the slot variables."""
        self._steps = steps
        self._table = table
        self._optimizer = optimizer
        super().__init__(
            keras.initializers.Zeros(),
            shape=(),
            dtype="float32",
            autocast=False,
            name="embeddings",
        )
        with tf.init_scope(), tf.device(HOST):
            optimizer._set_table(
                tables.table_for_strategy(table, optimizer._spec)
            )

    @property
    def table(self) -> ShardedVariable:
        """The table."""
        return self._table

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the table."""
        return tf.TensorShape(self._table.shape)

    def numpy(self) -> np.ndarray:
        """Returns the rows."""
        return self._table.numpy()

    def _write(self, value):
        self._table.assign(value)
        return value

    def assign(self, value: Any) -> Any:
        """Assigns rows, or applies a step in `Optimizer.apply`."""
        optimizer = keras_private.applying_optimizer()
        if optimizer is None:
            return self._write(value)
        check_not_stateless(self.path)
        self._steps.apply(unscaled(value, optimizer.loss_scale_factor))
        return value

    def accumulate(
        self, gradient: Any, steps: int, is_last: Any, position: Any
    ) -> None:
        """Raises `ValueError`, because the host applies each step."""
        raise ValueError(
            "The model's optimizer must not accumulate gradients of a table "
            "under TPUStrategy, because the host applies the gradients after "
            "each program of the TPU. Use larger batches. Received: "
            f"gradient_accumulation_steps={steps} (weight {self.path!r})."
        )

    def __repr__(self) -> str:
        return f"<TableWeightOnTPU path={self.path} table={self._table!r}>"


class ShardWeight(ShardOfTable, keras.Variable):
    """One shard of a table. Its gradients contain each row only once.

    If a gradient contained the same row twice, Keras' optimizers would add the
    squares of its two gradient rows. This class therefore sums equal rows
    before an optimizer squares them.
    """

    def __init__(
        self,
        make_table: Callable[[], ShardedVariable],
        shard: int,
        shape: tuple[int, int],
        *,
        dtype: str,
        is_only_shard: bool,
    ):
        """Creates the weight. `make_table` may be called later.

        Args:
          make_table: Function that returns the table.
          shard: Index of the shard.
          shape: Shape of the shard.
          dtype: Dtype of the table.
          is_only_shard: Whether the table has only one shard.
        """
        self._is_only_shard = is_only_shard
        self._make_table = make_table
        self._shard = shard
        self._summed = None
        super().__init__(
            make_table,
            shape=shape,
            dtype=dtype,
            autocast=False,
            name="embeddings" if is_only_shard else f"embeddings_{shard}",
        )

    def _initialize_with_initializer(self, initializer):
        del initializer
        self._value = self._make_table().variables[self._shard]

    @property
    def table(self) -> ShardedVariable:
        """The table."""
        return self._make_table()

    @property
    def shard(self) -> int:
        """Index of the shard."""
        return self._shard

    @property
    def value(self):
        # The check is in this property, because optimizers read the property
        # before they write a variable.
        if not self._is_only_shard:
            optimizer = keras_private.applying_optimizer()
            tables.check_supports_shards(
                optimizer,
                (keras.optimizers.Adafactor, keras.optimizers.Lamb),
                f"weight {self.path!r}",
                _muon_setting(optimizer, self.path),
            )
        return super().value

    @property
    def handle(self):
        if self._value is None or tf_private.in_save_context():
            return super().handle
        if self._summed is None:
            self._summed = _SummedShard([self._value], name=self.path)
        return self._summed


class CopiedWeight(keras.Variable):
    """A full table that a strategy copies to its replicas, as other weights."""

    @property
    def value(self):
        # In an exported model, the rows are in another variable.
        read = placeholders.placeholder_of(self)
        return super().value if read is None else read()


def _muon_setting(optimizer: Any, path: str) -> str | None:
    """Returns the setting with which Muon orthogonalizes a table, or None."""
    if not isinstance(optimizer, keras.optimizers.Muon) or (
        optimizer.exclude_embeddings
        or any(re.search(pattern, path) for pattern in optimizer.exclude_layers)
    ):
        return None
    return "Muon(exclude_embeddings=False)"


class _SummedGradient(ShardedVariableGradient):
    """Gradient of a shard, in which equal rows are summed."""

    def replace_gradient_components(self, value, component_grads):
        gradient = super().replace_gradient_components(value, component_grads)
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        rows, positions = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(
            gradient.values, positions, tf.size(rows)
        )
        return tf.IndexedSlices(values, rows, gradient.dense_shape)


class _SummedShard(ShardedVariable):
    __composite_gradient__ = _SummedGradient()
