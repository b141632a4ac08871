"""Keras layers with sharded tables.

Keras 3 models use the layers of this module. tf_keras models use the layers of
`layers.tf_keras`. The module `layers.tf_keras` requires the package tf_keras,
and is imported when a program first accesses it.
"""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "DotInteraction": "tf_layoutmap.layers.keras3.dot_interaction:DotInteraction",
    "EmbeddingEntry": "tf_layoutmap.layers.base.embedding_report:EmbeddingEntry",
    "EmbeddingReport": "tf_layoutmap.layers.base.embedding_report:EmbeddingReport",
    "RowOptimizer": "tf_layoutmap.layers.keras3.row_optimizer:RowOptimizer",
    "ShardedEmbedding": "tf_layoutmap.layers.keras3.sharded_embedding:ShardedEmbedding",
    "TPUEmbedding": "tf_layoutmap.layers.keras3.tpu_embedding:TPUEmbedding",
    "VocabularyLogger": "tf_layoutmap.layers.keras3.vocabulary_logger:VocabularyLogger",
    "shard_embeddings": "tf_layoutmap.layers.embedding_replacement:shard_embeddings",
    "sharded_embeddings": "tf_layoutmap.layers.embedding_replacement:sharded_embeddings",
    "tf_keras": "tf_layoutmap.layers.tf_keras",
}

if TYPE_CHECKING:
    import tf_layoutmap.layers.tf_keras as tf_keras
    from tf_layoutmap.layers.base.embedding_report import (
        EmbeddingEntry,
        EmbeddingReport,
    )
    from tf_layoutmap.layers.embedding_replacement import (
        shard_embeddings,
        sharded_embeddings,
    )
    from tf_layoutmap.layers.keras3.dot_interaction import DotInteraction
    from tf_layoutmap.layers.keras3.row_optimizer import RowOptimizer
    from tf_layoutmap.layers.keras3.sharded_embedding import ShardedEmbedding
    from tf_layoutmap.layers.keras3.tpu_embedding import TPUEmbedding
    from tf_layoutmap.layers.keras3.vocabulary_logger import VocabularyLogger
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "DotInteraction",
    "EmbeddingEntry",
    "EmbeddingReport",
    "RowOptimizer",
    "ShardedEmbedding",
    "TPUEmbedding",
    "VocabularyLogger",
    "shard_embeddings",
    "sharded_embeddings",
    "tf_keras",
]
