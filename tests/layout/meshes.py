"""Functions that create meshes of logical CPUs, and layouts on such meshes."""

import tensorflow as tf

import tests.strategies  # noqa: F401 - The import creates logical CPUs.
from tf_layoutmap.layout.mesh import device_mesh

dtensor = tf.experimental.dtensor


def mesh_of(**sizes: int):
    """Returns a mesh with these axes over the first logical CPUs.

    Also prepares the process for DTensor, as user programs do. Without this
    step, an error in a later test could end the process.
    """
    count = 1
    for size in sizes.values():
        count *= size
    mesh = dtensor.create_mesh(
        list(sizes.items()), devices=[f"CPU:{i}" for i in range(count)]
    )
    device_mesh.prepare_process(mesh)
    return mesh


def layout_of(mesh, *axes: str | None):
    return dtensor.Layout(
        [dtensor.UNSHARDED if a is None else a for a in axes], mesh
    )


def axes_of(variable) -> tuple[str | None, ...]:
    """Returns the mesh axes by which the stored value is actually sharded."""
    return tuple(
        None if s == dtensor.UNSHARDED else s
        for s in variable.value.layout.sharding_specs
    )
