"""What the emulation answers in a TPU's place.

Programs for a TPU ask TensorFlow which host a core belongs to, whether they
are inside of `strategy.run`, and for a way from there to the host. This gives
the answers for emulated cores, to TensorFlow's own TPUEmbedding and to ours;
all else, and all other strategies, stay as they are.
"""

# DOC-MERGE: Lets TensorFlow's TPU optimizers write their config with any protobuf.
#
# They assign a bool to the enum `low_dimensional_packing_status`. protobuf 7.34
# and later refuse that with a `TypeError`, so that no stock `TPUEmbedding` can
# be built. Both values of the bool are numbers of the enum with the same
# meaning, so an int does.
#
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tf_layoutmap._patches import engine, runtime_rows
from tf_layoutmap.embedding.tpu import batches
from tf_layoutmap.emulation.devices import Devices
from tf_layoutmap.emulation.strategy import EmulatedTPUStrategy, graph_of_core

_emulated: Devices | None = None


def install(devices: Devices) -> None:
    """Answers for `devices` until `uninstall`."""
    global _emulated
    _emulated = devices
    batches.set_emulated(
        lambda graph: graph is graph_of_core(), devices.input_device_of
    )
    engine.install(runtime_rows.EMULATION_GROUP)
    engine.install(runtime_rows.ENUM)


def uninstall() -> None:
    """Takes `install` back."""
    global _emulated
    engine.uninstall(runtime_rows.ENUM)
    engine.uninstall(runtime_rows.EMULATION_GROUP)
    batches.set_emulated(None)
    _emulated = None


def host_of(
    original: Callable[..., str], device: str, device_index: int = 0
) -> str:
    """The CPU of the host that a core belongs to."""
    host = None
    # One host is the CPU that TensorFlow gives anyway.
    if _emulated is not None and len(_emulated.hosts) > 1:
        host = _emulated.host_of(device)
    return host or original(device, device_index)


def outside_compilation(
    original: Callable[..., Any],
    computation: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `computation`, which is on the host already."""
    if graph_of_core() is None:
        return original(computation, *args, **kwargs)
    return computation(*args, **kwargs)


def is_in_program(original: Callable[..., bool], embedding: Any) -> bool:
    """Whether the caller is inside of `strategy.run`."""
    if isinstance(embedding._strategy, EmulatedTPUStrategy):
        return batches.is_in_tpu_program()
    return original(embedding)


def check_on_host(
    original: Callable[..., None],
    embedding: Any,
    flat_inputs: Any,
    flat_paths: Any,
) -> None:
    """Refuses inputs that are on a core."""
    # It looks for the names of TPUs, and the cores of its strategy are CPUs.
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
    """Enqueues, on a core by the name that its CPU has."""
    strategy = embedding._strategy
    if device is not None and isinstance(strategy, EmulatedTPUStrategy):
        device = strategy.extended.tpu_name_of(device)
    return original(embedding, features, weights, training, name, device)


class _WithEnum:
    """An optimizer whose packing status is an int; all else is its own."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self.low_dimensional_packing_status = int(
            optimizer.low_dimensional_packing_status
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def write(original: Callable[..., Any], optimizer: Any, parameters: Any) -> Any:
    """Writes the config of an optimizer, which is not changed."""
    return original(_WithEnum(optimizer), parameters)


@contextlib.contextmanager
def enum_patch_installed() -> Iterator[None]:
    """Lets the optimizers of TensorFlow write inside a `with` block."""
    engine.install(runtime_rows.ENUM)
    try:
        yield
    finally:
        engine.uninstall(runtime_rows.ENUM)
