"""The logical CPUs that stand for cores and hosts.

Cores come first: the number of the device an op runs on is that of its core.
A single host is the CPU that TensorFlow's `get_host_for_device` gives anyway;
several have a logical CPU each.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

_CPU = "/job:localhost/replica:0/task:0/device:CPU:{}"
# What code for a TPU is told instead: it takes the number from the name.
_TPU = "/job:localhost/replica:0/task:0/device:TPU:{}"


@dataclasses.dataclass(frozen=True)
class Devices:
    """Device names, in order."""

    cores: tuple[str, ...]
    hosts: tuple[str, ...]

    @property
    def num_cores_per_host(self) -> int:
        """The same on every host."""
        return len(self.cores) // len(self.hosts)

    def tpu_name_of(self, device: str) -> str:
        """Returns a TPU's name for a core: the number in it is the core's.

        >>> devices = Devices(("/job:localhost/replica:0/task:0/device:CPU:0",
        ...                    "/job:localhost/replica:0/task:0/device:CPU:1"),
        ...                   ("/device:CPU:2", "/device:CPU:3"))
        >>> devices.tpu_name_of("/task:1/device:TPU:0")
        '/job:localhost/replica:0/task:0/device:TPU:1'
        >>> devices.tpu_name_of("/device:CPU:1")
        '/job:localhost/replica:0/task:0/device:TPU:1'

        Args:
          device: `"/task:{host}/device:TPU:{core of that host}"`, as programs
            for a TPU write, or a logical CPU that stands for a core. Another
            one is returned as it is.

        Raises:
          ValueError: If the TPU has no such core.
        """
        spec = tf.DeviceSpec.from_string(device)
        index, host = spec.device_index or 0, spec.task or 0
        if spec.device_type == "CPU":
            if host or index >= len(self.cores):
                return device
            return _TPU.format(index)
        if spec.device_type != "TPU":
            return device
        per_host = self.num_cores_per_host
        if host >= len(self.hosts) or index >= per_host:
            raise ValueError(
                f"The emulated TPU has the tasks 0 to {len(self.hosts) - 1} "
                f"with the cores 0 to {per_host - 1} each. Received: device "
                f"{device!r}."
            )
        return _TPU.format(host * per_host + index)

    def input_device_of(self, device: str) -> str:
        """Returns a TPU's name if an input there has left the host.

        Datasets that stay on the host are on the first CPU, which is that of
        core 0 as well: what is there counts as being on the host.

        >>> devices = Devices(("/device:CPU:0", "/device:CPU:1"),
        ...                   ("/device:CPU:0",))
        >>> devices.input_device_of("/device:CPU:1")
        '/job:localhost/replica:0/task:0/device:TPU:1'
        >>> devices.input_device_of("/device:CPU:0")
        '/device:CPU:0'
        """
        spec = tf.DeviceSpec.from_string(device)
        if spec.device_type == "CPU" and spec.device_index:
            return self.tpu_name_of(device)
        return device

    def host_of(self, device: str) -> str | None:
        """The host of a core by either name; None of another device."""
        for number, core in enumerate(self.cores):
            if device in (core, _TPU.format(number)):
                return self.hosts[number // self.num_cores_per_host]
        return None


def make(num_cores: int, num_hosts: int) -> Devices:
    """Splits the CPU, unless it is split into enough parts already.

    Raises:
      RuntimeError: If TensorFlow has started with fewer parts.
    """
    needed = num_cores + (num_hosts if num_hosts > 1 else 0)
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = tf.config.get_logical_device_configuration(cpu)
    if parts is None or len(parts) < needed:
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * needed
            )
        except RuntimeError as error:
            # It has started; that is fine if one CPU is all it takes.
            started_with = len(tf.config.list_logical_devices("CPU"))
            if started_with < needed:
                raise RuntimeError(
                    f"{num_cores} cores and {num_hosts} hosts need {needed} "
                    "logical CPUs, and TensorFlow makes them only before its "
                    "first operation. Call `tlm.emulation.enable` at the "
                    "start of the program. Received: a TensorFlow that has "
                    f"started with {started_with}."
                ) from error
    hosts = range(num_cores, needed) if num_hosts > 1 else [0]
    return Devices(
        tuple(_CPU.format(core) for core in range(num_cores)),
        tuple(_CPU.format(host) for host in hosts),
    )
