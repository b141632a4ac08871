"""`Shards`, and checks of ids and values before any shard is written.

XLA does not compile run-time checks. In a function that XLA compiles, the
result for an out-of-range id is therefore NaN. If the dtype of the table has no
NaN, an error is raised when the function is traced.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing import assertions


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a table and their partition.

    Attributes:
      variables: One variable per shard. All variables have the same dtype and,
        except for `axis`, the same shape.
      partition: The partition of `axis` into shards.
      name: Name of the table, for messages.
      axis: Axis that is sharded. 0: each shard holds complete rows. 1: each
        shard holds some columns of all rows.
      is_exported: Whether a SavedModel is being traced. A SavedModel must
        contain only TensorFlow's own operations.
      argument_devices: Device of each variable. Required if the table is an
        argument of a `tf.function`, because the variables of an argument have
        no device.
    """

    variables: Sequence[tf.Variable]
    partition: RowPartition
    name: str
    axis: int = 0
    is_exported: bool = False
    argument_devices: Sequence[str] | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each shard."""
        return tuple(
            self.argument_devices
            or (variable.device for variable in self.variables)
        )

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the full table."""
        sizes = self.variables[0].shape.as_list()
        sizes[self.axis] = self.partition.num_rows
        return tf.TensorShape(sizes)

    @property
    def sizes(self) -> list[int]:
        """`shape` as a list."""
        return known_sizes(self)

    @property
    def num_rows(self) -> int:
        """Number of rows of the full table."""
        return cast("int", self.shape[0])

    @property
    def row_shape(self) -> Any:
        """`tf.TensorShape` of one row of the full table."""
        # The return type is Any, because the type stub of tf.concat does not
        # accept shapes.
        return self.shape[1:]

    @property
    def dtype(self) -> tf.DType:
        """Dtype of the rows."""
        return self.variables[0].dtype

    def single_shard(self, number: int) -> "Shards":
        """Returns one shard as a separate table."""
        variable, devices = self.variables[number], self.argument_devices
        return Shards(
            [variable],
            RowPartition.div(known_size(variable), 1),
            self.name,
            is_exported=self.is_exported,
            argument_devices=devices and [devices[number]],
        )

    def single_shards(self) -> list["Shards"]:
        """Returns each shard as a separate table."""
        return [
            self.single_shard(number) for number in range(len(self.variables))
        ]

    def split(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Splits a value of the full table into the values of its shards."""
        partition = self.partition
        if partition.is_contiguous:
            return tf.split(value, partition.sizes, axis=self.axis)
        if partition.placement == "mod":
            return [
                value[shard :: partition.num_shards]
                for shard in range(partition.num_shards)
            ]
        return [
            tf.gather(value, partition.global_rows(shard))
            for shard in range(partition.num_shards)
        ]


def known_size(variable: Any, axis: int = 0) -> int:
    """Returns the size of an axis of a variable or tensor of known shape."""
    return int(variable.shape[axis])


def known_sizes(variable: Any) -> list[int]:
    """Returns the known shape of a variable or tensor as a list."""
    return variable.shape.as_list()


ID_DTYPES = (tf.int32, tf.int64)


def ids_of(shards: Shards, ids: Any) -> tf.Tensor:
    """Returns `ids` as an int32 or int64 tensor; an empty list as int32.

    Raises:
      TypeError: If the dtype of `ids` is neither int32 nor int64.
    """
    tensor = tf.convert_to_tensor(ids)
    if isinstance(ids, (list, tuple)) and 0 in tensor.shape.as_list():
        tensor = tf.cast(tensor, tf.int32)
    if tensor.dtype not in ID_DTYPES:
        raise TypeError(
            "Argument `ids` must be int32 or int64. Received: dtype "
            f"{tensor.dtype.name} (table {shards.name!r})."
        )
    return tensor


def in_xla() -> bool:
    """Returns whether XLA compiles the function that is being traced."""
    return not tf.executing_eagerly() and tf_private.is_xla_graph(
        tf.compat.v1.get_default_graph()
    )


def in_vectorized_map() -> bool:
    """Returns whether the loop body of tf.vectorized_map is being traced.

    `tape.jacobian` uses the same loop. The function recognizes the loop only by
    its name scope. If a name scope in a user's program has the same name, the
    results are the same, but the computation is slower.
    """
    return any(
        scope.startswith("loop_body")
        for graph in tf_private.graphs_around()
        for scope in graph.get_name_scope().split("/")
    )


def check_devices_in_xla(shards: Shards) -> None:
    """Checks that all shards are on one device if XLA compiles the function.

    Raises:
      ValueError: If the shards are on several devices, which XLA does not
        support.
    """
    if len(shards.variables) == 1 or not in_xla():
        return
    devices = sorted(set(shards.devices))
    if len(devices) > 1:
        raise ValueError(
            f"The shards of table {shards.name!r} must be on one device in a "
            "function that XLA compiles (jit_compile=True). Received: shards "
            f"on {devices}. Look up rows outside of that function, or remove "
            "`jit_compile`."
        )


def check_ids(
    shards: Shards, ids: tf.Tensor, lowest: int = 0, axis: int = 0
) -> tf.Tensor:
    """Returns `ids` if all ids are in range, and raises an error otherwise.

    Args:
      shards: The table.
      ids: Any shape, int32 or int64.
      lowest: Smallest valid id. Can be negative if the caller handles negative
        ids.
      axis: The axis of the table that the ids index. 0 if ids are rows.

    Raises:
      tf.errors.InvalidArgumentError: If an id is out of range. In a graph, the
        op that returns `ids` fails.
    """
    size = cast("int", shards.shape[axis])
    if size > ids.dtype.max:
        # The ids are cast, because a size that the dtype cannot represent would
        # wrap around in the comparison.
        ids = tf.cast(ids, tf.int64)
    flat = tf.reshape(ids, [-1])
    outside = tf.logical_or(flat < lowest, flat >= size)
    sentence = "Id {} (ids[{}]) is outside " + _extent(shards, axis)
    if tf.executing_eagerly():
        if tf.reduce_any(outside):
            position = int(tf.argmax(outside))
            raise tf.errors.InvalidArgumentError(
                None, None, sentence.format(int(flat[position]), position)
            )
        return ids
    # argmax of an empty tensor raises an error, so an element is appended.
    position = tf.argmax(tf.concat([outside, [True]], axis=0))
    culprit = tf.gather(tf.concat([flat, [0]], axis=0), position)
    return _only_if(
        ids, tf.logical_not(tf.reduce_any(outside)), sentence, culprit, position
    )


def poison_ids(
    shards: Shards, ids: tf.Tensor, axis: int = 0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces invalid ids by 0; also returns a mask of the invalid ids.

    Raises:
      TypeError: If the dtype of the table has no NaN, and the ids are unknown
        during tracing.
      tf.errors.InvalidArgumentError: If the ids are known during tracing, and
        an id is out of range.
    """
    size = cast("int", shards.shape[axis])
    known = tf.get_static_value(ids)
    if known is not None:
        wrong = (known < 0) | (known >= size)
        if wrong.any():
            raise tf.errors.InvalidArgumentError(
                None,
                None,
                f"Id {int(known[wrong].flat[0])} is outside "
                + _extent(shards, axis),
            )
    elif not (shards.dtype.is_floating or shards.dtype.is_complex):
        raise TypeError(
            "In a function that XLA compiles, a table must have a floating "
            "dtype, because XLA drops the check of ids and only NaN can "
            f"show an invalid id. Received: dtype {shards.dtype.name} (table "
            f"{shards.name!r}). Use the table outside of `jit_compile=True`."
        )
    if size > ids.dtype.max:
        ids = tf.cast(ids, tf.int64)
    outside = tf.logical_or(ids < 0, ids >= size)
    return tf.where(outside, tf.zeros_like(ids), ids), outside


def _extent(shards: Shards, axis: int) -> str:
    if axis == 0:
        return f"table {shards.name!r} with {shards.num_rows} rows"
    return (
        f"axis {axis}, of size {shards.shape[axis]}, of table {shards.name!r}"
    )


def nan_where(condition: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Returns `tensor` with NaN where `condition` is true.

    The axes of `condition` are the leading axes of `tensor`. A tensor whose
    dtype has no NaN is returned unchanged.
    """
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return tensor  # `poison_ids` has checked the ids.
    shape = tf.concat(
        [
            tf.shape(condition),
            tf.ones([tf.rank(tensor) - tf.rank(condition)], tf.int32),
        ],
        axis=0,
    )
    # `tf.debugging.enable_check_numerics` does not allow a constant NaN.
    nan_or_zero = tf.sqrt(-tf.cast(condition, tf.float32))
    return tf.where(
        tf.reshape(condition, shape),
        tf.reshape(tf.cast(nan_or_zero, tensor.dtype), shape),
        tensor,
    )


def poison_to_add(outside: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns values to add after `min` or `max`, which drop NaN in XLA.

    Args:
      outside: Mask of the invalid ids.
      values: The scattered values.

    Returns:
      A tensor of the shape of `values`. All its elements are NaN if any id is
      invalid, and -0 otherwise. Adding -0 to a number does not change its bits.
    """
    return nan_where(
        tf.reduce_any(outside),
        tf.fill(tf.shape(values), tf.constant(-0.0, values.dtype)),
    )


def check_shape(
    shards: Shards,
    value: tf.Tensor,
    shape: tf.TensorShape,
    label: str = "Values",
) -> None:
    """Checks that the static shape of `value` is compatible with `shape`.

    Args:
      shards: The table, for the message.
      value: Any tensor.
      shape: The required static shape.
      label: Name of `value` in the message.

    Raises:
      ValueError: If the shape is not compatible.
    """
    if not value.shape.is_compatible_with(shape):
        raise ValueError(
            f"{label} for table {shards.name!r} must have shape {shape}. "
            f"Received: shape {value.shape}."
        )


def check_run_time_shape(
    shards: Shards,
    value: tf.Tensor,
    shape: tf.TensorShape,
    run_time_shape: Any,
    label: str = "Values",
) -> tf.Tensor:
    """Returns `value` if it has `shape`, and raises an error otherwise.

    The static shape is checked first. If the static shape is not fully known,
    the shape is also checked at run time.

    Args:
      shards: The table, for the message.
      value: Any tensor.
      shape: The required static shape.
      run_time_shape: The complete required shape: int32, `[rank]`.
      label: Name of `value` in the message.

    Raises:
      ValueError: If the static shape is not compatible.
      tf.errors.InvalidArgumentError: If the shape at run time differs from
        `run_time_shape`.
    """
    check_shape(shards, value, shape, label)
    if value.shape.is_fully_defined() and shape.is_fully_defined():
        return value
    if value.shape.rank is None:
        value = _only_if(
            value,
            tf.equal(tf.rank(value), tf.size(run_time_shape)),
            f"{label} for table {shards.name!r} must have shape {shape}, of "
            "rank {}. Received: rank {}",
            tf.size(run_time_shape),
            tf.rank(value),
        )
    value = _only_if(
        value,
        tf.reduce_all(tf.equal(tf.shape(value), run_time_shape)),
        f"{label} for table {shards.name!r} must have shape {shape}. "
        "Received: shape {}",
        tf.shape(value),
    )
    # tf.ensure_shape is not used, because its check may run before the check
    # above, and has a less specific message.
    value.set_shape(shape)
    return value


def check_divisors(shards: Shards, values: tf.Tensor) -> tf.Tensor:
    """Returns integer `values` if no value is 0, and raises an error otherwise.

    An integer division by 0 would terminate the process.
    """
    if in_xla():
        raise TypeError(
            "`scatter_div` in a function that XLA compiles requires a floating "
            "dtype, because XLA drops the check of divisors. "
            f"Received: dtype {shards.dtype.name} (table {shards.name!r})."
        )
    sentence = (
        "`scatter_div` of integers needs updates without 0 (table "
        f"{shards.name!r})"
    )
    is_good = tf.reduce_all(tf.not_equal(values, 0))
    return _only_if(values, is_good, sentence)


def _only_if(
    tensor: tf.Tensor, condition: tf.Tensor, sentence: str, *culprits: tf.Tensor
) -> tf.Tensor:
    """Returns `tensor` if `condition` holds, and raises an error otherwise.

    The text `sentence` contains one `{}` for each element of `culprits`.
    """
    # The assertion has the parts of the sentence as separate inputs, because
    # XLA could not compile a function with string ops that join them.
    words = sentence.split("{}")
    data: list[Any] = [words[0]]
    for culprit, word in zip(culprits, words[1:]):
        data += [culprit, word]
    checks = assertions.require(condition, *data, summarize=10)
    with tf.control_dependencies(checks):
        return tf.identity(tensor)
