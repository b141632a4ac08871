"""The Keras 3 version of the layer `TPUEmbedding`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private, patches
from tf_layoutmap.layers.base import (
    input_ids,
    keras_version_guard,
)
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore
from tf_layoutmap.layers.keras3 import process_fit
from tf_layoutmap.layers.keras3.step_weight import StepWeight
from tf_layoutmap.layout.keras3 import context as mesh_context

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Features, InputShape, Weights
    from tf_layoutmap.layers.keras3.mesh_host_tables import MeshFeatures


@keras.saving.register_keras_serializable("tf_layoutmap")
class TPUEmbedding(TPUEmbeddingCore, keras.layers.Layer):
    """Looks up all features of a model in tables that have separate optimizers.

    The layer contains a `tlm.TPUEmbedding`. In training, each call of the layer
    is one step of the `tlm.TPUEmbedding`. The tables are updated when the
    model's optimizer is applied: by `fit`, `train_on_batch`, or
    `apply_gradients` in a custom training loop. In exported models,
    TensorFlow's own ops look up the rows.

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

    The layer may be called several times in a training step, but on a TPU it
    must be called once. If the model's optimizer accumulates gradients, the
    tables are updated once with the mean, on the host with one replica. If the
    model's optimizer scales the loss, the scale is removed from the gradients
    of the tables. Other settings of the model's optimizer (clipping,
    weight decay) do not affect the tables. A custom loop may sum gradients and
    multiply them by numbers, for example clip them by their norm; other
    operations on the gradients raise an error. If a step was not applied, the
    next call of the layer discards the step. Tables and slot variables are
    saved in `.keras` files, `.weights.h5` files and checkpoints. A model can be
    saved to a `.keras` file only if the learning rates are numbers.

    The layer supports `OneDeviceStrategy`, `MirroredStrategy` and
    `MultiWorkerMirroredStrategy`. Create the layer and the model in
    `strategy.scope()`. The host holds a single copy of the tables. Under
    `MultiWorkerMirroredStrategy`, each process holds a copy, or a part with
    `over_processes="sharded"`. One step is applied per global batch. Gradients
    are summed feature by feature, then in the order of the samples in the
    global batch. The tables therefore match a run with one replica. The
    gradient of a row is not divided by the number of replicas, because Keras
    already divides the loss by the number of replicas.

    Under `ParameterServerStrategy` the tables are on the parameter servers, and
    `fit` requires `tlm.ps.Datasets`.

    Under `TPUStrategy`, real or emulated, the TPU executes steps and lookups.
    All batches must have the same static size, and dense inputs must have one
    id per sample. The layer must be called inside `strategy.run`, as in `fit`,
    `evaluate` and `predict`. With `engine="host"`, the host engine executes
    steps and lookups instead, before and after the program of the TPU. Inputs
    then have the same forms as without a TPU, and the layer can also be called
    outside of `strategy.run`, without gradients.

    Under `tlm.layout_map_scope` the tables stay on the host. The host looks up
    all features before each step, and the mesh receives the activations. The
    inputs must then be dense inputs of a Functional or Sequential model, or
    results of preprocessing layers that directly follow its inputs.

    Attributes:
      embedding: The `tlm.TPUEmbedding`.
    """

    # The tables, if the layer is on a mesh.
    _host_tables: MeshFeatures | None = None

    def _support_string_batches(self) -> None:
        patches.ensure("keras3_string_batches")

    def _support_processes(self) -> None:
        process_fit.enable_in_processes()

    def _support_evaluation(self) -> None:
        patches.ensure("keras3_evaluation")

    def build(self, input_shape: InputShape = None) -> None:
        """Creates the tables.

        Raises:
          NotImplementedError: If a device of the mesh of the layer belongs to
            another process.
        """
        del input_shape
        if self.built:
            return
        context, owner, _ = mesh_context.context_of_new_variable()
        if context is None:
            self._steps.build()
            self._marks = StepWeight(self._steps)
        else:
            from tf_layoutmap.layers.keras3 import mesh_host_tables

            with mesh_host_tables.creating_tables(context, self.name):
                self._steps.build()
            self._host_tables = mesh_host_tables.MeshFeatures(self._steps)
            self._marks = mesh_host_tables.MeshStepWeight(
                self._host_tables, context, owner
            )
        self._marks.trainable = self.trainable
        self.built = True

    def __call__(
        self, inputs: Features, *args: object, **kwargs: object
    ) -> Any:
        """Calls the layer; only Keras 3 models may call it."""
        input_ids.check_inputs(inputs, self.name)
        if not self.built and any(
            argument is None for argument in tf.nest.flatten([args, kwargs])
        ):
            # To build a layer, some versions of Keras read the shape of each
            # element of an argument, and raise an error for None in a dict.
            self.build(None)
        return super().__call__(inputs, *args, **kwargs)

    def call(
        self,
        inputs: Features,
        weights: Features | None = None,
        training: bool | None = None,
    ) -> Any:
        if self._host_tables is not None:
            from tf_layoutmap.layers.keras3 import mesh_host_tables

            if mesh_host_tables.runs_on_mesh():
                activations = self._host_tables.rows_on_mesh(inputs, weights)
                return self._cast(
                    tf.nest.pack_sequence_as(
                        self._steps.feature_config, activations
                    )
                )
        if not keras_private.is_abstract():
            return super().call(inputs, weights, training)
        if (
            self._steps.has_ordered_steps
            or self._steps.access.is_sharded
            or self._steps.is_packed(inputs)
        ):
            return self._cast(self._steps.zeros(inputs))
        # If there are several replicas, `fit` traces the model with the mean of
        # the replicas' ids, which is a float tensor.
        inputs = tf.nest.map_structure(
            lambda ids: tf.cast(ids, tf.int64), inputs
        )
        return self._cast(self._steps.look_up(inputs, weights))

    call.__doc__ = TPUEmbeddingCore.call.__doc__

    def load_own_variables(self, store: Weights) -> None:
        """Reads the saved arrays; discards accumulated gradients."""
        super().load_own_variables(store)
        self._marks.discard_accumulated()

    def _marks_variable(self) -> tf.Variable:
        return self._marks.value

    def _check_keras_version(self, inputs: Any) -> None:
        keras_version_guard.check_not_tf_keras(self, inputs)

    def compute_output_spec(
        self,
        inputs: Features,
        weights: Features | None = None,
        training: bool | None = None,
    ) -> Any:
        """Returns the activations as `KerasTensor` objects."""
        del weights, training
        return tf.nest.pack_sequence_as(
            self._steps.feature_config,
            [
                keras.KerasTensor(shape, dtype=self.compute_dtype)
                for shape in self._steps.output_shapes(inputs)
            ],
        )
