"""The one door for reads and writes of single rows.

Every verb decides first where each row lives (`Route`), checks ids and values
completely, and only then touches a shard: a refused call has written nothing.
With one shard, and so in every exported graph, nothing is routed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _ops, _tf_private
from tf_layoutmap.partition import RowPartition

ID_DTYPES = (tf.int32, tf.int64)


@dataclasses.dataclass(frozen=True)
class Shards:
    """What routing needs to know of a table.

    Attributes:
      variables: One per shard, equal dtype and row shape.
      partition: The rule that divides the rows among them.
      name: The table's name, for messages.
    """

    variables: Sequence[tf.Variable]
    partition: RowPartition
    name: str

    @property
    def row_shape(self) -> tf.TensorShape:
        """Shape of one row."""
        return self.variables[0].shape[1:]

    @property
    def dtype(self) -> tf.DType:
        """Dtype of the rows."""
        return self.variables[0].dtype


@dataclasses.dataclass(frozen=True)
class Route:
    """Where the rows of some ids live.

    Attributes:
      local_rows: One `[num_ids of the shard]` tensor per shard.
      positions: Alike, int32: which of the ids those are, ascending.
    """

    local_rows: Sequence[tf.Tensor]
    positions: Sequence[tf.Tensor]


def gather(shards: Shards, ids: Any, name: str | None = None) -> tf.Tensor:
    """Returns the rows of `ids`, in the order of `ids`.

    Args:
      shards: The table.
      ids: Any shape, int32 or int64: global rows.
      name: Name of the operations.

    Returns:
      Shape `ids.shape + row_shape`, dtype of the table.

    Raises:
      TypeError: `ids` are not int32 or int64.
      tf.errors.InvalidArgumentError: An id is outside the table.
    """
    with tf.name_scope(name or "sharded_gather"):
        ids = check_ids(shards, ids)
        flat_ids = tf.reshape(ids, [-1])
        if len(shards.variables) == 1:
            rows = shards.variables[0].sparse_read(flat_ids)
        else:
            route = _route(shards, flat_ids)
            rows = tf.dynamic_stitch(route.positions, [
                variable.sparse_read(local_rows)
                for variable, local_rows in zip(shards.variables,
                                                route.local_rows)])
        rows = tf.reshape(
            rows, tf.concat([tf.shape(ids), shards.row_shape], axis=0))
        rows.set_shape(ids.shape.concatenate(shards.row_shape))
        return tf.identity(rows, name="rows")


def scatter(shards: Shards, verb: str, ids: Any, values: Any,
            name: str | None = None) -> None:
    """Applies a scatter verb of `tf.Variable` to the rows of `ids`.

    Args:
      shards: The table.
      verb: `"scatter_add"`, `"scatter_update"` and so on.
      ids: Any shape, int32 or int64: global rows. For repeated ids the rule
        is `tf.Variable`'s: all of them apply, and of several updates of one
        row an arbitrary one stays.
      values: `ids.shape + row_shape`, or one scalar for all.
      name: Name of the operations.

    Raises:
      TypeError: `ids` are not int32 or int64.
      ValueError: `values` have another shape or dtype.
      tf.errors.InvalidArgumentError: An id is outside the table, or a shape
        known only at run time is wrong. No shard is written.
    """
    with tf.name_scope(name or verb):
        ids = check_ids(shards, ids)
        values = tf.convert_to_tensor(values, dtype=shards.dtype)
        is_scalar = values.shape.rank == 0
        flat_ids = tf.reshape(ids, [-1])
        if not is_scalar:
            values = check_shape(
                shards, values, ids.shape.concatenate(shards.row_shape),
                tf.concat([tf.shape(ids), shards.row_shape], axis=0))
            values = tf.reshape(values, tf.concat(
                [tf.shape(flat_ids), shards.row_shape], axis=0))
        if len(shards.variables) == 1:
            per_shard = [(flat_ids, values)]
        else:
            route = _route(shards, flat_ids)
            per_shard = [
                (local_rows,
                 values if is_scalar else tf.gather(values, positions))
                for local_rows, positions in zip(route.local_rows,
                                                 route.positions)]
        for variable, (local_rows, part) in zip(shards.variables, per_shard):
            getattr(variable, verb)(tf.IndexedSlices(part, local_rows))


def check_ids(shards: Shards, ids: Any, lowest: int = 0) -> tf.Tensor:
    """Returns `ids` as a tensor whose use waits for the range check.

    Args:
      shards: The table.
      ids: Any shape, int32 or int64.
      lowest: Smallest id allowed; a negative one counts from the end, which
        is left to the caller.
    """
    ids = id_tensor(ids)
    if ids.dtype not in ID_DTYPES:
        raise TypeError(
            "Argument `ids` must be int32 or int64. Received: dtype "
            f"{ids.dtype.name} (table {shards.name!r}).")
    num_rows = shards.partition.num_rows
    if num_rows > ids.dtype.max:
        # The row count itself would wrap around in the comparison.
        ids = tf.cast(ids, tf.int64)
    smallest, largest = tf.reduce_min(ids), tf.reduce_max(ids)
    inside = tf.logical_and(smallest >= lowest, largest < num_rows)
    outsider = tf.where(smallest < lowest, smallest, largest)
    return _require(
        ids, inside, f"Id {{}} is outside table {shards.name!r} with "
        f"{num_rows} rows.", outsider)


def id_tensor(ids: Any) -> tf.Tensor:
    """Returns `ids` as a tensor of their own dtype; `[]` holds int32."""
    tensor = tf.convert_to_tensor(ids)
    if isinstance(ids, (list, tuple)) and 0 in tensor.shape.as_list():
        return tf.cast(tensor, tf.int32)
    return tensor


def check_shape(shards: Shards, value: tf.Tensor, shape: tf.TensorShape,
                run_time_shape: Any, what: str = "Values") -> tf.Tensor:
    """Returns `value` if it has `shape`, checked before or when it runs.

    Args:
      shards: The table, for the message.
      value: Any tensor.
      shape: What it must be, as far as that is known now.
      run_time_shape: The same, complete: int32, `[rank]`.
      what: What the message calls `value`.
    """
    if not value.shape.is_compatible_with(shape):
        raise ValueError(
            f"{what} for table {shards.name!r} must have shape {shape}. "
            f"Received: shape {value.shape}.")
    if value.shape.is_fully_defined() and shape.is_fully_defined():
        return value
    if value.shape.rank is None:
        value = _require(
            value, tf.equal(tf.rank(value), shape.rank),
            f"{what} for table {shards.name!r} must have rank {shape.rank}. "
            "Received: rank {}.", tf.rank(value))
    value = _require(
        value, tf.reduce_all(tf.equal(tf.shape(value), run_time_shape)),
        f"{what} for table {shards.name!r} must have shape {shape}. "
        "Received: shape {}.", tf.shape(value))
    # Not tf.ensure_shape: its own check may run first, with fewer words.
    value.set_shape(shape)
    return value


def _require(tensor: tf.Tensor, condition: tf.Tensor, sentence: str,
             culprit: tf.Tensor) -> tf.Tensor:
    """Returns `tensor`, to be had only if `condition` holds.

    `sentence` has one `{}`, for `culprit`.
    """
    if tf.executing_eagerly():
        if not condition:
            shown = culprit.numpy()
            raise tf.errors.InvalidArgumentError(
                None, None, sentence.format(
                    shown.tolist() if shown.ndim else shown))
        return tensor
    # The sentence is data of the op, not built by it: string ops would keep
    # the function from being compiled by XLA.
    before, after = sentence.split("{}")
    check = tf.debugging.Assert(condition, [before, culprit, after])
    with tf.control_dependencies([check]):
        return tf.identity(tensor)


def _route(shards: Shards, flat_ids: tf.Tensor) -> Route:
    """Divides checked `[num_ids]` ids among the shards, keeping their order."""
    if _takes_our_ops(shards):
        return _route_by_op(shards.partition, flat_ids)
    return _route_by_stock_ops(shards.partition, flat_ids)


def _takes_our_ops(shards: Shards) -> bool:
    """Whether all shards are here, on a CPU, and XLA will not compile this."""
    devices = {variable.device for variable in shards.variables}
    if len(devices) > 1 or _tf_private.is_xla_graph(
            tf.compat.v1.get_default_graph()):
        return False
    device = tf.DeviceSpec.from_string(devices.pop())
    return (device.device_type in (None, "CPU")
            and device.job in (None, "localhost"))


def _route_by_op(partition: RowPartition, flat_ids: tf.Tensor) -> Route:
    local_rows, splits, permutation, _ = _ops.route_ids(
        ids=flat_ids, offsets=tf.constant(partition.offsets, tf.int64),
        placement=partition.placement)
    sizes = splits[1:] - splits[:-1]
    return Route(tf.split(local_rows, sizes, num=partition.num_shards),
                 tf.split(permutation, sizes, num=partition.num_shards))


def _route_by_stock_ops(partition: RowPartition,
                        flat_ids: tf.Tensor) -> Route:
    """The same as `_route_by_op`: for XLA, other devices, and as oracle."""
    owners, local_rows = assign(partition, flat_ids)
    positions = tf.range(tf.size(flat_ids))
    return Route(
        tf.dynamic_partition(local_rows, owners, partition.num_shards),
        tf.dynamic_partition(positions, owners, partition.num_shards))


def assign(partition: RowPartition,
           ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns owner (int32) and local row (dtype of `ids`) of checked ids.

    The tensor form of `RowPartition.locate`, for contiguous shards.
    """
    # Searching the ends (not the starts) skips empty shards.
    ends = tf.constant(partition.offsets[1:], ids.dtype)
    starts = tf.constant(partition.offsets[:-1], ids.dtype)
    owners = tf.searchsorted(ends, ids, side="right")
    return owners, ids - tf.gather(starts, owners)


SCATTER_VERBS = tuple(f"scatter_{verb}" for verb in (
    "add", "sub", "mul", "div", "min", "max", "update"))
