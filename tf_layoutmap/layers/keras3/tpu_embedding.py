"""`TPUEmbedding` as a Keras layer: nested features in, activations out."""

# DOC-MERGE: The weight of a layer whose tables an engine trains: it takes the marks.
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.layers.base import keras_version_guard, sharded_embedding
from tf_layoutmap.layers.base import steps as base_steps
from tf_layoutmap.layers.base.steps import StepTaker
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore
from tf_layoutmap.layers.keras3.row_optimizer import TakesGradients


class StepWeight(TakesGradients, keras.Variable):
    """Tells a layer when the model's optimizer takes a step.

    By `overwrite_with_gradient` the optimizer hands its gradient to `assign`,
    inside its `apply`: then the step is really taken.
    """

    def __init__(self, steps: StepTaker):
        """Takes what is told of a step."""
        self._steps = steps
        # Of a callable: Keras may be tracing, and make the value later.
        super().__init__(
            keras.initializers.Zeros(),
            shape=steps.mark_shape,
            name="marks",
            dtype="float32",
            autocast=False,
        )

    @property
    def overwrite_with_gradient(self) -> bool:
        """True: gradients come to `assign`."""
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        raise AttributeError("A step weight has no gradient of its own.")

    def missing_gradient(self) -> str:
        """Returns what to say where a step brings no gradient."""
        return base_steps.missing_gradient_message(
            self._steps.layer_name, self._steps.table_names
        )

    def assign(self, value: Any) -> Any:
        """Takes a step inside an optimizer's `apply`; else refuses.

        Raises:
          RuntimeError: `set_weights`, which has no tables, is called.
          ValueError: The optimizer accumulates gradients.
        """
        optimizer = keras_private.applying_optimizer()
        if optimizer is None:
            raise RuntimeError(
                base_steps.tables_are_not_weights(self._steps.layer_name)
            )
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if steps:
            raise ValueError(
                "The model's optimizer must not accumulate gradients: the "
                "tables have optimizers of their own, which take each as a "
                f"step. Received: gradient_accumulation_steps={steps} (layer "
                f"{self._steps.layer_name!r})."
            )
        scale = optimizer.loss_scale_factor
        self._steps.apply(value if scale is None else value / scale)
        return value

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        # A checkpoint has the zeros that it holds; under a strategy Keras would
        # `assign` them.
        del restored_tensors
        return self.value


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
        sharded_embedding.check_inputs(inputs, self.name)
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        if not keras_private.is_abstract():
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
