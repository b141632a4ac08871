"""`StepClosure`, the function that a coordinator schedules for its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.servers import (
    bundles,
    prefetching,
    resource_order,
)
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

_APPLY = (
    "LayoutMap>ApplyRows",
    "LayoutMap>ApplyRowsOfBundle",
    "LayoutMap>ApplyAndFetchRows",
)

# If a CancelledError contains this text, TensorFlow's coordinator runs the
# closure again, without a limit.
_RETRIED_ERROR_TEXT = "/job:"
_MAX_CANCELLED = 3

# A traced closure contains at most `2 * _MAX_GROUP` copies of a step, and fewer
# if they would have more ops than `2 * _MAX_GROUP_OPS`.
_MAX_GROUP = 8
# Maximum number of batches that a closure reads before its first step.
_MAX_BATCHES = 16
_MAX_GROUP_OPS = 4000


class InputCancelledError(RuntimeError):
    """The iterator of a worker was cancelled, and returns no more batches."""


class ScheduledCall(NamedTuple):
    """A scheduled call of a `StepClosure`.

    Attributes:
      future: The RemoteValue whose status is the status of the call. If the
        iterator of the worker was cancelled, waiting for this value raises
        `InputCancelledError`.
      remote: List that contains the result on its worker after the call. Empty
        if the coordinator copies the result, or if the result is not kept.
    """

    future: Any
    remote: list[Any]

    def fetch(self) -> Any:
        """Waits for the call and returns its result, as numpy arrays.

        Returns None if the result was not kept.
        """
        copied = self.future.fetch()
        if not self.remote:
            return copied
        return tf.nest.map_structure(
            lambda value: value.numpy() if hasattr(value, "numpy") else value,
            self.remote[0],
        )


class OptionalBody(Protocol):
    """Body of a closure whose steps run only if there is a batch."""

    def begin(self) -> None:
        """Begins a trace, in the graph of the closure."""
        ...

    def __call__(self, iterator: Any) -> Any:
        """Runs a step with the next batch, or waits if there is none."""
        ...

    def run(self, batch: Any) -> Any:
        """Runs a step."""
        ...

    def run_or_wait(self, batch: tf.experimental.Optional) -> Any:
        """Runs a step if `batch` has a value, and waits otherwise."""
        ...


class _Batches:
    """The next batches of an iterator, which may have ended."""

    def __init__(self, iterator: Any, count: int):
        """Reads batches."""
        self._batches = [iterator.get_next_as_optional() for _ in range(count)]

    def has_all(self) -> tf.Tensor:
        """Returns whether the iterator has not ended."""
        return tf.reduce_all([batch.has_value() for batch in self._batches])

    @tf.autograph.experimental.do_not_convert
    def take(self, place: int | tf.Tensor) -> tf.experimental.Optional:
        """Returns a batch."""
        if isinstance(place, int):
            return self._batches[place]
        return tf.switch_case(
            place, [lambda batch=batch: batch for batch in self._batches]
        )


class StepClosure:
    """One or more steps, each of which uses the next batch of a worker.

    Each step has a number, also within a closure, so that a repeated closure
    repeats only the steps that servers have not applied.

    Workers call the closure as a Python function, because a coordinator cannot
    cancel a Python function. If another closure fails, this closure therefore
    finishes its steps on all servers. The iterator of this closure remains
    usable, because TensorFlow does not cancel the iterator.
    """

    def __init__(
        self,
        coordinator: Any,
        body: Callable[[Any], Any],
        max_steps: int = 1,
        *,
        prefetch_steps: int = 0,
        joins_results: bool = False,
    ):
        """Creates the closure. `trace` traces it.

        Args:
          coordinator: A ClusterCoordinator.
          body: Function that runs one step, and is called with the iterator of
            a worker. All functions that `body` calls must be traced inside this
            closure, because a function that was traced elsewhere does not use
            the number of the step. If the dataset of a worker can end, `body`
            must have the methods of `OptionalBody`.
          max_steps: Maximum number of steps of a call.
          prefetch_steps: Number of earlier steps of the same call whose updates
            the rows of a step may miss, because the rows are read while these
            steps run. Must be less than `max_steps`.
          joins_results: Whether the result of a call contains the results of
            all its steps. In this case, `body` must return a float64 vector,
            and the result of a call is the concatenation of these vectors. By
            default, the result of a call is the result of its last step. If it
            is kept, it remains on its worker until it is fetched.
        """
        self._coordinator = coordinator
        self._max_steps = max_steps
        # The coordinator copies each result that a call returns from its
        # worker, with two more messages.
        self._copies_results = joins_results
        # Maps the number of steps of a call to a concrete function. The key
        # None is for all numbers other than `max_steps`.
        self._traced: dict[int | None, Any] = {}
        # Whether the traced functions join the lookups of layers. A step can
        # only be repeated by functions with the same value.
        self.joins_layers = False
        self._registration = 0

        looks_ahead = 1 < max_steps <= _MAX_BATCHES and hasattr(
            body, "run_or_wait"
        )

        begin = getattr(body, "begin", lambda: None)

        # The first trace joins and bundles calls if possible.
        self._closure_trace = ClosureTrace(
            prefetch_steps,
            num_steps=max_steps,
            joins_calls=True,
            bundles_updates=not prefetch_steps,
        )

        def step(run, place, epoch_and_number, may_join=False):
            self._closure_trace.begin(epoch_and_number, may_join=may_join)
            with bundles.bundled():
                return run(place)

        def repeated(run, numbers, first, num_groups, size, may_join):
            # Groups run one after the other.
            results = tf.TensorArray(
                tf.float64, num_groups, infer_shape=False, element_shape=[None]
            )
            for group in tf.range(num_groups):
                tf.autograph.experimental.set_loop_options(
                    parallel_iterations=1
                )
                parts = []
                for index in range(size):
                    place = first + group * size + index
                    parts.append(step(run, place, numbers[place], may_join))
                prefetching.end_steps()
                if joins_results:
                    results = results.write(group, tf.concat(parts, axis=0))
            return results.concat() if joins_results else None

        def copies(run, numbers):
            results = [step(run, 0, numbers[0])]
            self._check_use_of_tables()
            size = _group_size(max_steps, prefetch_steps)
            num_groups = (max_steps - 2) // size
            # A loop over steps on several devices costs more calls per step
            # than separate copies of the step.
            if num_groups < 2:
                num_groups = 0
            else:
                results.append(
                    repeated(run, numbers, 1, num_groups, size, True)
                )
            for place in range(1 + num_groups * size, max_steps):
                results.append(step(run, place, numbers[place], True))
            prefetching.end_steps()
            return tf.concat(results, axis=0) if joins_results else results[-1]

        def all_steps(iterator, numbers):
            begin()
            if not looks_ahead:
                return copies(lambda place: body(iterator), numbers)
            batches = _Batches(iterator, max_steps)
            # A condition of each step would send four more messages to each
            # server.
            if batches.has_all():
                result = copies(
                    lambda place: body.run(batches.take(place).get_value()),
                    numbers,
                )
            else:
                result = repeated(
                    lambda place: body.run_or_wait(batches.take(place)),
                    numbers,
                    0,
                    max_steps,
                    1,
                    False,
                )
            return result

        def some_steps(iterator, numbers):
            begin()

            def run(place):
                del place
                return body(iterator)

            last = tf.shape(numbers)[0] - 1
            results = [
                repeated(run, numbers, 0, last, 1, False),
                step(run, last, numbers[last]),
            ]
            return tf.concat(results, axis=0) if joins_results else results[-1]

        self._all_steps, self._some_steps = all_steps, some_steps

    def trace(self, iterator: Any) -> None:
        """Traces the closure, unless an earlier trace is still valid.

        Args:
          iterator: Per-worker iterator of the coordinator. All iterators must
            have the same type.

        Raises:
          ValueError: If the step calls a function that applies gradients and
            was traced outside of the closure.
        """
        if self._registration != resource_order.last_registration():
            self._traced.clear()
        self._trace(iterator, self._max_steps)
        # The first trace may create layers.
        self._registration = resource_order.last_registration()

    def num_copies(self, max_steps: int) -> int:
        """Returns how many times a closure of several steps traces a step.

        This closure must have one step, and must be traced. The trace of a
        closure takes about the time of this number of its traces.

        Args:
          max_steps: Number of steps of the other closure, at least 2.
        """
        size = _max_group(len(_nodes_of(self._traced[1].graph)))
        num_groups = (max_steps - 2) // size
        in_loop = num_groups * size if num_groups > 1 else 0
        # A closure with `OptionalBody` has another loop.
        return max_steps - in_loop + (size if in_loop else 0) + 1

    def schedule(
        self,
        iterator: Any,
        epoch: int,
        numbers: Sequence[int],
        *,
        keeps_result: bool = True,
    ) -> ScheduledCall:
        """Schedules a call of the closure on any worker.

        The current strategy must be the strategy of the coordinator.

        Args:
          iterator: As for `trace`.
          epoch: An epoch that has not been ended by `move_to_epoch`.
          numbers: Numbers of the steps in their epoch.
          keeps_result: Whether the result is kept. Always true with
            `joins_results`. The memory of a worker may not suffice for the
            results of all calls.

        Returns:
          The scheduled call.
        """
        remote: list[Any] = []
        pairs = np.empty((len(numbers), 2), np.int64)
        pairs[:, 0] = epoch
        pairs[:, 1] = numbers
        future = tf_private.schedule_call(
            self._coordinator,
            self._make_call(
                self._trace(iterator, len(numbers)),
                remote if keeps_result else None,
            ),
            (iterator, tf.constant(pairs)),
        )
        return ScheduledCall(future, remote)

    def _trace(self, iterator: Any, num_steps: int) -> Any:
        """Returns the concrete function for a number of steps."""
        is_full = num_steps == self._max_steps
        key = num_steps if is_full else None
        if key not in self._traced:
            self._traced[key] = self._trace_function(
                iterator,
                self._all_steps if is_full else self._some_steps,
                tf.TensorSpec([key, 2], tf.int64),
            )
        return self._traced[key]

    def _trace_function(
        self, iterator: Any, function: Any, numbers: tf.TensorSpec
    ) -> Any:
        """Returns the concrete function.

        Raises:
          ValueError: See `trace`.
        """
        while True:
            trace = self._closure_trace = self._closure_trace.renewed()
            traced = tf_private.trace_for_workers(
                self._coordinator, tf.function(function), iterator, numbers
            )
            _check_tokens(trace, traced.graph)
            joins_layers = trace.bundles_updates and trace.joins_layers
            if trace.joins_calls and resource_order.uses_variables(
                traced.graph
            ):
                trace.stop_joining()
            if trace.is_out_of_order:
                continue
            if self._traced and joins_layers != self.joins_layers:
                # A repeated step would not find the records of the servers.
                raise RuntimeError(
                    "All traces of a step over parameter servers must contain "
                    "the same lookups and updates, in the same order. "
                    "Received: a step whose lookups of layers can be joined in "
                    "only some of its traces."
                )
            self.joins_layers = joins_layers
            return traced

    def _make_call(
        self, traced: Any, remote: list[Any] | None
    ) -> Callable[[Any, tf.Tensor], Any]:
        """Returns the function that the coordinator calls.

        Args:
          traced: Concrete function.
          remote: List that receives the result if the coordinator must not copy
            it. None if the result is not kept.
        """
        num_cancelled = 0

        def call(iterator, numbers):
            nonlocal num_cancelled
            if tf_private.has_failed_closure(self._coordinator):
                # The closure must not start. The coordinator removes closures
                # from its queue only when all workers are idle.
                raise tf.errors.CancelledError(
                    None, None, "Not started, because another closure failed."
                )
            try:
                result = traced(iterator, numbers)
                # The steps have ended: with this strategy, TensorFlow waits for
                # the answer of a worker, also if it does not copy a result.
                if self._copies_results:
                    return result
                if remote is not None:
                    remote[:] = [result]
                return None
            except tf.errors.CancelledError as error:
                # No code cancels these calls deliberately. This error means
                # that a connection was interrupted, or that an op of this
                # worker failed while its iterator was waiting for a batch.
                num_cancelled += 1
                if (
                    _RETRIED_ERROR_TEXT in str(error)
                    and num_cancelled <= _MAX_CANCELLED
                ):
                    raise
                cause = error
            raise InputCancelledError(
                "The dataset of a worker was cancelled, because another "
                "op of the step failed while the dataset waited for a batch. "
                "A step must use its batch before any other op in it can "
                f"fail. Received: {cause}"
            )

        return call

    def move_to_epoch(self, epoch: int, next_epoch: int) -> list[set[int]]:
        """Ends an epoch on all servers; see `AppliedClosures`.

        Returns:
          One set of step numbers for each server of each embedding that the
          step trains. The set contains the steps that the server has applied in
          `epoch`. The list is empty if the step trains no embedding.
        """
        return [
            numbers
            for applied in self._closure_trace.applied
            for numbers in applied.move_to_epoch(epoch, next_epoch)
        ]

    @tf.autograph.experimental.do_not_convert
    def _check_use_of_tables(self) -> None:
        """Joins no calls if the first step reads or changes a table itself.

        TensorFlow orders such an op after all ops on the server that were
        created before, so an update must not be created later. The first step
        does not join calls, so its trace remains valid.
        """
        if resource_order.uses_variables(tf.compat.v1.get_default_graph()):
            self._closure_trace.joins_calls = False


def step_of_batch(strategy: Any, step_fn: Callable[..., Any]) -> Callable:
    """Returns a closure body that runs a step with the worker's next batch.

    Args:
      strategy: A ParameterServerStrategy.
      step_fn: Function that is called with a batch; may be a `tf.function`.
    """
    traced = getattr(step_fn, "python_function", step_fn)

    def step(batch):
        # Without this dependency, a step that does not use its batch could run
        # without a batch.
        with tf.control_dependencies(
            tf.nest.flatten(batch, expand_composites=True)
        ):
            return traced(batch)

    return lambda iterator: strategy.run(step, args=(next(iterator),))


@tf.autograph.experimental.do_not_convert
def _group_size(max_steps: int, prefetch_steps: int) -> int:
    """Returns the number of steps in an iteration of a loop over steps.

    Args:
      max_steps: Number of steps of the closure whose first step was traced.
      prefetch_steps: As for `StepClosure`.
    """
    if max_steps == 1:
        return 1
    nodes = _nodes_of(tf.compat.v1.get_default_graph())
    return max(1 + prefetch_steps, _max_group(len(nodes)))


def _max_group(num_ops: int) -> int:
    """Returns the same for steps with `num_ops` ops, without prefetching."""
    return max(1, min(_MAX_GROUP, _MAX_GROUP_OPS // num_ops))


def _nodes_of(graph: Any) -> list[Any]:
    """Returns the nodes of a graph, and of its functions, such as branches."""
    graph_def = graph.as_graph_def()
    return [
        *graph_def.node,
        *(
            node
            for function in graph_def.library.function
            for node in function.node_def
        ),
    ]


def _check_tokens(trace: ClosureTrace, graph: Any) -> None:
    """Checks that servers can recognize repeated updates of a step.

    Warns if the step has no updates.

    Raises:
      ValueError: If the step calls a function that applies gradients and was
        traced outside of this closure.
    """
    if trace.applied:
        return
    if any(node.op in _APPLY for node in _nodes_of(graph)):
        raise ValueError(
            "Argument `step_fn` must apply the gradients of a TPUEmbedding in "
            "functions that were not traced before; do not decorate it, or the "
            "functions that it calls, with tf.function. Received: a step that "
            "calls a function that was traced elsewhere."
        )
    if trace.num_enqueued:
        logging.warning(
            "The step enqueues for training and applies no gradients: closures "
            "count, but the tables of the TPUEmbedding are not updated. "
            "Call `apply_gradients`, or `enqueue(..., training=False)`."
        )
