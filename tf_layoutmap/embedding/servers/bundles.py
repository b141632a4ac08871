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
from tf_layoutmap.embedding.servers import (
    closure_trace,
    resource_order,
    variable_messages,
)
from tf_layoutmap.embedding.servers.closure_trace import Bundle, ClosureStep


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


@contextlib.contextmanager
def bundled() -> Iterator[None]:
    """Context of a step whose updates are bundled.

    The context does nothing if the enclosing closure does not bundle updates,
    or inside another such context of the same graph.
    """
    step = closure_trace.enclosing_step()
    graph = tf.compat.v1.get_default_graph()
    if (
        step is None
        or not step.trace.bundles_updates
        or graph in step.trace.bundles
    ):
        yield
        return
    step.trace.bundles[graph] = Bundle()
    first_op = len(graph.get_operations())
    try:
        yield
        lookups = step.trace.bundles[graph].lookups
        if lookups is not None:
            lookups.create_lookups()
        create_pending()
        variable_messages.reduce_messages(
            graph,
            first_op,
            step.trace.read_values.setdefault(
                graph, variable_messages.ReadValues()
            ),
        )
    finally:
        del step.trace.bundles[graph]


def apply(updates: Sequence[Update]) -> list[tf.Tensor]:
    """Creates the ops of updates now, or at the end of the `bundled` context.

    Returns:
      One output of each op that was created.
    """
    bundle = _bundle_of(closure_trace.enclosing_step())
    if bundle is None:
        return _create(updates)
    if not bundle.has_updates:
        graph = tf.compat.v1.get_default_graph()
        bundle.num_ops = len(graph.get_operations())
    bundle.updates.extend(updates)
    return []


def create_pending() -> None:
    """Creates the ops of all updates in the current graph.

    An op that reads rows calls this function before it is created.
    """
    step = closure_trace.enclosing_step()
    bundle = _bundle_of(step)
    if step is None or bundle is None or not bundle.has_updates:
        return
    graph = tf.compat.v1.get_default_graph()
    following = graph.get_operations()[bundle.num_ops :]
    if bundle.lookups is not None:
        bundle.lookups.create_updates()
    if _are_used(graph, bundle, following):
        step.trace.stop_bundling()
    updates, bundle.updates = bundle.updates, []
    _create(updates)


def _create(updates: Sequence[Update]) -> list[tf.Tensor]:
    """Creates one op for each device."""
    applied = []
    for device in dict.fromkeys(update.device for update in updates):
        here = [update for update in updates if update.device == device]
        requests = [update.request for update in here]
        if len(here) > 1:
            with tf.device(requests[0].device):
                bundle = ops.bundle_requests(requests=requests)
        with tf.device(device):
            is_new = (
                ops.apply_rows(server=here[0].handle, request=requests[0])
                if len(here) == 1
                else ops.apply_rows_of_bundle(
                    servers=[update.handle for update in here], bundle=bundle
                )
            )
        applied.append(resource_order.end_on_server(is_new))
    return applied


def _are_used(graph: Any, bundle: Bundle, following: Sequence[Any]) -> bool:
    """Returns whether ops that follow the first update use its variables.

    TensorFlow would run this op before the update, because the op of the update
    is created later.
    """
    used = {
        id(tensor)
        for update in bundle.updates
        for tensor in resource_order.resources_of(graph, update.handle)
    }
    return any(id(tensor) in used for op in following for tensor in op.inputs)


def _bundle_of(step: ClosureStep | None) -> Bundle | None:
    """Returns the bundle of the current graph in a step, or None.

    A call in a branch or a loop after an update outside of it is a conflict.
    """
    if step is None:
        return None
    bundles = step.trace.bundles
    graph, *outer = tf_private.graphs_around()
    if any(
        bundles[around].has_updates for around in outer if around in bundles
    ):
        step.trace.stop_bundling()
    return bundles.get(graph)
