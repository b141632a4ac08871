"""Order of reads and updates of servers in a function that prefetches rows.

By default, TensorFlow runs the read of a step after the updates of all earlier
steps of a traced function, because these ops use the same resource. `Reads`
removes this order for reads, and adds control dependencies, so that a read
follows the updates of all but the last `prefetch_steps` steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.servers import closures


class Reads:
    """The reads and updates of an embedding in each traced function."""

    def __init__(self):
        """Creates an object without functions."""
        # The updates of each graph: for each step, one op per server.
        self._updates: weakref.WeakKeyDictionary[Any, list[list[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        # The handles of the servers in each graph.
        self._handles: weakref.WeakKeyDictionary[Any, dict[int, tf.Tensor]] = (
            weakref.WeakKeyDictionary()
        )

    @contextlib.contextmanager
    def reading(self, index: int, handle: tf.Tensor) -> Iterator[tf.Tensor]:
        """Context in which the op that reads rows of a server is created.

        Args:
          index: Index of the server, whose device is the current device.
          handle: Handle of the resource of the server.

        Yields:
          The handle for the op.
        """
        num_steps = closures.prefetch_steps()
        if not num_steps:
            yield handle
            return
        graph = tf.compat.v1.get_default_graph()
        handles = self._handles.setdefault(graph, {})
        if index not in handles:
            # TensorFlow's automatic control dependencies treat the output of
            # IdentityN as a different resource, but not the output of Identity.
            # The op is created before the first update, so that it does not
            # follow an update.
            (handles[index],) = tf.identity_n([handle])
        updates = self._updates.get(graph, [])
        with tf.control_dependencies(
            [updates[-1 - num_steps][index]] if len(updates) > num_steps else []
        ):
            yield handles[index]

    def record_update(self, ops: Sequence[Any]) -> None:
        """Records the ops that update rows in a step, one for each server."""
        if closures.prefetch_steps():
            graph = tf.compat.v1.get_default_graph()
            self._updates.setdefault(graph, []).append(list(ops))
