"""Checks the ids of several tables that share one variable.

The module converts the ids to rows of the variable. Without these checks, an
out-of-range id could select a row of the next table in the variable, and
`tf.gather` would not raise an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class TableIds:
    """Ids of one input, and the position of the table in the variable.

    Attributes:
      ids: `[num_ids]` int64.
      num_rows: Number of rows of the table.
      start: Row of the variable that contains row 0 of the table.
      message: Error message for out-of-range ids.
    """

    ids: tf.Tensor
    num_rows: int
    start: int
    message: str


@dataclasses.dataclass(frozen=True)
class VariableRows:
    """Rows of a variable for the ids of all inputs, in order.

    Attributes:
      rows: `[num_ids]` int64, rows of the variable.
      sizes: `[num_inputs]` int64, number of ids of each input.
      is_inside: `[num_ids]` bool, whether each id is a row of its table. None
        if all ids are rows of their tables.
    """

    rows: tf.Tensor
    sizes: tf.Tensor
    is_inside: tf.Tensor | None


def rows_of(inputs: Sequence[TableIds], out_of_range: str) -> VariableRows:
    """Checks all ids and converts them to rows of the variable.

    Args:
      inputs: Ids of at least one input.
      out_of_range: Handling of out-of-range ids: `"error"`; `"drop"`, which
        returns row 0 and `is_inside`; or `"clip"`, which returns the nearest
        row.
    """
    if len(inputs) == 1:
        (one,) = inputs
        ids, limit, start = (
            one.ids,
            tf.constant(one.num_rows, tf.int64),
            tf.constant(one.start, tf.int64),
        )
        sizes, owner = tf.size(ids, tf.int64)[tf.newaxis], None
    else:
        ids = tf.concat([one.ids for one in inputs], axis=0)
        sizes = tf.stack([tf.size(one.ids, tf.int64) for one in inputs])
        # Index of the input of each id. UpperBound is used because it is a
        # single op. In contrast, tf.repeat adds about forty ops to the graph.
        owner = tf.cast(
            tf.raw_ops.UpperBound(
                sorted_inputs=tf.cumsum(sizes)[tf.newaxis],
                values=tf.range(tf.size(ids, tf.int64))[tf.newaxis],
            )[0],
            tf.int64,
        )
        limit, start = (
            tf.gather(
                tf.constant([getattr(one, field) for one in inputs], tf.int64),
                owner,
            )
            for field in ("num_rows", "start")
        )
    if out_of_range == "clip":
        ids = tf.maximum(tf.minimum(ids, limit - 1), 0)
        return VariableRows(ids + start, sizes, None)
    is_inside = (ids >= 0) & (ids < limit)
    if out_of_range == "drop":
        ids = tf.where(is_inside, ids, 0)
        return VariableRows(ids + start, sizes, is_inside)
    messages = tf.constant([one.message for one in inputs])
    with tf.control_dependencies(
        [_assert_inside(ids, is_inside, owner, messages)]
    ):
        return VariableRows(ids + start, sizes, None)


def _assert_inside(ids, is_inside, owner, messages):
    """Returns an op that fails if an id is out of range.

    The error contains the message of the first out-of-range id.
    """

    def fail():
        first = tf.argmax(tf.logical_not(is_inside))
        message = (
            messages[0] if owner is None else tf.gather(messages, owner[first])
        )
        return tf.raw_ops.Assert(
            condition=False,
            data=[message, "Received:", ids[first]],
            summarize=1,
        )

    # The error message is computed only if an id is out of range.
    return tf.cond(tf.reduce_all(is_inside), tf.no_op, fail).op
