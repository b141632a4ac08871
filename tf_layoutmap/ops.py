"""Operations for recommenders, with gradients."""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "dot_interaction": "tf_layoutmap.layers.base.interactions:dot_interaction",
    "SampledKeys": "tf_layoutmap.vocabulary.sampling:SampledKeys",
    "StoredKeys": "tf_layoutmap.vocabulary.stored_keys:StoredKeys",
    "sample_keys": "tf_layoutmap.vocabulary.sampling:sample_keys",
    "sampled_softmax_from_vectors": (
        "tf_layoutmap.layers.base.sampled_softmax:sampled_softmax_from_vectors"
    ),
    "sampled_softmax_loss": (
        "tf_layoutmap.layers.base.sampled_softmax:sampled_softmax_loss"
    ),
}

if TYPE_CHECKING:
    from tf_layoutmap.layers.base.interactions import dot_interaction
    from tf_layoutmap.layers.base.sampled_softmax import (
        sampled_softmax_from_vectors,
        sampled_softmax_loss,
    )
    from tf_layoutmap.vocabulary.sampling import SampledKeys, sample_keys
    from tf_layoutmap.vocabulary.stored_keys import StoredKeys
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "SampledKeys",
    "StoredKeys",
    "dot_interaction",
    "sample_keys",
    "sampled_softmax_from_vectors",
    "sampled_softmax_loss",
]
