"""Closures in rounds: between two of them, none is under way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap.layout.step import autotuning
from tf_layoutmap.ps import messages, waiting
from tf_layoutmap.ps.closures import make_closure

# Of a round: no more than a server's window.
_MOST_CLOSURES = 512

# Of a round: how many closures that failed run again.
_MOST_FAILURES = 16

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
        self, strategy: Any, body: Callable[[Any], Any],
        dataset_fn: Callable[[], Any], *, num_workers: int, deadline: float,
        seconds: float,
    ):
        """Starts with short rounds.

        Args:
          strategy: A ParameterServerStrategy.
          body: What a closure does, as `make_closure` takes it.
          dataset_fn: Makes the dataset of a worker.
          num_workers: Workers of the cluster.
          deadline: Seconds in which some closure must end.
          seconds: How long a round is to take.
        """
        self._coordinator = (
            tf.distribute.coordinator.ClusterCoordinator(strategy))
        self._closure = make_closure(body)
        self._dataset_fn = dataset_fn
        self._dataset: Any = None
        self._iterator: Any = None
        self._deadline = deadline
        self._seconds = seconds
        self._size = 4 * num_workers

    @property
    def dataset(self) -> Any:
        """The dataset of all workers; made when it is first asked for."""
        if self._dataset is None:
            # A worker that deletes an iterator answers nobody meanwhile.
            self._dataset = self._coordinator.create_per_worker_dataset(
                lambda: autotuning.without_autotuning(self._dataset_fn()))
        return self._dataset

    def start_over(self) -> None:
        """Lets all workers begin with their datasets anew."""
        self._iterator = None

    def run(self, most: int) -> Ended:
        """Runs closures until each counts, or too many have failed.

        An error of one closure makes the coordinator cancel the others, which
        may have reached some servers: they run again, under the same numbers.
        So does the closure that failed, with another batch: under its number
        a worker that died, or was cancelled, may have reached servers before.

        Args:
          most: How many at most.

        Raises:
          LateError: No closure ended within the deadline.
          tf.errors.OpError: One of `LOST`, or none of a closure.
        """
        if self._iterator is None:
            self._iterator = iter(self.dataset)
        count = min(self._size, most)
        began = time.monotonic()
        # Nothing is under way: what comes of an epoch before is a straggler.
        epoch = next(_epochs)
        good: dict[int, Any] = {}
        first_error: Exception | None = None
        num_failures = 0
        todo = list(range(count))
        while todo:
            futures, error = self._run_once(epoch, todo)
            first_error = first_error or error
            errors = {number: waiting.error_of(futures[number])
                      for number in futures}
            if error is not None and all(map(_is_cancelled, errors.values())):
                raise error  # Nothing ended: it is none of a closure.
            good.update((number, futures[number])
                        for number, own in errors.items() if own is None)
            failed = [number for number, own in errors.items()
                      if own is not None and not _is_cancelled(own)]
            given_up = failed[max(0, _MOST_FAILURES - num_failures):]
            num_failures += len(failed)
            todo = [number for number in todo
                    if number not in good and number not in given_up]
        if first_error is not None:
            return Ended(len(good), [], _explained(first_error))
        self._adapt(count, time.monotonic() - began)
        return Ended(count, [good[number] for number in range(count)], None)

    def fetch(self, future: Any) -> Any:
        """What a closure returned, as numpy; None if its worker has gone."""
        try:
            return waiting.within(future.fetch, self._deadline)
        except (tf.errors.OpError, waiting.LateError):
            return None

    def _run_once(
        self, epoch: int, numbers: list[int],
    ) -> tuple[dict[int, Any], tf.errors.OpError | None]:
        """Schedules closures and waits; returns them, and what was raised."""
        futures: dict[int, Any] = {}
        try:
            for number in numbers:
                futures[number] = self._coordinator.schedule(
                    self._closure, args=(
                        self._iterator,
                        tf.constant([epoch, number], tf.int64)))
            waiting.within(self._coordinator.join, self._deadline,
                           list(futures.values()))
        except LOST:
            raise
        except tf.errors.OpError as error:
            # See `waiting.error_of`.
            return futures, error.with_traceback(None)
        return futures, None

    def _adapt(self, count: int, seconds: float):
        wanted = int(count / max(seconds, 1e-3) * self._seconds)
        self._size = max(1, min(2 * self._size, _MOST_CLOSURES, wanted))


def _explained(error: tf.errors.OpError) -> Exception:
    if not isinstance(error, tf.errors.OutOfRangeError):
        return messages.concise(error)
    explained = ValueError(
        "Argument `dataset_fn` must make a dataset without end; add "
        "`.repeat()`. Received: one that has ended.")
    explained.__cause__ = error
    return explained


def _is_cancelled(error: Exception | None) -> bool:
    return isinstance(error, tf.errors.CancelledError)
