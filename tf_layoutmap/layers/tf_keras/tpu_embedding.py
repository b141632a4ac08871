"""`TPUEmbedding` for models of tf_keras."""

from typing import Any

import tensorflow as tf
import tf_keras

from tf_layoutmap import _tf_keras_private
from tf_layoutmap.layers.shared import keras_version_guard
from tf_layoutmap.layers.shared.tpu_embedding_base import TPUEmbeddingCore
from tf_layoutmap.layers.tf_keras.step_variable import StepVariable


@tf_keras.saving.register_keras_serializable("tf_layoutmap")
class TPUEmbedding(TPUEmbeddingCore, tf_keras.layers.Layer):
    """Looks up all features of a model, in tables with their own optimizers.

    `tlm.layers.TPUEmbedding` for tf_keras: the same arguments, and the same
    numbers, under `OneDeviceStrategy` and `MirroredStrategy` too.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_keras
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(4, 1, tf.ones, combiner="sum", name="words")
    >>> inputs = {"title": tf_keras.Input([2], dtype="int64")}
    >>> layer = tlm.layers.tf_keras.TPUEmbedding(
    ...     {"title": tpu.FeatureConfig(words)}, tpu.SGD(1.0))
    >>> model = tf_keras.Model(inputs, layer(inputs)["title"])
    >>> model.compile("adam", loss=lambda y, x: tf.reduce_sum(x, axis=1))
    >>> _ = model.fit({"title": np.array([[3, 0]])}, np.zeros([1]), verbose=0)
    >>> layer.embedding_tables[words].numpy().ravel().tolist()
    [0.0, 1.0, 1.0, 0.0]

    Attributes:
      embedding: The `tlm.TPUEmbedding`.
    """

    def build(self, input_shape: Any = None) -> None:
        """Makes the tables."""
        if self.built:
            return
        # It runs layers where a TPU has no step, as to make a functional model.
        if self._steps.is_on_tpu:
            raise NotImplementedError(
                f"Layer {self.name!r} does not train on a TPU in tf_keras; "
                "tlm.layers.TPUEmbedding of Keras 3 does."
            )
        with tf.init_scope():
            self._steps.build()
            marks = StepVariable.create(self._steps)
        self._marks = marks
        super().build(input_shape)

    def call(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        # Divided tables are looked up by all processes, in a step. A subclassed
        # model that is loaded is built with floats for all inputs.
        if _tf_keras_private.is_building_a_model() or (
            self._steps.access.is_divided
            and _tf_keras_private.is_only_for_shapes()
        ):
            return self._cast(self._steps.zeros(inputs))
        return super().call(inputs, weights, training)

    def _marks_variable(self) -> tf.Variable:
        return self._marks

    def _refuse_other_keras(self, inputs: Any) -> None:
        keras_version_guard.refuse_keras(self, inputs)
