"""What a layout says of each dimension, and a mesh of each axis."""

from typing import Any

import tensorflow as tf

dtensor = tf.experimental.dtensor


def axes_of_layout(layout: Any) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dimension, None where it is whole."""
    return tuple(None if spec == dtensor.UNSHARDED else spec
                 for spec in layout.sharding_specs)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Returns the size of each axis of a `dtensor.Mesh`."""
    return {name: mesh.dim_size(name) for name in mesh.dim_names}
