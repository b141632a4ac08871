"""Functions that enable, disable, reset and describe the emulation."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Iterator
from typing import Literal

import tensorflow as tf

from tf_layoutmap._core import checks, ops, tf_private
from tf_layoutmap.emulation import devices, tpu_answers
from tf_layoutmap.emulation.strategy import STEP_OPS, EmulatedTPUStrategy

# If one of these ops has a kernel before the emulation loads its own kernels,
# the process has a TPU runtime. All these ops are checked, because TPU runtimes
# differ in the ops for which they register kernels.
_FOREIGN_OPS = (
    "ConfigureTPUEmbedding",
    "ConfigureDistributedTPU",
    "ShutdownDistributedTPU",
    "IsTPUEmbeddingInitialized",
    *STEP_OPS,
    "ConvertToListOfSparseCoreCooTensors",
    "SortListOfSparseCoreCooTensors",
    "ConvertToSparseCoreCsrWrappedCooTensor",
    "GetStatsFromListOfSparseCoreCooTensors",
    "TPUCopyWithDynamicShape",
    "TPUAnnotateTensorsWithDynamicShape",
    *(
        f"{verb}TPUEmbedding{optimizer}Parameters"
        for verb in ("Load", "Retrieve")
        for optimizer in (
            "StochasticGradientDescent",
            "Adagrad",
            "AdagradMomentum",
            "ADAM",
            "FTRL",
        )
    ),
)


# SparseCores of each chip, by the type of the TPU.
_SPARSE_CORES_PER_CHIP = {"v4": 0, "v5p": 4, "v6e": 2}


@dataclasses.dataclass
class _Process:
    """The state of the emulation in this process.

    Attributes:
      strategy: The strategy that `enable` created most recently, or None.
      is_enabled: Whether the emulation is enabled.
      is_loaded: Whether the CPU kernels are loaded.
    """

    strategy: EmulatedTPUStrategy | None = None
    is_enabled: bool = False
    is_loaded: bool = False


_process = _Process()


def enable(
    num_cores: int = 2,
    num_hosts: int = 1,
    *,
    deadline: float = 60.0,
    tpu: Literal["v4", "v5p", "v6e"] = "v4",
) -> EmulatedTPUStrategy:
    """Runs TensorFlow's TPU embedding ops on the CPU, in this process.

    Call this function at the start of a program, where a Cloud TPU program
    connects to its TPU. Use the returned strategy instead of a TPUStrategy. The
    function loads CPU kernels for TensorFlow's TPU ops. The kernels remain
    loaded until the process ends. The function also splits the CPU into logical
    devices. TensorFlow can create logical devices only before its first
    operation.

    ```python
    strategy = tlm.emulation.enable(num_cores=2)
    with strategy.scope():
        embedding = tf.tpu.experimental.embedding.TPUEmbedding(...)
    ```

    Args:
      num_cores: Number of replicas of the strategy. Each replica is on a
        separate logical CPU.
      num_hosts: Number of hosts over which the tables are sharded. `num_cores`
        must be a multiple of `num_hosts`.
      deadline: Maximum time, in seconds, for which an op waits for another op.
        After this time, the op raises `tf.errors.DeadlineExceededError` with a
        report about the queues. On a real TPU, the op would wait without a
        timeout.
      tpu: Type of the TPU. A v4 has an embedding engine, for TensorFlow's
        `TPUEmbedding`. Each chip of a v5p has 4 SparseCores, and each chip of a
        v6e has 2 SparseCores, for TensorFlow's `TPUEmbeddingV2`. With
        SparseCores, each core represents a chip, so `num_cores` is the number
        of chips, and must be a power of two.

    Returns:
      A strategy for which `isinstance(strategy, tf.distribute.TPUStrategy)` is
      True. Another call with the same numbers of cores and hosts and the same
      type of TPU returns the same strategy.

    Raises:
      TypeError: If an argument is not a number.
      ValueError: If `num_cores` is not a multiple of `num_hosts`, if it is not
        a power of two with SparseCores, or if an argument is out of range.
      RuntimeError: If the process has a TPU runtime, if TensorFlow has already
        started and has too few logical CPUs, or if the emulation was enabled
        with another number of cores or hosts, or another type of TPU.
    """
    _check_numbers(num_cores, num_hosts, deadline)
    checks.check_one_of("tpu", tpu, tuple(_SPARSE_CORES_PER_CHIP))
    sparse_cores = _SPARSE_CORES_PER_CHIP[tpu]
    if sparse_cores and num_cores & (num_cores - 1):
        raise ValueError(
            checks.message(
                "num_cores", f"a power of two with tpu={tpu!r}", num_cores
            )
        )
    if _process.strategy is not None:
        _check_same(_process.strategy, num_cores, num_hosts, sparse_cores)
    if not _process.is_loaded:
        _check_no_kernels()
    logical_devices = devices.create_devices(num_cores, num_hosts)
    library = ops.load_emulation()
    _process.is_loaded = True
    library.layout_map_set_up_emulation(
        num_cores=num_cores,
        num_hosts=num_hosts,
        deadline=deadline,
        sparse_cores_per_chip=sparse_cores,
    )
    if not _process.is_enabled:
        tpu_answers.install(logical_devices)
        _process.is_enabled = True
    strategy = _process.strategy
    if strategy is None:
        strategy = _process.strategy = EmulatedTPUStrategy(
            logical_devices, sparse_cores
        )
    return strategy


def disable() -> None:
    """Disables the emulation, and discards its tables.

    The function removes the patches of TensorFlow. The kernels and the logical
    CPUs remain, because TensorFlow cannot remove them. After this call, the
    kernels raise errors. If the emulation is not enabled, the function does
    nothing.
    """
    if not _process.is_enabled:
        return
    tpu_answers.uninstall()
    _process.is_enabled = False
    tf.raw_ops.ShutdownDistributedTPU()


@contextlib.contextmanager
def enabled(
    num_cores: int = 2,
    num_hosts: int = 1,
    *,
    deadline: float = 60.0,
    tpu: Literal["v4", "v5p", "v6e"] = "v4",
) -> Iterator[EmulatedTPUStrategy]:
    """Enables the emulation in a `with` block.

    The arguments are the same as for `enable`.
    """
    strategy = enable(num_cores, num_hosts, deadline=deadline, tpu=tpu)
    try:
        yield strategy
    finally:
        disable()


def initialize_tpu_system() -> None:
    """Discards the embedding, so that a program can build another embedding.

    The tables of the embedding are also discarded. For a real TPU, call
    `tf.tpu.experimental.initialize_tpu_system` instead.

    Raises:
      RuntimeError: If the emulation is not enabled.
    """
    _check_enabled("initialize_tpu_system")
    tf.raw_ops.ShutdownDistributedTPU()


def reset() -> None:
    """Discards all steps in flight, for example after an error.

    Raises:
      RuntimeError: If the emulation is not enabled.
    """
    _check_enabled("reset")
    ops.load_emulation().layout_map_reset_emulation()


def report() -> str:
    """Returns a description of each core's queue and of the waiting calls.

    Raises:
      RuntimeError: If the emulation is not enabled.
    """
    _check_enabled("report")
    text = ops.load_emulation().layout_map_describe_emulation()
    return text.numpy().decode()


def _check_numbers(num_cores: int, num_hosts: int, deadline: float) -> None:
    for name, value in (("num_cores", num_cores), ("num_hosts", num_hosts)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(
                f"Argument `{name}` must be an int. Received: {name}={value!r}."
            )
    if num_hosts < 1 or num_cores < 1 or num_cores % num_hosts:
        raise ValueError(
            "Argument `num_cores` must be a multiple of `num_hosts`, both at "
            f"least 1. Received: num_cores={num_cores}, "
            f"num_hosts={num_hosts}."
        )
    if isinstance(deadline, bool) or not isinstance(deadline, numbers.Real):
        raise TypeError(
            "Argument `deadline` must be a number of seconds. "
            f"Received: deadline={deadline!r}."
        )
    if math.isnan(deadline) or not 0 < deadline <= 1e6:
        raise ValueError(
            "Argument `deadline` must be above 0 and at most 1e6 "
            f"seconds. Received: deadline={deadline!r}."
        )


def _check_same(
    strategy: EmulatedTPUStrategy,
    num_cores: int,
    num_hosts: int,
    sparse_cores: int,
) -> None:
    before = (strategy.num_replicas_in_sync, strategy.extended.num_hosts)
    cores_before = strategy.extended.sparse_cores_per_chip
    if (*before, cores_before) != (num_cores, num_hosts, sparse_cores):
        raise RuntimeError(
            "A process can emulate only one TPU. The emulation was enabled "
            f"with num_cores={before[0]}, num_hosts={before[1]} and "
            f"{cores_before} SparseCores per chip. Received: "
            f"num_cores={num_cores}, num_hosts={num_hosts} and {sparse_cores} "
            "SparseCores per chip."
        )


def _check_no_kernels() -> None:
    for op in _FOREIGN_OPS:
        kernels = tf_private.registered_kernels_of(op).kernel
        if kernels:
            raise RuntimeError(
                "The emulation registers CPU kernels for TensorFlow's TPU "
                "embedding ops, so the process must not have such kernels. "
                "Received: a process with a TPU runtime, which has a kernel "
                f"for {op!r} on {kernels[0].device_type}. Use the TPU, or "
                "run the program where tensorflow-cpu is installed."
            )


def _check_enabled(name: str) -> None:
    if not _process.is_enabled:
        raise RuntimeError(
            f"`tlm.emulation.{name}` requires an emulated TPU; call "
            "`tlm.emulation.enable` first."
        )
