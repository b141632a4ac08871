"""Lets TensorFlow's own TPUEmbedding run on the emulated strategy.

Three of its questions have another answer there: how its optimizers write an
enum (enum_mend), which hosts there are, and whether it is inside of
`strategy.run`. All else it does as on a TPU.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.emulation import enum_mend
from tf_layoutmap.emulation.strategy import EmulatedTPUStrategy, graph_of_core

_HOSTS = "get_list_of_hosts"
_IN_CORE = "_raise_error_for_incorrect_control_flow_context"

_originals: dict[str, Any] = {}


def install() -> None:
    """Gives the emulation's answers; nothing changes elsewhere."""
    utils = _tf_private.tpu_embedding_utils
    stock = tf.tpu.experimental.embedding.TPUEmbedding
    _originals[_HOSTS] = getattr(utils, _HOSTS)
    _originals[_IN_CORE] = getattr(stock, _IN_CORE)
    setattr(utils, _HOSTS, _list_of_hosts)
    setattr(stock, _IN_CORE, _is_in_core)
    enum_mend.install()


def uninstall() -> None:
    """Takes `install` back."""
    setattr(_tf_private.tpu_embedding_utils, _HOSTS, _originals[_HOSTS])
    setattr(tf.tpu.experimental.embedding.TPUEmbedding, _IN_CORE,
            _originals[_IN_CORE])
    enum_mend.uninstall()


def _list_of_hosts(strategy: Any) -> list[str]:
    if isinstance(strategy, EmulatedTPUStrategy):
        return list(strategy.extended.emulated_hosts)
    return _originals[_HOSTS](strategy)


def _is_in_core(embedding: Any) -> bool:
    """Whether `enqueue` was called by the function of `strategy.run`."""
    if not isinstance(embedding._strategy, EmulatedTPUStrategy):
        return _originals[_IN_CORE](embedding)
    graph = graph_of_core()
    if graph is None:
        return False
    if graph is not tf.compat.v1.get_default_graph():
        raise RuntimeError(
            "Inside of `strategy.run`, `enqueue` must be called by the "
            "function itself: TensorFlow cannot take it out of control flow "
            "or another tf.function, and refuses it on a TPU, too.")
    return True
