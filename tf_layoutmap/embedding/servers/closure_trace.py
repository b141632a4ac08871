"""The trace of a closure that runs steps over parameter servers.

A worker runs a closure as one function. While the function is traced, its ops
find the current step (`enclosing_step`), whose token identifies the step on the
servers. `ClosureTrace` holds everything that the embeddings of the closure
share during the trace.

A `ClosureTrace` can create the ops of an update later than the call that
applies the gradients, so that a server receives fewer messages:

* An update is joined with the next read of the same embedding
  (`prefetching.StepOrder`).
* The updates of several embeddings are bundled (`bundles.bundled`).
* The lookups and updates of several layers are joined (`joint_lookups`).

All of them change the order of ops. If this order contradicts the order of the
program, for example because a step also reads a table itself, the closure is
traced again without them (`ClosureTrace.is_out_of_order`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.servers.closures import AppliedClosures

# Token (epoch, number, attempt) of a step outside of closures.
_NONE = (0, -1, 0)

# Attribute of a graph that contains its current `ClosureStep`. The graphs of
# replica threads and inner functions are inside of this graph.
_ATTRIBUTE = "_tf_layoutmap_step"


@dataclasses.dataclass
class Calls:
    """The reads and updates of an embedding in one graph of a closure.

    Attributes:
      updates: For each update whose ops were created, one op for each server.
      pending: Later updates, whose ops were not created yet.
      handles: Handles for the reads of servers, by index.
      last_step: Step that contains the last update, or None.
    """

    updates: list[Sequence[Any]] = dataclasses.field(default_factory=list)
    pending: list[Any] = dataclasses.field(default_factory=list)
    handles: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    last_step: ClosureStep | None = None


@dataclasses.dataclass
class Bundle:
    """The updates in a graph whose ops were not created yet.

    Attributes:
      updates: The updates whose requests were created.
      num_ops: Number of ops in the graph before the first update.
      lookups: The `joint_lookups.JointLookups` of the graph, or None.
    """

    updates: list[Any] = dataclasses.field(default_factory=list)
    num_ops: int = 0
    lookups: Any = None

    @property
    def has_updates(self) -> bool:
        """Whether there are updates whose ops were not created yet."""
        return bool(self.updates) or (
            self.lookups is not None and self.lookups.has_updates
        )


class ClosureTrace:
    """The state of a closure while it is traced.

    Attributes:
      num_steps: Maximum number of steps of the closure.
      prefetch_steps: Number of earlier steps whose updates the rows of a step
        may miss.
      joins_calls: Whether an update can be joined with a later read.
      bundles_updates: Whether the updates of several embeddings are bundled.
      joins_layers: Whether the lookups and updates of several layers are
        joined, if updates are bundled. Servers record the updates of a group of
        layers separately. All traces of a closure therefore have the same
        value, because another trace may repeat a step.
      had_unknown_rule: Whether an earlier trace had to create the lookup of a
        layer before the rule of its table was known.
      is_out_of_order: Whether the order of the ops contradicts the order of the
        program. `joins_calls` and `bundles_updates` then have the values with
        which the closure must be traced again.
      applied: The records of the servers of each embedding that the closure
        trains, without duplicates.
      num_enqueued: Number of calls of `enqueue` with `training=True`.
      calls: For each graph, maps the `StepOrder` of an embedding to its calls.
      bundles: The bundle of each graph that is inside of `bundles.bundled`.
      read_values: The `variable_messages.ReadValues` of each graph.
    """

    def __init__(
        self,
        prefetch_steps: int = 0,
        *,
        num_steps: int = 1,
        joins_calls: bool = False,
        bundles_updates: bool = False,
        joins_layers: bool = True,
        had_unknown_rule: bool = False,
    ):
        """Creates the state of a new trace.

        Args:
          prefetch_steps: As for `tlm.ps.Run`.
          num_steps: Maximum number of steps of the closure.
          joins_calls: If true, `prefetching.end_steps` must be called after the
            last step.
          bundles_updates: Must be false with `prefetch_steps`, because a read
            that misses updates needs one op per update.
          joins_layers: See the attribute.
          had_unknown_rule: See the attribute.
        """
        self.num_steps = num_steps
        self.prefetch_steps = prefetch_steps
        self.joins_calls = joins_calls
        self.bundles_updates = bundles_updates
        self.joins_layers = joins_layers
        self.had_unknown_rule = had_unknown_rule
        self.is_out_of_order = False
        self.applied: dict[AppliedClosures, None] = {}
        self.num_enqueued = 0
        self.calls: dict[Any, dict[Any, Calls]] = {}
        self.bundles: dict[Any, Bundle] = {}
        self.read_values: dict[Any, Any] = {}

    def renewed(self) -> ClosureTrace:
        """Returns the state of another trace with the same settings."""
        return ClosureTrace(
            self.prefetch_steps,
            num_steps=self.num_steps,
            joins_calls=self.joins_calls,
            bundles_updates=self.bundles_updates,
            joins_layers=self.joins_layers,
            had_unknown_rule=self.had_unknown_rule,
        )

    @tf.autograph.experimental.do_not_convert
    def begin(
        self, numbers: tf.Tensor, *, may_join: bool = True
    ) -> ClosureStep:
        """Begins a step in the graph that is being traced.

        If the graph contains several steps, the next call ends the step.

        Args:
          numbers: int64 `[2]` tensor with the epoch (at least 1) and the number
            of the step.
          may_join: Whether updates of this step can be joined with a later
            read, if `joins_calls` is true.
        """
        # Each run of the function reads the time once, so the attempt is
        # unique.
        attempt = tf.bitcast(tf.timestamp(), tf.int64)
        step = ClosureStep(
            self,
            tf.concat(
                [tf.cast(numbers, tf.int64), tf.reshape(attempt, [1])], axis=0
            ),
            self.joins_calls and may_join,
        )
        setattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, step)
        return step

    def stop_joining(self) -> None:
        """Requires another trace, in which no update is joined with a read."""
        self.joins_calls, self.is_out_of_order = False, True

    def stop_bundling(self) -> None:
        """Requires another trace, in which updates are not bundled."""
        self.bundles_updates, self.is_out_of_order = False, True

    def miss_rule(self) -> None:
        """Requires another trace, because the rule of a layer is not known.

        The first trace may build the optimizer that determines the rule. If the
        rule is not known in the next trace, layers are not joined.
        """
        if self.had_unknown_rule:
            self.joins_layers = False
        self.had_unknown_rule, self.is_out_of_order = True, True


@dataclasses.dataclass(frozen=True, eq=False)
class ClosureStep:
    """A step of a closure.

    Attributes:
      trace: The trace of the closure.
      token: int64 `[3]` tensor with the epoch, the number and the attempt. The
        attempt is unique for each run of the closure.
      joins_calls: Whether an update of the step can be joined with a later
        read.
    """

    trace: ClosureTrace
    token: tf.Tensor
    joins_calls: bool


def enclosing_step() -> ClosureStep | None:
    """Returns the step of a closure that is being traced, or None."""
    steps = map(step_of_graph, tf_private.graphs_around())
    return next((step for step in steps if step is not None), None)


def step_of_graph(graph: Any) -> ClosureStep | None:
    """Returns the current step of a graph, or None.

    The result is None for functions inside of the step, such as branches.
    """
    return getattr(graph, _ATTRIBUTE, None)


def count_enqueued() -> None:
    """Counts a training batch that the enclosing closure enqueues."""
    step = enclosing_step()
    if step is not None:
        step.trace.num_enqueued += 1


def token_to_apply(applied: AppliedClosures) -> tf.Tensor:
    """Returns the token with which an update is applied.

    The token identifies the enclosing step. Outside of closures, the number in
    the token is -1.

    Args:
      applied: Records of the embedding's servers.
    """
    step = enclosing_step()
    if step is None:
        return tf.constant(_NONE, tf.int64)
    step.trace.applied[applied] = None
    return step.token


def token_to_fetch(call: int = 0) -> tf.Tensor:
    """Returns the token with which keys are looked up.

    Args:
      call: Index of the lookup among the lookups of the step.

    Returns:
      int64 `[4]`: the token of the enclosing step, and `call`.
    """
    step = enclosing_step()
    if step is None:
        return tf.constant((*_NONE, call), tf.int64)
    return tf.concat([step.token, [call]], axis=0)
