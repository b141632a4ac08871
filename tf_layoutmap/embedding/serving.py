"""Looks embeddings up with stock TensorFlow ops only.

What is traced from here runs where this package is not installed, so an
exported model serves from a plain TensorFlow. It gives what `dequeue` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs, sample_places, structure


# AutoGraph would rewrite all of this file and what it calls, at each trace.
@tf.autograph.experimental.do_not_convert
def serving_embedding_lookup(
    inputs: Any, weights: Any | None, tables: Mapping[Any, Any],
    feature_config: Any, *, out_of_range: str = "error",
) -> Any:
    """Looks up features in tables, for serving and evaluation.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> table = tf.tpu.experimental.embedding.TableConfig(
    ...     3, 2, initializer=tf.ones, combiner="sum", name="words")
    >>> feature = tf.tpu.experimental.embedding.FeatureConfig(table)
    >>> embedding = tlm.TPUEmbedding({"title": feature}, None)
    >>> ids = tf.ragged.constant([[0, 1], []], dtype=tf.int64)
    >>> found = tlm.serving_embedding_lookup(
    ...     {"title": ids}, None, embedding.embedding_tables,
    ...     {"title": feature})
    >>> found["title"].numpy().tolist()
    [[2.0, 2.0], [0.0, 0.0]]

    Args:
      inputs: Nested structure of `tf.Tensor` `[num_samples]` or `[..., ids
        per sample]`, `tf.SparseTensor` of rank 2 or more or
        `tf.RaggedTensor` of rank 2, all of integers. It may hold a part of
        the features only.
      weights: None, or the same structure with None, or float weights of the
        type of the input.
      tables: From each `TableConfig` to its rows `[num_rows, dim]`: a
        `tf.Variable`, a tensor or a `ShardedVariable`.
      feature_config: Nested structure of `FeatureConfig`.
      out_of_range: What becomes of an id that is no row of its table:
        `"error"`, `"drop"` or `"clip"`, as of `TPUEmbedding`.

    Returns:
      The structure of `inputs` with float32 activations: `[num_samples, dim]`,
      or `[num_samples, max_sequence_length, dim]` of a sequence feature.
      Samples without ids, and positions without one, are zeros. An id
      outside its table is an `InvalidArgumentError` that names the feature;
      a feature with `validate_weights_and_indices=False` leaves that to
      TensorFlow's gather, which names nothing and on a GPU gives zeros.

    Raises:
      TypeError: If ids are not integers or the structures differ in types.
      ValueError: If an input is not in `feature_config`, has no known type,
        or has a weight that does not go with it.
    """
    if out_of_range not in config.OUT_OF_RANGE:
        raise ValueError(
            f"Argument `out_of_range` must be one of {config.OUT_OF_RANGE}. "
            f"Received: {out_of_range!r}.")
    configs = dict(structure.flatten_with_paths(feature_config))
    named_inputs = structure.flatten_with_paths(inputs)
    flat_weights = structure.flatten_weights(
        weights, inputs, like="inputs")
    activations = []
    for (path, value), weight in zip(named_inputs, flat_weights):
        if path not in configs:
            raise ValueError(
                "Argument `inputs` must hold features of `feature_config`, "
                f"which are {sorted(configs)}. Received: {path!r}.")
        feature_config_of = configs[path]
        spec, table_configs = config.read_feature_config(
            [(path, _without_optimizer(feature_config_of))], None)
        if feature_config_of.table not in tables:
            raise ValueError(
                "Argument `tables` must hold the table of every input. "
                f"Missing: {table_configs[0].name!r} (feature {path!r}).")
        activations.append(_lookup(
            spec.features[0], spec.tables[0],
            tables[feature_config_of.table], value, weight, out_of_range))
    return tf.nest.pack_sequence_as(inputs, activations)


class _View:
    """Some attributes of a config in place of its own."""

    def __init__(self, viewed, **replaced):
        self._viewed = viewed
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self._viewed, name)


def _without_optimizer(feature):
    """Serving asks nothing of an optimizer, so any will do."""
    return _View(feature, table=_View(feature.table, optimizer=None))


def _lookup(feature, table, rows, value, weight, out_of_range):
    """Activations of one feature."""
    found = _read(feature, value, weight)
    shape = tf.TensorShape(rows.shape)
    if not shape.is_compatible_with([table.num_rows, table.dim]):
        raise ValueError(
            f"Table {table.name!r} must be of shape "
            f"[{table.num_rows}, {table.dim}]. Received: {shape} (feature "
            f"{feature.name!r}).")
    ids = tf.cast(found.ids, tf.int64)
    if out_of_range == "clip":
        ids = tf.clip_by_value(ids, 0, table.num_rows - 1)
    elif out_of_range == "error" and feature.validate:
        ids = _checked_ids(feature, table, ids)
    num_samples = tf.cast(found.num_samples, tf.int64)
    samples = _samples_of(feature, found, ids, num_samples)
    is_used = None
    if out_of_range == "drop":
        is_used = (ids >= 0) & (ids < table.num_rows)
    if feature.is_sequence and not found.inner_shape:
        activations = _place_in_sequence(
            feature, table, rows, ids, samples,
            _positions_of(feature, found, samples), num_samples, is_used)
        shape = [found.static_num_samples, feature.max_sequence_length]
    else:
        weights = found.weights if weight is not None else None
        if is_used is not None:
            ids, samples = (tf.boolean_mask(one, is_used)
                            for one in (ids, samples))
            if weights is not None:
                weights = tf.boolean_mask(weights, is_used)
        activations = _combine(
            table, rows, ids, samples, num_samples, weights)
        shape = [found.static_num_samples]
    if found.inner_shape:
        return _in_shape(feature, table, found, activations)
    if isinstance(value, tf.RaggedTensor) and feature.output_shape:
        shape = feature.output_shape
    return tf.ensure_shape(activations, [*shape, table.dim])


def _read(feature, value, weight):
    """The input, ragged samples laid out over the places of a shape."""
    found = feature_inputs.read_feature(feature, value, weight)
    shape = feature.output_shape
    if not isinstance(value, tf.RaggedTensor) or shape is None:
        return found
    if len(shape) == 1 and None in (shape[0], found.static_num_samples):
        return found
    return sample_places.fill(feature, found, shape)


def _in_shape(feature, table, found, activations):
    """Divides the samples into the dimensions they came in."""
    if None in found.inner_shape:
        raise ValueError(
            f"Input {feature.name!r} must have sizes that are known while "
            "tracing, but for the first and the last. Received: "
            f"{list(found.inner_shape)} between them.")
    shape = [-1, *found.inner_shape, table.dim]
    activations = tf.reshape(activations, shape)
    if feature.output_shape is None:
        return activations
    return tf.ensure_shape(activations, [*feature.output_shape, table.dim])


def _gather(table, rows, ids):
    """The rows of ids, rounded where the table is quantized."""
    # Rows of 16 bits are read as the engine reads them.
    found = tf.cast(tf.gather(rows, ids), tf.float32)
    quantization = table.quantization
    if quantization is None:
        return found
    # In float32 throughout, as the engine does it.
    lower = tf.constant(quantization.lower, tf.float32)
    upper = tf.constant(quantization.upper, tf.float32)
    quantum = (upper - lower) / tf.cast(
        quantization.num_buckets - 1, tf.float32)
    clipped = tf.clip_by_value(found, lower, upper)
    bucket = tf.floor((clipped - lower) / quantum + 0.5)
    return bucket * quantum + lower


def _checked_ids(feature, table, ids):
    message = (f"Feature {feature.name!r}: ids must be in "
               f"[0, {table.num_rows}), the rows of table {table.name!r}.")
    checks = [
        tf.debugging.assert_non_negative(ids, message),
        tf.debugging.assert_less(
            ids, tf.constant(table.num_rows, tf.int64), message),
    ]
    with tf.control_dependencies([one for one in checks if one is not None]):
        return tf.identity(ids)


def _samples_of(feature, found, ids, num_samples):
    """Which sample each id belongs to: `[num_ids]` int64."""
    if found.splits.shape.rank == 2:
        samples = found.splits[:, 0]
        # Segment sums need them ascending; an unsorted sparse tensor would
        # be summed wrongly or fail without a name.
        check = tf.debugging.assert_non_negative(
            samples[1:] - samples[:-1],
            f"Feature {feature.name!r}: a sparse input must be in row-major "
            "order; see tf.sparse.reorder.")
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(samples)
    if found.splits.shape[0] == 0:
        per_sample = tf.math.floordiv(
            tf.size(ids, tf.int64), tf.maximum(num_samples, 1))
        return tf.repeat(tf.range(num_samples), per_sample)
    return tf.repeat(
        tf.range(num_samples), found.splits[1:] - found.splits[:-1])


def _combine(table, rows, ids, samples, num_samples, weights):
    """Sum of gain times row over the ids of each sample."""
    found = _gather(table, rows, ids)
    if weights is None and table.combiner == "sum":
        return tf.math.unsorted_segment_sum(found, samples, num_samples)
    if weights is None:
        weights = tf.ones_like(ids, tf.float32)
    if table.combiner == "mean":
        total = tf.math.unsorted_segment_sum(weights, samples, num_samples)
        weights = tf.math.divide_no_nan(weights, tf.gather(total, samples))
    elif table.combiner == "sqrtn":
        squares = tf.math.unsorted_segment_sum(
            tf.square(weights), samples, num_samples)
        weights = tf.math.divide_no_nan(
            weights, tf.gather(tf.sqrt(squares), samples))
    return tf.math.unsorted_segment_sum(
        found * weights[:, tf.newaxis], samples, num_samples)


def _positions_of(feature, found, samples):
    """Where in its sample each id of a sequence stands: `[num_ids]` int64."""
    if found.splits.shape.rank != 2:
        return tf.range(tf.size(samples, tf.int64), dtype=tf.int64) - (
            tf.searchsorted(samples, samples, side="left", out_type=tf.int64))
    positions = found.splits[:, 1]
    message = (f"Feature {feature.name!r}: the positions of a sequence in a "
               "sparse input must be at least 0 and ascend; see "
               "tf.sparse.reorder.")
    is_later = (samples[1:] > samples[:-1]) | (positions[1:] > positions[:-1])
    checks = [tf.debugging.assert_non_negative(positions, message),
              tf.debugging.Assert(tf.reduce_all(is_later), [message])]
    with tf.control_dependencies([one for one in checks if one is not None]):
        return tf.identity(positions)


def _place_in_sequence(feature, table, rows, ids, samples, positions,
                       num_samples, is_used):
    """Rows at their positions; what is longer is cut, what is shorter 0."""
    kept = positions < feature.max_sequence_length
    if is_used is not None:
        kept &= is_used
    kept = tf.where(kept)[:, 0]
    places = tf.stack(
        [tf.gather(samples, kept), tf.gather(positions, kept)], axis=1)
    shape = tf.stack([num_samples,
                      tf.constant(feature.max_sequence_length, tf.int64),
                      tf.constant(table.dim, tf.int64)])
    return tf.scatter_nd(
        places, _gather(table, rows, tf.gather(ids, kept)), shape)
