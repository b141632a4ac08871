"""What a layout says of each dimension, and a mesh of each axis."""

from typing import TYPE_CHECKING

import tensorflow as tf

dtensor = tf.experimental.dtensor

# For signatures.
if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import Layout, Mesh
else:
    Mesh = dtensor.Mesh
    Layout = dtensor.Layout


def axes_of_layout(layout: Layout) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dimension, None where it is whole."""
    return tuple(None if spec == dtensor.UNSHARDED else spec
                 for spec in layout.sharding_specs)


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Returns the size of each axis of a `dtensor.Mesh`."""
    return {name: mesh.dim_size(name) for name in mesh.dim_names}
