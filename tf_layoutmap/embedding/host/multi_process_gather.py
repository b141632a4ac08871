"""What all replicas of all processes gather of each other's steps."""

from __future__ import annotations

import tensorflow as tf

from tf_layoutmap.embedding.step import feature_inputs

# How long a process waits for the others, which may be writing a checkpoint.
# One that died is noticed earlier, by its connection.
TIMEOUT_SECONDS = 600

# What a process says of each feature: its form (the rank of its splits, 0 if
# it is dense), what its ids are made of, ids, splits, weights and samples.
_NUM_SIZES = 6


def options() -> tf.distribute.experimental.CommunicationOptions:
    """Returns how long collective operations wait."""
    return tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=TIMEOUT_SECONDS
    )


def all_gather(values: tf.Tensor) -> tf.Tensor:
    """The vectors, or rows, of all replicas after each other."""
    context = tf.distribute.get_replica_context()
    return context.all_gather(values, axis=0, options=options())


def _size(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64)


def _form(feature: feature_inputs.FeatureIds) -> int:
    if feature.splits.shape.rank == 2:
        return 2
    return 0 if feature.splits.shape[0] == 0 else 1


def gather_inputs(features, training, restores, num_replicas: int):
    """`(training, features)` and restores of each replica, on all replicas."""
    sizes = [tf.cast(training, tf.int64), restores]
    for one in features:
        sizes += [
            tf.constant(_form(one), tf.int64),
            tf.constant(one.kind, tf.int64),
            _size(one.ids),
            _size(one.splits),
            _size(one.weights),
            tf.cast(one.num_samples, tf.int64),
        ]
    sizes = tf.ensure_shape(
        all_gather(tf.stack(sizes)[tf.newaxis]),
        [num_replicas, 2 + _NUM_SIZES * len(features)],
    )
    whole = [
        tf.reshape(tf.cast(part, tf.int64), [-1])
        for one in features
        for part in (one.ids, one.splits)
    ]
    whole = _Reader(all_gather(tf.concat(whole, 0)))
    # Whether there are weights is part of the program, which is one.
    has_weights = any(one.weights.shape[0] != 0 for one in features)
    weights = _Reader(
        all_gather(tf.concat([one.weights for one in features], 0))
        if has_weights
        else tf.zeros([0])
    )
    found = []
    for replica in range(num_replicas):
        inputs = []
        for index, one in enumerate(features):
            first = 2 + _NUM_SIZES * index
            (form, kind, num_ids, num_splits, num_weights, num_samples) = (
                tf.unstack(sizes[replica, first : first + _NUM_SIZES])
            )
            checks = [
                tf.debugging.assert_equal(
                    form,
                    tf.constant(_form(one), tf.int64),
                    f"Feature {index} must have the same form, dense, sparse "
                    "or ragged, in all processes.",
                ),
                tf.debugging.assert_equal(
                    kind,
                    tf.constant(one.kind, tf.int64),
                    f"Feature {index} must have integers in all processes, or "
                    "strings in all.",
                ),
            ]
            with tf.control_dependencies(
                [check for check in checks if check is not None]
            ):
                ids = whole.take(num_ids)
            splits = whole.take(num_splits)
            if _form(one) == 2:
                splits = tf.reshape(splits, [-1, 2])
            elif _form(one) == 0:
                splits = tf.zeros([0], tf.int64)
            inputs.append(
                feature_inputs.FeatureIds(
                    ids,
                    splits,
                    num_samples,
                    weights.take(num_weights),
                    kind=one.kind,
                )
            )
        found.append((tf.cast(sizes[replica, 0], tf.bool), inputs))
    return found, sizes[:, 1]


def gather_gradients(gradients, hyperparameters, num_replicas: int):
    """`(gradients, hyperparameters)` of each replica, on all replicas."""
    rows = all_gather(
        tf.stack([tf.shape(one, tf.int64)[0] for one in gradients])[tf.newaxis]
    )
    values = _Reader(
        all_gather(
            tf.concat(
                [
                    tf.reshape(one, [-1])
                    for one in [*gradients, *hyperparameters]
                ],
                0,
            )
        )
    )
    found = []
    for replica in range(num_replicas):
        of_replica = [
            tf.reshape(
                values.take(
                    rows[replica, index] * int(one.shape[1:].num_elements())
                ),
                [-1, *one.shape[1:]],
            )
            for index, one in enumerate(gradients)
        ]
        found.append(
            (
                of_replica,
                [
                    tf.ensure_shape(values.take(int(one.shape[0])), one.shape)
                    for one in hyperparameters
                ],
            )
        )
    return found


class _Reader:
    """Takes one piece after the other from a vector."""

    def __init__(self, values: tf.Tensor):
        self._values = values
        self._next = tf.constant(0, tf.int64)

    def take(self, size: tf.Tensor | int) -> tf.Tensor:
        """Returns the next `size` values."""
        size = tf.cast(size, tf.int64)
        piece = self._values[self._next : self._next + size]
        self._next += size
        return piece
