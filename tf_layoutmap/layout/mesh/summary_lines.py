"""Lines below `model.summary()` that describe how weights are sharded."""

from __future__ import annotations

import collections
import dataclasses
import math
import textwrap
from collections.abc import Callable, Sequence

import tensorflow as tf
from absl import logging

from tf_layoutmap.layout.mesh import shard_shapes
from tf_layoutmap.layout.mesh.device_mesh import Mesh, mesh_sizes

# Maximum number of weights that a line names.
_SHOWN = 4
_WIDTH = 80


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a model on a mesh.

    Attributes:
      name: Name of the weight.
      axes: Mesh axis of each dimension; None if the layout is not planned yet.
      shape: Shape of the unsharded weight.
      dtype: Name of the dtype.
    """

    name: str
    axes: tuple[str | None, ...] | None
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded weight."""
        return self._bytes_of(self.shape)

    def bytes_per_device(self, sizes: dict[str, int]) -> int:
        """Returns the bytes that one device holds, including padding."""
        axes = self.axes or (None,) * len(self.shape)
        return self._bytes_of(shard_shapes.local_shape(axes, self.shape, sizes))

    def _bytes_of(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * tf.as_dtype(self.dtype).size


def describe(weights: Sequence[Weight], mesh: Mesh) -> list[str]:
    """Returns the lines for the weights of a model on `mesh`.

    Weights with the same layout share a line, so models with many layers also
    have few lines.
    """
    sizes = mesh_sizes(mesh)
    by_axes: dict[tuple[str | None, ...], list[str]] = collections.defaultdict(
        list
    )
    num_replicated = num_unplanned = 0
    for weight in weights:
        if weight.axes is None:
            num_unplanned += 1
        elif any(weight.axes):
            by_axes[weight.axes].append(weight.name)
        else:
            num_replicated += 1
    lines = [
        " Mesh: " + ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    ]
    for axes, names in by_axes.items():
        shown = ", ".join(names[:_SHOWN])
        if len(names) > _SHOWN:
            shown += f" and {len(names) - _SHOWN} more"
        lines += textwrap.wrap(
            f"Layout {axes}: {shown}",
            _WIDTH,
            initial_indent=" ",
            subsequent_indent="   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    for count, what in (
        (num_replicated, "replicated on every device"),
        (num_unplanned, "without a layout until the layouts are planned"),
    ):
        if count:
            lines.append(f" {count} weight{'s' * (count > 1)} {what}")
    if not num_unplanned:
        held = sum(weight.bytes_per_device(sizes) for weight in weights)
        total = sum(weight.num_bytes for weight in weights)
        lines.append(f" Weights per device: {held:,} of {total:,} bytes")
    return lines


def print_lines(
    lines: Sequence[str],
    print_fn: Callable[[str], object] | None,
    is_interactive: bool,
) -> None:
    """Prints the lines of `describe` with the function that printed the table.

    Args:
      lines: The lines.
      print_fn: Argument of `model.summary`, or None.
      is_interactive: Whether Keras prints the table instead of logging it, if
        `print_fn` is None.
    """
    if print_fn is None:
        print_fn = print if is_interactive else logging.info
    print_fn("\n".join(lines))
