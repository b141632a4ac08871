"""Order of reads and updates of servers in a function that runs several steps.

By default, TensorFlow runs the read of a step after the updates of all earlier
steps of a traced function, because these ops use the same resource. `StepOrder`
changes two things:

* With `prefetch_steps`, a read only follows the updates of all but the last
  `prefetch_steps` steps. `StepOrder` removes TensorFlow's order for reads, and
  adds control dependencies. A read that follows the update of its own step in
  the program follows all updates.
* An update is joined with the next read that follows it, so that a server
  receives one message for both. The ops of an update are therefore created
  when the ops of this read are created, or when `end_steps` is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.servers import closure_trace
from tf_layoutmap.embedding.servers.closure_trace import Calls, ClosureStep


@dataclasses.dataclass(frozen=True)
class Update:
    """The inputs of `FoldGradients`, except `next`."""

    plan: tf.Tensor
    fetched: Sequence[tf.Tensor]
    gradients: Sequence[tf.Tensor]
    hyperparameters: Sequence[tf.Tensor]
    token: tf.Tensor


class StepOrder:
    """The order of the reads and updates of an embedding."""

    def __init__(self, apply: Callable[[Update], Sequence[Any]]):
        """Creates the object.

        Args:
          apply: Function that creates the ops of an update, and returns one op
            for each server.
        """
        self._apply = apply

    def add(self, update: Update, *, may_join: bool) -> None:
        """Creates the ops of an update now or later.

        Args:
          update: The update.
          may_join: Whether the update can be joined with a read.
        """
        self._check_functions_around()
        step = _step()
        if step is None:
            self._create(update)
            return
        calls = self._calls_of(step)
        calls.last_step = step
        if may_join and step.joins_calls:
            # The identity op has the control dependencies of the caller. Ops
            # that are created later do not have them.
            token = tf.identity(update.token)
            calls.pending.append(dataclasses.replace(update, token=token))
            return
        self.flush(calls)
        self._create(update)

    def take_for_read(self) -> Update | None:
        """Returns the update that is joined with the next read, or None."""
        self._check_functions_around()
        step = _step()
        if step is None:
            return None
        calls = self._calls_of(step)
        last = _num_prefetched(step, calls) + 1
        while len(calls.pending) > last:
            self._create(calls.pending.pop(0))
        return calls.pending.pop(0) if len(calls.pending) == last else None

    def record(self, ops: Sequence[Any]) -> None:
        """Records the ops of an update, one for each server."""
        step = _step()
        if step is not None:
            self._calls_of(step).updates.append(ops)

    def flush(self, calls: Calls) -> None:
        """Creates the ops of all updates whose ops were not created yet."""
        while calls.pending:
            self._create(calls.pending.pop(0))

    @contextlib.contextmanager
    def reading(self, index: int, handle: tf.Tensor) -> Iterator[tf.Tensor]:
        """Context in which an op that only reads rows of a server is created.

        Args:
          index: Index of the server, whose device is the current device.
          handle: Handle of the resource of the server.

        Yields:
          The handle for the op.
        """
        step = _step()
        calls = Calls() if step is None else self._calls_of(step)
        num_steps = 0 if step is None else _num_prefetched(step, calls)
        if not num_steps:
            yield handle
            return
        if index not in calls.handles:
            # TensorFlow's automatic control dependencies treat the output of
            # IdentityN as a different resource, but not the output of Identity.
            # The op is created before the first update, so that it does not
            # follow an update.
            (calls.handles[index],) = tf.identity_n([handle])
        # The updates that the read may miss include the pending updates.
        num_missed = num_steps - len(calls.pending)
        before = calls.updates[: len(calls.updates) - num_missed][-1:]
        with tf.control_dependencies([ops[index] for ops in before]):
            yield calls.handles[index]

    def _calls_of(self, step: ClosureStep) -> Calls:
        """Returns the calls in the current graph, whose step is `step`."""
        graph = tf.compat.v1.get_default_graph()
        return step.trace.calls.setdefault(graph, {}).setdefault(self, Calls())

    def _create(self, update: Update) -> None:
        with tf.device(update.plan.device):
            self.record(self._apply(update))

    def _check_functions_around(self) -> None:
        """Reports a call in a branch or a loop after a pending update."""
        for graph in list(tf_private.graphs_around())[1:]:
            step = closure_trace.step_of_graph(graph)
            if step is None:
                continue
            calls = step.trace.calls.get(graph, {}).get(self)
            if calls is not None and calls.pending:
                step.trace.stop_joining()


@tf.autograph.experimental.do_not_convert
def end_steps() -> None:
    """Creates the ops of all pending updates in the current graph."""
    step = _step()
    if step is not None:
        graph = tf.compat.v1.get_default_graph()
        for order, calls in step.trace.calls.get(graph, {}).items():
            order.flush(calls)


def _step() -> ClosureStep | None:
    """Returns the step of the current graph, or None in its functions."""
    return closure_trace.step_of_graph(tf.compat.v1.get_default_graph())


def _num_prefetched(step: ClosureStep, calls: Calls) -> int:
    """Returns the number of updates that the next read may miss."""
    return 0 if calls.last_step is step else step.trace.prefetch_steps
