"""Names and small variables of tables.

`table_store.py` creates all other variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import table_variable
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.table_variable import HOST, shards_of

__all__ = ["HOST", "PARAMETERS", "ROUNDING_STEPS", "shards_of"]

PARAMETERS = "parameters"
# Variable with the number of updates of a table with 16-bit rows. The
# stochastic rounding depends on this number, so checkpoints contain it.
ROUNDING_STEPS = "rounding_steps"


def owner_of(
    spec: config.EmbeddingSpec, table: config.TableSpec
) -> config.TableSpec:
    """Returns the table that owns the vocabulary of a table.

    Tables that share a vocabulary have the same shards, so that a key and its
    rows are in shards with the same index.
    """
    owner = None if table.vocabulary is None else table.vocabulary.owner
    return table if owner is None else spec.tables[owner]


def handles(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the handles of variables. Ops take handles as inputs."""
    return [variable.handle for variable in variables]


def text_variable(value: Any, name: str) -> tf.Variable:
    """Creates a variable that describes the tables in checkpoints."""
    with tf.device(HOST):
        return create_variable(tf.constant(value), name)


def create_variable(value: tf.Tensor, name: str) -> tf.Variable:
    """Creates a variable on the current device, which is not trainable."""
    return tf_private.ResourceVariable(
        value,
        trainable=False,
        name=name,
        distribute_strategy=table_variable.strategy_in_scope(),
    )
