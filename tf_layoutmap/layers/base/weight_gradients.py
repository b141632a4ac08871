"""Gradients of the weights of ids, while the engine trains the tables.

The engine computes activations and the gradients of tables. TensorFlow's ops
compute the gradient of a weight from the row of its id and the gradient of the
activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import stock_lookup
from tf_layoutmap.embedding.configs import config

# Returns the row of each id, `[num_ids, dim]`, for the features whose ids are
# not None.
RowsOfIds = Callable[
    [Sequence[embedding_inputs.FeatureIds | None]], list[tf.Tensor]
]


def may_have_gradient(weights: Any) -> bool:
    """Returns whether gradients of any weights may be computed.

    A function that is being traced does not know whether a tape records its
    arguments.
    """
    values = [
        tensor
        for tensor in tf.nest.flatten(weights, expand_composites=True)
        if getattr(tensor, "dtype", None) is not None
        and tf.as_dtype(tensor.dtype).is_floating
    ]
    return (not tf.executing_eagerly() and bool(values)) or is_recorded(values)


def is_recorded(values: Any) -> bool:
    """Returns whether a tape records computations on any of the tensors."""
    tensors = [
        tensor
        for tensor in tf.nest.flatten(values, expand_composites=True)
        if tf.is_tensor(tensor)
    ]
    return bool(
        tensors
        and tf_private.could_possibly_record()
        and tf_private.should_record_backprop(tensors)
    )


def connect(
    spec: config.EmbeddingSpec,
    activations: Sequence[tf.Tensor],
    inputs: Sequence[Any],
    weights: Sequence[Any],
    rows_of_ids: RowsOfIds,
    out_of_range: str,
) -> list[tf.Tensor]:
    """Connects the gradients of activations with the gradients of weights.

    Args:
      spec: Tables and features.
      activations: Activations of each feature.
      inputs: Ids of each feature.
      weights: For each feature, the weights of its ids, or None.
      rows_of_ids: Function that returns the rows of ids.
      out_of_range: How ids outside of their table are handled.

    Returns:
      The same activations.
    """
    all_ids: list[embedding_inputs.FeatureIds | None] = [
        None
        if weight is None
        else stock_lookup.read(
            feature,
            value,
            weight,
            spec.table_of(feature).vocabulary is not None,
        )
        for feature, value, weight in zip(spec.features, inputs, weights)
    ]
    return [
        activation
        if ids is None
        else _connect_feature(
            spec, index, activation, all_ids, rows_of_ids, out_of_range
        )
        for index, (activation, ids) in enumerate(zip(activations, all_ids))
    ]


def _connect_feature(
    spec: config.EmbeddingSpec,
    index: int,
    activation: tf.Tensor,
    all_found: Sequence[embedding_inputs.FeatureIds | None],
    rows_of_ids: RowsOfIds,
    out_of_range: str,
) -> tf.Tensor:
    feature = spec.features[index]
    table = spec.table_of(feature)
    ids = all_found[index]
    assert ids is not None
    of_feature = [
        feature_ids if other == index else None
        for other, feature_ids in enumerate(all_found)
    ]
    now = is_recorded([ids.weights])
    if out_of_range == "drop" and table.vocabulary is None:
        # Ids that are ignored do not count in the divisor of their sample.
        is_used = (ids.ids >= 0) & (tf.cast(ids.ids, tf.int64) < table.num_rows)
        ids.weights = tf.where(is_used, ids.weights, 0.0)
    # The rows may change before the gradient is computed, for example if a
    # persistent tape computes it again after an update.
    rows_before = _rows(rows_of_ids, of_feature, index) if now else None
    if tf.executing_eagerly() and not now:
        return activation
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @tf.custom_gradient
    def connected(activation: tf.Tensor, weights: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> Any:
            if not now and graph is tf.compat.v1.get_default_graph():
                # The tape is in the same function, and does not record the
                # weights.
                return upstream, None
            rows = (
                _rows(rows_of_ids, of_feature, index)
                if rows_before is None
                else rows_before
            )
            return upstream, _gradient_of_weights(
                feature, table, ids, weights, rows, upstream
            )

        return tf.identity(activation), gradient

    connected_activation: Any = connected(activation, ids.weights)
    return connected_activation


def _rows(
    rows_of_ids: RowsOfIds,
    features: Sequence[embedding_inputs.FeatureIds | None],
    index: int,
) -> tf.Tensor:
    with tf_private.stop_recording():
        return rows_of_ids(features)[index]


def _gradient_of_weights(
    feature: config.FeatureSpec,
    table: config.TableSpec,
    ids: embedding_inputs.FeatureIds,
    weights: tf.Tensor,
    rows: tf.Tensor,
    upstream: tf.Tensor,
) -> tf.Tensor:
    """Returns the gradient of weights, `[num_ids]` float32.

    An activation is the sum of `gains[i] * rows[i]`. The gains are computed in
    double precision, as in the engine.
    """
    num_samples = tf.cast(ids.num_samples, tf.int64)
    samples = stock_lookup.samples_of(feature, ids, ids.ids, num_samples)
    upstream = tf.reshape(upstream, [-1, table.dim])
    of_gains = tf.reduce_sum(tf.gather(upstream, samples) * rows, axis=1)
    if table.combiner == "sum":
        return of_gains
    with tf.GradientTape() as tape:
        tape.watch(weights)
        gains = stock_lookup.gains_of(
            table.combiner, weights, samples, num_samples
        )
    gradient: Any = tape.gradient(gains, weights, output_gradients=[of_gains])
    return gradient
