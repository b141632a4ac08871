"""Rows of ids out of a stored table: gathered first, unpacked after.

TensorFlow's own operations only. `packing` has the same in numpy.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.serving.tables.packing import RowFormat


def gather(stored: Any, ids: tf.Tensor, form: RowFormat) -> tf.Tensor:
    """Returns rows.

    Args:
      stored: A variable `[num_rows, form.width]`.
      ids: `[num_ids]` int64, each a row of it.
      form: How the rows are stored.

    Returns:
      `[num_ids, form.dim]` float32.
    """
    rows = tf.gather(stored, ids)
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
