"""Lookups in an exported model, with one gather per variable.

`FeatureLookup` replaces the lookup of a `TPUEmbedding`, and `RowLookup`
replaces the lookup of a `ShardedEmbedding`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import placeholders
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import stock_lookup
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase
from tf_layoutmap.serving import row_gathers
from tf_layoutmap.serving.stored_tables import StoredTable
from tf_layoutmap.sharded import ShardedVariable


def lookups_of(
    tables: Sequence[StoredTable],
) -> list[placeholders.Placeholder]:
    """Returns the functions that replace lookups and reads of tables."""
    tables_of: dict[Any, list[StoredTable]] = {}
    for stored in tables:
        tables_of.setdefault(stored.table.owner, []).append(stored)
    lookups: list[placeholders.Placeholder] = [
        (
            owner,
            FeatureLookup(owner, stored)
            if isinstance(owner, EmbeddingBase)
            else RowLookup(*stored),
        )
        for owner, stored in tables_of.items()
    ]
    # A table that the model reads without a lookup, for example for tied
    # weights, is read from the stored table.
    reads: list[placeholders.Placeholder] = [
        (
            weight,
            functools.partial(
                row_gathers.read_all, stored, tf.as_dtype(weight.dtype)
            ),
        )
        for stored in tables
        if isinstance(
            weight := stored.table.weight, ShardedVariable | keras.Variable
        )
    ]
    return lookups + reads


class FeatureLookup:
    """Looks up the features of an embedding in exported tables.

    The results are equal to the results of `serving_embedding_lookup`. The
    lookup uses far fewer operations, because it checks and gathers the ids of
    all features together.
    """

    def __init__(self, embedding: EmbeddingBase, tables: Sequence[StoredTable]):
        """Creates the lookup.

        Args:
          embedding: The embedding.
          tables: Its stored tables, in the order of its spec.
        """
        access = LayerAccess(embedding)
        self._spec = access.spec
        self._tables = tables
        self._out_of_range = access.out_of_range
        self._features: Mapping[str, config.FeatureSpec] = {
            feature.name: feature for feature in self._spec.features
        }

    @tf.autograph.experimental.do_not_convert
    def __call__(self, inputs: Any, weights: Any = None) -> Any:
        """Returns the activations of all features."""
        flat_weights = embedding_inputs.flatten_weights(
            weights, inputs, like="inputs"
        )
        inputs_of: list[tuple[Any, bool, embedding_inputs.FeatureIds]] = []
        features: list[config.FeatureSpec] = []
        for (path, value), weight in zip(
            embedding_inputs.flatten_with_paths(inputs), flat_weights
        ):
            features.append(self._feature_of(path))
            feature_ids = self._read(features[-1], value, weight)
            inputs_of.append((value, weight is not None, feature_ids))
        gathered = row_gathers.gather(
            [self._tables[feature.table] for feature in features],
            [
                tf.cast(feature_ids.ids, tf.int64)
                for _, _, feature_ids in inputs_of
            ],
            [self._message_of(feature) for feature in features],
            self._out_of_range,
        )
        return tf.nest.pack_sequence_as(
            inputs,
            [
                self._activations(feature, *of_feature, *rows)
                for feature, of_feature, rows in zip(
                    features, inputs_of, gathered
                )
            ],
        )

    def _read(
        self, feature: config.FeatureSpec, value: Any, weight: Any
    ) -> embedding_inputs.FeatureIds:
        """Returns the input of a feature, with keys replaced by their rows."""
        keys = self._tables[feature.table].keys
        feature_ids = stock_lookup.read(
            feature, value, weight, keys is not None
        )
        if keys is None:
            return feature_ids
        # The kind is a tensor only for packed batches, which are not served.
        assert isinstance(feature_ids.kind, int)
        return dataclasses.replace(
            feature_ids,
            ids=keys.rows_of(
                tf.cast(feature_ids.ids, tf.int64), feature_ids.kind
            ),
        )

    def _feature_of(self, path: str) -> config.FeatureSpec:
        # If there is only one feature, the input has no name.
        if not path and len(self._spec.features) == 1:
            return self._spec.features[0]
        if path not in self._features:
            raise ValueError(
                "Argument `inputs` must contain features of `feature_config`, "
                f"which are {sorted(self._features)}. Received: {path!r}."
            )
        return self._features[path]

    def _message_of(self, feature: config.FeatureSpec) -> str:
        """Returns the error message for out-of-range ids."""
        table = self._spec.table_of(feature)
        return (
            f"Feature {feature.name!r}: ids must be in [0, {table.num_rows}), "
            f"the rows of table {table.name!r}."
        )

    def _activations(
        self,
        feature: config.FeatureSpec,
        value: Any,
        has_weights: bool,
        feature_ids: embedding_inputs.FeatureIds,
        rows: tf.Tensor,
        is_inside: tf.Tensor | None,
    ) -> tf.Tensor:
        table = self._spec.table_of(feature)
        rows = stock_lookup.rounded_rows(table, rows)
        num_samples = tf.cast(feature_ids.num_samples, tf.int64)
        is_placed = feature.is_sequence and not feature_ids.inner_shape
        if (
            not is_placed
            and is_inside is None
            and _ids_per_sample(value, feature_ids) == 1
        ):
            # If a sample has only one id, all combiners return the row of this
            # id.
            return stock_lookup.in_shape(
                feature, table, value, feature_ids, rows
            )
        samples = _samples_of(feature, value, feature_ids, num_samples)
        if is_placed:
            kept, indices = stock_lookup.kept_in_sequence(
                feature,
                samples,
                stock_lookup.positions_of(feature, feature_ids, samples),
                is_inside,
            )
            activations = stock_lookup.in_sequence(
                feature, table, indices, tf.gather(rows, kept), num_samples
            )
        else:
            weights = feature_ids.weights if has_weights else None
            if is_inside is not None:
                # The row and the weight of a dropped id are replaced by zeros.
                rows = tf.where(is_inside[:, tf.newaxis], rows, 0.0)
                used = tf.cast(is_inside, tf.float32)
                weights = (
                    used
                    if weights is None
                    else tf.where(is_inside, weights, 0.0)
                )
            activations = stock_lookup.combine_rows(
                table, rows, samples, num_samples, weights
            )
        return stock_lookup.in_shape(
            feature, table, value, feature_ids, activations
        )


def _ids_per_sample(
    value: Any, feature_ids: embedding_inputs.FeatureIds
) -> int | None:
    """Returns the number of ids per sample of a dense input, if known."""
    if feature_ids.splits.shape != [0]:
        return None
    shape = tf.TensorShape(value.shape)
    return 1 if shape.rank == 1 else shape[-1]


def _samples_of(feature, value, feature_ids, num_samples):
    """Returns the sample of each id.

    The result is equal to the result of `stock_lookup.samples_of`. For dense
    and ragged inputs, this function uses fewer operations.
    """
    num_ids = tf.size(feature_ids.ids, tf.int64)
    per_sample = _ids_per_sample(value, feature_ids)
    if per_sample:
        return tf.range(num_ids) // per_sample
    if feature_ids.splits.shape.rank == 1 and feature_ids.splits.shape != [0]:
        # The index of an id's sample is equal to the number of samples that end
        # at or before this id.
        return tf.cast(
            tf.raw_ops.UpperBound(
                sorted_inputs=feature_ids.splits[tf.newaxis, 1:],
                values=tf.range(num_ids)[tf.newaxis],
            )[0],
            tf.int64,
        )
    return stock_lookup.samples_of(
        feature, feature_ids, feature_ids.ids, num_samples
    )


class RowLookup:
    """Looks up rows in one exported table."""

    def __init__(self, stored: StoredTable):
        """Initializes the lookup. Error messages name the layer."""
        self._stored = stored
        table = stored.table
        self._message = (
            f"Ids must be in [0, {table.num_rows}) (layer "
            f"{table.name_in_owner!r})."
        )

    @tf.autograph.experimental.do_not_convert
    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows, `ids.shape + [dim]` float32.

        An out-of-range id raises an error.
        """
        flat = tf.cast(tf.reshape(ids, [-1]), tf.int64)
        ((rows, _),) = row_gathers.gather(
            [self._stored], [flat], [self._message], "error"
        )
        dim = self._stored.table.dim
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], 0))
        return tf.ensure_shape(rows, ids.shape.concatenate([dim]))
