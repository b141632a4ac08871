"""Defines the mesh of all test cases, and layout maps for their models."""

import math
import re

import keras
import numpy as np

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import explain
from tf_layoutmap.layout.mesh import shard_shapes
from tf_layoutmap.planning import keras_models, search

AXES = {"batch": 2, "model": 2}


def mesh():
    """Returns a mesh of two by two logical CPUs."""
    return mesh_of(**AXES)


def generic_axes(path: str, shape: tuple[int, ...]) -> tuple | None:
    """Returns the axes of a weight in a generic layout map.

    Embedding tables are sharded by rows, and attention projections are sharded
    by heads. Other matrices are sharded over "model" along their larger
    dimension if it is divisible. In an MLP, the first matrix is therefore
    sharded by columns, and the second matrix by rows.

    Returns:
      One mesh axis or None per dimension, or None if the weight is replicated.
    """
    if len(shape) < 2:
        return None
    last = len(shape) - 1
    if path.endswith("embeddings"):
        dimensions = [0, last]
    # This is the kernel of an EinsumDense layer with attention heads.
    elif len(shape) == 3:
        dimensions = [0, 1] if "output" in path else [1, 2]
    elif shape[0] > shape[last]:
        dimensions = [0, last]
    else:
        dimensions = [last]
    for dimension in dimensions:
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
        # The layers have equal names, so one key would match weights of
        # different shapes.
        if len(found) > 1:
            continue
        axes = generic_axes(path, found.pop())
        if axes is not None:
            layout_map[key_of(path)] = layout_of(mesh, *axes)
    return layout_map


def planned_map(model, inputs) -> tlm.LayoutMap:
    """Returns the layout map that the planner creates for a model.

    The map must be the same as the map of a person: every key selects at least
    one weight, and only one key matches each weight.
    """
    sizes = {"batch": AXES["batch"], "model": AXES["model"]}
    problem = keras_models.problem_of_model(
        model, sizes, batch_size=8, inputs=inputs
    )
    solution = search.solve(problem)
    layout_map = tlm.LayoutMap(mesh())
    for key, axes in keras_models.keys_and_axes(
        problem, solution.selected
    ).items():
        layout_map[key] = axes
    explanation = layout_map.explain(model)
    assert explanation.ok, explanation.problems()
    assert not explanation.contested, explanation.contested
    assert layout_map, "nothing is sharded"
    return layout_map


def key_of(path: str) -> str:
    """Returns a key that matches the path of a weight, but no longer paths."""
    return re.escape(path) + "$"


def own_map(backbone) -> tuple[tlm.LayoutMap, str]:
    """Returns the layout map of a keras-hub backbone, and a comment on it.

    Args:
      backbone: Class of the backbone.
    """
    mesh_of_package = tlm.distribution.DeviceMesh(
        tuple(AXES.values()), tuple(AXES), [f"cpu:{i}" for i in range(4)]
    )
    try:
        layout_map = backbone.get_layout_map(mesh_of_package)
        return layout_map, ""
    except ValueError as error:
        if "device_mesh" not in str(error):
            raise
    layout_map = backbone.get_layout_map(
        keras.distribution.DeviceMesh(
            tuple(AXES.values()),
            tuple(AXES),
            np.array([f"cpu:{i}" for i in range(4)]),
        )
    )
    copy = tlm.distribution.LayoutMap(mesh_of_package)
    for key, layout in layout_map.items():
        copy[key] = tuple(layout.axes)
    return copy, "the map was copied into a `tlm.distribution.LayoutMap`"


def bytes_with_adam(explanation: explain.Explanation) -> int:
    """Returns the bytes per device of weights, slot variables and gradients.

    Gradients are not sharded over the axis of the batch.

    Args:
      explanation: Explanation of a layout map for a model.
    """
    total = 3 * explanation.bytes_per_device
    for one in explanation.variables:
        axes = tuple(None if a == "batch" else a for a in one.axes)
        total += 4 * math.prod(shard_shapes.local_shape(axes, one.shape, AXES))
    return total
