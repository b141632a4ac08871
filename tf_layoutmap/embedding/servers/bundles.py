"""Updates of several embeddings that a server receives in one message.

TensorFlow sends each tensor between two processes in a separate message. If
each layer of a model created its own update op, a step would therefore send one
message per layer to each server. In a `bundled` context, the ops of updates are
not created immediately. At the end of the context, `bundled` creates one op per
server, which applies all updates in their order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding.servers import closures, resource_order


@dataclasses.dataclass(frozen=True)
class Update:
    """An update of the shards of an embedding on one server.

    Attributes:
      device: Device of the server.
      handle: Handle of the resource on the server.
      request: Output of `FoldGradients` for the server.
    """

    device: str
    handle: tf.Tensor
    request: tf.Tensor


@dataclasses.dataclass
class _Bundle:
    """The updates in a graph whose ops were not created yet.

    Attributes:
      updates: The updates.
      num_ops: Number of ops in the graph before the first update.
    """

    updates: list[Update] = dataclasses.field(default_factory=list)
    num_ops: int = 0


# Attribute of a graph that contains its `_Bundle` in a `bundled` context.
_ATTRIBUTE = "_tf_layoutmap_bundle"


@contextlib.contextmanager
def bundled() -> Iterator[None]:
    """Context of a step whose updates are bundled.

    The context does nothing if the enclosing closure does not bundle updates,
    or inside another such context of the same graph.
    """
    closure = closures.enclosing_closure()
    graph = tf.compat.v1.get_default_graph()
    if (
        closure is None
        or not closure.bundles_updates
        or hasattr(graph, _ATTRIBUTE)
    ):
        yield
        return
    setattr(graph, _ATTRIBUTE, _Bundle())
    try:
        yield
        create_pending()
    finally:
        delattr(graph, _ATTRIBUTE)


def apply(updates: Sequence[Update]) -> list[tf.Tensor]:
    """Creates the ops of updates now, or at the end of the `bundled` context.

    Returns:
      One output of each op that was created.
    """
    _check_functions_around()
    graph = tf.compat.v1.get_default_graph()
    bundle = getattr(graph, _ATTRIBUTE, None)
    if bundle is None or tf.executing_eagerly():
        return _create(updates)
    if not bundle.updates:
        bundle.num_ops = len(graph.get_operations())
    bundle.updates.extend(updates)
    return []


def create_pending() -> None:
    """Creates the ops of all updates in the current graph.

    An op that reads rows calls this function before it is created.
    """
    _check_functions_around()
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    bundle = getattr(graph, _ATTRIBUTE, None)
    if bundle is None or not bundle.updates:
        return
    if _is_used_since(graph, bundle):
        _report_conflict()
    updates, bundle.updates = bundle.updates, []
    _create(updates)


def _create(updates: Sequence[Update]) -> list[tf.Tensor]:
    """Creates one op for each device."""
    applied = []
    for device in dict.fromkeys(one.device for one in updates):
        here = [one for one in updates if one.device == device]
        requests = [one.request for one in here]
        if len(here) > 1:
            with tf.device(requests[0].device):
                bundle = ops.bundle_requests(requests=requests)
        with tf.device(device):
            is_new = (
                ops.apply_rows(server=here[0].handle, request=requests[0])
                if len(here) == 1
                else ops.apply_rows_of_bundle(
                    servers=[one.handle for one in here], bundle=bundle
                )
            )
        applied.append(resource_order.end_on_server(is_new))
    return applied


def _is_used_since(graph: Any, bundle: _Bundle) -> bool:
    """Returns whether an op that follows the first update uses its variables.

    TensorFlow would run this op before the update, because the op of the update
    is created later.
    """
    used = {
        id(tensor)
        for one in bundle.updates
        for tensor in resource_order.resources_of(graph, one.handle)
    }
    return any(
        id(tensor) in used
        for op in graph.get_operations()[bundle.num_ops :]
        for tensor in op.inputs
    )


def _check_functions_around() -> None:
    """Reports a call in a branch or a loop after an update outside of it."""
    for graph in list(tf_private.graphs_around())[1:]:
        bundle = getattr(graph, _ATTRIBUTE, None)
        if bundle is not None and bundle.updates:
            _report_conflict()


def _report_conflict() -> None:
    closure = closures.enclosing_closure()
    assert closure is not None  # Only closures bundle updates.
    closure.has_bundle_conflict = True
