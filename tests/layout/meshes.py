"""Meshes of logical CPUs, and layouts on them."""

import tensorflow as tf

import tests.strategies  # noqa: F401 - splits the CPU.
from tf_layoutmap.layout.mesh import device_mesh

dtensor = tf.experimental.dtensor


def mesh_of(**sizes: int):
    """A mesh with these axes over the first logical CPUs.

    DTensor is prepared first, as programs do it: a test may be the first of
    its process, and errors of later ones could end it otherwise.
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
    """The axes of what a variable really holds, not of what was planned."""
    return tuple(
        None if s == dtensor.UNSHARDED else s
        for s in variable.value.layout.sharding_specs
    )
