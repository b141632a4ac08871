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
from tf_layoutmap.embedding.servers import closures


@dataclasses.dataclass(frozen=True)
class Update:
    """The inputs of `FoldGradients`, except `next`."""

    plan: tf.Tensor
    fetched: Sequence[tf.Tensor]
    gradients: Sequence[tf.Tensor]
    hyperparameters: Sequence[tf.Tensor]
    token: tf.Tensor


@dataclasses.dataclass
class _Calls:
    """The reads and updates of an embedding in the graph of a function.

    Attributes:
      updates: For each update whose ops were created, one op for each server.
      pending: Later updates, whose ops were not created yet.
      handles: Handles for the reads of servers, by index.
      last_step: Step that contains the last update, or None.
    """

    updates: list[Sequence[Any]] = dataclasses.field(default_factory=list)
    pending: list[Update] = dataclasses.field(default_factory=list)
    handles: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    last_step: closures.Closure | None = None

    def num_prefetched(self) -> int:
        """Returns the number of updates that the next read may miss."""
        num_steps = closures.prefetch_steps()
        if num_steps and self.last_step is closures.enclosing_closure():
            return 0
        return num_steps


# Attribute of a graph that maps each `StepOrder` to its `_Calls`. A dictionary
# with weak references to graphs would keep all graphs, because ops refer to
# their graph.
_ATTRIBUTE = "_tf_layoutmap_calls"


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
        self._calls().last_step = closures.enclosing_closure()
        if may_join and closures.joins_calls():
            # The identity op has the control dependencies of the caller. Ops
            # that are created later do not have them.
            token = tf.identity(update.token)
            self._calls().pending.append(
                dataclasses.replace(update, token=token)
            )
            return
        self.flush()
        self._create(update)

    def take_for_read(self) -> Update | None:
        """Returns the update that is joined with the next read, or None."""
        self._check_functions_around()
        calls = self._calls()
        pending = calls.pending
        last = calls.num_prefetched() + 1
        while len(pending) > last:
            self._create(pending.pop(0))
        return pending.pop(0) if len(pending) == last else None

    def record(self, ops: Sequence[Any]) -> None:
        """Records the ops of an update, one for each server."""
        self._calls().updates.append(ops)

    def flush(self) -> None:
        """Creates the ops of all updates whose ops were not created yet."""
        pending = self._calls().pending
        while pending:
            self._create(pending.pop(0))

    @contextlib.contextmanager
    def reading(self, index: int, handle: tf.Tensor) -> Iterator[tf.Tensor]:
        """Context in which an op that only reads rows of a server is created.

        Args:
          index: Index of the server, whose device is the current device.
          handle: Handle of the resource of the server.

        Yields:
          The handle for the op.
        """
        calls = self._calls()
        num_steps = calls.num_prefetched()
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
        with tf.control_dependencies([one[index] for one in before]):
            yield calls.handles[index]

    def _calls(self) -> _Calls:
        """Returns the calls in the current graph."""
        if tf.executing_eagerly():
            return _Calls()
        graph = tf.compat.v1.get_default_graph()
        return _calls_of_graph(graph).setdefault(self, _Calls())

    def _create(self, update: Update) -> None:
        with tf.device(update.plan.device):
            self.record(self._apply(update))

    def _check_functions_around(self) -> None:
        """Reports a call in a branch or a loop after a pending update."""
        for graph in list(tf_private.graphs_around())[1:]:
            calls = _calls_of_graph(graph).get(self)
            if calls is not None and calls.pending:
                closures.report_join_conflict(graph)


@tf.autograph.experimental.do_not_convert
def end_steps() -> None:
    """Creates the ops of all pending updates in the current graph."""
    for order in _calls_of_graph(tf.compat.v1.get_default_graph()):
        order.flush()


def _calls_of_graph(graph: Any) -> dict[StepOrder, _Calls]:
    if not hasattr(graph, _ATTRIBUTE):
        setattr(graph, _ATTRIBUTE, {})
    return getattr(graph, _ATTRIBUTE)
