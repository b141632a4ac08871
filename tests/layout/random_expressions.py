"""Expressions of the random models in `random_models.py`.

Each function of `EXPRESSIONS` maps a tensor `h` to a tensor of the same shape.
The last dimension of `h` is even.
"""

import keras
import tensorflow as tf


def _normalized(x):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


@tf.custom_gradient
def _clipped_gradient(x):
    return tf.identity(x), lambda dy: tf.clip_by_value(dy, -0.01, 0.01)


def _halves(x):
    first, second = tf.split(x, 2, axis=-1)
    return tf.concat([second * tf.sigmoid(first), first], -1)


def _loop(x):
    return tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y + x)), (0, x)
    )[1]


def _inner_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.tanh(x) ** 3)
    return tape.gradient(y, x)


def _late_tape(x):
    """Watches a tensor with a tape after the tensor has been used."""
    largest = tf.math.top_k(x, x.shape[-1])[0]
    factor = tf.reduce_mean(largest * largest, -1, keepdims=True)
    with tf.GradientTape() as tape:
        tape.watch(largest)
        y = tf.reduce_sum(tf.tanh(largest) ** 2)
    return x * factor + tape.gradient(y, largest)


def _attention(x):
    scores = tf.nn.softmax(x[..., :, None] * x[..., None, :])
    return tf.einsum("...ij,...j->...i", scores, x)


def _scattered(x):
    rows = tf.transpose(tf.reshape(x, [-1, x.shape[-1]]))
    size = rows.shape[0]
    summed = tf.math.unsorted_segment_sum(rows, tf.range(size) // 2, size)
    return tf.reshape(tf.transpose(summed), tf.shape(x))


def _mapped(x):
    columns = keras.ops.moveaxis(x, -1, 0)
    mapped = keras.ops.map(lambda y: y * keras.ops.tanh(y), columns)
    return keras.ops.moveaxis(mapped, 0, -1)


def _scanned(x):
    columns = keras.ops.moveaxis(x, -1, 0)
    _, sums = keras.ops.scan(
        lambda carry, y: (0.5 * carry + y, carry * y),
        keras.ops.zeros_like(columns[0]),
        columns,
    )
    return keras.ops.moveaxis(sums, 0, -1)


def _segment_sums(x):
    columns = keras.ops.moveaxis(x, -1, 0)
    size = columns.shape[0]
    sums = keras.ops.segment_sum(
        columns, tf.range(size) // 2, num_segments=size
    )
    return keras.ops.moveaxis(sums, 0, -1)


def _scatter_update(x):
    columns = keras.ops.moveaxis(x, -1, 0)
    updated = keras.ops.scatter_update(
        columns, [[1], [0]], keras.ops.tanh(columns[:2])
    )
    return keras.ops.moveaxis(updated, 0, -1)


EXPRESSIONS = {
    "identity": tf.identity,
    "gate": lambda h: tf.sigmoid(h) * h,
    "cumsum": lambda h: tf.cumsum(h, axis=-1),
    "cumsum exclusive": lambda h: tf.cumsum(
        h, axis=-1, exclusive=True, reverse=True
    ),
    "cumprod": lambda h: tf.math.cumprod(0.3 * tf.tanh(h) + 1, axis=-1),
    "reverse": lambda h: tf.reverse(h, [-1]),
    "sort": lambda h: tf.sort(h, axis=-1),
    "top_k": lambda h: (
        h * tf.reduce_sum(tf.math.top_k(h, 3)[0], -1, keepdims=True)
    ),
    "moments": _normalized,
    "reduce_prod": lambda h: (
        h * tf.reduce_prod(0.3 * tf.tanh(h) + 1, -1, keepdims=True)
    ),
    "reduce_max": lambda h: h - tf.reduce_max(h, -1, keepdims=True),
    "logsumexp": lambda h: h - tf.reduce_logsumexp(h, -1, keepdims=True),
    "tile": lambda h: tf.tile(h, [*[1] * (len(h.shape) - 1), 2])[
        ..., 3 : 3 + h.shape[-1]
    ],
    "roll": lambda h: tf.roll(h, 3, -1) + h,
    "halves": _halves,
    "gather": lambda h: tf.gather(
        h, [*range(1, h.shape[-1], 2), *range(0, h.shape[-1], 2)], axis=-1
    ),
    "stop_gradient": lambda h: h * tf.stop_gradient(tf.sigmoid(h)) + h,
    "softmax": tf.nn.softmax,
    "log_softmax": tf.nn.log_softmax,
    "attention": _attention,
    "reshape": lambda h: tf.reshape(
        tf.linalg.matrix_transpose(
            tf.reshape(h, [-1, *h.shape[1:-1], h.shape[-1] // 2, 2])
        ),
        tf.shape(h),
    ),
    "where": lambda h: tf.where(h > 0, h, 0.1 * h * h),
    "l2_normalize": lambda h: tf.nn.l2_normalize(h, -1),
    "custom_gradient": _clipped_gradient,
    "recompute_grad": lambda h: tf.recompute_grad(lambda y: tf.tanh(y) * y)(h),
    "while_loop": _loop,
    "inner gradient": _inner_gradient,
    "late tape": _late_tape,
    "pad": lambda h: tf.pad(h, [*[[0, 0]] * (len(h.shape) - 1), [2, 1]])[
        ..., : h.shape[-1]
    ],
    "strided slice": lambda h: tf.concat([h[..., ::2], h[..., 1::2]], -1),
    "segment sum": _scattered,
    "one_hot": lambda h: (
        h + tf.one_hot(tf.argmax(h, -1), h.shape[-1], dtype=h.dtype)
    ),
    "clip": lambda h: tf.clip_by_value(h, -0.7, 0.7),
    "erf": lambda h: tf.math.erf(h) * h,
    "stack": lambda h: tf.reduce_sum(
        tf.stack([h, tf.square(h), tf.tanh(h)], -2)
        * tf.constant([[0.5], [0.3], [0.2]], h.dtype),
        -2,
    ),
    "broadcast": lambda h: (
        h * tf.broadcast_to(tf.reduce_mean(h, -1, keepdims=True), tf.shape(h))
    ),
    "ops.map": _mapped,
    "ops.scan": _scanned,
    "ops.segment_sum": _segment_sums,
    "ops.scatter_update": _scatter_update,
    "ops.switch": lambda h: keras.ops.switch(
        1, [keras.ops.tanh, keras.ops.square], h
    ),
    "ops.cond": lambda h: keras.ops.cond(
        keras.ops.sum(h) > 0, lambda: keras.ops.tanh(h), lambda: 2 * h
    ),
    "ops.fft": lambda h: keras.ops.fft((h, keras.ops.zeros_like(h)))[0],
    "ops.logaddexp": lambda h: h * keras.ops.logaddexp(h, -h),
    "ops.flip": lambda h: keras.ops.flip(h, -1) + h,
    "squared difference": lambda h: tf.math.squared_difference(
        h, tf.reverse(h, [-1])
    ),
}
