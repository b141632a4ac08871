"""What an engine has counted, and the steps that it holds."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.embedding.spec import config

# Of each feature, in the engine's order.
_FEATURE_COUNTS = (
    "num_samples",
    "num_ids",
    "num_dropped",
    "num_clipped",
    "num_truncated",
)


def describe(engine: tf.Tensor, spec: config.EmbeddingSpec) -> dict[str, Any]:
    """Returns what an engine holds, as Python values.

    Args:
      engine: Handle of the engine.
      spec: Its tables and features.
    """
    with tf.init_scope(), tf.device(engine.device):
        found = _ops.describe_host_engine(engine=engine)
    return {
        "pending": found.pending.numpy().tolist(),
        "awaiting": found.awaiting.numpy().tolist(),
        "open": found.num_open.numpy().tolist(),
        "followed": found.num_followed.numpy().tolist(),
        "num_updates": int(found.num_updates),
        "poisoned": found.poisoned.numpy().decode(),
        "held": bool(found.held),
        "features": {
            feature.name: dict(zip(_FEATURE_COUNTS, counts))
            for feature, counts in zip(
                spec.features, found.feature_counts.numpy().tolist()
            )
        },
        "tables": {
            table.name: _describe_table(table, *counts)
            for table, counts in zip(
                spec.tables, found.table_counts.numpy().tolist()
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
