"""Layouts of stacked tables, as TensorFlow writes them."""

from tensorflow.core.tpu.kernels import sparse_core_layout_pb2


def padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def layouts_of(stacks: dict, num_cores: int, cores_per_chip: int = 2) -> dict:
    """Returns the layout of each table.

    Args:
      stacks: Shapes of the tables by stack and table.
      num_cores: Number of SparseCores.
      cores_per_chip: Number of SparseCores of each chip.
    """
    layouts = {}
    for stack, tables in stacks.items():
        sizes = {
            name: padded(num_rows, 8 * num_cores) // num_cores
            for name, (num_rows, _) in tables.items()
        }
        offset = rotation = 0
        for name, (num_rows, dim) in tables.items():
            layouts[name] = sparse_core_layout_pb2.SparseCoreTableLayout(
                table_name=name,
                stacked_table_name=stack,
                num_sparse_cores=num_cores,
                num_partitions=num_cores // cores_per_chip,
                unsharded_shape=[num_rows, dim],
                unsharded_padded_shape=[
                    sizes[name] * num_cores,
                    padded(dim, 8),
                ],
                total_rows_per_sparse_core_shard=sum(sizes.values()),
                sparse_core_shard_row_offset=offset,
                sparse_core_shard_rotation=rotation % num_cores,
            )
            offset += sizes[name]
            rotation += cores_per_chip
    return layouts
