"""Whether a layout fits a tensor: pure arithmetic, no TensorFlow.

Axes are mesh axis names, one per dimension of the tensor; None for a
dimension that is not sharded. A mesh is a dict of axis name to size.
"""

import difflib
from collections.abc import Mapping, Sequence


def axes_problems(axes: Sequence[str | None],
                  mesh: Mapping[str, int]) -> list[str]:
    """Returns what is wrong with `axes` on `mesh`, for any tensor.

    >>> axes_problems((None, "modle"), {"batch": 2, "model": 2})
    ["mesh axis 'modle' is unknown; the mesh has 'batch', 'model': did you \
mean 'model'?"]
    """
    problems: list[str] = []
    for axis in dict.fromkeys(a for a in axes if a is not None):
        if axis not in mesh:
            close = difflib.get_close_matches(str(axis), mesh, n=1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            problems.append(
                f"mesh axis {axis!r} is unknown; the mesh has "
                f"{', '.join(map(repr, mesh))}{hint}")
        elif list(axes).count(axis) > 1:
            dims = [i for i, a in enumerate(axes) if a == axis]
            problems.append(
                f"mesh axis {axis!r} shards dimensions "
                f"{' and '.join(map(str, dims))}; an axis shards one "
                "dimension at most")
    return problems


def fit_problems(axes: Sequence[str | None], shape: Sequence[int],
                 mesh: Mapping[str, int]) -> list[str]:
    """Returns what keeps a tensor of `shape` from having the layout `axes`.

    >>> fit_problems((None, "model"), (4, 5), {"model": 2})
    ["dimension 1 has size 5, which mesh axis 'model' of size 2 does not \
divide: use a multiple of 2 (next: 6), or leave the dimension unsharded"]
    """
    problems = axes_problems(axes, mesh)
    if len(axes) != len(shape):
        hint = suggest_axes(axes, len(shape))
        return [*problems,
                f"the layout has rank {len(axes)}, the variable has rank "
                f"{len(shape)}: use {hint}"]
    for dim, (axis, size) in enumerate(zip(axes, shape)):
        parts = mesh.get(axis, 1) if axis is not None else 1
        if size % parts:
            problems.append(
                f"dimension {dim} has size {size}, which mesh axis {axis!r} "
                f"of size {parts} does not divide: use a multiple of {parts} "
                f"(next: {-(-size // parts) * parts}), or leave the "
                "dimension unsharded")
    return problems


def suggest_axes(axes: Sequence[str | None], rank: int) -> str:
    """Returns an example of axes with `rank` dimensions, as Python text.

    The last dimensions are kept: layers put the feature dimension last.

    >>> suggest_axes((None, "model"), 1)
    "('model',)"
    >>> suggest_axes(("model",), 3)
    "(None, None, 'model')"
    """
    kept = tuple(axes)[max(len(axes) - rank, 0):]
    return repr((None,) * (rank - len(kept)) + kept)


def local_shape(axes: Sequence[str | None], shape: Sequence[int],
                mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape that one device holds.

    >>> local_shape((None, "model"), (4, 6), {"batch": 2, "model": 2})
    (4, 3)
    """
    return tuple(size // (mesh[axis] if axis is not None else 1)
                 for axis, size in zip(axes, shape))


def shard_slices(axes: Sequence[str | None], shape: Sequence[int],
                 mesh: Mapping[str, int],
                 location: Mapping[str, int]) -> tuple[slice, ...]:
    """Returns what of a tensor belongs to the device at `location`.

    >>> shard_slices((None, "model"), (4, 6), {"model": 2}, {"model": 1})
    (slice(0, 4, None), slice(3, 6, None))

    Args:
      axes: The layout, fitting `shape`.
      shape: Of the whole tensor.
      mesh: Size of each axis.
      location: Where the device is along each axis.
    """
    slices: list[slice] = []
    for axis, size in zip(axes, local_shape(axes, shape, mesh)):
        start = 0 if axis is None else location[axis] * size
        slices.append(slice(start, start + size))
    return tuple(slices)
