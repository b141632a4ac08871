"""`DeviceMesh`: a grid of devices with named axes."""

from collections.abc import Sequence

import keras
import numpy as np

from tf_layoutmap.layout.mesh import device_mesh
from tf_layoutmap.layout.mesh.device_mesh import Mesh


class DeviceMesh(keras.distribution.DeviceMesh):
    """A grid of devices with a name for each axis.

    Equivalent to `tf.experimental.dtensor.Mesh`, which `to_dtensor` returns. It
    is a subclass of `keras.distribution.DeviceMesh`.

    ```python
    mesh = tlm.distribution.DeviceMesh(
        (2, 2), ["batch", "model"],
        devices=["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
    ```
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Sequence[str] | np.ndarray | None = None,
    ):
        """Creates the mesh.

        Args:
          shape: Number of devices along each axis, each at least 1.
          axis_names: Unique name of each axis.
          devices: `math.prod(shape)` device names such as `"cpu:0"`, in
            row-major order of the grid; None for all of `list_devices()`.

        Raises:
          TypeError: A size is not an integer, or a name is not a string.
          ValueError: A size is below 1, a name repeats, the number of names
            differs from the number of axes, or the number of devices differs
            from the size of the grid.
        """
        found = np.array(
            device_mesh.list_devices() if devices is None else devices
        )
        device_mesh.check_grid(shape, axis_names, found)
        super().__init__(shape, axis_names, found)

    @property
    def shape(self) -> Sequence[int]:
        """Number of devices along each axis, as passed."""
        return super().shape

    @property
    def axis_names(self) -> Sequence[str]:
        """The name of each axis, as passed."""
        return super().axis_names

    @property
    def devices(self) -> np.ndarray:
        """The device names, as an array of `shape`."""
        return super().devices

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.devices.size

    @property
    def backend_mesh(self) -> Mesh:
        """The `dtensor.Mesh`, under the name that keras.distribution uses."""
        return self.to_dtensor()

    def to_dtensor(self) -> Mesh:
        """Returns the `tf.experimental.dtensor.Mesh` of these devices."""
        return device_mesh.to_dtensor_mesh(self)
