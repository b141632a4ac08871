"""A table in shards on the host, as a `RowOptimizer` trains it."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.sharded import ShardedVariable

# Where the kernels are. Under every strategy a table is one copy, here.
HOST = "/device:CPU:0"


class HostTable:
    """A table and its slot variables; `MeshTable` is the same on a mesh."""

    def __init__(self, variable: ShardedVariable):
        """Takes the table."""
        self._variable = variable

    @property
    def name(self) -> str:
        """For messages."""
        return self._variable.name

    def new_slot(self, name: str, initial: float) -> ShardedVariable:
        """Returns a slot variable with the shards of the table."""
        name = f"{self.name}/{name}"
        return ShardedVariable(
            [
                tf.Variable(
                    tf.fill(shard.shape, initial),
                    trainable=False,
                    name=f"{name}/part_{part}",
                )
                for part, shard in enumerate(self._variable.variables)
            ],
            name=name,
        )

    def fill_slot(self, slot: ShardedVariable, value: float) -> None:
        """Starts a slot variable anew."""
        for shard in slot.variables:
            shard.assign(tf.fill(shard.shape, value))

    def constrain(
        self, ids: tf.Tensor, constraint: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        """Writes what `constraint` makes of the rows of `ids`."""
        rows, _ = tf.unique(ids)
        self._variable.scatter_update(
            tf.IndexedSlices(constraint(self._variable.sparse_read(rows)), rows)
        )

    def update(
        self,
        slots: Sequence[ShardedVariable],
        ids: tf.Tensor,
        gradients: tf.Tensor,
        *,
        optimizer: str,
        hyperparameters: tf.Tensor,
    ) -> None:
        """Takes one step on the rows of `ids`, those of equal ids summed.

        Args:
          slots: In the order of the rule.
          ids: `[num_ids]` int32 or int64.
          gradients: `[num_ids, dim]` float32, of the rows of `ids`.
          optimizer: Name of the rule.
          hyperparameters: `[k]` float32, the numbers of the rule.
        """
        partition = self._variable.partition
        # Each gradient row is a sample of its own, with one id.
        row_splits = tf.range(tf.size(ids, tf.int64) + 1)
        gains, unique_rows, unique_splits, positions = _ops.find_unique_rows(
            ids=ids,
            row_splits=row_splits,
            weights=tf.zeros([0]),
            combiner="sum",
            num_rows=partition.num_rows,
            feature=self.name,
            table=self.name,
        )
        _ops.apply_row_gradients(
            shards=[shard.handle for shard in self._variable.variables],
            slots=[shard.handle for slot in slots for shard in slot.variables],
            offsets=tf.constant(partition.offsets, tf.int64),
            unique_rows=unique_rows,
            unique_splits=unique_splits,
            positions=positions,
            row_splits=row_splits,
            gains=gains,
            gradients=gradients,
            hyperparameters=hyperparameters,
            placement=partition.placement,
            optimizer=optimizer,
            table=self.name,
        )
