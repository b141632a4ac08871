"""Checks the arguments of `ShardedVariable`'s constructors."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import (
    Any,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
)

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, literals
from tf_layoutmap.partition import FixedShardsPartitioner, RowPartition

# Valid strings. A placement can also be a RowPartition, a callable or offsets.
PLACEMENT_NAMES = get_args(literals.Placement)

Placement: TypeAlias = (
    literals.Placement
    | Iterable[SupportsIndex]
    | RowPartition
    | Callable[..., object]
)
"""Name of a placement, offsets, a partition, or a callable of global rows."""


_ADVICE = (
    "Use ShardedVariable.create(initial_value, shape, num_shards=2) to make a "
    "table from a value or an initializer."
)
_CREATE_ARGUMENTS = (
    "initial_value",
    "shape",
    "dtype",
    "partitioner",
    "num_shards",
    "devices",
    "trainable",
)

_Init = TypeVar("_Init", bound=Callable[..., None])


def rejects_create_arguments(init: _Init) -> _Init:
    """Decorates a constructor to raise `TypeError` for arguments of `create`.

    The error message recommends the method `create`.
    """

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        names = [name for name in _CREATE_ARGUMENTS if name in kwargs]
        if names:
            raise TypeError(
                f"{type(self).__name__}() takes existing variables as shards "
                "and does not support arguments of `create`. Received: "
                f"{', '.join(names)}. " + _ADVICE
            )
        init(self, *args, **kwargs)

    return cast("_Init", checked)


def check_variables(
    variables: Any, name: str, axis: int, may_be_sliced: bool = False
) -> list[tf.Variable]:
    """Checks that `variables` can be the shards of one table.

    Args:
      variables: The value to check.
      name: Name of the table, for messages.
      axis: The axis along which the shapes may differ, 0 or 1.
      may_be_sliced: Whether the variables may have `SaveSliceInfo`, as in
        TensorFlow's own class.

    Raises:
      TypeError: If `variables` is not a list of `tf.Variable`s, or a variable
        has copies on several replicas.
      ValueError: If a variable occurs twice; shapes, dtypes or `trainable`
        differ; or a variable has `SaveSliceInfo` and `may_be_sliced` is false.
    """
    where = f" (table {name!r})."
    if (
        not isinstance(variables, Sequence)
        or not variables
        or not all(isinstance(v, tf.Variable) for v in variables)
    ):
        raise TypeError(
            "Argument `variables` should be a non-empty list of "
            f"`tf.Variable`s. Received: {_described(variables)}{where} "
            + _ADVICE
        )
    mirrored = [
        v.name
        for v in variables
        if isinstance(v, tf.distribute.DistributedValues)
        and v.distribute_strategy.num_replicas_in_sync > 1
    ]
    if mirrored:
        # An op uses one handle per variable. The op would therefore update only
        # one of the copies, and the copies would differ.
        raise TypeError(
            "Argument `variables` must not have copies on several replicas; "
            "create them outside `strategy.scope()`. Received: "
            f"{mirrored}{where}"
        )
    if len({id(variable) for variable in variables}) < len(variables):
        raise ValueError(
            "Argument `variables` must not contain a variable twice. Received: "
            f"{[v.name for v in variables]}{where}"
        )
    if any(
        (v.shape.rank or 0) <= axis or not v.shape.is_fully_defined()
        for v in variables
    ):
        raise ValueError(
            "All `variables` must have fully defined shapes with at least "
            f"{('one axis', 'two axes')[axis]}. Received: "
            f"{[v.shape for v in variables]}{where}"
        )
    if len({variable.dtype for variable in variables}) > 1:
        raise ValueError(
            "All `variables` must have the same dtype. Received: "
            f"{[v.dtype.name for v in variables]}{where}"
        )
    if len({(*v.shape[:axis], *v.shape[axis + 1 :]) for v in variables}) > 1:
        raise ValueError(
            "All `variables` must have the same shapes except for the "
            f"{('first', 'second')[axis]} axis. Received: "
            f"{[v.shape for v in variables]}{where}"
        )
    if len({variable.trainable for variable in variables}) > 1:
        raise ValueError(
            "All `variables` must have the same `trainable`. Received: "
            f"{[v.trainable for v in variables]}{where}"
        )
    if not may_be_sliced and any(
        variable._get_save_slice_info() for variable in variables
    ):
        raise ValueError(
            "`SaveSliceInfo` must not be set for `variables`, because the "
            "table sets the slice of each variable. Received: "
            f"{[v.name for v in variables]}{where}"
        )
    return list(variables)


def check_full_value(
    value: Any, shape: Any, dtype: Any, name: str
) -> tuple[Any, tf.TensorShape, tf.DType]:
    """Checks a value; returns an array or a tensor, its shape and its dtype.

    Raises:
      TypeError: If `value` is a string.
      ValueError: If `shape` is not the shape of the value.
    """
    if isinstance(value, str):
        raise TypeError(
            checks.message(
                "initial_value",
                "an array, a tensor, or a callable such as "
                f"tf.keras.initializers.get({value!r})",
                value,
                f"table {name!r}",
            )
        )
    if not isinstance(value, np.ndarray) or dtype is not None:
        value = tf.convert_to_tensor(value, dtype=dtype)
    value_shape = tf.TensorShape(value.shape)
    if shape is not None and not value_shape.is_compatible_with(shape):
        raise ValueError(
            "Argument `shape` must be the shape of `initial_value`, "
            f"{value_shape}. Received: {shape} (table {name!r})."
        )
    return value, value_shape, tf.as_dtype(value.dtype)


def _described(value: Any) -> str:
    """Returns a short description of a value, also if the value is large."""
    if isinstance(value, tf.Variable):
        return f"one tf.Variable of shape {value.shape}, not in a list"
    if tf.is_tensor(value) or isinstance(value, np.ndarray):
        return (
            f"{type(value).__name__} of shape {tuple(value.shape)} and "
            f"dtype {tf.as_dtype(value.dtype).name}"
        )
    return repr(value)


def check_axis(axis: Any, name: str) -> int:
    """Checks that a table can be sharded along `axis`; returns `axis`."""
    return checks.check_int(
        "axis", axis, lowest=0, highest=1, where=f"table {name!r}"
    )


def partition_of(
    sizes: list[int], placement: Any, axis: int, name: str
) -> RowPartition:
    """Returns the partition of a table into shards of `sizes`.

    Args:
      sizes: Size of each shard along `axis`.
      placement: None or `"offsets"`: contiguous shards. `"div"`: contiguous
        shards of even sizes. `"mod"`: row `r` in shard `r % num_shards`. A
        list of offsets: contiguous shards that start at these rows. A callable.
        A `RowPartition`.
      axis: The axis along which the table is sharded.
      name: Name of the table, for messages.

    Raises:
      TypeError: If `placement` is of an unsupported type.
      ValueError: If `placement` is invalid or does not fit `sizes`.
    """
    where = f"table {name!r}"
    if isinstance(placement, RowPartition):
        partition = placement
    elif callable(placement):
        partition = RowPartition.from_callable(
            cast("Callable[[Any], tuple[Any, Any]]", placement), sizes
        )
    elif placement == "mod":
        partition = RowPartition.mod(sum(sizes), len(sizes))
    elif placement == "div":
        partition = RowPartition.div(sum(sizes), len(sizes))
    elif placement is None or placement == "offsets":
        partition = RowPartition.from_sizes(sizes)
    elif isinstance(placement, str):
        raise ValueError(
            checks.message(
                "placement",
                f"one of {PLACEMENT_NAMES}, offsets, a callable or a "
                "RowPartition",
                placement,
                where,
            )
        )
    else:
        partition = from_offsets(placement, name)
    if partition.sizes != tuple(sizes):
        raise ValueError(
            f"Argument `placement` must fit the shards, of sizes {sizes} "
            f"along axis {axis}. Received: {placement!r}, which requires "
            f"sizes {list(partition.sizes)} ({where})."
        )
    if axis == 1 and not partition.is_contiguous:
        raise ValueError(
            "Argument `placement` must be contiguous along axis 1. Received: "
            f"{placement!r} ({where})."
        )
    return partition


def from_offsets(offsets: Any, name: str) -> RowPartition:
    """Returns a partition into contiguous shards that start at `offsets`.

    Args:
      offsets: First row of each shard, followed by the number of rows of the
        table.
      name: Name of the table, for messages.

    Raises:
      TypeError: If `offsets` are not integers.
    """
    try:
        offsets = [int(offset) for offset in offsets]
    except (TypeError, ValueError):
        raise TypeError(
            checks.message(
                "placement",
                f"one of {PLACEMENT_NAMES}, offsets, a callable or a "
                "RowPartition",
                offsets,
                f"table {name!r}",
            )
        ) from None
    checked = RowPartition("offsets", tuple(offsets))
    return RowPartition.from_sizes(checked.sizes)


def partition_from_arguments(
    shape: tuple,
    dtype: tf.DType,
    axis: int,
    placement: Any,
    partitioner: Any,
    num_shards: Any,
    devices: Any,
    name: str,
    default_num_shards: int = 1,
) -> RowPartition:
    """Returns the partition that the arguments of `create` or `reshard` define.

    `default_num_shards` is used if no other argument specifies the number of
    shards.
    """
    size = shape[axis]
    fixed = None
    if isinstance(placement, RowPartition):
        fixed = placement
    elif (
        placement is not None
        and not isinstance(placement, str)
        and (not callable(placement))
    ):
        fixed = from_offsets(placement, name)
    if fixed is not None:
        if partitioner is not None or num_shards not in (
            None,
            fixed.num_shards,
        ):
            raise ValueError(
                "Arguments `num_shards` and `partitioner` must be left out "
                "when `placement` sets the number of shards, here "
                f"{fixed.num_shards}. Received: num_shards={num_shards!r}, "
                f"partitioner={partitioner!r} (table {name!r})."
            )
        if fixed.num_rows != size:
            raise ValueError(
                f"Argument `placement` must cover {size} "
                f"{('rows', 'columns')[axis]}. Received: {fixed.num_rows} "
                f"(table {name!r})."
            )
        return partition_of(list(fixed.sizes), fixed, axis, name)
    if partitioner is None and num_shards is None:
        num_shards = default_num_shards if devices is None else len(devices)
    count = _number_of_shards(partitioner, num_shards, shape, dtype, axis, name)
    sizes = list(RowPartition.div(size, count).sizes)
    return partition_of(sizes, placement, axis, name)


def check_devices(devices: Any, name: str) -> list[str] | None:
    """Returns `devices` as a list of device names, or None if it is None.

    Raises:
      TypeError: If `devices` is not a non-empty list of strings.
    """
    if devices is None:
        return None
    if (
        isinstance(devices, str)
        or not isinstance(devices, Sequence)
        or (not devices or not all(isinstance(d, str) for d in devices))
    ):
        raise TypeError(
            checks.message(
                "devices",
                "a non-empty list of device names",
                devices,
                f"table {name!r}",
            )
        )
    return list(devices)


def _number_of_shards(
    partitioner: Any,
    num_shards: Any,
    shape: tuple,
    dtype: tf.DType,
    axis: int,
    name: str,
) -> int:
    if partitioner is not None and num_shards is not None:
        raise ValueError(
            "Arguments `partitioner` and `num_shards` must not both be "
            f"given. Received: {partitioner!r} and {num_shards!r} (table "
            f"{name!r})."
        )
    if num_shards is not None:
        partitioner = FixedShardsPartitioner(num_shards)
    partitioner = checks.check_partitioner(partitioner, f"table {name!r}")
    options = {"axis": axis} if axis else {}
    counts = partitioner(tf.TensorShape(shape), dtype, **options)
    if not isinstance(counts, Sequence):
        raise TypeError(
            "Argument `partitioner` must return a list with the number of "
            f"shards along each axis. Received: {counts!r} (table {name!r})."
        )
    counts = list(counts)
    if (
        len(counts) != len(shape)
        or counts[axis] < 1
        or any(count != 1 for i, count in enumerate(counts) if i != axis)
    ):
        raise ValueError(
            f"Argument `partitioner` must shard axis {axis} only. Received: "
            f"counts {counts} for shape {shape} (table {name!r})."
        )
    return int(counts[axis])
