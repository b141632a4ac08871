"""TensorFlow functions that the emulation replaces, and their replacements.

Programs for a TPU call three kinds of TensorFlow functions: functions that
return the host of a core, functions that return whether the caller is inside
`strategy.run`, and functions that run code on the host from inside
`strategy.run`. The replacements handle calls for emulated cores, both from
TensorFlow's `TPUEmbedding` and from the `TPUEmbedding` of this package. For all
other devices and strategies, the replacements call the original functions.

Another patch makes TensorFlow's TPU optimizers work with every protobuf
version. TensorFlow's optimizers assign a bool to the enum
`low_dimensional_packing_status`. With protobuf 7.34 and later, this assignment
raises a `TypeError`, and TensorFlow's `TPUEmbedding` cannot be built. The patch
assigns an int instead. In this enum, the numbers 0 and 1 have the same meaning
as False and True.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import patches
from tf_layoutmap.embedding import tpu_program
from tf_layoutmap.embedding.tpu import batches
from tf_layoutmap.emulation.devices import Devices
from tf_layoutmap.emulation.strategy import EmulatedTPUStrategy, graph_of_core

_emulated: Devices | None = None


def install(devices: Devices) -> None:
    """Installs the replacements for the cores in `devices`."""
    global _emulated
    _emulated = devices
    tpu_program.set_emulated(
        lambda graph: graph is graph_of_core(), devices.input_device_of
    )
    patches.install("emulation")
    patches.install("tpu_optimizer_enum")


def uninstall() -> None:
    """Removes the replacements that `install` has installed."""
    global _emulated
    patches.uninstall("tpu_optimizer_enum")
    patches.uninstall("emulation")
    tpu_program.set_emulated(None)
    _emulated = None


def host_of(original: Callable[..., str], device: str, *index: int) -> str:
    """Returns the CPU that represents the host of a core.

    Some versions of TensorFlow pass the index of the CPU as a second argument.
    """
    host = None
    # If there is only one host, TensorFlow itself returns the correct CPU.
    if _emulated is not None and len(_emulated.hosts) > 1:
        host = _emulated.host_of(device)
    return host or original(device, *index)


def outside_compilation(
    original: Callable[..., Any],
    computation: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `computation` directly, because emulated cores are on the host."""
    if graph_of_core() is None:
        return original(computation, *args, **kwargs)
    return computation(*args, **kwargs)


def is_in_program(original: Callable[..., bool], embedding: Any) -> bool:
    """Returns whether the caller is inside `strategy.run`."""
    if isinstance(embedding._strategy, EmulatedTPUStrategy):
        return tpu_program.is_in_tpu_program()
    return original(embedding)


def check_on_host(
    original: Callable[..., None],
    embedding: Any,
    flat_inputs: Any,
    flat_paths: Any,
) -> None:
    """Checks that all inputs are on the host, and not on a core."""
    # The original function searches for device names of TPUs, but emulated
    # cores have device names of CPUs.
    if isinstance(embedding._strategy, EmulatedTPUStrategy):
        batches.check_on_host(list(zip(flat_paths, flat_inputs, strict=True)))
    else:
        original(embedding, flat_inputs, flat_paths)


def enqueue(
    original: Callable[..., None],
    embedding: Any,
    features: Any,
    weights: Any = None,
    training: bool = True,
    name: str | None = None,
    device: str | None = None,
) -> None:
    """Enqueues on a core. `device` is the CPU name or TPU name of the core."""
    device = _tpu_name_of(embedding._strategy, device)
    return original(embedding, features, weights, training, name, device)


def enqueue_sparse_cores(
    original: Callable[..., Any],
    embedding: Any,
    features: Any,
    weights: Any = None,
    device: str | None = None,
) -> Any:
    """Prepares ids for SparseCores on the host of a chip.

    `device` is the CPU name or TPU name of the chip.
    """
    return original(
        embedding, features, weights, _tpu_name_of(embedding._strategy, device)
    )


def _tpu_name_of(strategy: Any, device: str | None) -> str | None:
    if device is None or not isinstance(strategy, EmulatedTPUStrategy):
        return device
    return strategy.extended.tpu_name_of(device)


def read_sharded(original: Callable[..., Any], variable: Any) -> Any:
    """Returns the shard of the calling core inside `strategy.run`."""
    if graph_of_core() is None:
        return original(variable)
    return tf.raw_ops.ReadVariableOp(
        resource=variable.handle, dtype=variable.dtype
    )


def mirrored_to_tensor(
    original: Callable[..., Any],
    variable: Any,
    dtype: Any = None,
    name: str | None = None,
    as_ref: bool = False,
) -> Any:
    """Converts the value to `dtype` inside `strategy.run`, as on a TPU."""
    if (
        graph_of_core() is None
        or dtype is None
        or variable.dtype == dtype
        or not isinstance(variable.distribute_strategy, EmulatedTPUStrategy)
    ):
        return original(variable, dtype, name, as_ref)
    return tf.cast(variable.read_value(), dtype)


def sharded_to_tensor(
    original: Callable[..., Any],
    variable: Any,
    dtype: Any = None,
    name: str | None = None,
    as_ref: bool = False,
) -> Any:
    """Returns the shard of the calling core inside `strategy.run`."""
    if graph_of_core() is None:
        return original(variable, dtype, name, as_ref)
    return read_sharded(original, variable)


def assign_sharded(
    original: Callable[..., Any],
    variable: Any,
    value: Any,
    use_locking: bool = False,
    name: str | None = None,
    read_value: bool = True,
) -> Any:
    """Assigns the shard of the calling core inside `strategy.run`."""
    if graph_of_core() is None:
        return original(variable, value, use_locking, name, read_value)
    value = tf.convert_to_tensor(value, variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
    return read_sharded(original, variable)


def read_shard(original: Callable[..., Any], variable: Any, device: str) -> Any:
    """Returns the shard of a core. `device` is its CPU name or TPU name."""
    shard = _shard_of(variable, device)
    return original(variable, device) if shard is None else shard.read_value()


def assign_shard(
    original: Callable[..., Any], variable: Any, device: str, value: Any
) -> None:
    """Assigns the shard of a core. `device` is its CPU name or TPU name."""
    shard = _shard_of(variable, device)
    if shard is None:
        original(variable, device, value)
    else:
        shard.assign(value, read_value=False)


def _shard_of(variable: Any, device: str) -> Any:
    strategy = getattr(variable, "distribute_strategy", None)
    if not isinstance(strategy, EmulatedTPUStrategy):
        return None
    spec = tf.DeviceSpec.from_string(strategy.extended.tpu_name_of(device))
    if spec.device_type != "TPU":
        raise ValueError(
            "`device` must be a core of the emulated TPU, for example "
            f"'/device:TPU:0'. Received: device={device!r}."
        )
    return variable.values[spec.device_index]


class _WithEnum:
    """A proxy of an optimizer that returns the packing status as an int."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self.low_dimensional_packing_status = int(
            optimizer.low_dimensional_packing_status
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def write(original: Callable[..., Any], optimizer: Any, parameters: Any) -> Any:
    """Writes the config of an optimizer, with its packing status as an int."""
    return original(_WithEnum(optimizer), parameters)


@contextlib.contextmanager
def enum_patch_installed() -> Iterator[None]:
    """Installs the patch for TensorFlow's optimizers in a `with` block."""
    patches.install("tpu_optimizer_enum")
    try:
        yield
    finally:
        patches.uninstall("tpu_optimizer_enum")
