"""A step of a run, as the function that a coordinator schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.servers import closures

_APPLY = "LayoutMap>ApplyRows"

# TensorFlow's coordinator runs a closure again after a CancelledError with
# these words, without a limit.
_OF_A_JOB = "/job:"
_MOST_CANCELLED = 3


class InputCancelledError(RuntimeError):
    """The iterator of a worker was cancelled and gives no more batches."""


class StepClosure:
    """A step with the next batch of a worker, under the number of a closure.

    Workers call it as a Python function, so that a coordinator cannot cancel
    it: when another closure has failed, it ends its step on all servers, and
    its iterator, which TensorFlow would cancel for good, can still be used.
    """

    def __init__(self, coordinator: Any, body: Callable[[Any], Any]):
        """Initializes from what a closure does; nothing is traced yet.

        Args:
          coordinator: A ClusterCoordinator.
          body: Takes the iterator of a worker. All functions that it calls
            must be traced here: a trace of elsewhere knows no closure.
        """
        self._coordinator = coordinator
        self._applied: list[Any] = []
        self._traced: Any = None

        @tf.function
        def closure(iterator, numbers):
            state = closures.begin(numbers)
            result = body(iterator)
            self._note(state)
            return result

        self._function = closure

    def trace(self, iterator: Any) -> None:
        """Traces the closure.

        Args:
          iterator: An iterator of all workers.

        Raises:
          ValueError: If gradients are applied by a function that was traced
            before, outside of the closure.
        """
        self._traced = _tf_private.trace_for_workers(
            self._coordinator,
            self._function,
            iterator,
            tf.TensorSpec([2], tf.int64),
        )

    def schedule(self, iterator: Any, epoch: int, number: int) -> Any:
        """Schedules the closure on any worker.

        Args:
          iterator: As of `trace`.
          epoch: An epoch that servers have not ended.
          number: Of the closure in its epoch.

        Returns:
          The future result. Its error is an `InputCancelledError` if the
          iterator of the worker was cancelled.
        """
        return _tf_private.schedule_call(
            self._coordinator,
            self._make_call(),
            (iterator, tf.constant([epoch, number], tf.int64)),
        )

    def _make_call(self) -> Callable[[Any, tf.Tensor], Any]:
        traced = self._traced
        num_cancelled = 0

        def call(iterator, numbers):
            nonlocal num_cancelled
            if _tf_private.has_failed_closure(self._coordinator):
                # The coordinator clears its queue only when no worker is busy.
                raise tf.errors.CancelledError(
                    None, None, "Not started, because another closure failed."
                )
            try:
                return traced(iterator, numbers)
            except tf.errors.CancelledError as error:
                # No caller cancels: a connection was lost for a moment, or an
                # operation of this worker failed while its iterator was
                # waiting for a batch.
                num_cancelled += 1
                if _OF_A_JOB in str(error) and num_cancelled <= _MOST_CANCELLED:
                    raise
                cause = error
            raise InputCancelledError(
                "The dataset of a worker was cancelled, because another "
                "operation of the step failed while it waited for its batch. "
                "A step must use its batch before anything else in it can "
                f"fail. Received: {cause}"
            )

        return call

    def move_to_epoch(self, epoch: int, next_epoch: int) -> list[set[int]]:
        """Moves what servers have applied; see `AppliedClosures`.

        Returns:
          For each server of each embedding that the step trains, the numbers
          of the closures that it has applied in `epoch`; empty if it trains
          none.
        """
        return [
            numbers
            for one in self._applied
            for numbers in one.move_to_epoch(epoch, next_epoch)
        ]

    @tf.autograph.experimental.do_not_convert
    def _note(self, state: closures.Closure) -> None:
        """Takes what one trace of the closure has found."""
        _check_tokens(state)
        # One embedding may have several places in a step, as in branches.
        self._applied = list(dict.fromkeys(state.applied))


def step_of_batch(strategy: Any, step_fn: Callable[..., Any]) -> Callable:
    """Returns the body of a closure that takes a step with the next batch.

    Args:
      strategy: A ParameterServerStrategy.
      step_fn: Takes a batch; may be a `tf.function`.
    """
    traced = getattr(step_fn, "python_function", step_fn)

    def step(batch):
        # Without a batch nothing happens, also where it needs none.
        with tf.control_dependencies(
            tf.nest.flatten(batch, expand_composites=True)
        ):
            return traced(batch)

    return lambda iterator: strategy.run(step, args=(next(iterator),))


def _check_tokens(state: closures.Closure):
    """Refuses a step whose updates would not be told from their repetition.

    Warns of one that has none.

    Raises:
      ValueError: If gradients are applied by a function that was traced
        before, outside of this closure.
    """
    if state.applied:
        return
    graph = tf.compat.v1.get_default_graph().as_graph_def()
    nodes = [
        *graph.node,
        *(
            node
            for function in graph.library.function
            for node in function.node_def
        ),
    ]
    if any(node.op == _APPLY for node in nodes):
        raise ValueError(
            "Argument `step_fn` must apply the gradients of a TPUEmbedding in "
            "functions that were not traced before; call it, and what it "
            "calls, without tf.function. Received: a step that calls a "
            "function with a trace from elsewhere."
        )
    if state.num_enqueued:
        logging.warning(
            "The step enqueues for training and applies no gradients: closures "
            "will count, and the tables of the TPUEmbedding stay as they are. "
            "Call `apply_gradients`, or `enqueue(..., training=False)`."
        )
