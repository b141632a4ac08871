"""A grid of devices with named axes, as a `keras.distribution.DeviceMesh`."""

from collections.abc import Sequence

import keras
import numpy as np

from tf_layoutmap.layout.mesh import device_mesh
from tf_layoutmap.layout.mesh.device_mesh import Mesh


class DeviceMesh(keras.distribution.DeviceMesh):
    """Devices in a grid, each axis with a name.

    Aligned with `tf.experimental.dtensor.Mesh`, which `to_dtensor` returns. It
    is a `keras.distribution.DeviceMesh`, for whoever asks for one.

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
        """Makes the mesh.

        Args:
          shape: Devices along each axis, each at least 1.
          axis_names: A name per axis, no two alike.
          devices: `math.prod(shape)` device names such as `"cpu:0"`, in the
            order of the grid; None for all of `list_devices()`.

        Raises:
          TypeError: A size is no integer or a name no string.
          ValueError: A size below 1, names that repeat or whose number is not
            that of the axes, or another number of devices than the grid has.
        """
        found = np.array(
            device_mesh.list_devices() if devices is None else devices
        )
        device_mesh.check_grid(shape, axis_names, found)
        super().__init__(shape, axis_names, found)

    @property
    def shape(self) -> Sequence[int]:
        """Devices along each axis, as given."""
        return super().shape

    @property
    def axis_names(self) -> Sequence[str]:
        """The name of each axis, as given."""
        return super().axis_names

    @property
    def devices(self) -> np.ndarray:
        """The device names, as an array of `shape`."""
        return super().devices

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self.devices.size

    @property
    def backend_mesh(self) -> Mesh:
        """The `dtensor.Mesh`, by keras.distribution's name."""
        return self.to_dtensor()

    def to_dtensor(self) -> Mesh:
        """Returns the `tf.experimental.dtensor.Mesh` of these devices."""
        return device_mesh.to_dtensor_mesh(self)
