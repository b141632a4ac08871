"""What the emulation answers in a TPU's place.

Programs for a TPU ask TensorFlow which host a core belongs to, whether they
are inside of `strategy.run`, and for a way from there to the host. This gives
the answers for emulated cores, to TensorFlow's own TPUEmbedding and to ours;
all else, and all other strategies, stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.tpu import replicate_context
from tf_layoutmap.emulation import enum_mend
from tf_layoutmap.emulation.devices import Devices
from tf_layoutmap.emulation.strategy import EmulatedTPUStrategy, graph_of_core

_StockEmbedding = tf.tpu.experimental.embedding.TPUEmbedding
_IN_PROGRAM = "_raise_error_for_incorrect_control_flow_context"
_ON_HOST = "_raise_error_for_inputs_not_on_cpu"

_undo: list[Callable[[], None]] = []


def install(devices: Devices) -> None:
    """Answers for `devices` until `uninstall`."""
    _replace(_tf_private.device_util, "get_host_for_device",
             lambda original: _host_of(devices, original))
    _replace(_tf_private.tpu_replication, "outside_compilation",
             _outside_compilation)
    _replace(_StockEmbedding, _IN_PROGRAM, _is_in_program)
    _replace(_StockEmbedding, _ON_HOST, _check_on_host)
    _replace(_StockEmbedding, "enqueue", _enqueue)
    replicate_context.set_emulated(
        lambda graph: graph is graph_of_core(), devices.input_device_of)
    _undo.append(lambda: replicate_context.set_emulated(None))
    enum_mend.install()
    _undo.append(enum_mend.uninstall)


def uninstall() -> None:
    """Takes `install` back."""
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    _undo.append(lambda: setattr(owner, name, original))


def _host_of(devices: Devices, original):
    def get_host_for_device(device, device_index=0):
        # One host is the CPU that TensorFlow gives anyway.
        host = devices.host_of(device) if len(devices.hosts) > 1 else None
        return host or original(device, device_index)

    return get_host_for_device


def _outside_compilation(original):
    def outside_compilation(computation, *args, **kwargs):
        if graph_of_core() is None:
            return original(computation, *args, **kwargs)
        return computation(*args, **kwargs)

    return outside_compilation


def _is_in_program(original):
    def is_in_program(embedding):
        if isinstance(embedding._strategy, EmulatedTPUStrategy):
            return replicate_context.is_in_tpu_program()
        return original(embedding)

    return is_in_program


def _check_on_host(original):
    # It looks for the names of TPUs, and the cores of its strategy are CPUs.
    def check_on_host(embedding, flat_inputs, flat_paths):
        if isinstance(embedding._strategy, EmulatedTPUStrategy):
            replicate_context.check_on_host(
                list(zip(flat_paths, flat_inputs, strict=True)))
        else:
            original(embedding, flat_inputs, flat_paths)

    return check_on_host


def _enqueue(original):
    # It takes the names of TPUs only, and the cores of its strategy are CPUs.
    @functools.wraps(original)
    @tf.autograph.experimental.do_not_convert
    def enqueue(embedding, features, weights=None, training=True, name=None,
                device=None):
        strategy = embedding._strategy
        if device is not None and isinstance(strategy, EmulatedTPUStrategy):
            device = strategy.extended.tpu_name_of(device)
        return original(embedding, features, weights, training, name, device)

    return enqueue
