"""Counts devices, and initializes a program with several processes."""

import os
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.layout.mesh.device_mesh import list_devices

dtensor = tf.experimental.dtensor


def get_device_count(device_type: str | None = None) -> int:
    """Returns the number of devices in `list_devices(device_type)`."""
    return len(list_devices(device_type))


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Connects the processes of one program.

    Call this function before TensorFlow runs any operation. If an argument is
    None, its value is read from the environment variable
    `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `KERAS_DISTRIBUTION_NUM_PROCESSES` or
    `KERAS_DISTRIBUTION_PROCESS_ID`. If there is only one process, no
    connections are created. In this case, `dtensor.create_distributed_mesh` can
    create a mesh of the devices of this process, unless TensorFlow has already
    run an operation.

    >>> import tf_layoutmap as tlm
    >>> tlm.distribution.initialize(num_processes=1, process_id=0)

    Args:
      job_addresses: Address of each process, as `"host:port,host:port"`.
      num_processes: Number of processes.
      process_id: Index of this process, in `[0, num_processes)`.

    Raises:
      ValueError: If `process_id` or the number of addresses does not match
        `num_processes`.
    """

    def from_argument_or_environment(value: Any, name: str) -> Any:
        return (
            os.environ.get(f"KERAS_DISTRIBUTION_{name}")
            if (value is None)
            else value
        )

    addresses = from_argument_or_environment(job_addresses, "JOB_ADDRESSES")
    addresses = (
        []
        if addresses is None
        else [
            a.strip()
            for a in checks.check_type(
                "job_addresses", addresses, str, "a string"
            ).split(",")
        ]
    )
    count = int(
        from_argument_or_environment(num_processes, "NUM_PROCESSES")
        or len(addresses)
        or 1
    )
    number = int(from_argument_or_environment(process_id, "PROCESS_ID") or 0)
    if count < 1 or not 0 <= number < count:
        raise ValueError(
            "Argument `process_id` must be at least 0 and below "
            f"`num_processes`. Received: process_id={number}, "
            f"num_processes={count}."
        )
    if count == 1:
        _initialize_alone()
        return
    if len(addresses) != count:
        raise ValueError(
            "Argument `job_addresses` must have an address for each of the "
            f"{count} processes, separated by commas. Received: "
            f"{','.join(addresses)!r}."
        )
    os.environ.update(
        {
            "DTENSOR_CLIENT_ID": str(number),
            "DTENSOR_NUM_CLIENTS": str(count),
            "DTENSOR_JOB_NAME": "worker",
            "DTENSOR_JOBS": ",".join(addresses),
        }
    )
    # The context is not reset, because a reset would remove the logical devices
    # that user code has configured.
    dtensor.initialize_accelerator_system(
        _preferred_device_type(), experimental_reset_context=False
    )


def _initialize_alone() -> None:
    """Prepares a single process for `dtensor.create_distributed_mesh`."""
    try:
        dtensor.initialize_accelerator_system(
            _preferred_device_type(), experimental_reset_context=False
        )
    except ValueError as error:
        # Either user code has already initialized DTensor, or TensorFlow has
        # already run an operation. In the second case, only
        # create_distributed_mesh fails.
        if "already been initialized" not in str(error):
            raise


def _preferred_device_type() -> str:
    # Logical devices are not listed here, because this would start the runtime
    # too early.
    return next(
        kind
        for kind in ("TPU", "GPU", "CPU")
        if tf.config.list_physical_devices(kind)
    )
