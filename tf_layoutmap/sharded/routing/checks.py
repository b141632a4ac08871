"""Refuses ids and values before anything is written.

XLA compiles no run-time check. What it compiles shows a bad id as NaN, and
where the dtype has none, it is refused when the function is traced.
"""

# DOC-MERGE: What reads and writes need to know of a table.
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing import assertions


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a table and the rule that divides it.

    Attributes:
      variables: One per shard, equal dtype; equal shape but for `axis`.
      partition: The rule that divides `axis` among them.
      name: The table's name, for messages.
      axis: 0: each shard holds whole rows. 1: each holds some columns of all
        rows.
      is_exported: Whether a SavedModel is traced, which may hold TensorFlow's
        own operations only.
      argument_devices: Where the variables are, when the table is an argument
        of a `tf.function`, in which variables do not know it.
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
        """Shape of the whole table."""
        sizes = self.variables[0].shape.as_list()
        sizes[self.axis] = self.partition.num_rows
        return tf.TensorShape(sizes)

    @property
    def sizes(self) -> list[int]:
        """`shape` as a list."""
        return known_sizes(self)

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return cast("int", self.shape[0])

    @property
    def row_shape(self) -> Any:
        """`tf.TensorShape` of one row of the whole table."""
        # Any, for type checkers: their tf.concat takes no shapes.
        return self.shape[1:]

    @property
    def dtype(self) -> tf.DType:
        """Dtype of the rows."""
        return self.variables[0].dtype

    def alone(self, number: int) -> "Shards":
        """Returns one shard as a table of its own."""
        variable, devices = self.variables[number], self.argument_devices
        return Shards(
            [variable],
            RowPartition.div(known_size(variable), 1),
            self.name,
            is_exported=self.is_exported,
            argument_devices=devices and [devices[number]],
        )

    def each_alone(self) -> list["Shards"]:
        """Returns every shard as a table of its own."""
        return [self.alone(number) for number in range(len(self.variables))]

    def split(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Divides a value of the whole table among its shards."""
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
    """Returns a size of a variable or tensor of known shape."""
    return int(variable.shape[axis])


def known_sizes(variable: Any) -> list[int]:
    """Returns the shape of a variable or tensor, which is known, as a list."""
    return variable.shape.as_list()


ID_DTYPES = (tf.int32, tf.int64)


def ids_of(shards: Shards, ids: Any) -> tf.Tensor:
    """Returns `ids` as a tensor, int32 or int64; `[]` holds int32."""
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
    """Whether XLA compiles what is traced here."""
    return not tf.executing_eagerly() and tf_private.is_xla_graph(
        tf.compat.v1.get_default_graph()
    )


def in_vectorized_map() -> bool:
    """Whether the body of tf.vectorized_map is traced, or that of a jacobian.

    TensorFlow tells only by the name scope. Where a user's scope has the same
    name, the same is computed more slowly.
    """
    return not tf.executing_eagerly() and any(
        scope.startswith("loop_body")
        for scope in tf.get_current_name_scope().split("/")
    )


def check_devices_in_xla(shards: Shards) -> None:
    """Refuses shards on several devices in a function that XLA compiles.

    Raises:
      ValueError: If there are several: XLA reaches those of one only.
    """
    if len(shards.variables) == 1 or not in_xla():
        return
    devices = sorted(set(shards.devices))
    if len(devices) > 1:
        raise ValueError(
            f"The shards of table {shards.name!r} must be on one device in a "
            "function that XLA compiles (jit_compile=True). Received: shards "
            f"on {devices}. Look rows up outside of that function, or leave "
            "`jit_compile` out."
        )


def check_ids(
    shards: Shards, ids: tf.Tensor, lowest: int = 0, axis: int = 0
) -> tf.Tensor:
    """Returns `ids`, to be had only if the table has them all.

    Args:
      shards: The table.
      ids: Any shape, int32 or int64.
      lowest: Smallest id allowed; what a negative one means is left to the
        caller.
      axis: What the ids index: 0 for rows.
    """
    size = cast("int", shards.shape[axis])
    if size > ids.dtype.max:
        # The size itself would wrap around in the comparison.
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
    # argmax of nothing is refused, so there is always one more.
    position = tf.argmax(tf.concat([outside, [True]], axis=0))
    culprit = tf.gather(tf.concat([flat, [0]], axis=0), position)
    return _only_if(
        ids, tf.logical_not(tf.reduce_any(outside)), sentence, culprit, position
    )


def poison_ids(
    shards: Shards, ids: tf.Tensor, axis: int = 0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns ids that are inside, and which of them were not, for XLA.

    Raises:
      TypeError: The dtype has no NaN, and the ids are not known yet.
      tf.errors.InvalidArgumentError: They are known, and outside.
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
            "In a function that XLA compiles a table must be of floating "
            "numbers, because XLA drops the check of ids and only NaN can "
            f"show a bad one. Received: dtype {shards.dtype.name} (table "
            f"{shards.name!r}). Call it outside of `jit_compile=True`."
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
    """Returns `tensor` with NaN where `condition`, of the leading axes."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return tensor  # The ids were checked when the function was traced.
    shape = tf.concat(
        [
            tf.shape(condition),
            tf.ones([tf.rank(tensor) - tf.rank(condition)], tf.int32),
        ],
        axis=0,
    )
    return tf.where(
        tf.reshape(condition, shape),
        tf.constant(float("nan"), tensor.dtype),
        tensor,
    )


def poison_to_add(outside: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns what to add after `min` and `max`: under XLA these drop NaN.

    Args:
      outside: Which ids were bad.
      values: What was scattered.

    Returns:
      Of the shape of `values`: NaN if any id was bad, else -0, which added
      to any number changes no bit of it.
    """
    return nan_where(
        tf.reduce_any(outside),
        tf.fill(tf.shape(values), tf.constant(-0.0, values.dtype)),
    )


def check_shape(
    shards: Shards,
    value: tf.Tensor,
    shape: tf.TensorShape,
    what: str = "Values",
) -> None:
    """Refuses `value` if it is known not to have `shape`.

    Args:
      shards: The table, for the message.
      value: Any tensor.
      shape: What it must be, as far as that is known now.
      what: What the message calls `value`.
    """
    if not value.shape.is_compatible_with(shape):
        raise ValueError(
            f"{what} for table {shards.name!r} must have shape {shape}. "
            f"Received: shape {value.shape}."
        )


def check_run_time_shape(
    shards: Shards,
    value: tf.Tensor,
    shape: tf.TensorShape,
    run_time_shape: Any,
    what: str = "Values",
) -> tf.Tensor:
    """Returns `value` if it has `shape`, checked before or when it runs.

    Args:
      shards: The table, for the message.
      value: Any tensor.
      shape: What it must be, as far as that is known now.
      run_time_shape: The same, complete: int32, `[rank]`.
      what: What the message calls `value`.
    """
    check_shape(shards, value, shape, what)
    if value.shape.is_fully_defined() and shape.is_fully_defined():
        return value
    if value.shape.rank is None:
        value = _only_if(
            value,
            tf.equal(tf.rank(value), tf.size(run_time_shape)),
            f"{what} for table {shards.name!r} must have shape {shape}, of "
            "rank {}. Received: rank {}",
            tf.size(run_time_shape),
            tf.rank(value),
        )
    value = _only_if(
        value,
        tf.reduce_all(tf.equal(tf.shape(value), run_time_shape)),
        f"{what} for table {shards.name!r} must have shape {shape}. "
        "Received: shape {}",
        tf.shape(value),
    )
    # Not tf.ensure_shape: its own check may run first, with fewer words.
    value.set_shape(shape)
    return value


def check_divisors(shards: Shards, values: tf.Tensor) -> tf.Tensor:
    """Returns integer `values` if none is 0: that would end the process."""
    if in_xla():
        raise TypeError(
            "`scatter_div` in a function that XLA compiles must be of "
            "floating numbers, because XLA drops the check of divisors. "
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
    """Returns `tensor`, to be had only if `condition` holds.

    `sentence` has one `{}` for each of `culprits`.
    """
    # The sentence is data of the op, not built by it: string ops would keep
    # the function from being compiled by XLA.
    words = sentence.split("{}")
    data: list[Any] = [words[0]]
    for culprit, word in zip(culprits, words[1:]):
        data += [culprit, word]
    checks = assertions.require(condition, *data, summarize=10)
    with tf.control_dependencies(checks):
        return tf.identity(tensor)
