"""`serving_embedding_lookup`: lookups with TensorFlow's own ops only.

The traced graph of a lookup does not require this package, so TensorFlow alone
can serve an exported model. The results match the results of `dequeue`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import literals
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import stock_lookup
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.vocabulary.state import Vocabulary

if TYPE_CHECKING:
    from tf_layoutmap._core.types import (
        FeatureConfigs,
        Features,
        TableKey,
        TensorLike,
    )


# Without this decorator, each trace would run AutoGraph on the function and on
# all functions that it calls.
@tf.autograph.experimental.do_not_convert
def serving_embedding_lookup(
    inputs: Features,
    weights: Features | None,
    tables: Mapping[TableKey, TensorLike],
    feature_config: FeatureConfigs,
    *,
    out_of_range: literals.OutOfRange = "error",
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> Any:
    """Looks up the rows of features, for serving and evaluation.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> table = tf.tpu.experimental.embedding.TableConfig(
    ...     3, 2, initializer=tf.ones, combiner="sum", name="words")
    >>> feature = tf.tpu.experimental.embedding.FeatureConfig(table)
    >>> embedding = tlm.TPUEmbedding({"title": feature}, None)
    >>> ids = tf.ragged.constant([[0, 1], []], dtype=tf.int64)
    >>> found = tlm.serving.serving_embedding_lookup(
    ...     {"title": ids}, None, embedding.embedding_tables,
    ...     {"title": feature})
    >>> found["title"].numpy().tolist()
    [[2.0, 2.0], [0.0, 0.0]]

    Args:
      inputs: Nested structure of integer ids. Each leaf is a `tf.Tensor`
        `[num_samples]` or `[..., ids per sample]`, a `tf.SparseTensor` of rank
        2 or more, or a `tf.RaggedTensor` of rank 2. The structure can contain a
        subset of the features.
      weights: None, or the same structure in which each leaf is None or the
        weights of the ids. Weights are floats, and have the same tensor type as
        the ids.
      tables: Mapping from each `TableConfig` to the rows of its table,
        `[num_rows, dim]`. The rows are a `tf.Variable`, a tensor or a
        `ShardedVariable`.
      feature_config: Nested structure of `FeatureConfig`.
      out_of_range: How ids outside of their table are handled: `"error"`,
        `"drop"` or `"clip"`, as in `TPUEmbedding`.
      vocabularies: Vocabularies by table name for all tables whose ids are
        keys, as in `TPUEmbedding.vocabularies`. Keys without a row are handled
        in the same way as in training.

    Returns:
      Float32 activations in the structure of `inputs`. The shape is
      `[num_samples, dim]`, or `[num_samples, max_sequence_length, dim]` for a
      sequence feature. Samples and positions without ids have activations of
      zeros. With `out_of_range="error"`, an id outside of its table raises an
      `InvalidArgumentError` when the ops run. The message names the feature.
      If a feature has `validate_weights_and_indices=False`, `tf.gather` handles
      ids outside of the table. On a CPU, `tf.gather` raises an error that does
      not name the feature. On a GPU, `tf.gather` returns zeros.

    Raises:
      TypeError: If ids are not integers, or if the structures have different
        types.
      ValueError: If an input is not in `feature_config`, if the type of an
        input is not supported, or if weights do not match their ids.
    """
    return look_up(
        inputs,
        weights,
        tables,
        feature_config,
        out_of_range,
        vocabularies,
        may_fuse=False,
    )


@tf.autograph.experimental.do_not_convert
def look_up(
    inputs: Features,
    weights: Features | None,
    tables: Mapping[TableKey, TensorLike],
    feature_config: FeatureConfigs,
    out_of_range: literals.OutOfRange,
    vocabularies: Mapping[str, Vocabulary] | None,
    *,
    may_fuse: bool,
) -> Any:
    """Does the same as `serving_embedding_lookup`.

    Args:
      inputs: See `serving_embedding_lookup`.
      weights: See `serving_embedding_lookup`.
      tables: See `serving_embedding_lookup`.
      feature_config: See `serving_embedding_lookup`.
      out_of_range: See `serving_embedding_lookup`.
      vocabularies: See `serving_embedding_lookup`.
      may_fuse: Whether the lookup can use an op of this package. Pass False if
        the graph may be exported.
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
        one_config = configs[path]
        spec, table_configs = config.read_feature_config(
            [(path, _without_optimizer(one_config))], None
        )
        if one_config.table not in tables:
            raise ValueError(
                "Argument `tables` must contain the table of every input. "
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
                tables[one_config.table],
                value,
                weight,
                out_of_range,
                vocabulary and vocabulary.rows_of_keys,
                may_fuse=may_fuse,
            )
        )
    return tf.nest.pack_sequence_as(inputs, activations)


class _ConfigView:
    """View of a config in which some attributes are replaced."""

    def __init__(self, config, **replaced):
        self._config = config
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self._config, name)


def _without_optimizer(feature):
    """Returns a view of a feature config whose table has no optimizer."""
    return _ConfigView(
        feature, table=_ConfigView(feature.table, optimizer=None)
    )
