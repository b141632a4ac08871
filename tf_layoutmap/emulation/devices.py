"""Logical CPUs that represent the cores and hosts of an emulated TPU.

The first logical CPUs represent the cores. The device index of an op is
therefore the index of its core. A single host is represented by the CPU that
TensorFlow's `get_host_for_device` returns by default. If there are several
hosts, each host is represented by a separate logical CPU after the CPUs of the
cores.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_layoutmap.layout.mesh import cpu_threads

_CPU = "/job:localhost/replica:0/task:0/device:CPU:{}"
# Device name of a core for code that requires TPU names. The code parses the
# index of the core from the name.
_TPU = "/job:localhost/replica:0/task:0/device:TPU:{}"


@dataclasses.dataclass(frozen=True)
class Devices:
    """The device names of all cores and of all hosts, in order."""

    cores: tuple[str, ...]
    hosts: tuple[str, ...]

    @property
    def num_cores_per_host(self) -> int:
        """Number of cores per host, which is equal for all hosts."""
        return len(self.cores) // len(self.hosts)

    def tpu_name_of(self, device: str) -> str:
        """Returns the TPU device name of a core.

        >>> devices = Devices(("/job:localhost/replica:0/task:0/device:CPU:0",
        ...                    "/job:localhost/replica:0/task:0/device:CPU:1"),
        ...                   ("/device:CPU:2", "/device:CPU:3"))
        >>> devices.tpu_name_of("/task:1/device:TPU:0")
        '/job:localhost/replica:0/task:0/device:TPU:1'
        >>> devices.tpu_name_of("/device:CPU:1")
        '/job:localhost/replica:0/task:0/device:TPU:1'

        Args:
          device: Device name of a core: either the name in programs for a TPU,
            `"/task:{host}/device:TPU:{core of that host}"`, or the name of the
            logical CPU that represents the core. The name of any other device
            is returned unchanged.

        Raises:
          ValueError: If the emulated TPU does not have this core.
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
                "`device` must be a core of the emulated TPU, which has "
                f"tasks 0 to {len(self.hosts) - 1} with the cores 0 to "
                f"{per_host - 1} each. Received: device {device!r}."
            )
        return _TPU.format(host * per_host + index)

    def input_device_of(self, device: str) -> str:
        """Returns the TPU device name for the device of an input.

        If the input is on the host, the name is returned unchanged. The first
        CPU represents core 0 and also holds datasets that stay on the host. An
        input on this CPU is therefore considered to be on the host.

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
        """Returns the host of a core, or None if `device` is not a core.

        Args:
          device: CPU device name or TPU device name of the core.
        """
        for number, core in enumerate(self.cores):
            if device in (core, _TPU.format(number)):
                return self.hosts[number // self.num_cores_per_host]
        return None


def create_devices(num_cores: int, num_hosts: int) -> Devices:
    """Creates logical CPUs for cores and hosts, unless the CPUs already exist.

    Raises:
      RuntimeError: If TensorFlow has already started and has too few logical
        CPUs.
    """
    needed = num_cores + (num_hosts if num_hosts > 1 else 0)
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical_cpus = tf.config.get_logical_device_configuration(cpu)
    if logical_cpus is None or len(logical_cpus) < needed:
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * needed
            )
        except RuntimeError as error:
            # TensorFlow has already started, but may have enough logical CPUs.
            started_with = len(tf.config.list_logical_devices("CPU"))
            if started_with < needed:
                raise RuntimeError(
                    f"{num_cores} cores and {num_hosts} hosts require "
                    f"{needed} logical CPUs, and TensorFlow creates logical "
                    "CPUs only before its first operation. Call "
                    "`tlm.emulation.enable` at the start of the program. "
                    "Received: TensorFlow has already started with "
                    f"{started_with} logical CPUs."
                ) from error
    cpu_threads.share_cores()
    hosts = range(num_cores, needed) if num_hosts > 1 else [0]
    return Devices(
        tuple(_CPU.format(core) for core in range(num_cores)),
        tuple(_CPU.format(host) for host in hosts),
    )
