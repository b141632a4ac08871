"""Tokens of closures, records of applied closures, and steps in flight.

If the worker that runs a closure dies, the coordinator schedules the closure
again. Each closure has a token. Servers record the tokens of applied closures,
so that a server does not apply a closure twice. `AppliedClosures` reads these
records.

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

from tf_layoutmap._core import tf_private
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
    return {int(one) - 1 for one in numbers[numbers > 0]}


def _write(variable: Any, places: Sequence[int], values: Sequence[int]):
    variable.scatter_nd_update(
        [[one] for one in places], np.asarray(values, np.int64)
    )


# Token (epoch, number, attempt) of a step outside of closures.
_NONE = (0, -1, 0)


@dataclasses.dataclass
class Closure:
    """The state of a step of a closure while it is traced.

    Attributes:
      token: int64 `[3]` tensor with the epoch, the number and the attempt. The
        attempt is unique for each run of the closure.
      applied: For each call of `apply_gradients` so far, the records of the
        embedding's servers.
      num_enqueued: Number of calls of `enqueue` with `training=True` so far.
      prefetch_steps: Number of earlier steps whose updates the rows of a step
        may miss.
      joins_calls: Whether an update can be joined with a later read.
      has_join_conflict: Whether an update that should be joined with a later
        read is followed by a call in another function, such as a branch. The
        order of the calls of this trace is wrong.
      bundles_updates: Whether the updates of several embeddings are bundled;
        see `bundles`.
      has_bundle_conflict: Whether an op uses variables of a bundled update
        after the update. The order of the calls of this trace is wrong.
    """

    token: tf.Tensor
    prefetch_steps: int = 0
    joins_calls: bool = False
    has_join_conflict: bool = False
    bundles_updates: bool = False
    has_bundle_conflict: bool = False
    applied: list[AppliedClosures] = dataclasses.field(default_factory=list)
    num_enqueued: int = 0


# Attribute of the graph of the closure's function. The graphs of replica
# threads and inner functions are inside this graph.
_ATTRIBUTE = "_tf_layoutmap_closure"


def begin(
    numbers: tf.Tensor,
    prefetch_steps: int = 0,
    *,
    joins_calls: bool = False,
    bundles_updates: bool = False,
) -> Closure:
    """Begins a step of a closure in the function that is being traced.

    If the function contains several steps, the next call ends the step.

    Args:
      numbers: int64 `[2]` tensor with the epoch (at least 1) and the number of
        the step.
      prefetch_steps: As for `tlm.ps.Run`.
      joins_calls: As for `Closure`. If True, `prefetching.end_steps` must be
        called after the last step.
      bundles_updates: As for `Closure`. Must be False with `prefetch_steps`.
    """
    # Each run of the function reads the time once, so the attempt is unique.
    attempt = tf.bitcast(tf.timestamp(), tf.int64)
    closure = Closure(
        tf.concat(
            [tf.cast(numbers, tf.int64), tf.reshape(attempt, [1])], axis=0
        ),
        prefetch_steps,
        joins_calls,
        bundles_updates=bundles_updates,
    )
    setattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, closure)
    return closure


def token_to_apply(applied: AppliedClosures) -> tf.Tensor:
    """Returns the token with which an update is applied.

    The token identifies the enclosing closure. Outside of closures, the number
    in the token is -1.

    Args:
      applied: Records of the embedding's servers.
    """
    closure = enclosing_closure()
    if closure is None:
        return tf.constant(_NONE, tf.int64)
    closure.applied.append(applied)
    return closure.token


def count_enqueued() -> None:
    """Counts a training batch that the enclosing closure enqueues."""
    closure = enclosing_closure()
    if closure is not None:
        closure.num_enqueued += 1


def token_to_fetch(call: int = 0) -> tf.Tensor:
    """Returns the token with which keys are looked up.

    Args:
      call: Index of the lookup among the lookups of the step.

    Returns:
      int64 `[4]`: the token of the enclosing closure, and `call`.
    """
    closure = enclosing_closure()
    if closure is None:
        return tf.constant((*_NONE, call), tf.int64)
    return tf.concat([closure.token, [call]], axis=0)


def prefetch_steps() -> int:
    """Returns the `prefetch_steps` of the function that is being traced.

    The result is 0 in functions inside the closure, such as branches.
    """
    closure = _closure_of(tf.compat.v1.get_default_graph())
    return 0 if closure is None else closure.prefetch_steps


def joins_calls() -> bool:
    """Returns whether an update can be joined with a later read.

    The result is False in functions inside the closure, such as branches.
    """
    closure = _closure_of(tf.compat.v1.get_default_graph())
    return closure is not None and closure.joins_calls


def report_join_conflict(graph: Any) -> None:
    """Sets `has_join_conflict` of the current step in a closure's graph."""
    closure = _closure_of(graph)
    if closure is not None:
        closure.has_join_conflict = True


def enclosing_closure() -> Closure | None:
    """Returns the step of a closure that is being traced, or None."""
    for graph in tf_private.graphs_around():
        closure = _closure_of(graph)
        if closure is not None:
            return closure
    return None


def _closure_of(graph: Any) -> Closure | None:
    return getattr(graph, _ATTRIBUTE, None)


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
