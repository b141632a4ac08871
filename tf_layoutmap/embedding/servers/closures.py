"""The token of the closure that is being traced.

A coordinator runs a closure again whose worker has died. Its token tells the
servers that it is the same one, and they apply what they have not applied.
"""

# DOC-MERGE: The steps of one embedding between `enqueue` and `apply_gradients`.
#
# Their state are tensors of the function being traced: a worker keeps nothing,
# and what is enqueued in one closure is dequeued in it.
#
# DOC-MERGE: Which closures the servers of an embedding have applied.
from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import steps

# The variable `applied`: cc/core/servers/applied_closures.h.
NUM_APPLIED = 2054
_EPOCH, _BASE, _WINDOW = 0, 1, 6
# The variable `fetched_steps`: cc/core/served_keys/fetched_steps.h.
_FETCHED_EPOCH = 2


class AppliedClosures:
    """The records of one embedding's servers, one for each server."""

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
        """Moves what was applied in one epoch to the next one.

        Afterwards servers raise an error for closures of `epoch` that are
        still under way somewhere. A closure that is scheduled again, in
        `next_epoch` and under its number, is applied by the servers that have
        not applied it.

        No closure of `next_epoch` may have been scheduled. If the last round
        that failed was moved, too, no closure of an epoch before `epoch` can
        change a server any more.

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
    # One operation under the lock that an update takes: from here on the
    # server raises an error for closures of `epoch`.
    _write(variable, [_EPOCH], [next_epoch])
    state = variable.numpy()
    # The first closure of `epoch` may have been applied between the read and
    # the write. The attempt of a closure is unique, so the window differs.
    if before[_EPOCH] != epoch and np.array_equal(
        before[_WINDOW:], state[_WINDOW:]
    ):
        # The window is that of an older epoch, whose numbers were others.
        places = [_BASE, *range(_WINDOW, NUM_APPLIED)]
        _write(variable, places, [0] * len(places))
        return set()
    numbers = state[_WINDOW::2]
    return {int(one) - 1 for one in numbers[numbers > 0]}


def _write(variable: Any, places: Sequence[int], values: Sequence[int]):
    variable.scatter_nd_update(
        [[one] for one in places], np.asarray(values, np.int64)
    )


# Of a step without a closure: epoch, number, attempt.
_NONE = (0, -1, 0)


@dataclasses.dataclass
class Closure:
    """What is known of a closure while it is traced.

    Attributes:
      token: int64 `[3]`: epoch, number, and an attempt that no other run of
        the closure has.
      applied: What the servers of each embedding record that the closure has
        applied gradients of; one for each call of `apply_gradients` so far.
      num_enqueued: Calls of `enqueue` for training so far.
    """

    token: tf.Tensor
    applied: list[AppliedClosures] = dataclasses.field(default_factory=list)
    num_enqueued: int = 0


# Of the graph of the function that is the closure. Threads of replicas and
# functions inside of it are in graphs below.
_ATTRIBUTE = "_tf_layoutmap_closure"


def begin(numbers: tf.Tensor) -> Closure:
    """Makes the function being traced a closure.

    Args:
      numbers: int64 `[2]`: epoch, from 1 on, and number of the closure.
    """
    # Each run of the function asks for the time once.
    attempt = tf.bitcast(tf.timestamp(), tf.int64)
    closure = Closure(
        tf.concat(
            [tf.cast(numbers, tf.int64), tf.reshape(attempt, [1])], axis=0
        )
    )
    setattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, closure)
    return closure


def token_to_apply(applied: AppliedClosures) -> tf.Tensor:
    """Returns the token of the closure around, of number -1 if there is none.

    Args:
      applied: What the servers of the embedding record.
    """
    closure = _closure_around()
    if closure is None:
        return tf.constant(_NONE, tf.int64)
    closure.applied.append(applied)
    return closure.token


def note_enqueued() -> None:
    """Counts a batch that the closure around enqueues for training."""
    closure = _closure_around()
    if closure is not None:
        closure.num_enqueued += 1


def token_to_fetch() -> tf.Tensor:
    """Returns the token that a closure looks keys up with, as above."""
    closure = _closure_around()
    return tf.constant(_NONE, tf.int64) if closure is None else closure.token


def _closure_around() -> Closure | None:
    for graph in tf_private.graphs_around():
        closure = getattr(graph, _ATTRIBUTE, None)
        if closure is not None:
            return closure
    return None


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


class StepsInFlight(steps.StepQueues[Step]):
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

    def _queue(self) -> steps.Queue[Step]:
        if not tf.executing_eagerly():
            return super()._queue()
        if not hasattr(self._eager, "queue"):
            self._eager.queue = steps.Queue()
        return self._eager.queue
