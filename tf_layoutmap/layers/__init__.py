"""Keras layers over tables in shards."""

from tf_layoutmap.layers.row_optimizer import RowOptimizer
from tf_layoutmap.layers.sharded_embedding import ShardedEmbedding

__all__ = ["RowOptimizer", "ShardedEmbedding"]
