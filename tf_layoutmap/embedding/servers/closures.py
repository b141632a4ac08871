"""Tokens of closures, records of applied closures, and steps in flight.

If the worker of a closure has died, the coordinator schedules the closure
again. The token of the closure identifies it, so that a server does not apply
it twice. `AppliedClosures` reads the records of applied closures.

`StepsInFlight` holds the steps of one embedding between `enqueue` and
`apply_gradients`. The state of a step consists of tensors of the function that
is traced. A worker keeps no state, so a batch must be dequeued in the closure
that has enqueued it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import steps

# Size and indices of the variable `applied`; see
# cc/core/servers/applied_closures.h.
NUM_APPLIED = 2054
_EPOCH, _BASE, _WINDOW = 0, 1, 6
# Index in the variable `fetched_steps`; see
# cc/core/served_keys/fetched_steps.h.
_FETCHED_EPOCH = 2


class AppliedClosures:
    """The records of applied closures of one embedding, one per server."""

    def __init__(
        self, applied: Sequence[Any], fetched_steps: Sequence[Any] = ()
    ):
        """Initializes from the variables that the ops of a step write.

        Args:
          applied: Variable `applied` of each server.
          fetched_steps: Variable `fetched_steps` of each server; empty without
            open vocabularies.
        """
        self._applied = applied
        self._fetched_steps = fetched_steps

    def move_to_epoch(self, epoch: int, next_epoch: int) -> list[set[int]]:
        """Moves the records of applied closures from one epoch to the next.

        Afterwards, servers raise an error for closures of `epoch` that still
        run on a worker. If a closure is scheduled again in `next_epoch` with
        the same number, only the servers that have not applied it apply it.

        The call must precede the first closure of `next_epoch`. If the records
        of the previous failed epoch were also moved, closures of epochs before
        `epoch` can no longer change a server.

        Args:
          epoch: The epoch of the closures; their numbers are below 1,024.
          next_epoch: A later epoch that no closure has used.

        Returns:
          For each server, the numbers of the closures that it has applied.
        """
        for variable in self._fetched_steps:
            if variable.numpy()[_FETCHED_EPOCH] == epoch:
                _write(variable, [_FETCHED_EPOCH], [next_epoch])
        return [
            _move(variable, epoch, next_epoch) for variable in self._applied
        ]


def _move(variable: Any, epoch: int, next_epoch: int) -> set[int]:
    before = variable.numpy()
    # The write is one operation and uses the same lock as an update. From now
    # on, the server raises an error for closures of `epoch`.
    _write(variable, [_EPOCH], [next_epoch])
    state = variable.numpy()
    # The first closure of `epoch` may have been applied after the read and
    # before the write. In this case the two windows differ, because the attempt
    # of a closure is unique.
    if before[_EPOCH] != epoch and np.array_equal(
        before[_WINDOW:], state[_WINDOW:]
    ):
        # The window belongs to an older epoch with other closure numbers.
        places = [_BASE, *range(_WINDOW, NUM_APPLIED)]
        _write(variable, places, [0] * len(places))
        return set()
    numbers = state[_WINDOW::2]
    return {int(one) - 1 for one in numbers[numbers > 0]}


def _write(variable: Any, places: Sequence[int], values: Sequence[int]):
    variable.scatter_nd_update(
        [[one] for one in places], np.asarray(values, np.int64)
    )


# Token (epoch, number, attempt) of a step that is not in a closure.
_NONE = (0, -1, 0)


@dataclasses.dataclass
class Closure:
    """The state of a closure while it is traced.

    Attributes:
      token: int64 `[3]` tensor of epoch, number, and an attempt, which is
        unique for each run of the closure.
      applied: Records of the embedding's servers, one entry for each call of
        `apply_gradients` so far.
      num_enqueued: Number of `enqueue` calls for training so far.
    """

    token: tf.Tensor
    applied: list[AppliedClosures] = dataclasses.field(default_factory=list)
    num_enqueued: int = 0


# Attribute of the graph of the closure's function. Replica threads and inner
# functions have graphs inside this graph.
_ATTRIBUTE = "_tf_layoutmap_closure"


def begin(numbers: tf.Tensor) -> Closure:
    """Marks the function that is being traced as a closure.

    Args:
      numbers: int64 `[2]` tensor of epoch, at least 1, and closure number.
    """
    # Each run of the function reads the time once.
    attempt = tf.bitcast(tf.timestamp(), tf.int64)
    closure = Closure(
        tf.concat(
            [tf.cast(numbers, tf.int64), tf.reshape(attempt, [1])], axis=0
        )
    )
    setattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, closure)
    return closure


def token_to_apply(applied: AppliedClosures) -> tf.Tensor:
    """Returns the token of the enclosing closure for an update.

    The number in the token is -1 if there is no closure.

    Args:
      applied: Records of the embedding's servers.
    """
    closure = _enclosing_closure()
    if closure is None:
        return tf.constant(_NONE, tf.int64)
    closure.applied.append(applied)
    return closure.token


def count_enqueued() -> None:
    """Counts a batch that the enclosing closure enqueues for training."""
    closure = _enclosing_closure()
    if closure is not None:
        closure.num_enqueued += 1


def token_to_fetch() -> tf.Tensor:
    """Returns the token of the enclosing closure for a lookup of keys."""
    closure = _enclosing_closure()
    return tf.constant(_NONE, tf.int64) if closure is None else closure.token


def _enclosing_closure() -> Closure | None:
    for graph in tf_private.graphs_around():
        closure = getattr(graph, _ATTRIBUTE, None)
        if closure is not None:
            return closure
    return None


@dataclasses.dataclass
class Step:
    """A step in flight.

    Attributes:
      begun: Plan that `StepOps.begin` returned.
      plan: Equal to `begun` before `dequeue`. Afterwards, the plan that
        `StepOps.placed` returned.
      requests: Request to each server.
      training: Whether gradients may follow.
      fetched: Replies of the servers; None before `dequeue`.
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
        self._eager = threading.local()

    def dequeue(self) -> Step:
        """Returns the oldest step.

        Raises:
          RuntimeError: If there is no step, or if the previous step still
            awaits its gradients.
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
        """Removes and returns the last dequeued step, to apply its gradients.

        Raises:
          RuntimeError: If there is no such step, or it is forward-only.
        """
        last = self._queue().last
        if last is not None and not last.training:
            raise RuntimeError(
                "`apply_gradients` must not follow `enqueue(training=False)`."
            )
        return super().take_dequeued()

    def reset(self):
        """Discards the steps of this thread, or of the traced function."""
        queue = self._queue()
        queue.pending.clear()
        queue.last = None

    def last_of_thread(self) -> Step | None:
        """Returns the last dequeued eager step of this thread."""
        return self._queue().last if tf.executing_eagerly() else None

    def describe(self) -> tuple[int, bool]:
        """Returns the number of pending steps, and whether one was dequeued."""
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
