"""Tables of which each process has the rows of one shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private, partition
from tf_layoutmap._patches import engine as patches
from tf_layoutmap.embedding.divided import collectives, saving
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.variables import tables
from tf_layoutmap.sharded.routing.shards import known_size

# Values of a table that each process sends to the first one at a time: 1 MiB.
# Much larger blocks stay in the memory of the process after they are freed.
_CHUNK = 2**18


class DividedTable(_tf_private.Trackable):
    """A table, or a slot variable of it, divided among processes.

    The first rows are in the first process, and so on: as many in each, but
    for one. A table with fewer rows than there are processes is in the first
    of them.

    Attributes:
      name: Of the table or slot variable.
      shape: Of the whole, `[num_rows, dim]`.
      dtype: How rows are stored.
      rows: Which rows this process has, a `range`.
      block: Their `tf.Variable`, `[len(rows), dim]`; where the process has
        none, one row that nobody asks for.
    """

    def __init__(
        self,
        name: str,
        block: Any,
        cut: partition.RowPartition,
        rank: int,
        gather: Callable[[Any], Iterator[tuple[int, tf.Tensor]]],
    ):
        """Takes the variable of this process.

        Args:
          name: Of the whole.
          block: What this process has of it.
          cut: Which rows the processes have.
          rank: The number of this process.
          gather: Does what the method of this name does, of this object.
        """
        self.name = name
        self.shape = tf.TensorShape([cut.num_rows, known_size(block, 1)])
        self.dtype = tf.as_dtype(block.dtype)
        self.cut = cut
        first, size = (
            (cut.offsets[rank], cut.sizes[rank])
            if rank < cut.num_shards
            else (cut.num_rows, 0)
        )
        self.rows = range(first, first + size)
        self.block = block
        self._gather = gather
        self._restored_rows: _Rows | None = None

    def __repr__(self) -> str:
        return (
            f"<DividedTable {self.name!r} shape={tuple(self.shape)} "
            f"dtype={self.dtype.name} rows={self.rows}>"
        )

    def numpy(self) -> Any:
        """Refuses, as every use of its value does.

        Raises:
          NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"Table {self.name!r} is divided among processes, and none has "
            "all of its rows. Save a checkpoint and restore it into a "
            'TPUEmbedding of one process, or with over_processes="copied", '
            "which exports too; `block` is what this process has."
        )

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        """Refuses; see `numpy`."""
        return self.numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses; see `numpy`."""
        return self.numpy()

    def gather(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Brings all rows to the first process, some of each shard at a time.

        All processes go through it to its end, at the same time.

        Yields:
          In the first process the first row of a block, and its values
          `[rows, dim]`; in others nothing.
        """
        return self._gather(self)

    def slice_spec(self, first: int, count: int) -> str:
        """Returns how a checkpoint calls `count` rows from `first` on."""
        shape = self.shape.as_list()
        return tf.Variable.SaveSliceInfo(  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
            full_name=self.name,
            full_shape=shape,
            var_offset=[first, 0],
            var_shape=[count, shape[1]],
        ).spec

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # It is one tensor, and not that of its block.
        return {}

    def _gather_saveables_for_checkpoint(self):
        def saveable(name: str = self.name):
            self._restored_rows = _Rows(self, name)
            return self._restored_rows

        return {_tf_private.VARIABLE_VALUE_KEY: saveable}

    def _checkpoint_adapter(self, path: str) -> None:
        # A restore asks between making the saveable and reading the file.
        rows, self._restored_rows = self._restored_rows, None
        if path is not None and rows is not None:
            rows.read_own()

    def _copy_trackable_to_cpu(self, object_map):
        raise NotImplementedError(
            "Tables that are divided among processes cannot be saved "
            "asynchronously: the processes meet in a save. Leave "
            "`experimental_enable_async_checkpoint` out (table "
            f"{self.name!r})."
        )


class _Rows(_tf_private.SaveableObject):
    """Saves a whole table in the first process, and restores own rows."""

    def __init__(self, table: DividedTable, key: str):
        self._table = table
        self._key = key
        super().__init__(None, [self._spec("")], key)

    def _spec(self, slice_spec: str):
        return _tf_private.SaveSpec(
            self._value,
            slice_spec,
            self._key,
            self._table.dtype,
            self._table.block.device,
        )

    def _value(self) -> tf.Tensor | None:
        self._refuse_saved_model()
        if saving.note(self._table, self._key):
            return None
        return saving.whole(self._table)

    def _refuse_saved_model(self):
        # One that is saved traces how its variables are saved and restored.
        if not tf.executing_eagerly():
            self._table.numpy()

    def read_own(self):
        """Lets the restore read the rows of this process only."""
        rows = self._table.rows
        self.specs = (
            [self._spec(self._table.slice_spec(rows.start, len(rows)))]
            if rows
            else []
        )

    def restore(self, restored_tensors, restored_shapes):
        del restored_shapes
        self._refuse_saved_model()
        if not self.specs:
            return None
        return self._table.block.assign(restored_tensors[0])


class DividedTables:
    """Creates the tables of an embedding, and brings them together."""

    def __init__(self, group: collectives.Group, strategy: Any):
        """Takes the processes."""
        self._group = group
        self._strategy = strategy
        patches.ensure("divided")

    def create(self, spec: config.EmbeddingSpec) -> dict[str, dict[str, Any]]:
        """Creates the variables of this process.

        First values are those of one process with as many shards: so two
        shards are not alike where processes have one seed.

        Returns:
          As `tables.create_tables`, with `DividedTable`s.
        """
        group = self._group
        found = tables.create_tables(
            spec, partition.FixedShardsPartitioner(group.size), only=group.rank
        )
        for table in spec.tables:
            cut = partition.RowPartition.div(
                table.num_rows, min(group.size, table.num_rows)
            )
            for name, variable in found[table.name].items():
                if name != tables.ROUNDING_STEPS:
                    found[table.name][name] = DividedTable(
                        table.name
                        if name == tables.PARAMETERS
                        else f"{table.name}/{name}",
                        variable,
                        cut,
                        group.rank,
                        self._gather,
                    )
        return found

    def _gather(self, table: DividedTable) -> Iterator[tuple[int, tf.Tensor]]:
        """Brings all rows to the first process; see `DividedTable.gather`."""
        sizes = table.cut.sizes
        rows_at_once = max(1, _CHUNK // known_size(table.block, 1))
        for first in range(0, max(sizes), rows_at_once):
            size = min(rows_at_once, max(sizes) - first)
            own = table.block[first : first + size]
            missing = size - int(own.shape[0])
            # float32 holds 16 bits as they are, and collectives take it.
            found = self._all_gather(
                tf.cast(tf.pad(own, [[0, missing], [0, 0]]), tf.float32)
            )
            if self._group.rank == 0:
                for shard, begin in enumerate(
                    range(0, len(sizes) * size, size)
                ):
                    count = min(size, max(0, sizes[shard] - first))
                    if count:
                        yield (
                            table.cut.offsets[shard] + first,
                            tf.cast(found[begin : begin + count], table.dtype),
                        )

    @tf.function(reduce_retracing=True)
    def _all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        return self._strategy.experimental_local_results(
            self._strategy.run(self._group.all_gather, (rows,))
        )[0]
