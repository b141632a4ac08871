"""The steps of one embedding between `enqueue` and `apply_gradients`.

What a process knows of a step are tensors of the function being traced.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Any

import tensorflow as tf

# Of a graph: the queues of the embeddings that have steps in it.
_ATTRIBUTE = "_tf_layoutmap_divided_steps"

_ORDER = ("With tables that are divided among processes, the calls of a step "
          "are made in one tf.function.")


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch on its way.

    Attributes:
      plan: Of `PlanExchange`.
      requests: By process, the rows that it wants of this one.
      sizes: `[processes, processes, 4]` int64: by sender and owner, those of
        `PlanExchange`.
      num_samples: By process and feature, `[num_features]` int64 each: the
        activations whose gradients this process gets.
    """

    plan: tf.Tensor
    requests: list[tf.Tensor]
    sizes: tf.Tensor
    num_samples: list[tf.Tensor]


@dataclasses.dataclass
class _Queue:
    pending: collections.deque[Step] = dataclasses.field(
        default_factory=collections.deque)
    last: Step | None = None


class StepsInFlight:
    """Queues of steps, one for each function that is traced."""

    def enqueue(self, step: Step):
        """Puts a step at the end of the queue."""
        self._queue().pending.append(step)

    def dequeue(self) -> Step:
        """Returns the oldest step.

        Raises:
          RuntimeError: If there is none.
        """
        queue = self._queue()
        if not queue.pending:
            raise RuntimeError(
                "`dequeue` needs an enqueued step; call `enqueue` first. "
                + _ORDER)
        queue.last = queue.pending.popleft()
        return queue.last

    def take_dequeued(self) -> Step:
        """Returns the step dequeued last, which gets its gradients now.

        Raises:
          RuntimeError: If there is none.
        """
        queue = self._queue()
        if queue.last is None:
            raise RuntimeError(
                "`apply_gradients` needs a dequeued step; call `enqueue` and "
                "`dequeue` first. " + _ORDER)
        step, queue.last = queue.last, None
        return step

    def _queue(self) -> _Queue:
        # With the graph, whose tensors a queue holds: both go together.
        graph: Any = tf.compat.v1.get_default_graph()
        by_embedding = getattr(graph, _ATTRIBUTE, None)
        if by_embedding is None:
            by_embedding = weakref.WeakKeyDictionary()
            setattr(graph, _ATTRIBUTE, by_embedding)
        return by_embedding.setdefault(self, _Queue())
