"""The mesh of all cases, and a layout map for models that bring none."""

import re

import keras
import numpy as np

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

AXES = {"batch": 2, "model": 2}


def mesh():
    """Two by two logical CPUs."""
    return mesh_of(**AXES)


def generic_axes(path: str, shape: tuple[int, ...]) -> tuple | None:
    """The axes of a weight in a map that knows no model.

    Rows of embedding tables, heads, and the larger of a matrix' dimensions
    are divided over "model", as far as it divides them: columns of the first
    matrix of a pair that widens and narrows again, rows of the second.

    Returns:
      An axis, or None, per dimension; None for a weight that is to be whole.
    """
    if len(shape) < 2:
        return None
    last = len(shape) - 1
    if path.endswith("embeddings"):
        wanted = [0, last]
    elif len(shape) == 3:  # EinsumDense with heads.
        wanted = [0, 1] if "output" in path else [1, 2]
    elif shape[0] > shape[last]:
        wanted = [0, last]
    else:
        wanted = [last]
    for dimension in wanted:
        if shape[dimension] > 1 and shape[dimension] % AXES["model"] == 0:
            return tuple(
                "model" if i == dimension else None for i in range(len(shape))
            )
    return None


def generic_map(models, mesh) -> tlm.LayoutMap:
    """Returns a layout map for models, from paths and shapes of weights."""
    shapes: dict[str, set] = {}
    for model in models:
        for weight in model.weights:
            shapes.setdefault(weight.path, set()).add(tuple(weight.shape))
    layout_map = tlm.LayoutMap(mesh)
    for path, found in shapes.items():
        # Layers with one name have one key, which cannot fit all of them.
        if len(found) > 1:
            continue
        axes = generic_axes(path, found.pop())
        if axes is not None:
            layout_map[key_of(path)] = layout_of(mesh, *axes)
    return layout_map


def key_of(path: str) -> str:
    """The key for one weight and for none whose path goes on from there."""
    return re.escape(path) + "$"


def own_map(backbone) -> tuple[tlm.LayoutMap, str]:
    """Returns the map that a backbone of keras-hub ships, and a remark.

    Args:
      backbone: The class.
    """
    ours = tlm.distribution.DeviceMesh(
        tuple(AXES.values()), tuple(AXES), [f"cpu:{i}" for i in range(4)]
    )
    try:
        theirs = backbone.get_layout_map(ours)
        return theirs, ""
    except ValueError as error:
        if "device_mesh" not in str(error):
            raise
    theirs = backbone.get_layout_map(
        keras.distribution.DeviceMesh(
            tuple(AXES.values()),
            tuple(AXES),
            np.array([f"cpu:{i}" for i in range(4)]),
        )
    )
    copy = tlm.distribution.LayoutMap(ours)
    for key, layout in theirs.items():
        copy[key] = tuple(layout.axes)
    return copy, "its map was copied into one of ours"
