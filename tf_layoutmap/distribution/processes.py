"""Several processes, started as keras.distribution starts them."""

import os
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.layout.mesh.device_mesh import list_devices

dtensor = tf.experimental.dtensor


def get_device_count(device_type: str | None = None) -> int:
    """Returns how many devices `list_devices(device_type)` lists."""
    return len(list_devices(device_type))


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of one program; before anything is computed.

    Each argument may come from the environment instead:
    `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `KERAS_DISTRIBUTION_NUM_PROCESSES` and
    `KERAS_DISTRIBUTION_PROCESS_ID`. With one process nothing is joined, and
    `dtensor.create_distributed_mesh` makes a mesh of its devices, if nothing
    was computed before.

    >>> import tf_layoutmap as tlm
    >>> tlm.distribution.initialize(num_processes=1, process_id=0)

    Args:
      job_addresses: `"host:port,host:port"`, one for each process.
      num_processes: How many there are.
      process_id: Which one this is, from 0.

    Raises:
      ValueError: The numbers and addresses do not match.
    """

    def given(value: Any, name: str) -> Any:
        return (
            os.environ.get(f"KERAS_DISTRIBUTION_{name}")
            if (value is None)
            else value
        )

    addresses = given(job_addresses, "JOB_ADDRESSES")
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
    count = int(given(num_processes, "NUM_PROCESSES") or len(addresses) or 1)
    number = int(given(process_id, "PROCESS_ID") or 0)
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
    # Resetting the context would forget the logical devices of the program.
    dtensor.initialize_accelerator_system(
        _best_type(), experimental_reset_context=False
    )


def _initialize_alone() -> None:
    """Lets programs for several processes make their mesh in one."""
    try:
        dtensor.initialize_accelerator_system(
            _best_type(), experimental_reset_context=False
        )
    except ValueError as error:
        # By this program itself, or TensorFlow is in use, which suits all but
        # create_distributed_mesh.
        if "already been initialized" not in str(error):
            raise


def _best_type() -> str:
    # Physical ones: logical ones would start the runtime too early.
    return next(
        kind
        for kind in ("TPU", "GPU", "CPU")
        if tf.config.list_physical_devices(kind)
    )
