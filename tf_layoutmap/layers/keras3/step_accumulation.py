"""Accumulated gradients of tables that the host engine trains.

The engine keeps the lookups of all accumulated gradients until their mean is
applied. `GradientSum` stores the sum of marks, or the concatenated rows of
`tf.IndexedSlices`, between the steps. Files do not contain this sum, because a
mark identifies a lookup of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layers.base.tables import HOST

# The engine keeps the gradients of at most this number of lookups.
MAX_STEPS = 64


class GradientSum:
    """Sum of the gradients of one weight over several steps."""

    def __init__(self, apply: Callable[[Any], None], layer: str):
        """Creates an empty sum.

        Args:
          apply: Function that applies a gradient.
          layer: Name of the layer, for messages.
        """
        self._apply = apply
        self._layer = layer
        self._count: Any = None
        self._parts: list[Any] = []

    def add(
        self, gradient: Any, steps: int, is_last: tf.Tensor, position: tf.Tensor
    ) -> None:
        """Adds a gradient; applies the mean after the last gradient.

        Args:
          gradient: A sum of marks, or the `tf.IndexedSlices` of a table.
          steps: The model's `gradient_accumulation_steps`, at most `MAX_STEPS`.
          is_last: `[]` bool, whether this is the last of `steps` gradients.
          position: `[]` integer, number of earlier gradients of these `steps`.
        """
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        new = [gradient.indices, gradient.values] if is_sparse else [gradient]
        with tf.device(HOST):
            new = [tf.convert_to_tensor(part) for part in new]
            self._create(new, is_sparse)
            position = tf.cast(position, tf.int64)
            count = tf.where(
                tf.equal(position, 0),
                tf.zeros([], tf.int64),
                self._count.read_value(),
            )
            total = [
                _joined(part.read_value(), new_part, count, is_sparse=is_sparse)
                for part, new_part in zip(self._parts, new)
            ]
            tf.cond(
                tf.equal(count, position), lambda: 0, lambda: self._warn(count)
            )

            def take() -> int:
                # The sum is discarded first. If the update fails, the next
                # steps start a new sum.
                self.discard()
                mean = total[-1] / steps
                self._apply(
                    tf.IndexedSlices(mean, total[0], gradient.dense_shape)
                    if is_sparse
                    else mean
                )
                return 0

            def keep() -> int:
                for part, value in zip(self._parts, total):
                    part.assign(value)
                self._count.assign(count + 1)
                return 0

            tf.cond(is_last, take, keep)

    def discard(self) -> None:
        """Discards the sum, for example because the tables were restored."""
        if self._count is not None:
            self._count.assign(0)

    def _create(self, new: list[tf.Tensor], is_sparse: bool) -> None:
        """Creates the variables in the first call."""
        if self._count is not None:
            return
        with tf.init_scope(), tf.device(HOST):
            # The variables are not distributed variables of a strategy.
            self._count = tf_private.ResourceVariable(
                tf.zeros([], tf.int64), trainable=False, name="num_accumulated"
            )
            self._parts = [
                tf_private.ResourceVariable(
                    tf.zeros(
                        [0, *part.shape[1:]] if is_sparse else part.shape,
                        part.dtype,
                    ),
                    shape=[None, *part.shape[1:]] if is_sparse else None,
                    trainable=False,
                    name="accumulated",
                )
                for part in new
            ]

    def _warn(self, count: tf.Tensor) -> int:
        tf.print(
            f"WARNING: layer {self._layer!r} has not accumulated the gradients "
            "of all earlier steps before this update, because the tables were "
            "restored or reset, or a step failed. Files do not contain the "
            "accumulated gradients of a table with an open vocabulary or of "
            "TPUEmbedding. The missing gradients count as zeros in the mean. "
            "Save after a multiple of `gradient_accumulation_steps` steps. "
            "Number of accumulated gradients:",
            count,
        )
        return 0


def _joined(
    old: tf.Tensor, new: tf.Tensor, count: tf.Tensor, *, is_sparse: bool
) -> tf.Tensor:
    """Returns the sum of two gradients, or the first if `count` is 0."""
    is_first = tf.equal(count, 0)
    if is_sparse:
        return tf.concat(
            [old[: tf.where(is_first, 0, tf.shape(old)[0])], new], axis=0
        )
    # The first sum of marks is not added to zeros, because the engine reads the
    # signs of zeros.
    return tf.where(is_first, new, old + new)
