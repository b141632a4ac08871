"""Records of applied closures, and steps in flight.

If the worker that runs a closure dies, the coordinator schedules the closure
again. Each closure has a token (`closure_trace`). Servers record the tokens of
applied closures, so that a server does not apply a closure twice.
`AppliedClosures` reads these records and starts epochs.

`StepsInFlight` stores the steps of one embedding between `enqueue` and
`apply_gradients`. The state of a step consists of tensors in the graph of the
traced function. A worker does not store state between closures, so the closure
that enqueues a batch must also dequeue the batch.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding import steps

# Size and indices of the variable `applied`. See
# cc/core/servers/applied_closures.h.
NUM_APPLIED = 2054
_EPOCH, _BASE, _WINDOW = 0, 1, 6
# Index in the variable `fetched_steps`. See
# cc/core/served_keys/fetched_steps.h.
_FETCHED_EPOCH = 2


class AppliedClosures:
    """The records of applied closures on all servers of one embedding."""

    def __init__(
        self, applied: Sequence[Any], fetched_steps: Sequence[Any] = ()
    ):
        """Stores the variables to which the ops of a step write.

        Args:
          applied: Variable `applied` of each server.
          fetched_steps: Variable `fetched_steps` of each server. Empty if no
            table has an open vocabulary.
        """
        self._applied = applied
        self._fetched_steps = fetched_steps

    def move_to_epoch(self, epoch: int, next_epoch: int) -> list[set[int]]:
        """Changes the epoch of the records from `epoch` to `next_epoch`.

        After this call, servers raise an error for closures of `epoch` that
        still run on a worker. The coordinator can schedule these closures again
        in `next_epoch` with the same numbers. Servers that have already applied
        a closure do not apply the closure again.

        The program must call this method before the first closure of
        `next_epoch`. If the program also called the method for the previous
        failed epoch, closures of epochs before `epoch` can no longer change a
        server.

        Args:
          epoch: Epoch of the closures. The closure numbers must be below 1,024.
          next_epoch: Later epoch, which no closure has used yet.

        Returns:
          For each server, the numbers of the closures that the server has
          applied.
        """
        for variable in self._fetched_steps:
            if variable.numpy()[_FETCHED_EPOCH] == epoch:
                _write(variable, [_FETCHED_EPOCH], [next_epoch])
        return [
            _move(variable, epoch, next_epoch) for variable in self._applied
        ]


def _move(variable: Any, epoch: int, next_epoch: int) -> set[int]:
    before = variable.numpy()
    # The write is a single operation, and uses the same lock as an update.
    # After the write, the server raises an error for closures of `epoch`.
    _write(variable, [_EPOCH], [next_epoch])
    state = variable.numpy()
    # The server may have applied the first closure of `epoch` between the read
    # and the write. The two windows then differ, because the attempt in the
    # token of a closure is unique.
    if before[_EPOCH] != epoch and np.array_equal(
        before[_WINDOW:], state[_WINDOW:]
    ):
        # The window belongs to an older epoch with other closure numbers, so it
        # is cleared.
        places = [_BASE, *range(_WINDOW, NUM_APPLIED)]
        _write(variable, places, [0] * len(places))
        return set()
    numbers = state[_WINDOW::2]
    return {int(number) - 1 for number in numbers[numbers > 0]}


def _write(variable: Any, places: Sequence[int], values: Sequence[int]):
    variable.scatter_nd_update(
        [[place] for place in places], np.asarray(values, np.int64)
    )


@dataclasses.dataclass
class Step:
    """A step in flight.

    Attributes:
      begun: Plan that `StepOps.begin` returned.
      plan: Plan that `StepOps.placed` returned. Before `dequeue`, `plan` equals
        `begun`.
      requests: Request to each server.
      training: Whether the step can receive gradients.
      fetched: Replies of the servers, or None before `dequeue`.
    """

    begun: Any
    plan: Any
    requests: Any
    training: bool
    fetched: Any = None


class StepsInFlight(steps.StepQueues[Step]):
    """The queues of steps, one for each traced function."""

    def __init__(self):
        """Creates empty queues."""
        super().__init__(
            "Over parameter servers, all calls of a step must be made in one "
            "tf.function, or eagerly in one thread."
        )
        # Closures that are not tf.functions run in threads of the coordinator.
        # Each thread has a separate queue.
        self._eager = threading.local()

    def dequeue(self) -> Step:
        """Returns the oldest step in the queue.

        Raises:
          RuntimeError: If the queue is empty, or if the previous step still
            waits for its gradients.
        """
        queue = self._queue()
        if (
            queue.pending
            and tf.executing_eagerly()
            and (queue.last is not None and queue.last.training)
        ):
            raise RuntimeError(
                "`dequeue`: the previous step still awaits its gradients; "
                "call `apply_gradients` first, or enqueue with training=False "
                "if the step has no gradients."
            )
        return super().dequeue()

    def take_dequeued(self) -> Step:
        """Removes the last dequeued step from the queue, and returns it.

        Raises:
          RuntimeError: If no step is dequeued, or if the last dequeued step is
            forward-only.
        """
        last = self._queue().last
        if last is not None and not last.training:
            raise RuntimeError(
                "`apply_gradients` must not follow `enqueue(training=False)`."
            )
        return super().take_dequeued()

    def reset(self):
        """Discards the steps of the traced function or of this thread."""
        queue = self._queue()
        queue.pending.clear()
        queue.last = None

    def last_of_thread(self) -> Step | None:
        """Returns this thread's last dequeued eager step, or None."""
        return self._queue().last if tf.executing_eagerly() else None

    def describe(self) -> tuple[int, bool]:
        """Returns the number of steps, and whether a step awaits gradients."""
        queue = self._queue()
        return len(queue.pending), (
            queue.last is not None and queue.last.training
        )

    def _queue(self) -> steps.Queue[Step]:
        if not tf.executing_eagerly():
            return super()._queue()
        if not hasattr(self._eager, "queue"):
            self._eager.queue = steps.Queue()
        return self._eager.queue
