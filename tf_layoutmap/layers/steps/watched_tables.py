"""Tables in shards that Keras' export has to know of.

`model.export` of Keras 3 saves the weights of the model, and the variables that
its functions have read. A table of an embedding is no weight, and a table in
shards is read by an op of ours, which tells nobody.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.sharded import ShardedVariable


def watch(embedding: TPUEmbedding) -> None:
    """Tells the function being traced that a lookup reads the tables."""
    graph: Any = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(graph, "watch_variable"):
        return
    read = [
        *embedding.embedding_tables.values(),
        *(one.key_variable for one in embedding.vocabularies.values()),
    ]
    for table in read:
        if isinstance(table, ShardedVariable):
            graph.watch_variable(table)
