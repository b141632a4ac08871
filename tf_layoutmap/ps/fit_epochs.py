"""Runs passes over the datasets of all workers, in rounds of closures.

`Epochs` runs the passes. A closure returns the results of all its steps in one
vector, because the coordinator would need a separate call for each tensor. The
dtype of the vector is float64, because float64 represents counts and float32
values exactly.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap._core import checks
from tf_layoutmap.embedding.servers import bundles, closure_trace
from tf_layoutmap.ps import guard, processes, rounds
from tf_layoutmap.ps.datasets import Datasets

# When a worker has finished its dataset, its steps only wait. All steps of one
# closure together wait for this number of microseconds. Without the wait, the
# worker would take many closures from the common queue while other workers are
# busy.
_IDLE_MICROSECONDS = 20_000
# The number of examples of a step that did not run.
_ENDED = -1


class StepResult(NamedTuple):
    """Result of one step of `StepBody`.

    Attributes:
      worker: Index of the worker.
      num_examples: Size of the batch; None if the worker's dataset has ended.
        In this case, the step did not run.
      values: Results of the step function, as arrays.
    """

    worker: int
    num_examples: int | None
    values: list[np.ndarray]


class StepBody:
    """Body of a closure for `StepClosure` with `joins_results=True`.

    The object also reads its results.
    """

    def __init__(
        self,
        strategy: Any,
        step: Callable[[Any], list[tf.Tensor]],
        condition: Callable[[], tf.Tensor] | None = None,
    ):
        """Creates the body from a step function.

        Args:
          strategy: A ParameterServerStrategy.
          step: Function that is called with a batch, in `strategy.run`. The
            function must return tensors with known shapes and with values that
            float64 represents exactly.
          condition: Function that returns a bool scalar before each step. If it
            is passed, the step function is traced twice, with the bools True
            and False as its second argument, and each step runs the function
            that was traced with the value of the condition.
        """
        self._strategy = strategy
        self._step = step
        self._condition = condition
        self._worker: Any = None
        self._shapes: list[tuple[tuple[int, ...], Any]] = []

    @tf.autograph.experimental.do_not_convert
    def begin(self) -> None:
        """Creates the index of the worker, in the graph of the closure.

        TensorFlow does not support this op in the branch of a condition.
        """
        index = tf.distribute.coordinator.experimental_get_current_worker_index
        self._worker = tf.cast(index(), tf.float64)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, iterator: Any) -> tf.Tensor:
        """Runs a step if there is a batch, and returns a vector for `read`."""
        return self.run_or_wait(iterator.get_next_as_optional())

    @tf.autograph.experimental.do_not_convert
    def run_or_wait(self, batch: tf.experimental.Optional) -> tf.Tensor:
        """Runs a step if there is a batch, and returns a vector for `read`."""
        step = closure_trace.enclosing_step()
        num_steps = 1 if step is None else step.trace.num_steps
        return self._with_worker(
            tf.cond(
                batch.has_value(),
                lambda: self._run(batch.get_value()),
                lambda: _idle(_IDLE_MICROSECONDS // num_steps),
            )
        )

    @tf.autograph.experimental.do_not_convert
    def run(self, batch: Any) -> tf.Tensor:
        """Runs a step, and returns a vector for `read`."""
        return self._with_worker(self._run(batch))

    def _with_worker(self, result: tf.Tensor) -> tf.Tensor:
        return tf.concat([[self._worker], result], axis=0)

    def _run(self, batch: Any) -> tf.Tensor:
        values = self._call_step(batch)
        self._shapes = [
            (tuple(value.shape.as_list()), value.dtype.as_numpy_dtype)
            for value in values
        ]
        return tf.concat(
            [
                [tf.cast(num_samples(batch), tf.float64)],
                *(
                    tf.reshape(tf.cast(value, tf.float64), [-1])
                    for value in values
                ),
            ],
            axis=0,
        )

    def _call_step(self, batch: Any) -> Any:
        if self._condition is None:
            return self._run_step(batch)
        # The condition is outside `strategy.run`, because TensorFlow cannot
        # update variables in a condition inside `strategy.run`.
        return tf.cond(
            self._condition(),
            lambda: self._run_step(batch, True),
            lambda: self._run_step(batch, False),
        )

    def _run_step(self, *args: Any) -> Any:
        with bundles.bundled():
            return self._strategy.run(self._step, args=args)

    def read(self, result: np.ndarray) -> list[StepResult]:
        """Converts the vector that a closure returned to results of steps."""
        results, offset = [], 0

        def take(size: int) -> np.ndarray:
            nonlocal offset
            offset += size
            return result[offset - size : offset]

        while offset < result.size:
            worker, num_examples = map(int, take(2))
            if num_examples == _ENDED:
                results.append(StepResult(worker, None, []))
                continue
            values = [
                take(int(np.prod(shape))).reshape(shape).astype(dtype)
                for shape, dtype in self._shapes
            ]
            results.append(StepResult(worker, num_examples, values))
        return results


def num_samples(batch: Any) -> tf.Tensor:
    """Returns the size of a batch, an int scalar."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    # The size of the labels is preferred, because features may be packed.
    tensors = [
        tensor
        for part in (*parts[1:2], *parts[:1])
        for tensor in tf.nest.flatten(part)
        if tensor is not None
    ]
    first = tensors[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first)[0]


def _idle(microseconds: int) -> tf.Tensor:
    """Waits, and returns the result of a step that did not run."""
    nothing = tf.data.Dataset.from_tensors(tf.constant([_ENDED], tf.float64))
    late = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(nothing),
        sleep_microseconds=tf.constant(microseconds, tf.int64),
        output_types=[tf.float64],
        output_shapes=[[1]],
    )
    return tf.data.experimental.from_variant(
        late, nothing.element_spec
    ).get_single_element()


# Target duration of a round in seconds. Callbacks run between two rounds, when
# no closure is scheduled.
_ROUND_SECONDS = 2.0
# Larger than the number of closures of any round.
_UNLIMITED = 1 << 30


class Progress(NamedTuple):
    """Result of a round.

    Attributes:
      num_steps: Number of batches that this pass has processed so far.
      num_examples: Number of samples of this round.
      seconds: Duration of the round.
      values: Results of each step in the round, in the order of step numbers.
    """

    num_steps: int
    num_examples: int
    seconds: float
    values: list[list[np.ndarray]]


class Epochs:
    """Runs a step function in passes over the datasets of all workers."""

    def __init__(
        self,
        strategy: Any,
        data: Datasets,
        step: Callable[[Any], list[tf.Tensor]],
        error_guard: guard.Guard,
        steps_per_closure: int | None = 1,
        condition: Callable[[], tf.Tensor] | None = None,
    ):
        """Creates the object. `run` starts the passes.

        Args:
          strategy: A ParameterServerStrategy.
          data: The datasets.
          step: Step function, as for `StepBody`.
          error_guard: Guard that raises errors with an explanation if the
            cluster fails.
          steps_per_closure: Number of steps of a closure, from 1 to 512; None
            as for `Rounds`.
          condition: As for `StepBody`.

        Raises:
          ValueError: If `steps_per_closure` is too large.
        """
        if steps_per_closure is not None:
            checks.check_int(
                "steps_per_execution",
                steps_per_closure,
                lowest=1,
                highest=rounds.MAX_STEPS,
                where="`compile` of a model on parameter servers",
            )
        self._num_workers = processes.count_workers()
        self._body = StepBody(strategy, step, condition)
        self._deadline = data.deadline
        self._rounds = rounds.Rounds(
            strategy,
            self._body,
            data._function(self._num_workers),
            num_workers=self._num_workers,
            deadline=data.deadline,
            seconds=_ROUND_SECONDS,
            steps_per_closure=steps_per_closure,
            joins_results=True,
        )
        self._guard = error_guard

    @property
    def element_spec(self) -> Any:
        """Element spec of the batches."""
        return self._rounds.dataset.element_spec

    def run(self, num_steps: int | None) -> Iterator[Progress]:
        """Runs a pass. No closure is pending when the method yields a result.

        Args:
          num_steps: Number of batches, or None for all datasets. If all
            datasets end earlier, the pass ends with a warning.

        Raises:
          ServerLostError: If a server is lost, and the program does not
            restart.
          StepDeadlineError: If no batch is finished within the deadline.
          tf.errors.OpError: If a step fails. The failed step does not count.
        """
        if num_steps is None:
            self._rounds.restart_datasets()
        finished_workers: set[int] = set()
        done, last = 0, time.monotonic()
        while num_steps is None or done < num_steps:
            began, before = time.monotonic(), done
            ended = self._guard.call(
                functools.partial(
                    self._rounds.run,
                    _UNLIMITED if num_steps is None else num_steps - done,
                )
            )
            if ended.error is not None:
                raise ended.error
            values, num_examples = [], 0
            results = self._results(ended)
            # If the worker that had a result was lost, its steps count.
            done += ended.num_done - len(results)
            for result in results:
                if result.num_examples is None:
                    finished_workers.add(result.worker)
                    continue
                done += 1
                num_examples += result.num_examples
                values.append(result.values)
            now = time.monotonic()
            if done > before:
                last = now
                yield Progress(done, num_examples, now - began, values)
            if len(finished_workers) == self._num_workers:
                self._rounds.restart_datasets()
                break
            if now - last > self._deadline:
                raise self._guard.deadline_error()
        if num_steps is not None and done < num_steps:
            logging.warning(
                "The datasets of all workers have ended after %d of %d "
                "batches; add `.repeat()`, or omit the number of steps.",
                done,
                num_steps,
            )

    def _results(self, ended: rounds.RoundResult) -> list[StepResult]:
        """Returns the results of a round's steps, except lost results."""
        results = []
        for future in ended.values:
            fetched = self._guard.call(
                functools.partial(self._rounds.fetch, future)
            )
            if fetched is not None:
                results.extend(self._body.read(fetched))
        return results
