"""Describes batches, models and optimizers as plain data.

Processes that train one model exchange these descriptions to check that they
are equal.
"""

import re
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout

dtensor = tf.experimental.dtensor

# Number of values per shard that are compared. This number is large enough to
# detect a different seed or file, and the comparison is fast relative to the
# compilation of the first step.
_NUM_VALUES = 4096


def describe_batch(leaves: list[tuple[str, Any]]) -> list[list[Any]]:
    """Returns `[path, dtype, shape]` of each tensor of a batch."""
    return [
        [path, "None", None]
        if x is None
        else [path, tf.as_dtype(x.dtype).name, [int(s) for s in x.shape]]
        for path, x in leaves
    ]


def variables_of(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer; an empty list for None."""
    if optimizer is None:
        return []
    variables = optimizer.variables
    # In legacy optimizers of tf_keras, `variables` is a method.
    if callable(variables):
        variables = optimizer.variables()
    return list(variables)


def dvariable_of(variable: Any) -> Any:
    """Returns the DVariable of a Keras variable, or None."""
    if isinstance(variable, dtensor.DVariable):
        return variable
    value = getattr(variable, "_value", None)
    return value if isinstance(value, dtensor.DVariable) else None


def describe_weights(weights: Iterable[Any]) -> list[list[Any]]:
    """Returns the path, dtype, shape, axes and kind of each weight."""
    descriptions = []
    for weight in weights:
        value = dvariable_of(weight)
        descriptions.append(
            [
                name_of(weight),
                tf.as_dtype(weight.dtype).name,
                [int(s) for s in weight.shape],
                [] if value is None else list(value.layout.sharding_specs),
                "trainable" if weight.trainable else "not trainable",
            ]
        )
    return descriptions


def name_of(variable: Any) -> str:
    """Returns the path of a Keras 3 variable; the name of other variables."""
    return getattr(variable, "path", None) or variable.name


def describe_optimizer(optimizer: Any) -> list[list[Any]]:
    """Returns the class and config of an optimizer; an empty list for None."""
    if optimizer is None:
        return []
    # The name is not compared, because Keras adds a number to the name, and
    # this number can differ between processes.
    return [["class", type(optimizer).__name__]] + sorted(
        [name, stable_text(value)]
        for name, value in optimizer.get_config().items()
        if name != "name"
    )


def describe_loss(loss: Any) -> list[list[Any]]:
    """Returns descriptions of the losses that were passed to `compile`."""
    return [
        [
            "function",
            stable_text(
                tf.nest.map_structure(
                    lambda entry: (
                        entry
                        if isinstance(entry, str | None)
                        else getattr(entry, "__name__", type(entry).__name__)
                    ),
                    loss,
                )
            ),
        ]
    ]


def times_set(model: Any) -> int:
    """Returns how often weights and optimizer variables were set eagerly."""
    variables = [
        *model.weights,
        *variables_of(getattr(model, "optimizer", None)),
    ]
    return sum(getattr(dvariable_of(v), "times_set", 0) for v in variables)


def stable_text(value: Any) -> str:
    """Returns a string that is equal in all processes for equal values."""
    if isinstance(value, np.generic | np.ndarray) or tf.is_tensor(value):
        value = np.asarray(value).tolist()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def variable_checksums(variables: Iterable[Any]) -> list[list[Any]]:
    """Returns `[path, {bounds of shard: checksum}]` of each variable.

    Only shards that both this process and another process hold are included.
    For large shards, only a sample of the values is used.
    """
    checksums = []
    for variable in variables:
        value = dvariable_of(variable)
        is_shared = value is not None and has_shared_shards(value.layout)
        checksums.append(
            [name_of(variable), _sums_of_parts(value) if is_shared else {}]
        )
    return checksums


def _sums_of_parts(variable: Any) -> dict[str, int]:
    sums: dict[str, int] = {}
    components = dtensor.unpack(variable.read_value())
    for shard in transfer.unique_shards(variable.shape, variable.layout):
        flat = components[shard.devices[0]].numpy().reshape(-1)
        step = max(1, flat.size // _NUM_VALUES)
        sums[_bounds_text(shard)] = checksum(flat[::step])
    return sums


def has_shared_shards(layout: Layout) -> bool:
    """Returns whether another process holds a shard that this process holds."""
    mesh = layout.mesh
    axes = [axis for axis in layout.sharding_specs if axis != dtensor.UNSHARDED]
    here: dict[tuple, int] = {}
    for location in mesh.local_device_locations():
        part = tuple(location[axis] for axis in axes)
        here[part] = here.get(part, 0) + 1
    copies = mesh.size
    for axis in axes:
        copies //= mesh.dim_size(axis)
    return any(count < copies for count in here.values())


def shard_checksums(x: Any, layout: Layout) -> dict[str, int]:
    """Returns checksums of the shards of a host value that processes share."""
    if not has_shared_shards(layout):
        return {}
    value = np.asarray(x)
    return {
        _bounds_text(shard): checksum(value[shard.slices])
        for shard in transfer.unique_shards(value.shape, layout)
    }


def _bounds_text(shard: transfer.Shard) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in shard.bounds)


def checksum(value: np.ndarray) -> int:
    """Returns the CRC32 of an array."""
    value = np.ascontiguousarray(value)
    if value.dtype == object:
        return zlib.crc32(repr(value.tolist()).encode())
    return zlib.crc32(value.reshape(-1).view(np.uint8).data)
