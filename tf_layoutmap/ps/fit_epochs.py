"""Passes over the datasets of all workers, in rounds of closures."""

# DOC-MERGE: What a closure of `fit` does, and the one tensor that it returns.
#
# Each tensor that the coordinator asks a worker for is a call of its own. So all
# that it has to know of a closure is one float64 vector, which holds float32 and
# counts as they are.
#
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

# How long a worker that is through with its dataset waits in a closure that has
# nothing to do: others are busy, and the queue of the coordinator is for all.
_IDLE_MICROSECONDS = 20_000


class StepResult(NamedTuple):
    """What came of one closure.

    Attributes:
      worker: Its index.
      num_examples: Of the batch; None if the dataset of the worker has ended.
      values: What the step gave, as arrays.
    """

    worker: int
    num_examples: int | None
    values: list[np.ndarray]


class StepBody:
    """A body for `ps.closures.make_closure`, and how to read its results."""

    def __init__(self, strategy: Any, step: Callable[[Any], list[tf.Tensor]]):
        """Takes what is done with a batch.

        Args:
          strategy: A ParameterServerStrategy.
          step: Takes a batch, in `strategy.run`; returns tensors of known
            shapes whose values float64 holds.
        """
        self._strategy = strategy
        self._step = step
        self._shapes: list[tuple[tuple[int, ...], Any]] = []

    @tf.autograph.experimental.do_not_convert
    def __call__(self, iterator: Any) -> tf.Tensor:
        """Takes a step if there is a batch; the result is for `read`."""
        index = tf.distribute.coordinator.experimental_get_current_worker_index
        batch = iterator.get_next_as_optional()
        rest = tf.cond(
            batch.has_value(), lambda: self._run(batch.get_value()), _idle
        )
        return tf.concat([[tf.cast(index(), tf.float64)], rest], axis=0)

    def _run(self, batch: Any) -> tf.Tensor:
        values = self._strategy.run(self._step, args=(batch,))
        self._shapes = [
            (tuple(one.shape.as_list()), one.dtype.as_numpy_dtype)
            for one in values
        ]
        return tf.concat(
            [
                [tf.cast(num_samples(batch), tf.float64)],
                *(tf.reshape(tf.cast(one, tf.float64), [-1]) for one in values),
            ],
            axis=0,
        )

    def read(self, result: np.ndarray) -> StepResult:
        """Returns what a closure has told."""
        if result.size == 1:
            return StepResult(int(result[0]), None, [])
        values, offset = [], 2
        for shape, dtype in self._shapes:
            size = int(np.prod(shape))
            values.append(
                result[offset : offset + size].reshape(shape).astype(dtype)
            )
            offset += size
        return StepResult(int(result[0]), int(result[1]), values)


def num_samples(batch: Any) -> tf.Tensor:
    """Returns the size of a batch, an int scalar."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    # Labels first: features may be packed.
    whole = [
        one
        for part in (*parts[1:2], *parts[:1])
        for one in tf.nest.flatten(part)
        if one is not None
    ]
    first = whole[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first)[0]


def _idle() -> tf.Tensor:
    nothing = tf.data.Dataset.from_tensors(tf.zeros([0], tf.float64))
    late = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(nothing),
        sleep_microseconds=tf.constant(_IDLE_MICROSECONDS, tf.int64),
        output_types=[tf.float64],
        output_shapes=[[0]],
    )
    return tf.data.experimental.from_variant(
        late, nothing.element_spec
    ).get_single_element()


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
