"""The features of an embedding in an exported model: one gather a variable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import (
    feature_inputs,
    stock_lookup,
    stock_parts,
    structure,
)
from tf_layoutmap.serving.tables import stored_tables
from tf_layoutmap.serving.tables.stored_keys import StoredKeys
from tf_layoutmap.serving.tables.stored_tables import Found, StoredTable, Wanted


class FeatureLookup:
    """Looks the features of an embedding up in the tables of an export.

    The same as `serving_embedding_lookup`, with far fewer operations: the ids
    of all features are checked and gathered together.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        tables: Sequence[StoredTable],
        out_of_range: str,
        keys: Mapping[int, StoredKeys] | None = None,
    ):
        """Takes the tables in the order of `spec.tables`.

        Args:
          spec: Tables and features.
          tables: Where they are.
          out_of_range: What becomes of ids that are no row.
          keys: By number of the table, of those whose ids are keys.
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
        """Returns activations, as `serving_embedding_lookup` does."""
        flat_weights = structure.flatten_weights(weights, inputs, like="inputs")
        pieces: list[
            tuple[config.FeatureSpec, Any, bool, feature_inputs.FeatureIds]
        ] = []
        for (path, value), weight in zip(
            structure.flatten_with_paths(inputs), flat_weights
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
    ) -> feature_inputs.FeatureIds:
        """The input of a feature, with rows for ids that are keys."""
        keys = self._keys.get(feature.table)
        found = stock_lookup.read(feature, value, weight, keys is not None)
        if keys is None:
            return found
        return dataclasses.replace(
            found, ids=keys.rows_of(tf.cast(found.ids, tf.int64), found.kind)
        )

    def _feature_of(self, path: str) -> config.FeatureSpec:
        if not path and len(self._spec.features) == 1:
            return self._spec.features[0]  # It may have a name of its own.
        if path not in self._features:
            raise ValueError(
                "Argument `inputs` must hold features of `feature_config`, "
                f"which are {sorted(self._features)}. Received: {path!r}."
            )
        return self._features[path]

    def _wanted(
        self, feature: config.FeatureSpec, found: feature_inputs.FeatureIds
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
        found: feature_inputs.FeatureIds,
        gathered: Found,
    ) -> tf.Tensor:
        table = self._spec.table_of(feature)
        rows = stock_parts.rounded(table, gathered.rows)
        is_inside = gathered.is_inside
        num_samples = tf.cast(found.num_samples, tf.int64)
        is_placed = feature.is_sequence and not found.inner_shape
        if (
            not is_placed
            and is_inside is None
            and _ids_per_sample(value, found) == 1
        ):
            # The gain of one id is 1, whatever the combiner.
            return stock_lookup.in_shape(feature, table, value, found, rows)
        samples = _samples_of(feature, value, found, num_samples)
        if is_placed:
            kept, indices = stock_parts.kept_in_sequence(
                feature,
                samples,
                stock_parts.positions_of(feature, found, samples),
                is_inside,
            )
            activations = stock_parts.in_sequence(
                feature, table, indices, tf.gather(rows, kept), num_samples
            )
        else:
            weights = found.weights if has_weights else None
            if is_inside is not None:
                # What was dropped is zeros, rounded or not, and weighs nothing.
                rows = tf.where(is_inside[:, tf.newaxis], rows, 0.0)
                used = tf.cast(is_inside, tf.float32)
                weights = (
                    used
                    if weights is None
                    else tf.where(is_inside, weights, 0.0)
                )
            activations = stock_parts.combine(
                table, rows, samples, num_samples, weights
            )
        return stock_lookup.in_shape(feature, table, value, found, activations)


def _ids_per_sample(value: Any, found: feature_inputs.FeatureIds) -> int | None:
    """How many ids a sample of a dense input has; None if not known."""
    if found.splits.shape != [0]:
        return None
    shape = tf.TensorShape(value.shape)
    return 1 if shape.rank == 1 else shape[-1]


def _samples_of(feature, value, found, num_samples):
    """As `stock_parts.samples_of`, with fewer operations where there are."""
    num_ids = tf.size(found.ids, tf.int64)
    per_sample = _ids_per_sample(value, found)
    if per_sample:
        return tf.range(num_ids) // per_sample
    if found.splits.shape.rank == 1 and found.splits.shape != [0]:
        # How many samples end at or before each id.
        return tf.cast(
            tf.raw_ops.UpperBound(
                sorted_inputs=found.splits[tf.newaxis, 1:],
                values=tf.range(num_ids)[tf.newaxis],
            )[0],
            tf.int64,
        )
    return stock_parts.samples_of(feature, found, found.ids, num_samples)
