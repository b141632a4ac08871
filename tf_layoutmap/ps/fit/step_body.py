"""What a closure of `fit` does, and the one tensor that it returns.

Each tensor that the coordinator asks a worker for is a call of its own. So all
that it has to know of a closure is one float64 vector, which holds float32 and
counts as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

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
