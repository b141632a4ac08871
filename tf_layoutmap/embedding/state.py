"""State of a `TPUEmbedding`, and the three methods of a step.

`EmbeddingState` contains the specs and the backend, and checks whether a call
is possible. `StepMethods` contains `enqueue`, `dequeue` and `apply_gradients`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tf_layoutmap._core import literals, tf_private
from tf_layoutmap.embedding import inputs, replicas
from tf_layoutmap.embedding.backend import Backend, EngineBackend
from tf_layoutmap.embedding.configs import config

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Features

FORWARD_STEPS = "use `enqueue(training=False)` and `dequeue`"


@dataclasses.dataclass
class EmbeddingState:
    """State of an embedding. Checkpoints do not contain this state.

    Attributes:
      feature_config: Nested structure of `FeatureConfig`.
      spec: Specs of tables and features.
      table_configs: The `TableConfig` of each table in `spec`.
      replicas: Replicas of the strategy.
      out_of_range: One of `config.OUT_OF_RANGE`.
      backend: Backend that runs the steps.
      lacks_tpu: Whether `engine="tpu"` was passed without a `TPUStrategy`. In
        this state, all methods of a step raise an error.
      is_copied: Whether the variables existed when the last asynchronous save
        started. If True, the save has copied the variables.
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
        """Raises a RuntimeError if the TPU is missing, or during an export."""
        if self.lacks_tpu:
            raise RuntimeError(
                f'`{method}` is not valid when TPUEmbedding(engine="tpu") is '
                "not created under a TPUStrategy; omit `engine` to run steps "
                "on the host."
            )
        if not self.backend.is_on_tpu:
            _check_not_exported(method)

    def check_built(self, method: str):
        """Raises a RuntimeError if steps are impossible, or before `build`."""
        self.check_can_step(method)
        if not self.backend.is_built:
            raise RuntimeError(
                f"`{method}` requires a built TPUEmbedding; call `enqueue` or "
                "`build` first."
            )

    def check_not_in_loop_of_replica(self):
        """Checks that no replica is in a loop over steps.

        On the host, a step of one replica waits for the gradients of all
        replicas, but the loops of the replicas run independently.

        Raises:
          RuntimeError: If there are several replicas, and a loop in
            `strategy.run` is being traced.
        """
        if (
            self.replicas.num_replicas > 1
            and not self.backend.is_on_tpu
            and tf_private.in_loop_of_replica()
        ):
            raise RuntimeError(
                "`apply_gradients` must not be called in a loop inside "
                "`strategy.run`, because each step waits for all "
                f"{self.replicas.num_replicas} replicas; call `strategy.run` "
                "inside the loop."
            )

    def check_optimizers(self, caller: str, to_serve: str):
        """Raises a RuntimeError if a table has no optimizer.

        Args:
          caller: Name of the call that requires an optimizer, for the message.
          to_serve: Advice for programs that only need serving, for the message.
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

        If `training` is a tensor, the engine checks its value later.

        Raises:
          TypeError: If `training` is neither a bool nor a tensor.
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
        """Returns the built backend, or raises a RuntimeError on a TPU."""
        self.check_built(method)
        if self.backend.is_on_tpu:
            raise RuntimeError(
                f"`{method}` is only available with the host engine: the host "
                "has no access to the steps on a TPU."
            )
        return cast(EngineBackend, self.backend)


def _check_not_exported(method: str):
    """Raises a RuntimeError if the current graph is being exported.

    A program that loads a graph with a step would require this package.
    """
    if tf_private.in_save_context():
        raise RuntimeError(
            f"`{method}` cannot be exported: a SavedModel must load without "
            "tf_layoutmap. Use `serving_embedding_lookup` for serving, and do "
            "not keep training functions as attributes of the saved object."
        )


# Without this decorator, each trace would run AutoGraph on the methods of this
# module and on all functions that they call.
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
        """Starts a step that looks up the ids in `features`.

        Inside `strategy.run`, a call starts a step of the calling replica.
        Outside `strategy.run`, each leaf must contain one value per replica, or
        `device` must select the replica of the step.

        Under `TPUStrategy`, a call inside `strategy.run` must be at the top
        level of the function that is passed to `strategy.run`. If the tables
        are on the TPU, `features` must be arguments of this function, dense
        inputs must have one id per sample, and batch sizes must be constant,
        and must be known during tracing. If the tables are on the host, the
        function may compute `features` from its arguments without variables,
        random numbers and calls of a `tf.function`.

        Args:
          features: Integer ids in the structure of `feature_config`. Each leaf
            is a `tf.Tensor` `[num_samples]` or `[..., ids per sample]`, a
            row-major `tf.SparseTensor` of rank 2 or more, or a
            `tf.RaggedTensor` of rank 2. Different features can have different
            tensor types and batch sizes. `features` can also be the tensor that
            `tlm.pack` returned for this structure.
          weights: None, or the same structure in which each leaf is None or the
            weights of the ids. Weights have the same sparse or ragged form as
            the ids. For packed features, `weights` are the weights that
            `tlm.pack` returned.
          training: Bool or scalar bool tensor. If False, the step is
            forward-only and receives no gradients. If a `tf.function` calls
            `enqueue` and `dequeue` with a `name`, but does not call
            `apply_gradients` with this name, the steps with this name are
            forward-only for all values of `training`.
          name: Name that is equal in all calls of a step in a `tf.function`. If
            several steps have the same name, the calls of these steps are
            matched in order.
          device: A device of the strategy, such as `"/device:CPU:1"`. On a TPU,
            any core of the TPU.

        Raises:
          TypeError: If the structure of `features` or `weights` has other types
            than `feature_config`, or if ids are not integers.
          ValueError: If a structure, size or rank does not match
            `feature_config` or the known shapes, or if weights do not match
            their ids.
          RuntimeError: If `training` is True and a table has no optimizer, if
            the caller is a replica of another strategy, or if the call is in
            control flow inside a TPU program.
          tf.errors.InvalidArgumentError: If ids, splits or weights are invalid.
            The message names the feature, the sample, the id and the table.
          tf.errors.FailedPreconditionError: If too many enqueued steps wait for
            `dequeue`.
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
          Float32 tensors in the structure of `feature_config`. The shape is
          `[num_samples, dim]`, or `[*output_shape, dim]` if the feature has an
          `output_shape`, or `[num_samples, max_sequence_length, dim]` for a
          sequence feature. Samples without ids have activations of zeros.

        Raises:
          RuntimeError: If the embedding is not built, or if there are several
            replicas and the call is outside `strategy.run`.
          tf.errors.FailedPreconditionError: If no step is enqueued, or if the
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

        The engine applies the update after all replicas have called
        `apply_gradients`. Each dynamic learning rate is called once.

        Args:
          gradients: Float32 gradients of the activations, in the structure of
            `feature_config`. Each gradient has the shape of its activations. A
            gradient of None is replaced by zeros, and a warning is logged.
          name: The `name` that was passed to `enqueue`.

        Raises:
          TypeError: If `gradients` has other types than `feature_config`.
          ValueError: If `gradients` has another size than `feature_config`, or
            if a gradient is not a tensor or has another dtype or shape.
          RuntimeError: If the embedding is not built, if a table has no
            optimizer, if there are several replicas and the call is outside
            `strategy.run` or in a loop in a replica, or if the traced function
            calls `enqueue` with this name and `training=False`.
          tf.errors.FailedPreconditionError: If no step is dequeued, or if the
            dequeued step was enqueued with `training=False`.
          tf.errors.InvalidArgumentError: If a learning rate is negative or not
            finite. The message names the table.
        """
        self._state.check_built("apply_gradients")
        self._state.check_optimizers("`apply_gradients`", FORWARD_STEPS)
        inputs.check_same_structure(
            gradients, "gradients", self._state.feature_config, "feature_config"
        )
        self._state.check_not_in_loop_of_replica()
        self._state.backend.apply(tf.nest.flatten(gradients), name)

    @property
    def _verify_output_shapes_on_enqueue(self) -> bool:
        """Whether `enqueue` checks shapes. User code can assign False."""
        return self._state.backend.checks_shapes

    @_verify_output_shapes_on_enqueue.setter
    def _verify_output_shapes_on_enqueue(self, value: bool):
        # Programs cannot disable the checks of the host engine, because they
        # are fast and prevent invalid memory accesses.
        if self._state.backend.is_on_tpu:
            self._state.backend.checks_shapes = value
