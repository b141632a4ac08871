"""Lookups in an exported model, with one gather per variable.

`FeatureLookup` replaces the lookup of a `TPUEmbedding`, and `RowLookup`
replaces the lookup of a `ShardedEmbedding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import stock_lookup
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.serving import stored_tables
from tf_layoutmap.serving.stored_tables import (
    Found,
    StoredKeys,
    StoredTable,
    Wanted,
)


class FeatureLookup:
    """Looks up the features of an embedding in exported tables.

    The results are equal to the results of `serving_embedding_lookup`. The
    lookup uses far fewer operations, because it checks and gathers the ids of
    all features together.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        tables: Sequence[StoredTable],
        out_of_range: str,
        keys: Mapping[int, StoredKeys] | None = None,
    ):
        """Creates the lookup.

        Args:
          spec: Tables and features of the embedding.
          tables: The stored tables, in the order of `spec.tables`.
          out_of_range: Handling of out-of-range ids: `"error"`, `"drop"` or
            `"clip"`.
          keys: Keys of the tables with open vocabularies, by index of the
            table.
        """
        self._spec = spec
        self._tables = tables
        self._out_of_range = out_of_range
        self._keys = keys or {}
        self._features: Mapping[str, config.FeatureSpec] = {
            feature.name: feature for feature in spec.features
        }

    @tf.autograph.experimental.do_not_convert
    def __call__(self, inputs: Any, weights: Any = None) -> Any:
        """Returns the activations of all features."""
        flat_weights = embedding_inputs.flatten_weights(
            weights, inputs, like="inputs"
        )
        pieces: list[
            tuple[config.FeatureSpec, Any, bool, embedding_inputs.FeatureIds]
        ] = []
        for (path, value), weight in zip(
            embedding_inputs.flatten_with_paths(inputs), flat_weights
        ):
            feature = self._feature_of(path)
            found = self._read(feature, value, weight)
            pieces.append((feature, value, weight is not None, found))
        rows = stored_tables.gather(
            [self._wanted(feature, found) for feature, _, _, found in pieces],
            self._out_of_range,
        )
        return tf.nest.pack_sequence_as(
            inputs,
            [
                self._activations(*piece, rows_of_one)
                for piece, rows_of_one in zip(pieces, rows)
            ],
        )

    def _read(
        self, feature: config.FeatureSpec, value: Any, weight: Any
    ) -> embedding_inputs.FeatureIds:
        """Returns the input of a feature, with keys replaced by their rows."""
        keys = self._keys.get(feature.table)
        found = stock_lookup.read(feature, value, weight, keys is not None)
        if keys is None:
            return found
        # The kind is a tensor only for packed batches, which are not served.
        assert isinstance(found.kind, int)
        return dataclasses.replace(
            found, ids=keys.rows_of(tf.cast(found.ids, tf.int64), found.kind)
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

    def _wanted(
        self, feature: config.FeatureSpec, found: embedding_inputs.FeatureIds
    ) -> Wanted:
        table = self._spec.table_of(feature)
        return Wanted(
            self._tables[feature.table],
            tf.cast(found.ids, tf.int64),
            f"Feature {feature.name!r}: ids must be in [0, {table.num_rows}), "
            f"the rows of table {table.name!r}.",
        )

    def _activations(
        self,
        feature: config.FeatureSpec,
        value: Any,
        has_weights: bool,
        found: embedding_inputs.FeatureIds,
        gathered: Found,
    ) -> tf.Tensor:
        table = self._spec.table_of(feature)
        rows = stock_lookup.rounded_rows(table, gathered.rows)
        is_inside = gathered.is_inside
        num_samples = tf.cast(found.num_samples, tf.int64)
        is_placed = feature.is_sequence and not found.inner_shape
        if (
            not is_placed
            and is_inside is None
            and _ids_per_sample(value, found) == 1
        ):
            # If a sample has only one id, all combiners return the row of this
            # id.
            return stock_lookup.in_shape(feature, table, value, found, rows)
        samples = _samples_of(feature, value, found, num_samples)
        if is_placed:
            kept, indices = stock_lookup.kept_in_sequence(
                feature,
                samples,
                stock_lookup.positions_of(feature, found, samples),
                is_inside,
            )
            activations = stock_lookup.in_sequence(
                feature, table, indices, tf.gather(rows, kept), num_samples
            )
        else:
            weights = found.weights if has_weights else None
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
        return stock_lookup.in_shape(feature, table, value, found, activations)


def _ids_per_sample(
    value: Any, found: embedding_inputs.FeatureIds
) -> int | None:
    """Returns the number of ids per sample of a dense input, if known."""
    if found.splits.shape != [0]:
        return None
    shape = tf.TensorShape(value.shape)
    return 1 if shape.rank == 1 else shape[-1]


def _samples_of(feature, value, found, num_samples):
    """Returns the sample of each id.

    The result is equal to the result of `stock_lookup.samples_of`. For dense
    and ragged inputs, this function uses fewer operations.
    """
    num_ids = tf.size(found.ids, tf.int64)
    per_sample = _ids_per_sample(value, found)
    if per_sample:
        return tf.range(num_ids) // per_sample
    if found.splits.shape.rank == 1 and found.splits.shape != [0]:
        # The index of an id's sample is equal to the number of samples that end
        # at or before this id.
        return tf.cast(
            tf.raw_ops.UpperBound(
                sorted_inputs=found.splits[tf.newaxis, 1:],
                values=tf.range(num_ids)[tf.newaxis],
            )[0],
            tf.int64,
        )
    return stock_lookup.samples_of(feature, found, found.ids, num_samples)


class RowLookup:
    """Looks up rows in one exported table."""

    def __init__(self, table: StoredTable, layer: str):
        """Initializes the lookup. Error messages name the layer."""
        self._table = table
        self._message = (
            f"Ids must be in [0, {table.num_rows}) (layer {layer!r})."
        )

    @tf.autograph.experimental.do_not_convert
    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows, `ids.shape + [dim]` float32.

        An out-of-range id raises an error.
        """
        flat = tf.cast(tf.reshape(ids, [-1]), tf.int64)
        (found,) = stored_tables.gather(
            [Wanted(self._table, flat, self._message)], "error"
        )
        dim = self._table.variable.form.dim
        rows = tf.reshape(found.rows, tf.concat([tf.shape(ids), [dim]], 0))
        return tf.ensure_shape(rows, ids.shape.concatenate([dim]))
