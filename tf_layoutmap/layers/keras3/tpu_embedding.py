"""`TPUEmbedding` as a Keras layer: nested features in, activations out."""

from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.layers.keras3.step_weight import StepWeight
from tf_layoutmap.layers.shared import (
    embedding_arguments,
    keras_version_guard,
)
from tf_layoutmap.layers.shared.tpu_embedding_base import TPUEmbeddingCore


@keras.saving.register_keras_serializable("tf_layoutmap")
class TPUEmbedding(TPUEmbeddingCore, keras.layers.Layer):
    """Looks up all features of a model, in tables with their own optimizers.

    The layer holds a `tlm.TPUEmbedding`. In training a call is one step of
    it: the tables take theirs when the model's optimizer is applied, by `fit`,
    `train_on_batch` or `apply_gradients` in a loop of your own. In evaluation,
    prediction and export it looks up by TensorFlow's own operations.

    >>> import keras, numpy as np, tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(4, 1, tf.ones, combiner="sum", name="words")
    >>> inputs = {"title": keras.Input([2], dtype="int64")}
    >>> layer = tlm.layers.TPUEmbedding(
    ...     {"title": tpu.FeatureConfig(words)}, tpu.SGD(1.0))
    >>> model = keras.Model(inputs, layer(inputs)["title"])
    >>> model.compile("adam", loss=lambda y, x: keras.ops.sum(x, axis=1))
    >>> _ = model.fit({"title": np.array([[3, 0]])}, np.zeros([1]), verbose=0)
    >>> layer.embedding_tables[words].numpy().ravel().tolist()
    [0.0, 1.0, 1.0, 0.0]

    In a training step the layer is called once. The model's optimizer must
    not accumulate gradients; a loss scale is taken out of them, and its other
    settings (clipping, decay) do not reach the tables. A step that is not
    applied is forgotten by the next call. `.keras` and `.weights.h5` files
    and checkpoints hold tables and slot variables; a `.keras` file needs
    learning rates that are numbers.

    It works under `OneDeviceStrategy` and `MirroredStrategy`, when it is made
    in `strategy.scope()` as its model is. The tables stay one copy on the
    host and take one step per global batch. Gradients are summed feature by
    feature, then in the order of the samples of the global batch, so that the
    tables become those of one replica; a row's gradient is what reaches it,
    not divided by the number of replicas: Keras' losses already are.

    Under `ParameterServerStrategy` the tables are on its servers, and `fit`
    takes `tlm.ps.Datasets`; the layer is called once in a training step.

    Under `TPUStrategy`, real or emulated, steps and lookups are the TPU's:
    batches have one known size, dense inputs one id per sample, and the layer
    is called inside `strategy.run`, as `fit`, `evaluate` and `predict` do.

    Attributes:
      embedding: The `tlm.TPUEmbedding`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # XLA has no kernels for our ops.
        self.supports_jit = False

    __init__.__doc__ = TPUEmbeddingCore.__init__.__doc__

    def build(self, input_shape: Any = None) -> None:
        """Makes the tables."""
        del input_shape
        if self.built:
            return
        self._steps.build()
        self._marks = StepWeight(self._steps)
        self._marks.trainable = self.trainable
        self.built = True

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer, of a model of Keras 3 only."""
        embedding_arguments.check_inputs(inputs, self.name)
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        if not _keras_private.is_abstract():
            return super().call(inputs, weights, training)
        if (
            self._steps.is_on_tpu
            or self._steps.access.is_divided
            or self._steps.is_packed(inputs)
        ):
            return self._cast(self._steps.zeros(inputs))
        # `fit` of several replicas traces with the mean of their ids.
        inputs = tf.nest.map_structure(
            lambda ids: tf.cast(ids, tf.int64), inputs
        )
        return self._cast(self._steps.look_up(inputs, weights))

    call.__doc__ = TPUEmbeddingCore.call.__doc__

    def _marks_variable(self) -> tf.Variable:
        return self._marks.value

    def _refuse_other_keras(self, inputs: Any) -> None:
        keras_version_guard.refuse_tf_keras(self, inputs)

    def compute_output_spec(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        """Returns the activations as `KerasTensor`s."""
        del weights, training
        return tf.nest.pack_sequence_as(
            self._steps.feature_config,
            [
                keras.KerasTensor(shape, dtype=self.compute_dtype)
                for shape in self._steps.output_shapes(inputs)
            ],
        )
