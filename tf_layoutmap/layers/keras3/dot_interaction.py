"""`DotInteraction` for Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from tf_layoutmap.layers.base import keras_version_guard
from tf_layoutmap.layers.base.interactions import DotInteractionCore


@keras.saving.register_keras_serializable("tf_layoutmap")
class DotInteraction(DotInteractionCore, keras.layers.Layer):
    """Dot products of all pairs of features, as in DLRM (arXiv:1906.00091).

    The layer has the arguments and results of
    `keras_rs.layers.DotInteraction`. In training with float32, C++ ops compute
    the products and their gradients, without intermediate tensors; see
    `tlm.ops.dot_interaction`.

    >>> import keras, numpy as np
    >>> import tf_layoutmap as tlm
    >>> user, item = keras.Input([2]), keras.Input([2])
    >>> products = tlm.layers.DotInteraction()([user, item])
    >>> model = keras.Model([user, item], products)
    >>> model.predict([np.array([[1., 2.]]), np.array([[3., 4.]])], verbose=0)
    array([[11.]], dtype=float32)

    In evaluation, prediction and exported models, TensorFlow's own operations
    compute the products. The results are equal up to rounding. The same applies
    to other compute dtypes, models on a GPU or a mesh, and functions that XLA
    compiles. Keras does not compile a model with this layer by XLA; with
    `jit_compile=True`, Keras issues a warning.

    Attributes:
      self_interaction: Whether the results contain the product of each feature
        with itself.
      skip_gather: Whether the result is the full matrix of products.
    """

    def _check_keras_version(self, inputs: Any) -> None:
        keras_version_guard.check_not_tf_keras(self, inputs)

    def _shape(self, shape: tuple[int | None, int]) -> Any:
        return shape
