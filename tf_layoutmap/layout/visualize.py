"""Draws the devices that hold each shard of a variable, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import (
    Layout,
    axes_of_layout,
    mesh_sizes,
)

if TYPE_CHECKING:
    import keras

dtensor = tf.experimental.dtensor


def visualize_layout(
    variable: keras.Variable | tf.Tensor | tf.Variable, *, show: bool = True
) -> str:
    """Draws the devices that hold each shard of a variable.

    ```
    d1/kernel (10, 20), layout (None, 'model') on mesh batch=2 x model=2
        [:, 0:10]     [:, 10:20]
        CPU:0 CPU:2   CPU:1 CPU:3
    ```

    The drawing has one row for each shard of the first dimension, and one
    column for each shard of the other dimensions.

    Args:
      variable: A Keras variable on a mesh, a `DVariable`, or an eager
        DTensor.
      show: Whether to also print the drawing.

    Returns:
      The drawing.

    Raises:
      TypeError: If `variable` is not on a mesh.
    """
    layout = getattr(variable, "layout", None)
    if (
        layout is None
        and tf.is_tensor(variable)
        and (dtensor.is_dtensor(variable))
    ):
        layout = dtensor.fetch_layout(variable)
    if not isinstance(layout, Layout):
        raise TypeError(
            checks.message(
                "variable",
                "a variable or tensor on a mesh",
                type(variable).__name__,
            )
        )
    shape = cast("tuple[int, ...]", tuple(variable.shape))
    mesh = " x ".join(
        f"{name}={size}" for name, size in mesh_sizes(layout.mesh).items()
    )
    name = getattr(variable, "path", None) or getattr(variable, "name", "")
    text = (
        f"{name} {shape}, layout {axes_of_layout(layout)} on mesh {mesh}\n"
        + _grid(_holders(shape, layout), len(shape))
    ).lstrip()
    if show:
        print(text)
    return text


def _holders(
    shape: tuple[int, ...], layout: Layout
) -> dict[tuple[tuple[int, int], ...], list[str]]:
    """Returns a dict from shard to devices.

    Each shard is a tuple with `(start, stop)` for each dimension.
    """
    names = [
        ":".join(device.split(":")[-2:]).upper()
        for device in layout.mesh.local_devices()
    ]
    return {
        shard.bounds: [names[device] for device in shard.devices]
        for shard in transfer.unique_shards(shape, layout)
    }


def _grid(holders: dict, rank: int) -> str:
    rows = sorted({part[:1] for part in holders})
    columns = sorted({part[1:] for part in holders})
    has_all_rows, has_all_columns = len(rows) == 1, _unsharded(columns, rank)
    cells = {}
    for part, devices in holders.items():
        spans = []
        for dim, (start, stop) in enumerate(part):
            is_full = has_all_rows if dim == 0 else has_all_columns[dim - 1]
            spans.append(":" if is_full else f"{start}:{stop}")
        cells[part] = (
            f"[{', '.join(spans)}]" if rank else "[]",
            " ".join(devices),
        )
    width = max(len(text) for cell in cells.values() for text in cell)
    lines = []
    for row in rows:
        line = [cells[row + column] for column in columns]
        for level in (0, 1):
            lines.append(
                "    "
                + "   ".join(cell[level].ljust(width) for cell in line).rstrip()
            )
    return "\n".join(lines)


def _unsharded(columns: list, rank: int) -> list[bool]:
    return [
        len({column[dim] for column in columns}) == 1
        for dim in range(max(rank - 1, 0))
    ]
