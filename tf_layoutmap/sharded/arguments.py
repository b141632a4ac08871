"""What the constructors of `ShardedVariable` take, checked."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.partition import FixedShardsPartitioner, RowPartition

# What is not a string: a RowPartition, a callable, or offsets.
PLACEMENT_NAMES = ("div", "mod", "offsets")


_ADVICE = (
    "Use ShardedVariable.create(initial_value, shape, num_shards=2) to make a "
    "table from a value or an initializer."
)
_OF_CREATE = (
    "initial_value",
    "shape",
    "dtype",
    "partitioner",
    "num_shards",
    "devices",
    "trainable",
)

_Init = TypeVar("_Init", bound=Callable[..., None])


def refuses_arguments_of_create(init: _Init) -> _Init:
    """Makes a constructor name `create` when it gets one of its arguments."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        found = [name for name in _OF_CREATE if name in kwargs]
        if found:
            raise TypeError(
                f"{type(self).__name__}() takes existing variables as shards, "
                f"and no such argument. Received: {', '.join(found)}. "
                + _ADVICE
            )
        init(self, *args, **kwargs)

    return cast("_Init", checked)


def check_variables(
    variables: Any, name: str, axis: int, may_be_sliced: bool = False
) -> list[tf.Variable]:
    """Returns `variables` if they can be the shards of one table.

    Args:
      variables: What came.
      name: Of the table.
      axis: 0 or 1: the axis along which they may differ.
      may_be_sliced: Whether they may carry `SaveSliceInfo`, as those of
        TensorFlow's own class do.
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
        # Operations know one handle of each, so copies would drift apart.
        raise TypeError(
            "Argument `variables` must not have copies on several replicas; "
            "make them outside of `strategy.scope()`. Received: "
            f"{mirrored}{where}"
        )
    if len({id(variable) for variable in variables}) < len(variables):
        raise ValueError(
            "Argument `variables` must not hold a variable twice. Received: "
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
            "All `variables` must be trainable, or none. Received: "
            f"{[v.trainable for v in variables]}{where}"
        )
    if not may_be_sliced and any(
        variable._get_save_slice_info() for variable in variables
    ):
        raise ValueError(
            "`SaveSliceInfo` should not be set for `variables`: the table "
            f"gives each its slice. Received: {[v.name for v in variables]}"
            f"{where}"
        )
    return list(variables)


def check_whole_value(
    value: Any, shape: Any, dtype: Any, name: str
) -> tuple[Any, tf.TensorShape, tf.DType]:
    """Returns the value as array or tensor, its shape and dtype."""
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
    found = tf.TensorShape(value.shape)
    if shape is not None and not found.is_compatible_with(shape):
        raise ValueError(
            f"Argument `shape` must be that of `initial_value`, {found}. "
            f"Received: {shape} (table {name!r})."
        )
    return value, found, tf.as_dtype(value.dtype)


def _described(value: Any) -> str:
    """A value in a message, where it may be a large table."""
    if isinstance(value, tf.Variable):
        return f"one tf.Variable of shape {value.shape}, not in a list"
    if tf.is_tensor(value) or isinstance(value, np.ndarray):
        return (
            f"{type(value).__name__} of shape {tuple(value.shape)} and "
            f"dtype {tf.as_dtype(value.dtype).name}"
        )
    return repr(value)


def check_axis(axis: Any, name: str) -> int:
    """Returns `axis` if a table can be cut along it."""
    return checks.check_int(
        "axis", axis, lowest=0, highest=1, where=f"table {name!r}"
    )


def partition_of(
    sizes: list[int], placement: Any, axis: int, name: str
) -> RowPartition:
    """Returns the rule by which shards of `sizes` divide the table.

    Args:
      sizes: Of each shard, along `axis`.
      placement: None or `"offsets"`: contiguous. `"div"`: contiguous and
        even. `"mod"`. Offsets: contiguous, and these. A callable, or a
        `RowPartition`.
      axis: Along which the table is cut.
      name: Of the table.

    Raises:
      TypeError, ValueError: The placement is none, or another than sizes
        allow.
    """
    where = f"table {name!r}"
    if isinstance(placement, RowPartition):
        found = placement
    elif callable(placement):
        found = RowPartition.from_callable(
            cast("Callable[[Any], tuple[Any, Any]]", placement), sizes
        )
    elif placement == "mod":
        found = RowPartition.mod(sum(sizes), len(sizes))
    elif placement == "div":
        found = RowPartition.div(sum(sizes), len(sizes))
    elif placement is None or placement == "offsets":
        found = RowPartition.from_sizes(sizes)
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
        found = from_offsets(placement, name)
    if found.sizes != tuple(sizes):
        raise ValueError(
            f"Argument `placement` must fit the shards, of sizes {sizes} "
            f"along axis {axis}. Received: {placement!r}, which needs sizes "
            f"{list(found.sizes)} ({where})."
        )
    if axis == 1 and not found.is_contiguous:
        raise ValueError(
            "Argument `placement` must be contiguous along axis 1. Received: "
            f"{placement!r} ({where})."
        )
    return found


def from_offsets(offsets: Any, name: str) -> RowPartition:
    """Returns contiguous blocks that start at `offsets`, the end included."""
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


def partition_to_make(
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
    """Returns the partition that `create` or `reshard` is asked for.

    The last argument counts where no other one says how many shards.
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
                "Argument `placement` already says how many shards: "
                f"{fixed.num_shards}. Received: num_shards={num_shards!r}, "
                f"partitioner={partitioner!r} (table {name!r})."
            )
        if fixed.num_rows != size:
            raise ValueError(
                f"Argument `placement` must be of {size} "
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
    """Returns `devices` if they are names of devices, or None."""
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
    if not callable(partitioner):
        raise TypeError(
            checks.message(
                "partitioner", "callable", partitioner, f"table {name!r}"
            )
        )
    options = {"axis": axis} if axis else {}
    counts = partitioner(tf.TensorShape(shape), dtype, **options)
    if not isinstance(counts, Sequence):
        raise TypeError(
            "Argument `partitioner` must return a list, the number of shards "
            f"along each axis. Received: {counts!r} (table {name!r})."
        )
    counts = list(counts)
    if (
        len(counts) != len(shape)
        or counts[axis] < 1
        or any(count != 1 for i, count in enumerate(counts) if i != axis)
    ):
        raise ValueError(
            f"Argument `partitioner` must cut axis {axis} only. Received: "
            f"counts {counts} for shape {shape} (table {name!r})."
        )
    return int(counts[axis])
