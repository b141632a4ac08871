"""What processes that train one model must have in common, as plain data."""

import re
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout

dtensor = tf.experimental.dtensor

# Values of a weight's part that are compared: enough to notice another seed or
# another file, and fast compared with the first step's compilation.
_NUM_VALUES = 4096


def of_batch(leaves: list[tuple[str, Any]]) -> list[list[Any]]:
    """Returns `[path, dtype, shape]` of each tensor of a batch."""
    return [
        [path, "None", None]
        if x is None
        else [path, tf.as_dtype(x.dtype).name, [int(s) for s in x.shape]]
        for path, x in leaves
    ]


def variables_of(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer; none without one."""
    if optimizer is None:
        return []
    found = optimizer.variables
    if callable(found):  # A method in the first optimizers of tf_keras.
        found = optimizer.variables()
    return list(found)


def on_mesh(variable: Any) -> Any:
    """Returns the DVariable behind a variable; None of one that has none."""
    if isinstance(variable, dtensor.DVariable):
        return variable
    value = getattr(variable, "_value", None)
    return value if isinstance(value, dtensor.DVariable) else None


def of_weights(weights: Iterable[Any]) -> list[list[Any]]:
    """Returns path, dtype, shape, axes and kind of each weight."""
    found = []
    for one in weights:
        value = on_mesh(one)
        found.append(
            [
                name_of(one),
                tf.as_dtype(one.dtype).name,
                [int(s) for s in one.shape],
                [] if value is None else list(value.layout.sharding_specs),
                "trainable" if one.trainable else "not trainable",
            ]
        )
    return found


def name_of(variable: Any) -> str:
    """Returns the path of a Keras 3 variable, the name of another."""
    return getattr(variable, "path", None) or variable.name


def of_optimizer(optimizer: Any) -> list[list[Any]]:
    """Returns class and settings of an optimizer; empty without one."""
    if optimizer is None:
        return []
    # Keras numbers names within a process.
    return [["class", type(optimizer).__name__]] + sorted(
        [name, plain(value)]
        for name, value in optimizer.get_config().items()
        if name != "name"
    )


def of_loss(loss: Any) -> list[list[Any]]:
    """Returns the losses of `compile` in words."""
    return [
        [
            "function",
            plain(
                tf.nest.map_structure(
                    lambda one: (
                        one
                        if isinstance(one, str | None)
                        else getattr(one, "__name__", type(one).__name__)
                    ),
                    loss,
                )
            ),
        ]
    ]


def times_set(model: Any) -> int:
    """Returns how often weights and optimizer were set outside of a step."""
    variables = [
        *model.weights,
        *variables_of(getattr(model, "optimizer", None)),
    ]
    return sum(getattr(on_mesh(v), "times_set", 0) for v in variables)


def plain(value: Any) -> str:
    """Returns a text that is the same in another process."""
    if isinstance(value, np.generic | np.ndarray) or tf.is_tensor(value):
        value = np.asarray(value).tolist()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def of_values(variables: Iterable[Any]) -> list[list[Any]]:
    """Returns `[path, {part: checksum}]` of each variable.

    Parts are those that this process and another hold; of large ones some
    values count.
    """
    found = []
    for one in variables:
        value = on_mesh(one)
        is_shared = value is not None and shares_parts(value.layout)
        found.append([name_of(one), _sums_of_parts(value) if is_shared else {}])
    return found


def _sums_of_parts(variable: Any) -> dict[str, int]:
    sums: dict[str, int] = {}
    components = dtensor.unpack(variable.read_value())
    for shard in transfer.unique_shards(variable.shape, variable.layout):
        flat = components[shard.devices[0]].numpy().reshape(-1)
        step = max(1, flat.size // _NUM_VALUES)
        sums[_text(shard)] = checksum(flat[::step])
    return sums


def shares_parts(layout: Layout) -> bool:
    """Whether another process holds a part that this one holds, too."""
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


def of_contents(x: Any, layout: Layout) -> dict[str, int]:
    """Returns a checksum of each part of a host value that others hold."""
    if not shares_parts(layout):
        return {}
    value = np.asarray(x)
    return {
        _text(shard): checksum(value[shard.slices])
        for shard in transfer.unique_shards(value.shape, layout)
    }


def _text(shard: transfer.Shard) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in shard.bounds)


def checksum(value: np.ndarray) -> int:
    """Returns a CRC32: arrays that differ rarely have the same."""
    value = np.ascontiguousarray(value)
    if value.dtype == object:
        return zlib.crc32(repr(value.tolist()).encode())
    return zlib.crc32(value.reshape(-1).view(np.uint8).data)
