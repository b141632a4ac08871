"""What the engine's ops are told of tables, features and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs, packed_ids
from tf_layoutmap.embedding.variables import tables
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded.routing.shards import known_size

# Of the features of a step, in the spec's order.
StepInputs = Sequence[feature_inputs.FeatureIds] | packed_ids.PackedIds


def config_attrs(
    spec: config.EmbeddingSpec,
    variables: dict[str, dict[str, Any]],
    *,
    out_of_range: str,
    rounding_seed: int,
) -> dict[str, Any]:
    """Returns the attrs that say which tables and features there are.

    Args:
      spec: Tables and features.
      variables: By table name; `"parameters"` has its shards.
      out_of_range: What becomes of ids that are no row of their table.
      rounding_seed: Of tables with 16-bit rows.
    """
    counts, offsets, placements = [], [], []
    for table in spec.tables:
        shards = tables.shards_of(variables[table.name][tables.PARAMETERS])
        counts.append(len(shards))
        offsets.extend(_offsets(shards))
        placements.append(
            "div"
            if table.vocabulary is None
            else RowPartition.from_sizes(
                [known_size(one) for one in shards]
            ).placement
        )
    return {
        "table_names": [one.title or one.name for one in spec.tables],
        "table_num_rows": [one.num_rows for one in spec.tables],
        "table_dims": [one.dim for one in spec.tables],
        "table_num_shards": counts,
        "table_placements": placements,
        "table_offsets": offsets,
        "table_optimizers": [
            one.optimizer.name if one.optimizer else "none"
            for one in spec.tables
        ],
        "feature_names": [one.name for one in spec.features],
        "feature_tables": [one.table for one in spec.features],
        "feature_combiners": [
            spec.table_of(one).combiner for one in spec.features
        ],
        "feature_max_sequence_lengths": [
            one.max_sequence_length for one in spec.features
        ],
        "out_of_range": out_of_range,
        "table_dtypes": [tf.as_dtype(one.dtype) for one in spec.tables],
        "rounding_seed": rounding_seed,
        **_quantization(spec.tables),
    }


def activation_attrs(spec: config.EmbeddingSpec) -> dict[str, Any]:
    """Returns the attrs of an op that gives the activations of all features."""
    features = spec.features
    return {
        "num_features": len(features),
        "dims": [spec.table_of(one).dim for one in features],
        "max_sequence_lengths": [one.max_sequence_length for one in features],
    }


def batch_inputs(
    features: StepInputs, *, of_keys: bool = False
) -> dict[str, Any]:
    """Returns the inputs of an op that takes the ids of a batch."""
    if isinstance(features, packed_ids.PackedIds):
        return {
            "ids": [features.ids],
            "splits": [tf.zeros([0], tf.int64)],
            "num_samples": tf.reshape(
                tf.cast(features.num_samples, tf.int64), [1]
            ),
            "weights": [features.weights],
            "packed": True,
            "mark": features.mark,
        }
    if not of_keys:
        feature_inputs.unify_id_types(features)
    return {
        "ids": [
            tf.cast(one.ids, tf.int64) if of_keys else one.ids
            for one in features
        ],
        "splits": [tf.cast(one.splits, tf.int64) for one in features],
        "num_samples": tf.stack(
            [tf.cast(one.num_samples, tf.int64) for one in features]
        ),
        "weights": [one.weights for one in features],
    }


def _offsets(shards: Sequence[tf.Variable]) -> list[int]:
    offsets = [0]
    for shard in shards:
        offsets.append(offsets[-1] + known_size(shard))
    return offsets


def _quantization(specs: Sequence[config.TableSpec]) -> dict[str, list]:
    """The attrs that say how rows are rounded, 0 buckets where they are not."""
    if all(one.quantization is None for one in specs):
        return {}
    found = [
        one.quantization or config.QuantizationSpec(0.0, 0.0, 0)
        for one in specs
    ]
    return {
        "table_num_buckets": [one.num_buckets for one in found],
        "table_limits": [
            limit for one in found for limit in (one.lower, one.upper)
        ],
    }
