"""`DotInteraction` for tf_keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap.layers.base import keras_version_guard
from tf_layoutmap.layers.base.interactions import DotInteractionCore


@tf_keras.saving.register_keras_serializable("tf_layoutmap")
class DotInteraction(DotInteractionCore, tf_keras.layers.Layer):
    """Dot products of all pairs of features, as in DLRM (arXiv:1906.00091).

    This layer is the tf_keras version of `tlm.layers.DotInteraction`, and has
    the same arguments and results.

    >>> import numpy as np
    >>> import tf_keras
    >>> import tf_layoutmap as tlm
    >>> user, item = tf_keras.Input([2]), tf_keras.Input([2])
    >>> products = tlm.layers.tf_keras.DotInteraction()([user, item])
    >>> model = tf_keras.Model([user, item], products)
    >>> model.predict([np.array([[1., 2.]]), np.array([[3., 4.]])], verbose=0)
    array([[11.]], dtype=float32)

    Attributes:
      self_interaction: Whether the results contain the product of each feature
        with itself.
      skip_gather: Whether the result is the full matrix of products.
    """

    def _check_keras_version(self, inputs: Any) -> None:
        keras_version_guard.check_not_keras3(self, inputs)

    def _shape(self, shape: tuple[int | None, int]) -> Any:
        return tf.TensorShape(shape)
