"""The steps of one embedding between `enqueue` and `apply_gradients`.

Their state are tensors of the function being traced: a worker keeps nothing,
and what is enqueued in one closure is dequeued in it.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from typing import Any

import tensorflow as tf

# Of a graph: the queues of the embeddings that have steps in it.
_ATTRIBUTE = "_tf_layoutmap_steps"

_ORDER = ("Over parameter servers the calls of a step are made in one "
          "tf.function, or all eagerly in one thread.")


@dataclasses.dataclass
class Step:
    """A batch on its way.

    Attributes:
      plan: Of `StepOps.plan`.
      requests: What to ask each server.
      training: Whether gradients may follow.
      fetched: What the servers sent; None before `dequeue`.
    """

    plan: Any
    requests: Any
    training: bool
    fetched: Any = None


@dataclasses.dataclass
class _Queue:
    pending: collections.deque[Step] = dataclasses.field(
        default_factory=collections.deque)
    last: Step | None = None


class StepsInFlight:
    """Queues of steps, one for each function that is traced."""

    def __init__(self):
        """Starts without steps."""
        # Closures that are no tf.function run in threads of the coordinator.
        self._eager = threading.local()

    def enqueue(self, step: Step):
        """Puts a step at the end of the queue."""
        self._queue().pending.append(step)

    def dequeue(self) -> Step:
        """Returns the oldest step.

        Raises:
          RuntimeError: If there is none, or the one before waits.
        """
        queue = self._queue()
        if not queue.pending:
            raise RuntimeError(
                "`dequeue` needs an enqueued step; call `enqueue` first. "
                + _ORDER)
        if queue.last is not None and queue.last.training and (
                tf.executing_eagerly()):
            raise RuntimeError(
                "`dequeue`: the step before still awaits its gradients; call "
                "`apply_gradients` first, or enqueue with training=False if "
                "there will be none.")
        queue.last = queue.pending.popleft()
        return queue.last

    def take_dequeued(self) -> Step:
        """Returns the step dequeued last, which gets its gradients now.

        Raises:
          RuntimeError: If there is none, or it is forward-only.
        """
        queue = self._queue()
        if queue.last is None:
            raise RuntimeError(
                "`apply_gradients` needs a dequeued step; call `enqueue` and "
                "`dequeue` first. " + _ORDER)
        if not queue.last.training:
            raise RuntimeError(
                "`apply_gradients` must not follow `enqueue(training=False)`.")
        step, queue.last = queue.last, None
        return step

    def reset(self):
        """Forgets the steps of this thread, or of the function traced here."""
        queue = self._queue()
        queue.pending.clear()
        queue.last = None

    def describe(self) -> tuple[int, bool]:
        """Returns the eager steps pending here, and whether one awaits."""
        queue = self._queue()
        return len(queue.pending), (
            queue.last is not None and queue.last.training)

    def _queue(self) -> _Queue:
        if tf.executing_eagerly():
            if not hasattr(self._eager, "queue"):
                self._eager.queue = _Queue()
            return self._eager.queue
        # With the graph, whose tensors a queue holds: both go together.
        graph = tf.compat.v1.get_default_graph()
        by_embedding = getattr(graph, _ATTRIBUTE, None)
        if by_embedding is None:
            by_embedding = weakref.WeakKeyDictionary()
            setattr(graph, _ATTRIBUTE, by_embedding)
        return by_embedding.setdefault(self, _Queue())
