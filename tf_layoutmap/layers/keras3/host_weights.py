"""Tables as Keras weights.

`TableWeight` is one Keras variable for a whole table that has an optimizer of
its own. `ShardWeight` is one shard of a table that the model's optimizer
trains. Keras sees ordinary variables; a tape gives each one gradient.
"""

import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private, tf_private
from tf_layoutmap.layers.base import tables
from tf_layoutmap.layers.base.tables import HOST
from tf_layoutmap.layers.keras3.row_optimizer import RowOptimizer, TrainsItself
from tf_layoutmap.layers.keras3.shard_slots import ShardOfTable
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.gradient import ShardedVariableGradient


class TableWeight(TrainsItself, keras.Variable):
    """A whole table, trained by a `RowOptimizer`."""

    # On a mesh; a layout map asks before there is one.
    pads_rows = True

    def __init__(
        self,
        make_table: Callable[[], ShardedVariable],
        shape: tuple[int, int],
        *,
        optimizer: RowOptimizer,
        name: str = "embeddings",
    ):
        """Calls `make_table`, or lets Keras do so later while it traces."""
        self._make_table = make_table
        self._optimizer = optimizer
        super().__init__(
            make_table, shape=shape, dtype="float32", autocast=False, name=name
        )

    def _initialize_with_initializer(self, initializer):
        del initializer
        self._value = self._make_table()
        # By this name optimizers tell variables from each other.
        self._value._unique_id = f"{self.path}_{id(self)}"
        with tf.init_scope(), tf.device(HOST):
            self._optimizer.create_slots(
                tables.servers_table_of(self._value, self._optimizer._spec)
            )

    @property
    def table(self) -> ShardedVariable | None:
        """The table; None as long as Keras has not initialised it."""
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

    # The value stays in its shards: no cast and no copy of all of it.

    @property
    def value(self):
        return super().value if self._value is None else self._value

    @property
    def handle(self):
        # What a tape takes for the variable.
        in_export = tf_private.in_save_context()
        return self._value.handle if in_export else self._value

    def __repr__(self) -> str:
        return f"<TableWeight path={self.path} table={self._value!r}>"

    # To tf.train.Checkpoint and tf.saved_model it is the table.

    def _gather_saveables_for_checkpoint(self):
        return self._value._gather_saveables_for_checkpoint()

    def _checkpoint_adapter(self, path):
        return self._value._checkpoint_adapter(path)

    def _copy_trackable_to_cpu(self, object_map):
        self._value._copy_trackable_to_cpu(object_map)
        object_map[self] = object_map[self._value]

    def _export_to_saved_model_graph(
        self, object_map, tensor_map, options, **kwargs
    ):
        handles = self._value._export_to_saved_model_graph(
            object_map, tensor_map, options, **kwargs
        )
        object_map[self] = object_map[self._value]
        return handles

    @property
    def _shared_name(self):
        return self._value._shared_name


class ShardWeight(ShardOfTable, keras.Variable):
    """One shard of a table, whose gradients hold each row once.

    Keras' optimizers square what comes for a row, and add the squares up: so
    what comes must be the sum.
    """

    def __init__(
        self,
        make_table: Callable[[], ShardedVariable],
        shard: int,
        shape: tuple[int, int],
        *,
        dtype: str,
        is_whole: bool,
    ):
        """Takes the variable of `shard`; may call `make_table` later.

        Args:
          make_table: Returns the table.
          shard: Which of its shards.
          shape: Of the shard.
          dtype: Of the table.
          is_whole: Whether it is the only one.
        """
        self._is_whole = is_whole
        self._make_table = make_table
        self._shard = shard
        self._summed = None
        super().__init__(
            make_table,
            shape=shape,
            dtype=dtype,
            autocast=False,
            name=f"embeddings_{shard}",
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
        """Which of its shards."""
        return self._shard

    @property
    def value(self):
        # What an optimizer asks for before it writes anything.
        if not self._is_whole:
            optimizer = keras_private.applying_optimizer()
            tables.check_no_full_weights(
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


def _muon_setting(optimizer: Any, path: str) -> str | None:
    """The setting by which Muon would orthogonalize a table, if it does."""
    if not isinstance(optimizer, keras.optimizers.Muon) or (
        optimizer.exclude_embeddings
        or any(re.search(one, path) for one in optimizer.exclude_layers)
    ):
        return None
    return "Muon(exclude_embeddings=False)"


class _SummedGradient(ShardedVariableGradient):
    """The gradient of a table, equal rows summed."""

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
