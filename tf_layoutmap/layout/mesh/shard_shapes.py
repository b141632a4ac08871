"""Shapes and slices of shards, and checks of layouts, without TensorFlow.

`axes` contains one mesh axis name per dimension of a tensor, or None for an
unsharded dimension. `mesh` is a dict from axis name to size.
"""

import difflib
from collections.abc import Mapping, Sequence


def axes_problems(
    axes: Sequence[str | None], mesh: Mapping[str, int]
) -> list[str]:
    """Returns the problems of `axes` that do not depend on a tensor's shape.

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
                f"{', '.join(map(repr, mesh))}{hint}"
            )
        elif list(axes).count(axis) > 1:
            dims = [i for i, a in enumerate(axes) if a == axis]
            problems.append(
                f"mesh axis {axis!r} shards dimensions "
                f"{' and '.join(map(str, dims))}; an axis can shard at most "
                "one dimension"
            )
    return problems


def fit_problems(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mapping[str, int]
) -> list[str]:
    """Returns the reasons why `axes` does not fit a tensor of `shape`.

    >>> fit_problems((None, "model"), (4, 5), {"model": 2})
    ["dimension 1 has size 5, which mesh axis 'model' of size 2 does not \
divide: use a multiple of 2 (next: 6), or leave the dimension unsharded"]
    """
    problems = axes_problems(axes, mesh)
    if len(axes) != len(shape):
        hint = suggest_axes(axes, len(shape))
        return [
            *problems,
            f"the layout has rank {len(axes)}, the variable has rank "
            f"{len(shape)}: use {hint}",
        ]
    for dim, (axis, size) in enumerate(zip(axes, shape)):
        parts = mesh.get(axis, 1) if axis is not None else 1
        if size % parts:
            problems.append(
                f"dimension {dim} has size {size}, which mesh axis {axis!r} "
                f"of size {parts} does not divide: use a multiple of {parts} "
                f"(next: {-(-size // parts) * parts}), or leave the "
                "dimension unsharded"
            )
    return problems


def suggest_axes(axes: Sequence[str | None], rank: int) -> str:
    """Returns an example of axes with `rank` dimensions, as Python code.

    If `axes` has too many elements, the first elements are removed, because the
    feature dimension of a layer is the last one.

    >>> suggest_axes((None, "model"), 1)
    "('model',)"
    >>> suggest_axes(("model",), 3)
    "(None, None, 'model')"
    """
    kept = tuple(axes)[max(len(axes) - rank, 0) :]
    return repr((None,) * (rank - len(kept)) + kept)


def local_shape(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the shape of the shard on each device.

    The shape includes padding if an axis does not divide a dimension.

    >>> local_shape((None, "model"), (4, 6), {"batch": 2, "model": 2})
    (4, 3)
    >>> local_shape(("model", None), (5, 6), {"model": 2})
    (3, 6)
    """
    return tuple(
        -(-size // (mesh[axis] if axis is not None else 1))
        for axis, size in zip(axes, shape)
    )


def padded_rows(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns `shape` with the number of rows padded for the first axis.

    >>> padded_rows(("model", None), (5, 6), {"model": 2})
    (6, 6)
    """
    axis = axes[0] if shape and axes else None
    if axis is None or axis not in mesh:
        return tuple(shape)
    parts = mesh[axis]
    return (-(-shape[0] // parts) * parts, *shape[1:])


def padding_problems(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mapping[str, int]
) -> list[str]:
    """Returns the reasons why a table cannot be sharded by rows with padding.

    >>> padding_problems(("model", None), (9, 6), {"model": 8})
    ["dimension 0 has size 9, which is too small to shard it over mesh axis \
'model' of size 8 with padding: use at least 13, or leave the dimension \
unsharded"]
    """
    axis = axes[0] if shape and axes else None
    if axis is None or axis not in mesh:
        return []
    parts, rows = mesh[axis], shape[0]

    def fits(rows: int) -> bool:
        # All devices except one must hold at least one row that is not padding.
        return not rows % parts or (parts - 2) * -(-rows // parts) < rows

    if fits(rows):
        return []
    enough = next(more for more in range(rows, rows + parts + 1) if fits(more))
    return [
        f"dimension 0 has size {rows}, which is too small to shard it over "
        f"mesh axis {axis!r} of size {parts} with padding: use at least "
        f"{enough}, or leave the dimension unsharded"
    ]


def shard_slices(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mapping[str, int],
    location: Mapping[str, int],
) -> tuple[slice, ...]:
    """Returns the slices of a tensor for the device at `location`.

    >>> shard_slices((None, "model"), (4, 6), {"model": 2}, {"model": 1})
    (slice(0, 4, None), slice(3, 6, None))

    Args:
      axes: Mesh axis of each dimension. If an axis does not divide a
        dimension, the last devices have smaller or empty slices.
      shape: Shape of the unsharded tensor.
      mesh: Size of each mesh axis.
      location: Position of the device along each mesh axis.
    """
    slices: list[slice] = []
    for axis, size, full in zip(axes, local_shape(axes, shape, mesh), shape):
        start = 0 if axis is None else min(location[axis] * size, full)
        slices.append(slice(start, min(start + size, full)))
    return tuple(slices)
