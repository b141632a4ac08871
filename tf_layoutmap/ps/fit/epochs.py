"""Passes over the datasets of all workers, in rounds of closures."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap.ps import guard, processes, rounds
from tf_layoutmap.ps.datasets import Datasets
from tf_layoutmap.ps.fit.step_body import StepBody

# Between two moments at which no closure is under way, and callbacks are told.
_ROUND_SECONDS = 2.0
# More than a round has.
_ANY = 1 << 30


class Progress(NamedTuple):
    """What came of a round.

    Attributes:
      num_steps: Batches of this pass so far.
      num_examples: Samples of this round.
      seconds: It took.
      values: What each of its steps gave, in the order of their numbers.
    """

    num_steps: int
    num_examples: int
    seconds: float
    values: list[list[np.ndarray]]


class Epochs:
    """Steps of one kind over datasets of one kind."""

    def __init__(
        self,
        strategy: Any,
        data: Datasets,
        step: Callable[[Any], list[tf.Tensor]],
        explains: guard.Guard,
    ):
        """Takes what is done with a batch; nothing runs yet.

        Args:
          strategy: A ParameterServerStrategy.
          data: The datasets.
          step: As of `StepBody`.
          explains: The errors of what uses the cluster.
        """
        self._num_workers = processes.count_workers()
        self._body = StepBody(strategy, step)
        self._deadline = data.deadline
        self._rounds = rounds.Rounds(
            strategy,
            self._body,
            data._function(self._num_workers),
            num_workers=self._num_workers,
            deadline=data.deadline,
            seconds=_ROUND_SECONDS,
        )
        self._guard = explains

    @property
    def element_spec(self) -> Any:
        """Of the batches."""
        return self._rounds.dataset.element_spec

    def run(self, num_steps: int | None) -> Iterator[Progress]:
        """Runs a pass; between what it yields no closure is under way.

        Args:
          num_steps: Batches, or None until all workers are through with their
            datasets. Fewer, with a warning, if they are before.

        Raises:
          ServerLostError: A server is gone, and the program does not start
            anew.
          StepDeadlineError: No batch was through within the deadline.
          tf.errors.OpError: A step failed; it does not count.
        """
        if num_steps is None:
            self._rounds.start_over()
        through: set[int] = set()
        done, last = 0, time.monotonic()
        while num_steps is None or done < num_steps:
            began, before = time.monotonic(), done
            ended = self._guard.call(
                functools.partial(
                    self._rounds.run,
                    _ANY if num_steps is None else num_steps - done,
                )
            )
            if ended.error is not None:
                raise ended.error
            values, num_examples = [], 0
            for future in ended.values:
                fetched = self._guard.call(
                    functools.partial(self._rounds.fetch, future)
                )
                if fetched is None:
                    # Its worker has gone with what it counted.
                    done += 1
                    continue
                result = self._body.read(fetched)
                if result.num_examples is None:
                    through.add(result.worker)
                    continue
                done += 1
                num_examples += result.num_examples
                values.append(result.values)
            now = time.monotonic()
            if done > before:
                last = now
                yield Progress(done, num_examples, now - began, values)
            if len(through) == self._num_workers:
                self._rounds.start_over()
                break
            if now - last > self._deadline:
                raise self._guard.late()
        if num_steps is not None and done < num_steps:
            logging.warning(
                "The datasets of all workers have ended after %d of %d "
                "batches; add `.repeat()`, or leave the number out.",
                done,
                num_steps,
            )
