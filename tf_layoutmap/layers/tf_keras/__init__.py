"""The layers of `tlm.layers` for models of tf_keras, which this imports."""

try:
    import tf_keras as _tf_keras  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "tlm.layers.tf_keras needs tf_keras: pip install --no-deps "
        '"tf_keras==2.21.*".') from _error

from tf_layoutmap.layers.tf_keras.row_optimizer import RowOptimizer
from tf_layoutmap.layers.tf_keras.sharded_embedding import ShardedEmbedding
from tf_layoutmap.layers.tf_keras.tpu_embedding import TPUEmbedding

__all__ = ["RowOptimizer", "ShardedEmbedding", "TPUEmbedding"]
