"""Runs closures in rounds. Between two rounds, no closure is pending.

`Rounds` schedules closures, waits for them, and runs failed closures again.
`_Failures` decides which failed closures of a round run again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout import mesh_step
from tf_layoutmap.ps import (
    answers,
    datasets,
    handled_errors,
    messages,
    step_closure,
    waiting,
)

# Maximum number of steps in a round. This number must not exceed the window of
# numbers that a server accepts.
MAX_STEPS = 512

# Maximum number of failed closures in a round that run again.
_MAX_FAILURES = 4

# Limits for attempts to complete steps that only some servers have applied: the
# maximum number of attempts, and the number of attempts with the next batches.
# After this number of attempts, workers restart their datasets before each
# attempt.
_MAX_COMPLETIONS = 16
_MAX_NEXT_BATCHES = 4

# Epoch numbers of this process. Each number is used only once.
_epochs = itertools.count(1)


class RoundResult(NamedTuple):
    """Result of a round.

    Attributes:
      num_done: Number of steps whose updates are in the tables.
      values: Results of the steps, in the order of their numbers. Each result
        can be passed to `Rounds.fetch`. The result of a step is None if it was
        not the last step of its closure, or if its result was lost. Without
        `joins_results`, only the result of the last step is kept. Empty if the
        round has an error.
      error: Error of a step that does not count, or None.
    """

    num_done: int
    values: list[Any]
    error: Exception | None


class Rounds:
    """Schedules closures, and waits until all closures have ended."""

    def __init__(
        self,
        strategy: Any,
        body: Callable[[Any], Any],
        dataset_fn: Callable[[], Any],
        *,
        num_workers: int,
        deadline: float,
        seconds: float,
        steps_per_closure: int = 1,
        prefetch_steps: int = 0,
        joins_results: bool = False,
    ):
        """Creates the object.

        Args:
          strategy: A ParameterServerStrategy.
          body: Body of a closure, as for `StepClosure`.
          dataset_fn: Function that creates the dataset of a worker.
          num_workers: Number of workers of the cluster.
          deadline: Maximum time in seconds without a finished closure.
          seconds: Target duration of a round in seconds. The first rounds are
            shorter.
          steps_per_closure: Number of steps that a worker runs per closure, at
            most `MAX_STEPS`.
          prefetch_steps: As for `StepClosure`.
          joins_results: As for `StepClosure`.
        """
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        self._closure = step_closure.StepClosure(
            self._coordinator,
            body,
            steps_per_closure,
            prefetch_steps=prefetch_steps,
            joins_results=joins_results,
        )
        self._steps_per_closure = steps_per_closure
        self._dataset_fn = dataset_fn
        self._dataset: Any = None
        self._iterator: Any = None
        self._deadline = deadline
        self._seconds = seconds
        self._size = min(4 * num_workers * steps_per_closure, MAX_STEPS)
        self._is_settled = True

    @property
    def dataset(self) -> Any:
        """The dataset of all workers, which the first access creates."""
        if self._dataset is None:
            # Autotuning is off, because with autotuning a worker does not
            # answer other calls while it deletes an iterator.
            dataset = self._coordinator.create_per_worker_dataset(
                lambda: mesh_step.without_autotuning(self._dataset_fn())
            )
            datasets.check_worker_dataset_function(
                tf_private.dataset_function_of(dataset)
            )
            self._dataset = dataset
        return self._dataset

    def restart_datasets(self) -> None:
        """Makes all workers restart their datasets."""
        self._iterator = None

    def run(self, max_steps: int) -> RoundResult:
        """Runs steps until each step counts, or too many closures have failed.

        After an error, the coordinator does not start the closures in its
        queue. Closures that workers have already started are finished. Each
        server then reports the steps that it has applied, and rejects later
        updates of the epoch. A step counts if all servers have applied its
        update. Other steps run again with the same number and another batch. If
        too many closures have failed, only steps that some servers have applied
        run again.

        Args:
          max_steps: Maximum number of steps.

        Raises:
          LateError: If no closure ends within the deadline.
          RuntimeError: If some servers have applied a step that no worker could
            complete, or if an earlier call raised an error.
          tf.errors.OpError: One of `handled_errors.LOST`.
        """
        self.check_settled()
        self._prepare()
        self._is_settled = False
        ended = self._run(max_steps)
        self._is_settled = True
        return ended

    def check_settled(self) -> None:
        """Checks that all earlier calls of `run` have returned.

        Raises:
          RuntimeError: If an earlier call of `run` raised an error.
        """
        if not self._is_settled:
            raise RuntimeError(
                "Steps of this run were interrupted, and the tables may hold "
                "steps that do not count, or incomplete steps: they must be "
                "neither saved nor trained. Start the program again."
            )

    def _run(self, max_steps: int) -> RoundResult:
        count = min(self._size, max_steps)
        if count < max_steps:
            # Only the last closure of a run has fewer steps than the others.
            count -= count % self._steps_per_closure
        began = time.monotonic()
        # Each round has a new epoch, so that servers reject late updates of
        # earlier rounds.
        epoch = next(_epochs)
        done: dict[int, Any] = {}
        failures = _Failures()
        todo = list(range(count))
        while todo:
            calls, error = self._run_once(epoch, todo, last=count - 1)
            errors = []
            for numbers, call in calls:
                call_error = waiting.wait_for_error(call.future)
                if call_error is None:
                    done.update(dict.fromkeys(numbers))
                    done[numbers[-1]] = call
                else:
                    errors.append(call_error)
            if error is None:
                break
            failures.add(error, errors)
            epoch, everywhere, somewhere = self._move_to_next_epoch(epoch)
            # All servers have applied the next steps, so these steps count. The
            # results of these steps are lost.
            done.update(
                (number, None)
                for number in todo
                if number in everywhere and number not in done
            )
            todo = [number for number in todo if number not in done]
            if failures.has_too_many:
                todo = [number for number in todo if number in somewhere]
            if todo and failures.must_stop:
                raise RuntimeError(
                    f"{len(todo)} steps were applied by some servers and not "
                    "by others, and no worker could complete them: the tables "
                    "must be neither saved nor trained. Start the program "
                    "again. The last attempt failed with "
                    f"{type(error).__name__}: {error}"
                ) from error
            if todo and failures.needs_new_iterators:
                self.restart_datasets()
                self._prepare()
        values = [done[number] for number in sorted(done)]
        if len(done) < count or failures.batch_error is not None:
            return RoundResult(
                len(done),
                [],
                _user_error(failures.batch_error or failures.last),
            )
        self._adapt(count, time.monotonic() - began)
        return RoundResult(count, values, None)

    def fetch(self, call: step_closure.ScheduledCall | None) -> Any:
        """Returns a closure's result in numpy; None if its worker is lost."""
        if call is None:
            return None
        try:
            return waiting.call_with_deadline(call.fetch, self._deadline)
        except (tf.errors.OpError, waiting.LateError):
            return None

    def _prepare(self):
        """Creates the iterator and traces the closure, unless they exist.

        Raises:
          LateError: If a process did not answer. TensorFlow ignores that it
            could not register a function with this process.
        """
        if self._iterator is None:
            before = answers.num_closed()
            self._iterator = iter(self.dataset)
            self._closure.trace(self._iterator)
            if answers.num_closed() != before:
                raise waiting.LateError

    def _run_once(
        self,
        epoch: int,
        numbers: list[int],
        *,
        last: int,
    ) -> tuple[
        list[tuple[list[int], step_closure.ScheduledCall]], Exception | None
    ]:
        """Schedules closures for steps, and waits until they have run.

        Args:
          epoch: Epoch of the steps.
          numbers: Numbers of the steps.
          last: Number of the last step of the round, whose result is kept.

        Returns:
          The numbers and the scheduled call of each closure, and the error of a
          closure or None.
        """
        calls: list[tuple[list[int], step_closure.ScheduledCall]] = []
        size = self._steps_per_closure
        try:
            # Entering the scope takes longer than scheduling a closure.
            with self._coordinator.strategy.scope():
                for start in range(0, len(numbers), size):
                    group = numbers[start : start + size]
                    call = self._closure.schedule(
                        self._iterator,
                        epoch,
                        group,
                        keeps_result=group[-1] == last,
                    )
                    calls.append((group, call))
            waiting.call_with_deadline(
                self._coordinator.join,
                self._deadline,
                [call.future for _, call in calls],
            )
        except (*handled_errors.LOST, waiting.LateError):
            raise
        except Exception as error:
            # The docstring of `wait_for_error` says why the traceback is
            # removed.
            return calls, error.with_traceback(None)
        return calls, None

    def _move_to_next_epoch(
        self,
        epoch: int,
    ) -> tuple[int, set[int], set[int]]:
        """Ends an epoch on all servers.

        Returns:
          The next epoch, and two sets of step numbers: the steps that all
          servers have applied in the ended epoch, and the steps that at least
          one server has applied.
        """
        next_epoch = next(_epochs)
        applied = waiting.call_with_deadline(
            lambda: self._closure.move_to_epoch(epoch, next_epoch),
            self._deadline,
        )
        if not applied:
            return next_epoch, set(), set()
        return next_epoch, set.intersection(*applied), set.union(*applied)

    def _adapt(self, count: int, seconds: float):
        wanted = int(count / max(seconds, 1e-3) * self._seconds)
        self._size = max(
            self._steps_per_closure, min(2 * self._size, MAX_STEPS, wanted)
        )


class _Failures:
    """Records the failures of a round, and decides how the round continues.

    Attributes:
      batch_error: The first error of a step or a dataset, or None.
      last: The most recent error.
    """

    def __init__(self):
        """Creates the object, without any failure."""
        self.batch_error: Exception | None = None
        self.last: Exception | None = None
        self._num_closures = 0
        self._num_rounds = 0

    def add(self, error: Exception, errors: Sequence[Exception]) -> None:
        """Adds the coordinator's error, and the errors of closures."""
        was_enough = self.has_too_many
        failed = [
            error
            for error in errors
            if not isinstance(error, tf.errors.CancelledError)
        ]
        # If an error belongs to no closure, or a dataset has ended, another
        # attempt would raise the same error.
        comes_again = not failed or isinstance(error, tf.errors.OutOfRangeError)
        self._num_closures += _MAX_FAILURES + 1 if comes_again else len(failed)
        self._num_rounds += was_enough
        if self.batch_error is None and not isinstance(
            error, step_closure.InputCancelledError
        ):
            self.batch_error = error
        self.last = error

    @property
    def has_too_many(self) -> bool:
        """Whether only steps that some servers have applied run again."""
        return self._num_closures > _MAX_FAILURES

    @property
    def must_stop(self) -> bool:
        """Whether steps that some servers have applied failed too often."""
        return self._num_rounds >= _MAX_COMPLETIONS

    @property
    def needs_new_iterators(self) -> bool:
        """Whether the workers must restart their datasets."""
        return isinstance(self.last, step_closure.InputCancelledError) or (
            self._num_rounds >= _MAX_NEXT_BATCHES
        )


def _user_error(error: Exception | None) -> Exception | None:
    if not isinstance(error, tf.errors.OutOfRangeError):
        return (
            messages.shorten_error(error)
            if isinstance(error, tf.errors.OpError)
            else error
        )
    user_error = ValueError(
        "Argument `dataset_fn` must return an infinite dataset; add "
        "`.repeat()`. Received: a dataset that has ended."
    )
    user_error.__cause__ = error
    return user_error
