"""What a layout says of each dimension, and a mesh of each axis.

And which meshes are ours: DTensor is corrected on those only.
"""

from typing import TYPE_CHECKING

import tensorflow as tf

dtensor = tf.experimental.dtensor

# For signatures.
if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import Layout, Mesh
else:
    Mesh = dtensor.Mesh
    Layout = dtensor.Layout

# The meshes that programs have passed to this package. A mesh is a value, so
# an equal one, as `dtensor.fetch_layout` returns it, is the same mesh.
_own: set[str] = set()


def claim(mesh: Mesh) -> None:
    """Records that a program passes `mesh` to this package."""
    _own.add(mesh.to_string())
    if mesh.device_type() != "CPU":
        # Its datasets and checkpoints are on the hosts of its devices.
        _own.add(mesh.host_mesh().to_string())


def is_own(mesh: Mesh) -> bool:
    """Whether `mesh` was passed to this package.

    On other meshes, programs that use DTensor alone get TensorFlow's results
    and errors.
    """
    return mesh.to_string() in _own


def axes_of_layout(layout: Layout) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dimension, None where it is whole."""
    return tuple(
        None if spec == dtensor.UNSHARDED else spec
        for spec in layout.sharding_specs
    )


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Returns the size of each axis of a `dtensor.Mesh`."""
    return {name: mesh.dim_size(name) for name in mesh.dim_names}
