"""The Keras 3 version of the layer `TPUEmbedding`.

`StepWeight` is the class of mark weights. A layer has a mark weight if an
engine trains its tables; see `layers.base.steps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private, patches, strategies
from tf_layoutmap.layers.base import (
    input_ids,
    keras_version_guard,
)
from tf_layoutmap.layers.base import steps as base_steps
from tf_layoutmap.layers.base.steps import StepCommitHook
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore
from tf_layoutmap.layers.keras3 import process_fit
from tf_layoutmap.layers.keras3.row_optimizer import (
    TakesGradients,
    check_not_stateless,
    unscaled,
)
from tf_layoutmap.layers.keras3.step_accumulation import MAX_STEPS, GradientSum
from tf_layoutmap.layout.keras3 import context as mesh_context

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Features, InputShape, Weights


class StepWeight(TakesGradients, keras.Variable):
    """Mark weight: notifies a layer when the model's optimizer is applied.

    `overwrite_with_gradient` is true. The model's optimizer therefore passes
    the gradient of the weight to `assign` when it applies a step, and `assign`
    applies the step to the tables.
    """

    def __init__(self, steps: StepCommitHook, *, name: str = "marks"):
        """Creates the weight, which passes the sums of marks to `steps`."""
        self._steps = steps
        self._sum = GradientSum(steps.apply, steps.layer_name)
        # An initializer is passed instead of a value, because Keras creates the
        # value later if a function is being traced.
        super().__init__(
            keras.initializers.Zeros(),
            shape=steps.mark_shape,
            name=name,
            dtype="float32",
            autocast=False,
        )

    @property
    def overwrite_with_gradient(self) -> bool:
        """True, so that an optimizer's `apply` passes gradients to `assign`."""
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        raise AttributeError(
            "`overwrite_with_gradient` of a mark weight is read-only."
        )

    def missing_gradient_error(self) -> str:
        """Returns the error message for a step without a gradient."""
        return base_steps.missing_gradient_message(
            self._steps.layer_name, self._steps.table_names
        )

    def numpy(self) -> np.ndarray:
        """Returns zeros that hold a copy of the tables, for `get_weights`."""
        return base_steps.marks_with_tables(self._steps)

    def assign(self, value: Any) -> Any:
        """Applies a step to the tables, with a sum of marks as `value`.

        If the caller is not an optimizer, but for example `set_weights`, the
        tables are restored from the copy that `value` holds.

        Raises:
          RuntimeError: If the caller is not an optimizer, and `value` holds no
            copy of the tables. Keras' weights do not contain the tables.
        """
        optimizer = keras_private.applying_optimizer()
        if optimizer is None:
            copied = base_steps.tables_in(value)
            if copied is None:
                raise RuntimeError(
                    base_steps.set_weights_error(self._steps.layer_name)
                )
            self._steps.load(copied)
            self.discard_accumulated()
            return value
        check_not_stateless(self.path)
        scale = optimizer.loss_scale_factor
        self._steps.apply(unscaled(value, scale))
        return value

    # Whether the weight is on the host.
    _is_on_host = True

    def accumulate(
        self, gradient: Any, steps: int, is_last: Any, position: Any
    ) -> None:
        """Accumulates a gradient; applies the mean after the last gradient.

        Args:
          gradient: Gradient of the weight.
          steps: The model's `gradient_accumulation_steps`.
          is_last: `[]` bool tensor: whether this is the last of `steps`
            gradients.
          position: `[]` integer tensor, number of earlier gradients of these
            `steps`; None on parameter servers.

        Raises:
          ValueError: If the tables do not support accumulated gradients.
        """
        where = (
            f"Received: gradient_accumulation_steps={steps} (layer "
            f"{self._steps.layer_name!r})."
        )
        if (
            position is None
            or strategies.on_servers()
            or not self._is_on_host
            or not self._steps.mark_shape
            or self._steps.num_replicas > 1
        ):
            raise ValueError(
                "The model's optimizer must not accumulate gradients of a "
                "table on the host or a TPU, except with one replica on the "
                "host: only there can a step of the table run in the `tf.cond` "
                "in which Keras applies accumulated gradients. Use larger "
                f"batches. {where}"
            )
        if steps > MAX_STEPS:
            raise ValueError(
                "Argument `gradient_accumulation_steps` must be at most "
                f"{MAX_STEPS}, because the engine keeps the gradients of "
                f"{MAX_STEPS} calls. {where}"
            )
        optimizer = keras_private.applying_optimizer()
        assert optimizer is not None  # An optimizer calls this method.
        check_not_stateless(self.path)
        self._sum.add(
            unscaled(gradient, optimizer.loss_scale_factor),
            steps,
            is_last,
            position,
        )

    def discard_accumulated(self) -> None:
        """Discards accumulated gradients after the tables were restored."""
        self._sum.discard()

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        # The saved value of this weight is always zero. The value is not
        # restored, because under a strategy Keras would call `assign`.
        del restored_tensors
        self.discard_accumulated()
        return self.value


@keras.saving.register_keras_serializable("tf_layoutmap")
class TPUEmbedding(TPUEmbeddingCore, keras.layers.Layer):
    """Looks up all features of a model in tables that have separate optimizers.

    The layer contains a `tlm.TPUEmbedding`. In training, each call of the layer
    is one step of the `tlm.TPUEmbedding`. The tables are updated when the
    model's optimizer is applied: by `fit`, `train_on_batch`, or
    `apply_gradients` in a custom training loop. In evaluation, prediction and
    exported models, TensorFlow's own ops look up the rows.

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

    Attributes:
      embedding: The `tlm.TPUEmbedding`.
    """

    def _support_string_batches(self) -> None:
        patches.ensure("keras3_string_batches")

    def _support_processes(self) -> None:
        process_fit.enable_in_processes()

    def build(self, input_shape: InputShape = None) -> None:
        """Creates the tables.

        Raises:
          NotImplementedError: In a scope of a mesh.
        """
        del input_shape
        if self.built:
            return
        if mesh_context.context_of_new_variable()[0] is not None:
            raise NotImplementedError(
                base_steps.mesh_error("tlm.layers.TPUEmbedding", self.name)
            )
        self._steps.build()
        self._marks = StepWeight(self._steps)
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
