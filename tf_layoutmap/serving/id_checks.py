"""The ids of several tables in one variable: checked, and turned into its rows.

An id that is no row of its table may be a row of the table after it, so that
no gather would refuse it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class TableIds:
    """Ids of one input, and where the rows of their table are.

    Attributes:
      ids: `[num_ids]` int64.
      num_rows: Of the table.
      start: Row of the variable that is row 0 of the table.
      message: The error about an id that is outside.
    """

    ids: tf.Tensor
    num_rows: int
    start: int
    message: str


@dataclasses.dataclass(frozen=True)
class VariableRows:
    """Rows of a variable, for all inputs in their order.

    Attributes:
      rows: `[num_ids]` int64, each a row of the variable.
      sizes: `[num_inputs]` int64: ids of each input.
      is_inside: `[num_ids]` bool, whether an id is one of its table; None
        if all are.
    """

    rows: tf.Tensor
    sizes: tf.Tensor
    is_inside: tf.Tensor | None


def rows_of(inputs: Sequence[TableIds], out_of_range: str) -> VariableRows:
    """Returns the rows of all ids.

    Args:
      inputs: At least one.
      out_of_range: What becomes of an id outside its table: `"error"`;
        `"drop"`, which gives row 0 and `is_inside`; `"clip"`, the nearest row.
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
        # Which input each id is of. One operation; tf.repeat is forty.
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
        [_refuse_outside(ids, is_inside, owner, messages)]
    ):
        return VariableRows(ids + start, sizes, None)


def _refuse_outside(ids, is_inside, owner, messages):
    """An operation that fails with the message of the first id outside."""

    def refuse():
        first = tf.argmax(tf.logical_not(is_inside))
        message = (
            messages[0] if owner is None else tf.gather(messages, owner[first])
        )
        return tf.raw_ops.Assert(
            condition=False,
            data=[message, "Received:", ids[first]],
            summarize=1,
        )

    # The message is made where it is needed only.
    return tf.cond(tf.reduce_all(is_inside), tf.no_op, refuse).op
