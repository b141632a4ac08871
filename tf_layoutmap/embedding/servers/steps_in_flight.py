"""The steps of one embedding between `enqueue` and `apply_gradients`.

Their state are tensors of the function being traced: a worker keeps nothing,
and what is enqueued in one closure is dequeued in it.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.step import step_queues


@dataclasses.dataclass
class Step:
    """A batch on its way.

    Attributes:
      begun: The plan, of `StepOps.begin`.
      plan: The same, or that of `StepOps.placed` after `dequeue`.
      requests: What to ask each server.
      training: Whether gradients may follow.
      fetched: What the servers sent; None before `dequeue`.
    """

    begun: Any
    plan: Any
    requests: Any
    training: bool
    fetched: Any = None


class StepsInFlight(step_queues.StepQueues[Step]):
    """Queues of steps, one for each function that is traced."""

    def __init__(self):
        """Starts without steps."""
        super().__init__(
            "Over parameter servers the calls of a step are made "
            "in one tf.function, or all eagerly in one thread."
        )
        # Closures that are no tf.function run in threads of the coordinator.
        self._eager = threading.local()

    def dequeue(self) -> Step:
        """Returns the oldest step.

        Raises:
          RuntimeError: If there is none, or the one before waits.
        """
        queue = self._queue()
        if (
            queue.pending
            and tf.executing_eagerly()
            and (queue.last is not None and queue.last.training)
        ):
            raise RuntimeError(
                "`dequeue`: the step before still awaits its gradients; call "
                "`apply_gradients` first, or enqueue with training=False if "
                "there will be none."
            )
        return super().dequeue()

    def take_dequeued(self) -> Step:
        """Returns the step dequeued last, which gets its gradients now.

        Raises:
          RuntimeError: If there is none, or it is forward-only.
        """
        last = self._queue().last
        if last is not None and not last.training:
            raise RuntimeError(
                "`apply_gradients` must not follow `enqueue(training=False)`."
            )
        return super().take_dequeued()

    def reset(self):
        """Forgets the steps of this thread, or of the function traced here."""
        queue = self._queue()
        queue.pending.clear()
        queue.last = None

    def last_of_thread(self) -> Step | None:
        """Returns the eager step of this thread that was dequeued last."""
        return self._queue().last if tf.executing_eagerly() else None

    def describe(self) -> tuple[int, bool]:
        """Returns the eager steps pending here, and whether one awaits."""
        queue = self._queue()
        return len(queue.pending), (
            queue.last is not None and queue.last.training
        )

    def _queue(self) -> step_queues.Queue[Step]:
        if not tf.executing_eagerly():
            return super()._queue()
        if not hasattr(self._eager, "queue"):
            self._eager.queue = step_queues.Queue()
        return self._eager.queue
