"""Groups shards into parts. One op reads or writes all shards of a part.

All shards on a CPU of this process form one part. A fused op of this package
reads or writes this part. The op checks the ids, locks all shards and copies
each row once. Each other shard is a separate part, which TensorFlow's own ops
read or write. TensorFlow's ops are used on parameter servers, whose processes
may not have this package's library, in functions that XLA compiles, and in
exported graphs.

For each id, the module also computes the part that owns the id, and the row of
the id in this part.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap._core import op_gradients, ops, strategies, tf_private
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing import checks
from tf_layoutmap.sharded.routing.checks import Shards

# `LayoutMap>ScatterRows` has no kernels for these dtypes. TensorFlow's ops are
# used instead and raise the same errors as for a `tf.Variable`.
_UNSERVED_DTYPES = (tf.variant, tf.resource)

tf_private.register_read_only_op("LayoutMap>GatherRows")
tf_private.forward_mode_of_ops["LayoutMap>GatherRows"] = (
    op_gradients.gather_rows_tangent
)


@dataclasses.dataclass(frozen=True)
class Part:
    """Shards of a table that one op reads or writes.

    Attributes:
      shards: The shards as a separate table. The table is contiguous, unless
        the part contains all shards.
      numbers: Indices of the shards in the full table.
      is_fused: Whether the fused op of this package reads and writes the part.
    """

    shards: Shards
    numbers: Sequence[int]
    is_fused: bool


def parts_of(shards: Shards) -> list[Part]:
    """Groups the shards of a table with sharded rows into parts."""
    checks.check_devices_in_xla(shards)
    groups: dict[str, list[int]] = {}
    is_stock = (
        shards.is_exported
        or shards.dtype in _UNSERVED_DTYPES
        or checks.in_xla()
    )
    for number, device in enumerate(shards.devices):
        is_fused = not is_stock and is_local_cpu(device)
        groups.setdefault(
            f"fused {device}" if is_fused else f"stock {number}", []
        ).append(number)
    return [
        Part(_sub_table(shards, numbers), numbers, key.startswith("fused"))
        for key, numbers in groups.items()
    ]


def is_local_cpu(device: str) -> bool:
    """Returns whether `device` is a CPU of this process.

    In a graph of TensorFlow 1, a variable can have no device. A session then
    places it on a GPU, if the process has one.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.job not in (None, "localhost"):
        return False
    if spec.device_type is None:
        return not tf.config.get_visible_devices("GPU")
    return spec.device_type == "CPU"


def gather(part: Part, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a part for `ids` of any shape."""
    if not part.is_fused:
        (variable,) = part.shards.variables
        # tf.gather is used, because `sparse_read` does not support
        # tf.autodiff.ForwardAccumulator.
        rows = tf.gather(variable, tf.reshape(ids, [-1]))
        row_shape = part.shards.row_shape
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), row_shape], axis=0))
        rows.set_shape(ids.shape.concatenate(row_shape))
        return rows
    for variable in part.shards.variables:
        tf_private.variable_accessed(variable)
    with tf.device(part.shards.devices[0]):
        return ops.gather_rows(
            **_described(part.shards), ids=ids, dtype=part.shards.dtype
        )


def combine(
    part: Part,
    ids: tf.Tensor,
    row_splits: tf.Tensor,
    gains: tf.Tensor,
    *,
    feature: str,
    table: str,
) -> tf.Tensor:
    """Returns the sum of the rows of each sample, `[num_samples, dim]`.

    Args:
      part: A fused part with all shards of a table of float32 rows.
      ids: `[num_ids]` rows of the table. The op checks that they exist.
      row_splits: `[num_samples + 1]` int64.
      gains: `[num_ids]` float32, the factors of the rows.
      feature: Name of the feature, for messages.
      table: Name of the table, for messages.
    """
    assert part.is_fused
    with tf.device(part.shards.devices[0]):
        return ops.lookup_rows(
            **(_described(part.shards) | {"table": table}),
            ids=ids,
            row_splits=row_splits,
            gains=gains,
            dim=part.shards.sizes[1],
            feature=feature,
        )


def scatter(part: Part, verb: str, ids: tf.Tensor, values: tf.Tensor) -> None:
    """Writes rows of a part.

    Args:
      part: The part.
      verb: One of `routing.VERBS`.
      ids: Any shape. With the verb `update`, equal ids must have equal values
        if the part is not fused, because only one of the values is written.
      values: Values for `ids`, or a scalar. Integer divisors must not be 0.
    """
    if part.is_fused:
        with tf.device(part.shards.devices[0]):
            ops.scatter_rows(
                **_described(part.shards), ids=ids, updates=values, verb=verb
            )
        return
    (variable,) = part.shards.variables
    flat_ids = tf.reshape(ids, [-1])
    if values.shape.rank != 0:
        values = tf.reshape(
            values,
            tf.concat([tf.shape(flat_ids), part.shards.row_shape], axis=0),
        )
    if (
        verb == "div"
        and part.shards.dtype.is_integer
        and part.shards.dtype.min < 0
    ):
        # TensorFlow's op terminates the process when it divides the lowest
        # number by -1.
        is_minus_one = tf.equal(values, tf.cast(-1, values.dtype))
        ones = tf.ones_like(values)
        variable.scatter_mul(
            tf.IndexedSlices(tf.where(is_minus_one, values, ones), flat_ids)
        )
        values = tf.where(is_minus_one, ones, values)
    getattr(variable, f"scatter_{verb}")(tf.IndexedSlices(values, flat_ids))


def last_of_equal(ids: tf.Tensor) -> tf.Tensor:
    """Returns for each id the position of the last equal id, `[num_ids]`.

    A caller writes the values at these positions. Equal ids then have equal
    values, and the order in which TensorFlow's ops write them does not matter.
    """
    order = tf.argsort(ids, stable=True)
    is_new = tf.concat(
        [
            [False],
            tf.not_equal(tf.gather(ids, order[1:]), tf.gather(ids, order[:-1])),
        ],
        axis=0,
    )
    # If there are no ids, `is_new` still has one element, which is removed.
    runs = tf.cumsum(tf.cast(is_new[: tf.size(ids)], tf.int32))
    last = tf.math.unsorted_segment_max(order, runs, tf.size(ids))
    return tf.scatter_nd(
        order[:, tf.newaxis], tf.gather(last, runs), tf.shape(ids)
    )


def assign(
    partition: RowPartition, ids: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns owner (int32) and local row (dtype of `ids`) of each valid id.

    For tensors, this function does the same as `RowPartition.locate`.
    """
    if partition.placement == "mod":
        num_shards = tf.constant(partition.num_shards, ids.dtype)
        return (tf.cast(ids % num_shards, tf.int32), ids // num_shards)  # pyright: ignore[reportOperatorIssue] The stub has no `%`.
    if partition.placement == "callable":
        assert partition.function is not None
        owners, local_rows = partition.function(ids)
        return tf.cast(owners, tf.int32), tf.cast(local_rows, ids.dtype)
    # The search uses the ends of the shards, because a search in the starts
    # would not skip empty shards.
    ends = tf.constant(partition.offsets[1:], ids.dtype)
    starts = tf.constant(partition.offsets[:-1], ids.dtype)
    owners = tf.searchsorted(ends, tf.reshape(ids, [-1]), side="right")
    owners = tf.reshape(owners, tf.shape(ids))
    return owners, ids - tf.gather(starts, owners)


def _sub_table(shards: Shards, numbers: Sequence[int]) -> Shards:
    if (
        len(numbers) == len(shards.variables)
        and shards.partition.placement != "callable"
    ):
        return shards
    sizes = [shards.partition.sizes[number] for number in numbers]
    devices = shards.argument_devices
    return Shards(
        [shards.variables[number] for number in numbers],
        RowPartition.from_sizes(sizes),
        shards.name,
        is_exported=shards.is_exported,
        argument_devices=devices and [devices[n] for n in numbers],
    )


def _described(shards: Shards) -> dict:
    """Returns the arguments of the fused op that describe the table."""
    return dict(
        shards=[
            strategies.handle_of(variable) for variable in shards.variables
        ],
        offsets=tf.constant(shards.partition.offsets, tf.int64),
        placement=shards.partition.placement,
        table=shards.name,
    )


@dataclasses.dataclass(frozen=True)
class Route:
    """The rows that some ids select in each part.

    Attributes:
      rows: One `[num_ids of the part]` tensor per part: rows of that part.
      positions: One int32 tensor of the same shape per part: the positions of
        these rows in the ids, in ascending order. If there is only one part, it
        has all ids, and the element is None.
    """

    rows: Sequence[tf.Tensor]
    positions: Sequence[tf.Tensor | None]


def route(shards: Shards, parts: Sequence[Part], flat_ids: tf.Tensor) -> Route:
    """Assigns valid ids, `[num_ids]`, to parts. Keeps the order of the ids."""
    rows, numbers = locate(shards, parts, flat_ids)
    if len(parts) == 1:
        return Route([rows], [None])
    positions = tf.range(tf.size(flat_ids))
    return Route(
        tf.dynamic_partition(rows, numbers, len(parts)),
        tf.dynamic_partition(positions, numbers, len(parts)),
    )


def locate(
    shards: Shards, parts: Sequence[Part], flat_ids: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the row of each id in its part, and the index of the part."""
    owners, rows = assign(shards.partition, flat_ids)
    part_of_shard = [0] * len(shards.variables)
    first_row_of_shard = [0] * len(shards.variables)
    for number, part in enumerate(parts):
        # In a part, the rows of the first shard are followed by the rows of the
        # next shard.
        first_row = 0
        for shard in part.numbers:
            part_of_shard[shard] = number
            first_row_of_shard[shard] = first_row
            first_row += shards.partition.sizes[shard]
    if any(first_row_of_shard):
        rows += tf.gather(tf.constant(first_row_of_shard, rows.dtype), owners)
    if len(parts) == len(shards.variables):
        return rows, owners
    return rows, tf.gather(tf.constant(part_of_shard, tf.int32), owners)
