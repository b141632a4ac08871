"""The hosts and cores of a TPUStrategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a TPU.

    Attributes:
      device: Its name, as `"/job:worker/replica:0/task:0/device:TPU:1"`.
      ordinal: Its number on its host.
      host: The CPU device of its host.
    """

    device: str
    ordinal: int
    host: str


class Cores:
    """Where the replicas of a TPUStrategy run.

    Attributes:
      hosts: The CPU device of each host, in the order of the tables' shards.
      num_replicas: Replicas of the strategy.
      num_cores_per_replica: Cores of an SPMD replica; None without a device
        assignment.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        """Reads the strategy.

        Raises:
          RuntimeError: If its devices are on another number of hosts than it
            says.
        """
        extended = strategy.extended
        self.num_replicas = strategy.num_replicas_in_sync
        assignment = getattr(extended, "_device_assignment", None)
        self.num_cores_per_replica = (
            assignment.num_cores_per_replica if assignment else None
        )
        self.num_hosts = extended.num_hosts
        self._of_replicas = [
            [core_of(device) for device in devices]
            for devices in _devices_of_replicas(
                extended, self.num_cores_per_replica
            )
        ]
        self.hosts = _hosts_of(extended.worker_devices)
        # Of an emulated TPU, whose cores have other names too.
        self._tpu_name_of = getattr(extended, "tpu_name_of", None)
        if len(self.hosts) != self.num_hosts:
            raise RuntimeError(
                f"The strategy must have devices on each of its "
                f"{self.num_hosts} hosts. Received: hosts {self.hosts}."
            )

    def of_replica(self, replica: int) -> list[Core]:
        """Returns the cores of one replica, in the order of its parts."""
        return self._of_replicas[replica]

    def named(self, device: str) -> Core:
        """Returns the core that a program calls so.

        Raises:
          ValueError: If it is no core.
        """
        if self._tpu_name_of is not None:
            device = self._tpu_name_of(device)
        if tf.DeviceSpec.from_string(device).device_type != "TPU":
            raise ValueError(
                "Argument `device` of `enqueue` must name a TPU core under "
                "TPUStrategy, as '/task:0/device:TPU:2'. Received: Non-TPU "
                f"device {device!r}."
            )
        return core_of(device)


def core_of(device: str) -> Core:
    """Returns the core of a device string."""
    return Core(
        device, tf.DeviceSpec.from_string(device).device_index, _host_of(device)
    )


def _devices_of_replicas(extended: Any, num_cores: int | None):
    if num_cores is None:
        return [[one] for one in extended.worker_devices]
    # Without a public name; `worker_devices` has the first core of each only.
    return extended._tpu_devices.tolist()


def _host_of(device: str) -> str:
    # By the module, so that what replaces it there is seen here too.
    return _tf_private.device_util.get_host_for_device(device)


def _hosts_of(devices: Sequence[str]) -> list[str]:
    def place(device: str):
        spec = tf.DeviceSpec.from_string(device)
        return spec.replica or 0, spec.task or 0, spec.device_index or 0

    hosts = [_host_of(device) for device in sorted(devices, key=place)]
    return list(dict.fromkeys(hosts))
