"""Layers of `tlm.layers` for tf_keras models; imports tf_keras."""

from tf_layoutmap._core import requirements

try:
    import tf_keras as _tf_keras  # noqa: F401
except ModuleNotFoundError as _error:
    _missing = requirements.not_installed(
        "tf_layoutmap.layers.tf_keras", _error
    )
    if _missing is None:
        raise
    raise _missing from None

# Registers the class of replaced layers, which is required to load a model.
from tf_layoutmap.layers.tf_keras import stock_embedding as _stock_embedding  # noqa: F401
from tf_layoutmap.layers.tf_keras.dot_interaction import DotInteraction
from tf_layoutmap.layers.tf_keras.row_optimizer import RowOptimizer
from tf_layoutmap.layers.tf_keras.sharded_embedding import ShardedEmbedding
from tf_layoutmap.layers.tf_keras.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.tf_keras.vocabulary_logger import VocabularyLogger

__all__ = [
    "DotInteraction",
    "RowOptimizer",
    "ShardedEmbedding",
    "TPUEmbedding",
    "VocabularyLogger",
]


def __dir__() -> list[str]:
    return __all__
