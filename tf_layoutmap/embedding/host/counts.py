"""Counters of a host engine, and its steps in flight."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding.configs import config

# Names of the counters of a feature, in the order in which the op returns them.
_FEATURE_COUNTS = (
    "num_samples",
    "num_ids",
    "num_dropped",
    "num_clipped",
    "num_truncated",
)


def describe_counts(
    engine: tf.Tensor, spec: config.EmbeddingSpec
) -> dict[str, Any]:
    """Returns the counters and the steps in flight of an engine.

    Args:
      engine: Handle of the engine.
      spec: Tables and features of the engine.
    """
    with tf.init_scope(), tf.device(engine.device):
        state = ops.describe_host_engine(engine=engine)
    return {
        "pending": state.pending.numpy().tolist(),
        "awaiting": state.awaiting.numpy().tolist(),
        "open": state.num_open.numpy().tolist(),
        "followed": state.num_followed.numpy().tolist(),
        "num_updates": int(state.num_updates),
        "poisoned": state.poisoned.numpy().decode(),
        "held": bool(state.held),
        "features": {
            feature.name: dict(zip(_FEATURE_COUNTS, counts))
            for feature, counts in zip(
                spec.features, state.feature_counts.numpy().tolist()
            )
        },
        "tables": {
            table.name: _describe_table(table, *counts)
            for table, counts in zip(
                spec.tables, state.table_counts.numpy().tolist()
            )
        },
    }


def _describe_table(
    table: config.TableSpec, num_lookups: int, num_unique_rows: int
) -> dict[str, Any]:
    return {
        "num_bytes": table.num_bytes,
        "num_slot_bytes": table.num_slot_bytes,
        "num_lookups": num_lookups,
        "num_unique_rows": num_unique_rows,
        "unique_ratio": (
            num_unique_rows / num_lookups if num_lookups else None
        ),
    }
