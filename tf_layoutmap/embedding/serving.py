"""Looks embeddings up with stock TensorFlow ops only.

What is traced from here runs where this package is not installed, so an
exported model serves from a plain TensorFlow. It gives what `dequeue` gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import stock_lookup
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.vocabulary.state import Vocabulary


# AutoGraph would rewrite all of this file and what it calls, at each trace.
@tf.autograph.experimental.do_not_convert
def serving_embedding_lookup(
    inputs: Any,
    weights: Any | None,
    tables: Mapping[Any, Any],
    feature_config: Any,
    *,
    out_of_range: str = "error",
    vocabularies: Mapping[str, Vocabulary] | None = None,
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
      vocabularies: Of tables whose ids are keys, by name, as of
        `TPUEmbedding.vocabularies`. Keys without a row are as in training.

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
            f"Received: {out_of_range!r}."
        )
    configs = dict(embedding_inputs.flatten_with_paths(feature_config))
    named_inputs = embedding_inputs.flatten_with_paths(inputs)
    flat_weights = embedding_inputs.flatten_weights(
        weights, inputs, like="inputs"
    )
    activations = []
    for (path, value), weight in zip(named_inputs, flat_weights):
        if path not in configs:
            raise ValueError(
                "Argument `inputs` must hold features of `feature_config`, "
                f"which are {sorted(configs)}. Received: {path!r}."
            )
        feature_config_of = configs[path]
        spec, table_configs = config.read_feature_config(
            [(path, _without_optimizer(feature_config_of))], None
        )
        if feature_config_of.table not in tables:
            raise ValueError(
                "Argument `tables` must hold the table of every input. "
                f"Missing: {table_configs[0].name!r} (feature {path!r})."
            )
        table, vocabulary = spec.tables[0], None
        if vocabularies and table.name in vocabularies:
            vocabulary = vocabularies[table.name]
            table = dataclasses.replace(
                table, num_rows=vocabulary.settings.num_rows
            )
        activations.append(
            stock_lookup.look_up(
                spec.features[0],
                table,
                tables[feature_config_of.table],
                value,
                weight,
                out_of_range,
                vocabulary and vocabulary.rows_by_stock_ops,
            )
        )
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
