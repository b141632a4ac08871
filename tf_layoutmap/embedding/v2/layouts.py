"""The layout of tables on SparseCores.

TensorFlow stacks tables of equal width and optimizer. The rows of a stack are
sharded over the SparseCores of all chips: row `id` of a table is on SparseCore
`(id + rotation) % num_sparse_cores`. A `SparseCoreTableLayout` describes the
rotation of a table, its first row in each SparseCore, and its padded shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.configs import config


def layouts_of(
    table_configs: Sequence[Any],
    spec: config.EmbeddingSpec,
    num_samples: Sequence[int],
    num_chips: int,
    cores_per_chip: int,
    table_stacking: bool,
) -> dict[str, Any]:
    """Returns the layout of each table, by its name.

    Args:
      table_configs: The `TableConfig` of each table, with name and optimizer.
      spec: Specs of the tables and features.
      num_samples: Number of samples of each feature and of a replica.
      num_chips: Number of chips, which is the number of replicas.
      cores_per_chip: Number of SparseCores of each chip.
      table_stacking: Whether tables are stacked.
    """
    counts = {table.name: 0 for table in spec.tables}
    num_features = dict(counts)
    for feature, number in zip(spec.features, num_samples):
        name = spec.table_of(feature).name
        counts[name] += number
        num_features[name] += 1
    given = {
        table.name: table.layout
        for table in table_configs
        if table.layout is not None
    }
    return {
        **tf_private.sparse_core_layouts(
            [table for table in table_configs if table.layout is None],
            counts,
            num_features,
            num_chips,
            cores_per_chip,
            table_stacking,
        ),
        **given,
    }


def stack_rows(layout: Any, rows: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a table in the order of the SparseCores.

    Args:
      layout: Layout of the table.
      rows: `[num_rows, dim]`.

    Returns:
      `[num_sparse_cores, rows per SparseCore, padded dim]`. The padding is
      zeros.
    """
    padded_rows, padded_dim = layout.unsharded_padded_shape
    padded = tf.pad(
        rows,
        [[0, padded_rows - rows.shape[0]], [0, padded_dim - rows.shape[1]]],
    )
    by_core = tf.transpose(
        tf.reshape(padded, [-1, layout.num_sparse_cores, padded_dim]), [1, 0, 2]
    )
    return tf.roll(by_core, layout.sparse_core_shard_rotation, axis=0)


def unstack_rows(layout: Any, stack: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a table, `[num_rows, dim]`.

    Args:
      layout: Layout of the table.
      stack: All rows of the stack, `[rows, padded dim]`.
    """
    num_rows, dim = layout.unsharded_shape
    padded_rows, padded_dim = layout.unsharded_padded_shape
    num_cores = layout.num_sparse_cores
    first = layout.sparse_core_shard_row_offset
    by_core = tf.reshape(stack, [num_cores, -1, padded_dim])[
        :, first : first + padded_rows // num_cores
    ]
    by_core = tf.roll(by_core, -layout.sparse_core_shard_rotation, axis=0)
    rows = tf.reshape(tf.transpose(by_core, [1, 0, 2]), [-1, padded_dim])
    return rows[:num_rows, :dim]


def with_table(layout: Any, stack: tf.Tensor, rows: Any) -> tf.Tensor:
    """Returns all rows of a stack, with other rows of one table.

    The padding of the table does not change.

    Args:
      layout: Layout of the table.
      stack: All rows of the stack, `[rows, padded dim]`.
      rows: The new rows, `[num_rows, dim]`.
    """
    is_row = stack_rows(layout, tf.ones_like(rows)) == 1
    by_core = tf.reshape(
        stack, [layout.num_sparse_cores, -1, layout.unsharded_padded_shape[1]]
    )
    first = layout.sparse_core_shard_row_offset
    end = first + is_row.shape[1]
    replaced = tf.where(
        is_row,
        stack_rows(layout, tf.convert_to_tensor(rows)),
        by_core[:, first:end],
    )
    joined = tf.concat([by_core[:, :first], replaced, by_core[:, end:]], axis=1)
    return tf.reshape(joined, [-1, joined.shape[-1]])


def join_tables(
    layouts: Sequence[Any], tables: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Returns all rows of a stack, `[rows, padded dim]`.

    Args:
      layouts: Layouts of the tables of the stack.
      tables: The result of `stack_rows` for each table.
    """
    in_order = [
        tables[index]
        for index in sorted(
            range(len(tables)),
            key=lambda index: layouts[index].sparse_core_shard_row_offset,
        )
    ]
    joined = tf.concat(in_order, axis=1)
    return tf.reshape(joined, [-1, joined.shape[-1]])
