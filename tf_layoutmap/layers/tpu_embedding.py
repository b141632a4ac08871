"""`TPUEmbedding` as a Keras layer: nested features in, activations out."""

import types
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.embedding import config, structure
from tf_layoutmap.embedding.serving import serving_embedding_lookup
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding as Embedding
from tf_layoutmap.layers import feature_configs

_PARAMETERS = "parameters"


class _StepWeight(keras.Variable):
    """Tells a layer when the model's optimizer takes a step.

    By `overwrite_with_gradient` the optimizer hands its gradient to `assign`,
    inside its `apply`: then the step is really taken.
    """

    def __init__(self, layer: "TPUEmbedding"):
        self._layer = layer
        super().__init__(0.0, dtype="float32", autocast=False, name="step")

    @property
    def overwrite_with_gradient(self) -> bool:
        """True: gradients come to `assign`."""
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        raise AttributeError("A step weight has no gradient of its own.")

    def assign(self, value):
        optimizer = _keras_private.applying_optimizer()
        if optimizer is None:
            return super().assign(value)
        self._layer._apply(optimizer, value)
        return value


# So that what comes to `assign` is 1 over the scale.
_keras_private.unscale_gradients_of(_StepWeight)


@keras.saving.register_keras_serializable("tf_layoutmap")
class TPUEmbedding(keras.layers.Layer):
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

    In a training step the layer is called once, by one replica. The model's
    optimizer must not accumulate gradients; a loss scale is taken out of
    them, and its other settings (clipping, decay) do not reach the tables.
    A step that is not applied is forgotten by the next call. `.keras` and
    `.weights.h5` files and checkpoints hold tables and slot variables; a
    `.keras` file needs learning rates that are numbers.

    Attributes:
      embedding: The `tlm.TPUEmbedding`.
    """

    def __init__(self, feature_config: Any, optimizer: Any = None, *,
                 partitioner: Any = None, out_of_range: str = "error",
                 **kwargs: Any):
        """Makes the layer.

        Args:
          feature_config: Nested structure of
            `tf.tpu.experimental.embedding.FeatureConfig`.
          optimizer: Of tables that bring none; None for tables that only
            serve, with `trainable=False`.
          partitioner: As of `tlm.TPUEmbedding`; not saved with the layer.
          out_of_range: As of `tlm.TPUEmbedding`.
          **kwargs: Those of every Keras layer, such as `name`.

        Raises:
          TypeError, ValueError: As of `tlm.TPUEmbedding`.
        """
        super().__init__(**kwargs)
        # In one object: Keras would replace lists and dicts by its own.
        self._arguments = types.SimpleNamespace(
            feature_config=feature_config, optimizer=optimizer,
            out_of_range=out_of_range)
        # XLA has no kernels for our ops, and ids must not become float16.
        self.supports_jit = False
        self.autocast = False
        self.embedding = Embedding(
            feature_config, optimizer, partitioner=partitioner,
            out_of_range=out_of_range)
        self._spec, _ = config.read_feature_config(
            structure.flatten_with_paths(feature_config), optimizer)
        self._gradients = None
        self._latest_call = None

    @property
    def _feature_config(self) -> Any:
        return self._arguments.feature_config

    def build(self, input_shape: Any = None) -> None:
        """Makes the tables."""
        del input_shape
        if self.built:
            return
        if self.embedding._state.replicas.num_replicas > 1:
            raise NotImplementedError(
                f"Layer {self.name!r} trains with one replica; use "
                "tlm.TPUEmbedding in a loop of your own for several. Received: "
                f"{self.embedding._state.replicas.num_replicas} replicas.")
        self.embedding.build()
        self._step = _StepWeight(self)
        self._step.trainable = self.trainable
        self.built = True

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """From each `TableConfig` to its rows, `[num_rows, dim]` float32."""
        return self.embedding.embedding_tables

    def call(self, inputs: Any, weights: Any = None,
             training: bool | None = None) -> Any:
        """Returns the activations of all features.

        Args:
          inputs: Structure of the feature config, as `enqueue` of
            `tlm.TPUEmbedding` takes it.
          weights: None, or the same structure of weights.
          training: Whether the tables are to take a step.

        Returns:
          Structure of the feature config with tensors of the compute dtype.
        """
        if not (training and self.trainable):
            found = serving_embedding_lookup(
                inputs, weights, self.embedding_tables, self._feature_config,
                out_of_range=self._arguments.out_of_range)
            return tf.nest.map_structure(self._cast, found)
        # One that was never applied, as when a scaled loss overflowed.
        self.embedding.reset()
        self.embedding.enqueue(inputs, weights, name=self.name)
        found = self.embedding.dequeue(name=self.name)
        flat = self._connect(
            tf.convert_to_tensor(self._step), *tf.nest.flatten(found))
        flat = [self._cast(one) for one in flat]
        return tf.nest.pack_sequence_as(self._feature_config, flat)

    def _cast(self, activations):
        return tf.cast(activations, self.compute_dtype)

    def _connect(self, step, *activations):
        """The activations, as something that depends on the step weight."""
        this_call = self._latest_call = object()

        @tf.custom_gradient
        def connected(step, *activations):
            def gradient(*gradients):
                if this_call is not self._latest_call:
                    raise RuntimeError(
                        f"Layer {self.name!r} must be called once in a "
                        "training step; give it the features of both calls "
                        "under names of their own.")
                # Kept until the optimizer is applied. The step weight gets
                # 1, but no finite number if one of them is none.
                self._gradients = gradients
                return (1 + tf.add_n([
                    tf.reduce_sum(one * 0) for one in gradients]),
                    *[None] * len(gradients))

            return [tf.identity(one) for one in activations], gradient

        return connected(step, *activations)

    def _apply(self, optimizer, scale):
        """Lets the tables take the step whose gradients were taken last.

        Args:
          optimizer: The model's.
          scale: What the gradients are to be multiplied with.
        """
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if steps:
            raise ValueError(
                "The model's optimizer must not accumulate gradients: the "
                "tables have optimizers of their own, which take each as a "
                f"step. Received: gradient_accumulation_steps={steps} (layer "
                f"{self.name!r}).")
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise RuntimeError(
                f"Layer {self.name!r} has no gradients to apply; call it with "
                "training=True inside the tape, once per step.")
        if optimizer.loss_scale_factor is not None:
            scale = scale / optimizer.loss_scale_factor
        gradients = [one * scale for one in gradients]
        self.embedding.apply_gradients(
            tf.nest.pack_sequence_as(self._feature_config, gradients),
            name=self.name)

    # Shapes, without computing anything: a step must not be enqueued for it.

    def compute_output_spec(self, inputs: Any, weights: Any = None,
                            training: bool | None = None) -> Any:
        """Returns the activations as `KerasTensor`s."""
        del weights, training
        structure.check_same(
            inputs, "inputs", self._feature_config, "feature_config")
        return tf.nest.pack_sequence_as(self._feature_config, [
            keras.KerasTensor(self._output_shape(feature, value.shape),
                              dtype=self.compute_dtype)
            for feature, value in zip(
                self._spec.features, tf.nest.flatten(inputs))])

    def _output_shape(self, feature, shape) -> tuple:
        dim = self._spec.table_of(feature).dim
        if feature.output_shape is not None:
            return (*feature.output_shape, dim)
        samples = tuple(shape)[:max(len(shape) - 1, 1)]
        positions = [feature.max_sequence_length] * feature.is_sequence
        return (*samples, *positions, dim)

    # Saving.

    def _variables_by_key(self) -> dict[str, Any]:
        found = {}
        tables = self.embedding.embedding_tables
        slots = self.embedding.slot_variables
        for number, (table, rows) in enumerate(tables.items()):
            found[f"{number}.{_PARAMETERS}"] = rows
            for name, slot in slots[table].items():
                found[f"{number}.{name}"] = slot
        return found

    def save_own_variables(self, store: Any) -> None:
        """Writes tables and slot variables, each as one array."""
        for key, variable in self._variables_by_key().items():
            store[key] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` of any number of shards wrote.

        Raises:
          ValueError: If tables, optimizers or shapes are others; nothing is
            changed then.
        """
        if not self.built:
            raise ValueError(
                f"Layer {self.name!r} must be built before weights are "
                "loaded; call the model, or `build`, first.")
        variables = self._variables_by_key()
        if set(store.keys()) != set(variables):
            raise ValueError(
                f"The saved weights of layer {self.name!r} must hold "
                f"{sorted(variables)}. Received: {sorted(store.keys())}.")
        for key, variable in variables.items():
            if tuple(store[key].shape) != tuple(variable.shape):
                raise ValueError(
                    f"Weight {key!r} of layer {self.name!r} must be of shape "
                    f"{tuple(variable.shape)}. Received: "
                    f"{tuple(store[key].shape)}.")
        for key, variable in variables.items():
            variable.assign(store[key][...])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, as plain values.

        Raises:
          ValueError: If a learning rate is a callable.
        """
        return {
            **super().get_config(),
            "feature_config": feature_configs.to_config(
                self._feature_config, self._arguments.optimizer),
            "out_of_range": self._arguments.out_of_range,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TPUEmbedding":
        """Makes a layer from what `get_config` returned."""
        config = dict(config)
        return cls(feature_configs.from_config(config.pop("feature_config")),
                   **config)
