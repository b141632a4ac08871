"""Steps between `enqueue` and `apply_gradients`, as parts of a function.

For engines whose steps are tensors of the function being traced: nothing else
knows of them.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Any, Generic, TypeVar

import tensorflow as tf

StepT = TypeVar("StepT")

# Of a graph: the queues of the embeddings that have steps in it.
_ATTRIBUTE = "_tf_layoutmap_steps"


@dataclasses.dataclass
class Queue(Generic[StepT]):
    """The steps of one embedding in one function.

    Attributes:
      pending: Those that were enqueued, the oldest first.
      last: The one that was dequeued last, until it has its gradients.
    """

    pending: collections.deque[StepT] = dataclasses.field(
        default_factory=collections.deque
    )
    last: StepT | None = None


class StepQueues(Generic[StepT]):
    """Queues of steps, one for each function that is traced."""

    def __init__(self, order: str):
        """Starts without steps.

        Args:
          order: A sentence for errors: how the calls of a step are made.
        """
        self._order = order

    def enqueue(self, step: StepT):
        """Puts a step at the end of the queue."""
        self._queue().pending.append(step)

    def dequeue(self) -> StepT:
        """Returns the oldest step.

        Raises:
          RuntimeError: If there is none.
        """
        queue = self._queue()
        if not queue.pending:
            raise RuntimeError(
                "`dequeue` needs an enqueued step; call `enqueue` first. "
                + self._order
            )
        queue.last = queue.pending.popleft()
        return queue.last

    def take_dequeued(self) -> StepT:
        """Returns the step dequeued last, which gets its gradients now.

        Raises:
          RuntimeError: If there is none.
        """
        queue = self._queue()
        if queue.last is None:
            raise RuntimeError(
                "`apply_gradients` needs a dequeued step; call `enqueue` and "
                "`dequeue` first. " + self._order
            )
        step, queue.last = queue.last, None
        return step

    def _queue(self) -> Queue[StepT]:
        # With the graph, whose tensors a queue holds: both go together.
        graph: Any = tf.compat.v1.get_default_graph()
        by_embedding = getattr(graph, _ATTRIBUTE, None)
        if by_embedding is None:
            by_embedding = weakref.WeakKeyDictionary()
            setattr(graph, _ATTRIBUTE, by_embedding)
        return by_embedding.setdefault(self, Queue())
