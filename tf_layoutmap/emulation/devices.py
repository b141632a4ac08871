"""The logical CPUs that stand for cores and hosts.

Cores come first: the number of the device an op runs on is that of its core.
A single host is the CPU that TensorFlow's `get_host_for_device` gives anyway;
several have a logical CPU each.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

_CPU = "/job:localhost/replica:0/task:0/device:CPU:{}"


@dataclasses.dataclass(frozen=True)
class Devices:
    """Device names, in order."""

    cores: tuple[str, ...]
    hosts: tuple[str, ...]


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
                cpu, [tf.config.LogicalDeviceConfiguration()] * needed)
        except RuntimeError as error:
            # It has started; that is fine if one CPU is all it takes.
            started_with = len(tf.config.list_logical_devices("CPU"))
            if started_with < needed:
                raise RuntimeError(
                    f"{num_cores} cores and {num_hosts} hosts need {needed} "
                    "logical CPUs, and TensorFlow makes them only before its "
                    "first operation. Call `tlm.emulation.enable` at the "
                    "start of the program. Received: a TensorFlow that has "
                    f"started with {started_with}.") from error
    hosts = range(num_cores, needed) if num_hosts > 1 else [0]
    return Devices(
        tuple(_CPU.format(core) for core in range(num_cores)),
        tuple(_CPU.format(host) for host in hosts))
