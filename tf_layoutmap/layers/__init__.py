"""Keras layers over tables in shards."""

from tf_layoutmap.layers.row_optimizer import RowOptimizer
from tf_layoutmap.layers.sharded_embedding import ShardedEmbedding
from tf_layoutmap.layers.tpu_embedding import TPUEmbedding

__all__ = ["RowOptimizer", "ShardedEmbedding", "TPUEmbedding"]
