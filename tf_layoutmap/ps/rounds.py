"""Runs closures in rounds. Between two rounds, no closure is pending.

`Rounds` schedules closures, waits for them, and runs failed closures again.
`_Failures` decides which failed closures of a round run again.
`AutomaticSteps` chooses the number of steps of a closure if the program does
not set it.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
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

# Largest number of steps that is chosen automatically for a closure, and the
# longest duration of such a closure. A closure of this size takes most of the
# possible gain, because the time of its call is then a small part of its
# processor time.
AUTOMATIC_STEPS = 16
_CLOSURE_SECONDS = 0.25
# The same limit, relative to the maximum time without a finished closure.
_CLOSURES_PER_DEADLINE = 40
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


class AutomaticSteps:
    """Chooses the number of steps of a closure.

    A closure with several steps takes less time per step, but another function
    has to be traced for it. The number is therefore 1 at first. It increases
    once, when the training has taken as long as this trace is expected to take.
    If the training ends at this moment, it takes about twice the time that it
    takes with one step per closure; if it continues, it takes less time. The
    duration of a closure is much shorter than a round and than the deadline.
    """

    def __init__(self, num_workers: int, deadline: float):
        """Creates the object.

        Args:
          num_workers: Number of workers of the cluster.
          deadline: Maximum time in seconds without a finished closure.
        """
        self._num_workers = num_workers
        self._max_seconds = min(
            _CLOSURE_SECONDS, deadline / _CLOSURES_PER_DEADLINE
        )
        self._trace_seconds = self._seconds = self._step_seconds = 0.0

    def add_trace(self, seconds: float) -> None:
        """Adds the expected duration of the trace of a longer closure."""
        self._trace_seconds = max(self._trace_seconds, seconds)

    def add_round(self, num_steps: int, seconds: float) -> None:
        """Adds a round: the number of its steps, and its duration."""
        self._seconds += seconds
        # Each worker runs its steps one after the other.
        self._step_seconds = seconds * self._num_workers / max(num_steps, 1)

    def choose(self, max_steps: int) -> int:
        """Returns the number of steps per closure, from now on.

        Args:
          max_steps: Number of the remaining steps of the caller.
        """
        if self._seconds <= self._trace_seconds:
            return 1
        # Each worker has at least two closures of a round.
        max_steps = min(max_steps, MAX_STEPS) // (2 * self._num_workers)
        return max(
            1,
            min(
                AUTOMATIC_STEPS,
                max_steps,
                int(self._max_seconds / max(self._step_seconds, 1e-6)),
            ),
        )


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
        steps_per_closure: int | None = 1,
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
            most `MAX_STEPS`. None: see `AutomaticSteps`. In this case,
            `prefetch_steps` must be 0, because the results of prefetched steps
            depend on the number.
          prefetch_steps: As for `StepClosure`.
          joins_results: As for `StepClosure`.
        """
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        self._automatic = (
            AutomaticSteps(num_workers, deadline)
            if steps_per_closure is None
            else None
        )
        self._num_workers = num_workers
        self._steps_per_closure = steps_per_closure or 1
        self._make_closure = functools.partial(
            step_closure.StepClosure,
            self._coordinator,
            body,
            prefetch_steps=prefetch_steps,
            joins_results=joins_results,
        )
        self._closure = self._make_closure(self._steps_per_closure)
        # Closure of more steps, which is chosen automatically.
        self._long_closure: step_closure.StepClosure | None = None
        self._dataset_fn = dataset_fn
        self._dataset: Any = None
        self._iterator: Any = None
        self._deadline = deadline
        self._seconds = seconds
        self._size = min(4 * num_workers * self._steps_per_closure, MAX_STEPS)
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
        self._choose_steps(max_steps)
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
            count -= count % self._unit
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
            self._iterator = iter(self.dataset)
            began = time.monotonic()
            self._trace(self._closure)
            if self._automatic is not None:
                self._automatic.add_trace(
                    (time.monotonic() - began)
                    * self._closure.num_copies(AUTOMATIC_STEPS)
                )
            if self._long_closure is not None:
                self._trace(self._long_closure)
                self._check_records()

    def _trace(self, closure: step_closure.StepClosure) -> None:
        before = answers.num_closed()
        closure.trace(self._iterator)
        if answers.num_closed() != before:
            raise waiting.LateError

    def _choose_steps(self, max_steps: int) -> None:
        """Increases the number of steps of a closure if it is automatic.

        Raises:
          LateError: As for `_prepare`.
        """
        if self._automatic is None or self._long_closure is not None:
            return
        num_steps = self._automatic.choose(max_steps)
        if num_steps == 1:
            return
        closure = self._make_closure(num_steps)
        self._trace(closure)
        self._long_closure = closure
        self._steps_per_closure = num_steps
        self._check_records()
        self._size = max(self._size, self._unit)

    def _check_records(self) -> None:
        """Removes the closure of more steps if its records are different.

        A failed step can run again in a closure of the other size. The servers
        find the record of its update only if both closures join the lookups of
        the same layers.
        """
        closure = self._long_closure
        if (
            closure is not None
            and closure.joins_layers != self._closure.joins_layers
        ):
            self._automatic = self._long_closure = None
            self._steps_per_closure = 1

    @property
    def _unit(self) -> int:
        """Number of steps of which a round has a multiple.

        Only the last round of a run can have another number of steps.
        """
        if self._long_closure is None:
            return self._steps_per_closure
        # All workers have the same number of closures.
        return self._steps_per_closure * self._num_workers

    def _groups(
        self, numbers: list[int]
    ) -> Iterator[tuple[step_closure.StepClosure, list[int]]]:
        """Yields the closures for steps, and the steps of each closure."""
        closure, size, rest = self._closure, self._steps_per_closure, 0
        if self._long_closure is not None:
            # The remaining steps are separate closures, so that all workers
            # finish at the same time, and no third function is traced.
            closure, rest = self._long_closure, len(numbers) % self._unit
        stop = len(numbers) - rest
        for start in range(0, stop, size):
            yield closure, numbers[start : min(start + size, stop)]
        for number in numbers[stop:]:
            yield self._closure, [number]

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
        try:
            # Entering the scope takes longer than scheduling a closure.
            with self._coordinator.strategy.scope():
                for closure, group in self._groups(numbers):
                    call = closure.schedule(
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
        self._size = max(self._unit, min(2 * self._size, MAX_STEPS, wanted))
        if self._automatic is not None:
            self._automatic.add_round(count, seconds)


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
