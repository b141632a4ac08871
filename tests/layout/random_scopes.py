"""Scopes of the random models in `random_models.py`: ways to choose layouts."""

import contextlib
import re

import keras
import numpy as np

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tests.layout.random_training import BATCH_SIZE

# How a model gets its layouts.
USES = (
    "LayoutMap",
    "distribution.LayoutMap",
    "distribution.ModelParallel",
    "distribution.DataParallel",
    "keras.ModelParallel",
    "keras.DataParallel",
    "auto",
    "auto with little memory",
)


@contextlib.contextmanager
def scope_of(use: str, sizes: dict[str, int] | None, keys: dict):
    """Places the models of a block on a mesh; yields the mesh or None.

    Args:
      use: Element of `USES`.
      sizes: Sizes of the axes of the mesh; None for no mesh.
      keys: Mesh axes of each weight, by its path.
    """
    if sizes is None:
        yield None
        return
    if use.endswith("DataParallel"):
        # Keras' own class raises an error for a mesh of two dimensions.
        sizes = {"batch": int(np.prod([*sizes.values()]))}
    mesh = mesh_of(**sizes)
    if use == "LayoutMap":
        layout_map = tlm.LayoutMap(mesh)
        for path, axes in keys.items():
            layout_map[f"^{re.escape(path)}$"] = layout_of(mesh, *axes)
        with tlm.layout_map_scope(layout_map):
            yield mesh
    elif use.startswith("auto"):
        memory = "24KiB" if use == "auto with little memory" else None
        with tlm.layout_map_scope(
            "auto", mesh=mesh, batch_size=BATCH_SIZE, memory=memory
        ):
            yield mesh
    elif use.startswith("keras."):
        with tlm.distribution.enabled():
            with _distribution(keras.distribution, use, sizes, keys):
                yield mesh
    else:
        with _distribution(tlm.distribution, use, sizes, keys):
            yield mesh


def _distribution(api, use: str, sizes: dict[str, int], keys: dict):
    """Returns a scope of `keras.distribution` or of `tlm.distribution`."""
    mesh = api.DeviceMesh(
        (*sizes.values(),),
        [*sizes],
        [f"cpu:{i}" for i in range(int(np.prod([*sizes.values()])))],
    )
    if use.endswith("DataParallel"):
        return api.DataParallel(device_mesh=mesh).scope()
    layout_map = api.LayoutMap(mesh)
    for path, axes in keys.items():
        # Keys of Keras match the full path.
        key = re.escape(path)
        layout_map[key if api is keras.distribution else f"^{key}$"] = axes
    if use == "distribution.LayoutMap":
        return tlm.layout_map_scope(layout_map)
    return api.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    ).scope()
