"""Whether a layout fits a tensor: pure arithmetic, no TensorFlow.

Axes are mesh axis names, one per dimension of the tensor; None for a
dimension that is not sharded. A mesh is a dict of axis name to size.
"""

import difflib
from collections.abc import Mapping, Sequence


def axes_problems(
    axes: Sequence[str | None], mesh: Mapping[str, int]
) -> list[str]:
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
                f"{', '.join(map(repr, mesh))}{hint}"
            )
        elif list(axes).count(axis) > 1:
            dims = [i for i, a in enumerate(axes) if a == axis]
            problems.append(
                f"mesh axis {axis!r} shards dimensions "
                f"{' and '.join(map(str, dims))}; an axis shards one "
                "dimension at most"
            )
    return problems


def fit_problems(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mapping[str, int]
) -> list[str]:
    """Returns what keeps a tensor of `shape` from having the layout `axes`.

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
    """Returns an example of axes with `rank` dimensions, as Python text.

    The last dimensions are kept: layers put the feature dimension last.

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
    """Returns the shape that one device holds.

    Where an axis does not divide a size, devices hold padding, too.

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
    """Returns `shape` with as many rows as the first axis divides.

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
    """Returns what keeps a table from being padded to divide its rows.

    >>> padding_problems(("model", None), (9, 6), {"model": 8})
    ["dimension 0 has size 9, too few for mesh axis 'model' of size 8 to \
divide it with padding: use 13 at least, or leave the dimension unsharded"]
    """
    axis = axes[0] if shape and axes else None
    if axis is None or axis not in mesh:
        return []
    parts, rows = mesh[axis], shape[0]

    def fits(rows: int) -> bool:
        # Two devices may not have padding only.
        return not rows % parts or (parts - 2) * -(-rows // parts) < rows

    if fits(rows):
        return []
    enough = next(more for more in range(rows, rows + parts + 1) if fits(more))
    return [
        f"dimension 0 has size {rows}, too few for mesh axis {axis!r} of "
        f"size {parts} to divide it with padding: use {enough} at least, or "
        "leave the dimension unsharded"
    ]


def shard_slices(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mapping[str, int],
    location: Mapping[str, int],
) -> tuple[slice, ...]:
    """Returns what of a tensor belongs to the device at `location`.

    >>> shard_slices((None, "model"), (4, 6), {"model": 2}, {"model": 1})
    (slice(0, 4, None), slice(3, 6, None))

    Args:
      axes: The layout. Where it does not divide the shape, the last devices
        have less of the tensor, or nothing.
      shape: Of the whole tensor.
      mesh: Size of each axis.
      location: Where the device is along each axis.
    """
    slices: list[slice] = []
    for axis, size, whole in zip(axes, local_shape(axes, shape, mesh), shape):
        start = 0 if axis is None else min(location[axis] * size, whole)
        slices.append(slice(start, min(start + size, whole)))
    return tuple(slices)
