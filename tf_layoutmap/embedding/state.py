"""State of a `TPUEmbedding`, and the three methods of a step.

`EmbeddingState` holds the specs and the backend, and checks whether a call is
allowed. `StepMethods` contains `enqueue`, `dequeue` and `apply_gradients`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tf_layoutmap._core import literals, tf_private
from tf_layoutmap.embedding import inputs, replicas
from tf_layoutmap.embedding.backend import Backend, EngineBackend
from tf_layoutmap.embedding.spec import config

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Features

FORWARD_STEPS = "use `enqueue(training=False)` and `dequeue`"


@dataclasses.dataclass
class EmbeddingState:
    """State of an embedding that is not saved in checkpoints.

    Attributes:
      feature_config: Nested structure of `FeatureConfig`.
      spec: Specs of tables and features.
      table_configs: The `TableConfig` of each table in `spec`.
      replicas: Replicas of the strategy.
      out_of_range: One of `config.OUT_OF_RANGE`.
      backend: Backend that runs the steps.
      lacks_tpu: Whether `engine="tpu"` was passed without a TPUStrategy, so
        that steps raise.
      is_copied: Whether variables existed when the last asynchronous save
        started. If so, the save has copied them.
    """

    feature_config: Any
    spec: config.EmbeddingSpec
    table_configs: list[Any]
    replicas: replicas.Replicas
    out_of_range: literals.OutOfRange
    backend: Backend
    lacks_tpu: bool
    is_copied: bool = False

    def check_can_step(self, method: str):
        """Raises if there is no TPU for the steps, or during an export."""
        if self.lacks_tpu:
            raise RuntimeError(
                f'`{method}` is not valid when TPUEmbedding(engine="tpu") is '
                "not created under a TPUStrategy; omit `engine` to run steps "
                "on the host."
            )
        if not self.backend.is_on_tpu:
            _check_not_exported(method)

    def check_built(self, method: str):
        """Raises if steps are not possible or the tables do not exist yet."""
        self.check_can_step(method)
        if not self.backend.is_built:
            raise RuntimeError(
                f"`{method}` requires a built TPUEmbedding; call `enqueue` or "
                "`build` first."
            )

    def check_optimizers(self, caller: str, to_serve: str):
        """Raises a RuntimeError if a table has no optimizer.

        Args:
          caller: Call that requires an optimizer, for the message.
          to_serve: Advice for programs that only serve, for the message.
        """
        for table in self.spec.tables:
            if table.optimizer is None:
                raise RuntimeError(
                    f"{caller} requires an optimizer for every table; table "
                    f"{table.name!r} has none. Pass `optimizer=` to the "
                    "TPUEmbedding or to the TableConfig; to serve only, "
                    f"{to_serve}."
                )

    def check_training(self, training: Any):
        """Checks the argument `training` of `enqueue`.

        The engine checks the value of a tensor.

        Raises:
          TypeError: If `training` is not a bool.
          RuntimeError: If `training` is True and a table has no optimizer.
        """
        if tf.is_tensor(training) or isinstance(training, tf.Variable):
            return
        if not isinstance(training, bool):
            raise TypeError(
                "Argument `training` must be a bool or a bool tensor. "
                f"Received: {training!r}."
            )
        if training:
            self.check_optimizers("`enqueue(training=True)`", FORWARD_STEPS)

    def require_host(self, method: str) -> EngineBackend:
        """Returns the built backend; raises a RuntimeError on a TPU."""
        self.check_built(method)
        if self.backend.is_on_tpu:
            raise RuntimeError(
                f"`{method}` is only available with the host engine: the host "
                "has no access to the steps on a TPU."
            )
        return cast(EngineBackend, self.backend)


def _check_not_exported(method: str):
    """Raises a RuntimeError for a step in a graph that is exported.

    Loading such a graph would require this package.
    """
    if tf_private.in_save_context():
        raise RuntimeError(
            f"`{method}` cannot be exported: a SavedModel must load without "
            "tf_layoutmap. Use `serving_embedding_lookup` for serving, and do "
            "not keep training functions as attributes of the saved object."
        )


# Without this decorator, AutoGraph would convert the methods of this module
# and all functions that they call, in each trace.
_no_autograph = tf.autograph.experimental.do_not_convert


class StepMethods:
    """`enqueue`, `dequeue` and `apply_gradients` of `TPUEmbedding`."""

    _state: EmbeddingState
    _create: Callable[[], None]

    @_no_autograph
    def enqueue(
        self,
        features: Features,
        weights: Features | None = None,
        training: bool | tf.Tensor | tf.Variable = True,
        name: str | None = None,
        device: str | None = None,
    ) -> None:
        """Starts a step with these ids.

        A call inside `strategy.run` starts a step of the calling replica. In a
        call outside `strategy.run`, each leaf holds one value per replica, or
        `device` selects the replica of the step.

        On a TPU, dense inputs must have one id per sample, and batch sizes
        must be known during tracing and constant. A call inside `strategy.run`
        must be at the top level of the function that is run, and `features`
        must be arguments of this function.

        Args:
          features: Structure of `feature_config`. Each leaf is a `tf.Tensor`
            `[num_samples]` or `[..., ids per sample]`, a `tf.SparseTensor`
            (row-major) of rank 2 or more, or a `tf.RaggedTensor` of rank 2,
            of integers. Forms and batch sizes may differ. Alternatively, the
            tensor that `tlm.pack` returned for the structure.
          weights: None, or the same structure with None or the weights of the
            ids, in the sparse or ragged form of the ids. For packed features,
            the weights that `tlm.pack` returned.
          training: Bool or scalar bool tensor. If False, the step is
            forward-only and receives no gradients. If a `tf.function` calls
            `enqueue` and `dequeue` with a `name` but never calls
            `apply_gradients` with it, the steps with this name are forward-only
            for any value of `training`.
          name: Name that the calls of one step in a `tf.function` share. The
            calls of several steps with the same name are matched in the order
            of the calls.
          device: A device of the strategy, such as `"/device:CPU:1"`; on a
            TPU, any core.

        Raises:
          TypeError: If structures differ in types, or ids are not integers.
          ValueError: If structures, sizes, ranks or weights do not match.
          RuntimeError: If `training` is true and a table has no optimizer, or
            the caller is a replica of another strategy, or the call is in
            control flow inside a TPU's program.
          tf.errors.InvalidArgumentError: If ids, splits or weights are
            invalid; the message names feature, sample, id and table.
          tf.errors.FailedPreconditionError: If too many steps are pending.
        """
        self._state.check_can_step("enqueue")
        self._state.check_training(training)
        backend = self._state.backend
        batch = backend.read(features, weights, device)
        if not backend.is_built:
            self._create()
        backend.enqueue(batch, training, name)

    @_no_autograph
    def dequeue(self, name: str | None = None) -> Any:
        """Returns the activations of the oldest enqueued step.

        Args:
          name: The `name` that was passed to `enqueue`.

        Returns:
          Structure of `feature_config` with float32 tensors: `[num_samples,
          dim]`, `[*output_shape, dim]`, or `[num_samples,
          max_sequence_length, dim]` for a sequence feature. The activations of
          a sample without ids are zeros.

        Raises:
          RuntimeError: If the embedding is not built, or the call is outside
            `strategy.run` with several replicas.
          tf.errors.FailedPreconditionError: If no step is enqueued, or the
            previous step still waits for its gradients.
        """
        self._state.check_built("dequeue")
        return tf.nest.pack_sequence_as(
            self._state.feature_config, self._state.backend.dequeue(name)
        )

    @_no_autograph
    def apply_gradients(
        self, gradients: Features, name: str | None = None
    ) -> None:
        """Updates the tables with the gradients of the last dequeued step.

        The update runs when the last replica has called `apply_gradients`.
        Each dynamic learning rate is called once.

        Args:
          gradients: Structure of `feature_config` with the gradient of each
            activation, float32, in the shape of the activation. None is treated
            as zeros and logs a warning.
          name: The `name` that was passed to `enqueue`.

        Raises:
          TypeError: If the structure differs in types.
          ValueError: If the structure differs in size, or a gradient is not a
            tensor or has another type or shape.
          RuntimeError: If the embedding is not built, a table has no
            optimizer, the call is outside `strategy.run` with several
            replicas, or the traced function calls `enqueue` with this name
            and `training=False`.
          tf.errors.FailedPreconditionError: If no step was dequeued, or it
            was enqueued with `training=False`.
          tf.errors.InvalidArgumentError: If a learning rate is negative or
            not finite; the message names the table.
        """
        self._state.check_built("apply_gradients")
        self._state.check_optimizers("`apply_gradients`", FORWARD_STEPS)
        inputs.check_same_structure(
            gradients, "gradients", self._state.feature_config, "feature_config"
        )
        self._state.backend.apply(tf.nest.flatten(gradients), name)

    @property
    def _verify_output_shapes_on_enqueue(self) -> bool:
        """Whether `enqueue` checks shapes; user code may disable this."""
        return self._state.backend.checks_shapes

    @_verify_output_shapes_on_enqueue.setter
    def _verify_output_shapes_on_enqueue(self, value: bool):
        # The checks of the host engine cannot be disabled: they are cheap and
        # prevent invalid memory accesses.
        if self._state.backend.is_on_tpu:
            self._state.backend.checks_shapes = value
