"""Turning the emulation on and off."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Iterator

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.emulation import devices, tpu_answers
from tf_layoutmap.emulation.strategy import EmulatedTPUStrategy

# If one of these has a kernel before ours are loaded, the process belongs to a
# TPU runtime. All are looked at: runtimes differ in where they register them.
_FOREIGN_OPS = (
    "ConfigureTPUEmbedding",
    "ConfigureDistributedTPU",
    "ShutdownDistributedTPU",
    "IsTPUEmbeddingInitialized",
    "EnqueueTPUEmbeddingArbitraryTensorBatch",
    "DynamicEnqueueTPUEmbeddingArbitraryTensorBatch",
    "RecvTPUEmbeddingActivations",
    "SendTPUEmbeddingGradients",
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


@dataclasses.dataclass
class _Process:
    """What is so for the whole process."""

    strategy: EmulatedTPUStrategy | None = None  # the last one there was
    is_enabled: bool = False
    is_loaded: bool = False


_process = _Process()


def enable(
    num_cores: int = 2,
    num_hosts: int = 1,
    *,
    deadline: float = 60.0,
) -> EmulatedTPUStrategy:
    """Runs TensorFlow's TPU embedding ops on the CPU, in this process.

    Call it at the start of a program, where a Cloud TPU program connects to
    its TPU; what it returns takes the place of the TPUStrategy. It loads CPU
    kernels for TensorFlow's own ops, which stay until the process ends, and
    splits the CPU into logical devices, which TensorFlow does only before its
    first operation.

    ```python
    strategy = tlm.emulation.enable(num_cores=2)
    with strategy.scope():
        embedding = tf.tpu.experimental.embedding.TPUEmbedding(...)
    ```

    Args:
      num_cores: Replicas of the strategy, each on a logical CPU.
      num_hosts: Hosts that the tables are cut over; it divides `num_cores`.
      deadline: Seconds that an op waits for another one which does not come,
        before it fails with `tf.errors.DeadlineExceededError` and a report of
        the queues. A TPU would wait forever.

    Returns:
      A strategy for which `isinstance(strategy, tf.distribute.TPUStrategy)`
      holds. Called again with the same numbers: the same one.

    Raises:
      TypeError: If a number is none.
      ValueError: If the numbers do not fit together.
      RuntimeError: If the process has a TPU runtime, if TensorFlow has
        started already and has too few logical CPUs, or if the emulation was
        enabled with other numbers.
    """
    _check_numbers(num_cores, num_hosts, deadline)
    if _process.strategy is not None:
        _check_same(_process.strategy, num_cores, num_hosts)
    if not _process.is_loaded:
        _check_no_kernels()
    made = devices.make(num_cores, num_hosts)
    library = ops.load_emulation()
    _process.is_loaded = True
    library.layout_map_set_up_emulation(
        num_cores=num_cores, num_hosts=num_hosts, deadline=deadline
    )
    if not _process.is_enabled:
        tpu_answers.install(made)
        _process.is_enabled = True
    strategy = _process.strategy
    if strategy is None:
        strategy = _process.strategy = EmulatedTPUStrategy(made)
    return strategy


def disable() -> None:
    """Forgets the emulated TPU with its tables, and restores replaced names.

    The kernels and the logical CPUs stay: TensorFlow cannot take them back.
    Without an embedding the kernels only raise errors. Nothing happens if the
    emulation is not enabled.
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
) -> Iterator[EmulatedTPUStrategy]:
    """`enable` for a `with` block, and `disable` behind it."""
    strategy = enable(num_cores, num_hosts, deadline=deadline)
    try:
        yield strategy
    finally:
        disable()


def initialize_tpu_system() -> None:
    """Forgets the embedding and its tables, so that another can be built.

    On a TPU, `tf.tpu.experimental.initialize_tpu_system` does it.

    Raises:
      RuntimeError: If the emulation is not enabled.
    """
    _check_enabled("initialize_tpu_system")
    tf.raw_ops.ShutdownDistributedTPU()


def reset() -> None:
    """Forgets the steps in flight, as after an error; tables stay.

    Raises:
      RuntimeError: If the emulation is not enabled.
    """
    _check_enabled("reset")
    ops.load_emulation().layout_map_reset_emulation()


def report() -> str:
    """Returns a few lines: the queue of each core, and which calls wait.

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


def _check_same(strategy: EmulatedTPUStrategy, num_cores: int, num_hosts: int):
    before = (strategy.num_replicas_in_sync, strategy.extended.num_hosts)
    if before != (num_cores, num_hosts):
        raise RuntimeError(
            "A process emulates one TPU: it was enabled with "
            f"num_cores={before[0]}, num_hosts={before[1]}. Received: "
            f"num_cores={num_cores}, num_hosts={num_hosts}."
        )


def _check_no_kernels() -> None:
    for op in _FOREIGN_OPS:
        kernels = tf_private.registered_kernels_of(op).kernel
        if kernels:
            raise RuntimeError(
                "The emulation registers CPU kernels for TensorFlow's TPU "
                "embedding ops, so there must be none yet. Received: a "
                f"process with a TPU runtime, which has one for {op!r} on "
                f"{kernels[0].device_type}. Use the TPU, or run this where "
                "tensorflow-cpu is installed."
            )


def _check_enabled(name: str) -> None:
    if not _process.is_enabled:
        raise RuntimeError(
            f"`tlm.emulation.{name}` needs an emulated TPU; call "
            "`tlm.emulation.enable` first."
        )
