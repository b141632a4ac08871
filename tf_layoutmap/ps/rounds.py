"""Closures in rounds: between two of them, none is under way."""

# DOC-MERGE: A step of a run, as the function that a coordinator schedules.
from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.servers import closures
from tf_layoutmap.layout import mesh_step
from tf_layoutmap.ps import datasets, messages, waiting

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
        self._traced = tf_private.trace_for_workers(
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
        return tf_private.schedule_call(
            self._coordinator,
            self._make_call(),
            (iterator, tf.constant([epoch, number], tf.int64)),
        )

    def _make_call(self) -> Callable[[Any, tf.Tensor], Any]:
        traced = self._traced
        num_cancelled = 0

        def call(iterator, numbers):
            nonlocal num_cancelled
            if tf_private.has_failed_closure(self._coordinator):
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


# Of a round: no more than a server's window.
_MOST_CLOSURES = 512

# Of a round: how many closures may fail before it is given up.
_MOST_FAILURES = 4

# How often steps that only some servers have applied are tried again; and how
# often of these with the batches that follow. After that, workers begin their
# datasets again.
_MOST_COMPLETIONS = 16
_MOST_NEXT_BATCHES = 4

# How TensorFlow says that a server is gone, or came back without its variables.
LOST = (tf.errors.UnavailableError, tf.errors.AbortedError)

# Of this process: an epoch of closures is never used again.
_epochs = itertools.count(1)


class Ended(NamedTuple):
    """What came of a round.

    Attributes:
      num_done: Closures that count in the tables.
      values: What they returned, in the order of their numbers, for
        `Rounds.fetch`; none of a round with an error.
      error: Why one does not count, or None.
    """

    num_done: int
    values: list[Any]
    error: Exception | None


class Rounds:
    """Schedules closures and waits until all have ended."""

    def __init__(
        self,
        strategy: Any,
        body: Callable[[Any], Any],
        dataset_fn: Callable[[], Any],
        *,
        num_workers: int,
        deadline: float,
        seconds: float,
    ):
        """Starts with short rounds.

        Args:
          strategy: A ParameterServerStrategy.
          body: What a closure does, as `StepClosure` takes it.
          dataset_fn: Makes the dataset of a worker.
          num_workers: Workers of the cluster.
          deadline: Seconds in which some closure must end.
          seconds: How long a round is to take.
        """
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        self._closure = StepClosure(self._coordinator, body)
        self._dataset_fn = dataset_fn
        self._dataset: Any = None
        self._iterator: Any = None
        self._deadline = deadline
        self._seconds = seconds
        self._size = 4 * num_workers
        self._is_settled = True

    @property
    def dataset(self) -> Any:
        """The dataset of all workers; made when it is first asked for."""
        if self._dataset is None:
            # A worker that deletes an iterator answers nobody meanwhile.
            dataset = self._coordinator.create_per_worker_dataset(
                lambda: mesh_step.without_autotuning(self._dataset_fn())
            )
            datasets.check_function_of_worker(
                tf_private.dataset_function_of(dataset)
            )
            self._dataset = dataset
        return self._dataset

    def start_over(self) -> None:
        """Lets all workers begin with their datasets anew."""
        self._iterator = None

    def run(self, most: int) -> Ended:
        """Runs closures until each counts, or too many have failed.

        After an error the coordinator schedules nothing more of what it has,
        and the steps that workers have begun come to their end. Each server is
        asked which closures it has applied, and raises an error for what comes
        later of them. A closure that all servers have applied counts. Others
        run again under their numbers, with another batch, until too many have
        failed; then those are given up that no server has applied.

        Args:
          most: How many at most.

        Raises:
          LateError: No closure ended within the deadline.
          RuntimeError: Some servers have applied a step that no worker could
            complete; or an earlier call has raised.
          tf.errors.OpError: One of `LOST`.
        """
        self.check_settled()
        self._prepare()
        self._is_settled = False
        ended = self._run(most)
        self._is_settled = True
        return ended

    def check_settled(self) -> None:
        """Checks that the tables hold the closures that count, and no others.

        Raises:
          RuntimeError: A call of `run` has not returned.
        """
        if not self._is_settled:
            raise RuntimeError(
                "Steps of this run were interrupted, and the tables may hold "
                "some that do not count, or parts of steps: they must be "
                "neither saved nor trained. Start the program again."
            )

    def _run(self, most: int) -> Ended:
        count = min(self._size, most)
        began = time.monotonic()
        # Nothing is under way: what comes of an epoch before is a straggler.
        epoch = next(_epochs)
        done: dict[int, Any] = {}
        failures = _Failures()
        todo = list(range(count))
        while todo:
            futures, error = self._run_once(epoch, todo)
            errors = {
                number: waiting.error_of(futures[number]) for number in futures
            }
            done.update(
                (number, futures[number])
                for number, own in errors.items()
                if own is None
            )
            if error is None:
                break
            failures.add(error, [one for one in errors.values() if one])
            epoch, everywhere, somewhere = self._move_to_next_epoch(epoch)
            # Their workers have not said what they returned.
            done.update(
                (number, None)
                for number in todo
                if number in everywhere and number not in done
            )
            todo = [number for number in todo if number not in done]
            if failures.are_too_many:
                todo = [number for number in todo if number in somewhere]
            if todo and failures.end_all:
                raise RuntimeError(
                    f"{len(todo)} steps were applied by some servers and not "
                    "by others, and no worker could complete them: the tables "
                    "must be neither saved nor trained. Start the program "
                    "again. The last attempt failed by "
                    f"{type(error).__name__}: {error}"
                ) from error
            if todo and failures.need_new_iterators:
                self.start_over()
                self._prepare()
        values = [done[number] for number in sorted(done)]
        if len(done) < count or failures.of_batch is not None:
            return Ended(
                len(done), [], _explained(failures.of_batch or failures.last)
            )
        self._adapt(count, time.monotonic() - began)
        return Ended(count, values, None)

    def fetch(self, future: Any) -> Any:
        """What a closure returned, as numpy; None if its worker has gone."""
        if future is None:
            return None
        try:
            return waiting.within(future.fetch, self._deadline)
        except (tf.errors.OpError, waiting.LateError):
            return None

    def _prepare(self):
        """Creates iterators and traces, where that is still to be done."""
        if self._iterator is None:
            self._iterator = iter(self.dataset)
            self._closure.trace(self._iterator)

    def _run_once(
        self,
        epoch: int,
        numbers: list[int],
    ) -> tuple[dict[int, Any], Exception | None]:
        """Schedules closures and waits; returns them, and what was raised."""
        futures: dict[int, Any] = {}
        try:
            for number in numbers:
                futures[number] = self._closure.schedule(
                    self._iterator, epoch, number
                )
            waiting.within(
                self._coordinator.join, self._deadline, list(futures.values())
            )
        except (*LOST, waiting.LateError):
            raise
        except Exception as error:
            # See `waiting.error_of`.
            return futures, error.with_traceback(None)
        return futures, None

    def _move_to_next_epoch(
        self,
        epoch: int,
    ) -> tuple[int, set[int], set[int]]:
        """Ends an epoch on all servers.

        Returns:
          The next epoch, and the numbers of the closures that all servers have
          applied in the one that has ended, and those that some have.
        """
        next_epoch = next(_epochs)
        applied = waiting.within(
            lambda: self._closure.move_to_epoch(epoch, next_epoch),
            self._deadline,
        )
        if not applied:
            return next_epoch, set(), set()
        return next_epoch, set.intersection(*applied), set.union(*applied)

    def _adapt(self, count: int, seconds: float):
        wanted = int(count / max(seconds, 1e-3) * self._seconds)
        self._size = max(1, min(2 * self._size, _MOST_CLOSURES, wanted))


class _Failures:
    """What went wrong in a round so far, and what follows from it.

    Attributes:
      of_batch: The first error of a step or a dataset, or None.
      last: The last error of any kind.
    """

    def __init__(self):
        """Starts without failures."""
        self.of_batch: Exception | None = None
        self.last: Exception | None = None
        self._num_closures = 0
        self._num_rounds = 0

    def add(self, error: Exception, errors: Sequence[Exception]) -> None:
        """Adds what the coordinator raised, and the errors of closures."""
        was_enough = self.are_too_many
        failed = [
            one
            for one in errors
            if not isinstance(one, tf.errors.CancelledError)
        ]
        # An error of no closure, or of a dataset that has ended, comes again.
        comes_again = not failed or isinstance(error, tf.errors.OutOfRangeError)
        self._num_closures += _MOST_FAILURES + 1 if comes_again else len(failed)
        self._num_rounds += was_enough
        if self.of_batch is None and not isinstance(error, InputCancelledError):
            self.of_batch = error
        self.last = error

    @property
    def are_too_many(self) -> bool:
        """Whether only what some servers have applied runs again."""
        return self._num_closures > _MOST_FAILURES

    @property
    def end_all(self) -> bool:
        """Whether even that has failed too often."""
        return self._num_rounds >= _MOST_COMPLETIONS

    @property
    def need_new_iterators(self) -> bool:
        """Whether those there are have no more batches, or no good ones."""
        return isinstance(self.last, InputCancelledError) or (
            self._num_rounds >= _MOST_NEXT_BATCHES
        )


def _explained(error: Exception | None) -> Exception | None:
    if not isinstance(error, tf.errors.OutOfRangeError):
        return (
            messages.concise(error)
            if isinstance(error, tf.errors.OpError)
            else error
        )
    explained = ValueError(
        "Argument `dataset_fn` must make a dataset without end; add "
        "`.repeat()`. Received: one that has ended."
    )
    explained.__cause__ = error
    return explained
