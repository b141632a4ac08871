"""Gathers rows of exported tables: checks of ids, one gather per variable.

Several tables can share one variable. Without the check of ids, an out-of-range
id could select a row of the next table in the variable, and `tf.gather` would
not raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.deltas.served.packing import RowFormat
from tf_layoutmap.serving.stored_tables import StoredTable
from tf_layoutmap.serving.stored_variable import StoredVariable


def gather(
    tables: Sequence[StoredTable],
    ids: Sequence[tf.Tensor],
    messages: Sequence[str],
    out_of_range: str,
) -> list[tuple[tf.Tensor, tf.Tensor | None]]:
    """Returns the rows of several inputs, with one gather for each variable.

    Args:
      tables: The table of each input, in any order.
      ids: `[num_ids]` int64 for each input.
      messages: Error message of each input for out-of-range ids.
      out_of_range: Handling of out-of-range ids: `"error"`; `"drop"`, which
        returns zeros; or `"clip"`, which returns the nearest row.

    Returns:
      For each input, a tuple of the rows, `[num_ids, dim]` float32, and of a
      `[num_ids]` bool, which is False for dropped ids. The second element is
      None if no id is dropped.
    """
    inputs_of: dict[StoredVariable, list[int]] = {}
    for index, table in enumerate(tables):
        inputs_of.setdefault(table.variable, []).append(index)
    gathered: dict[int, tuple[tf.Tensor, tf.Tensor | None]] = {}
    for variable, indices in inputs_of.items():
        rows, sizes, is_inside = _rows_of_variable(
            [tables[index] for index in indices],
            [ids[index] for index in indices],
            [messages[index] for index in indices],
            out_of_range,
        )
        values = gather_unpacked(variable.in_graph, rows, variable.form)
        if is_inside is not None:
            values = tf.where(is_inside[:, tf.newaxis], values, 0.0)
        gathered.update(
            zip(indices, _split(values, is_inside, sizes, len(indices)))
        )
    return [gathered[index] for index in range(len(tables))]


def _split(
    rows: tf.Tensor, is_inside: tf.Tensor | None, sizes: tf.Tensor, num: int
) -> list[tuple[tf.Tensor, tf.Tensor | None]]:
    """Splits the rows of one variable into the rows of each input."""
    if num == 1:
        return [(rows, is_inside)]
    return list(
        zip(
            tf.split(rows, sizes, num=num),
            [None] * num
            if is_inside is None
            else tf.split(is_inside, sizes, num=num),
        )
    )


def _rows_of_variable(
    tables: Sequence[StoredTable],
    ids: Sequence[tf.Tensor],
    messages: Sequence[str],
    out_of_range: str,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Checks ids of tables that share a variable; see `gather`.

    Returns:
      The rows of the variable for the ids of all inputs, in order; the number
      of ids of each input; and whether each id is a row of its table, or None
      if all ids are.
    """
    num_rows = [stored.table.num_rows for stored in tables]
    starts = [stored.start for stored in tables]
    if len(tables) == 1:
        (joined,) = ids
        limit = tf.constant(num_rows[0], tf.int64)
        start = tf.constant(starts[0], tf.int64)
        sizes, owner = tf.size(joined, tf.int64)[tf.newaxis], None
    else:
        joined = tf.concat(ids, axis=0)
        sizes = tf.stack([tf.size(values, tf.int64) for values in ids])
        # Index of the input of each id. UpperBound is used because it is a
        # single op. In contrast, tf.repeat adds about forty ops to the graph.
        owner = tf.cast(
            tf.raw_ops.UpperBound(
                sorted_inputs=tf.cumsum(sizes)[tf.newaxis],
                values=tf.range(tf.size(joined, tf.int64))[tf.newaxis],
            )[0],
            tf.int64,
        )
        limit = tf.gather(tf.constant(num_rows, tf.int64), owner)
        start = tf.gather(tf.constant(starts, tf.int64), owner)
    if out_of_range == "clip":
        nearest = tf.maximum(tf.minimum(joined, limit - 1), 0)
        return nearest + start, sizes, None
    is_inside = (joined >= 0) & (joined < limit)
    if out_of_range == "drop":
        return tf.where(is_inside, joined, 0) + start, sizes, is_inside
    with tf.control_dependencies(
        [_assert_inside(joined, is_inside, owner, tf.constant(messages))]
    ):
        return joined + start, sizes, None


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


def read_all(stored: StoredTable, dtype: tf.DType) -> tf.Tensor:
    """Returns all rows of a stored table, unpacked.

    Args:
      stored: The table to read.
      dtype: Dtype of the result.

    Returns:
      `[num_rows, dim]`, with the same values as lookups of the table.
    """
    form, num_rows = stored.variable.form, stored.table.num_rows
    rows = _unpacked(
        stored.variable.in_graph[stored.start : stored.start + num_rows], form
    )
    return tf.cast(tf.ensure_shape(rows, [num_rows, form.dim]), dtype)


def gather_unpacked(stored: Any, ids: tf.Tensor, form: RowFormat) -> tf.Tensor:
    """Gathers packed rows of a variable, and then unpacks them.

    The function uses only operations of TensorFlow. `packing.unpack` is the
    same function for numpy arrays.

    Args:
      stored: A variable `[num_rows, form.width]`.
      ids: `[num_ids]` int64, rows of the variable.
      form: Format of the stored rows.

    Returns:
      `[num_ids, form.dim]` float32.
    """
    return _unpacked(tf.gather(stored, ids), form)


def _unpacked(rows: Any, form: RowFormat) -> tf.Tensor:
    """Returns packed rows as float32."""
    if form.kind == "float16":
        rows = tf.bitcast(rows, tf.float16)
    if not form.is_packed:
        return tf.cast(rows, tf.float32)
    codes, scale, lowest = tf.split(rows, [form.num_codes, 4, 4], axis=1)
    if form.kind == "int4":
        low_bits = tf.bitwise.bitwise_and(codes, tf.constant(15, tf.uint8))
        high_bits = tf.bitwise.right_shift(codes, tf.constant(4, tf.uint8))
        codes = tf.concat([low_bits, high_bits], axis=1)
        if form.dim % 2:
            codes = codes[:, : form.dim]
    return tf.cast(codes, tf.float32) * _float_column(scale) + _float_column(
        lowest
    )


def _float_column(four_bytes: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(four_bytes, tf.float32)[:, tf.newaxis]
