"""What a `TPUEmbedding` knows, and which calls it allows now."""

# DOC-MERGE: The three calls of a step.
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import inputs, replicas
from tf_layoutmap.embedding.backend import Backend, EngineBackend
from tf_layoutmap.embedding.spec import config

FORWARD_STEPS = "use `enqueue(training=False)` and `dequeue`"


@dataclasses.dataclass
class EmbeddingState:
    """What an embedding knows and a checkpoint must not.

    Attributes:
      backend: What carries the steps out.
      is_refused: Whether steps are for a TPU that is not there.
      is_copied: Whether the last asynchronous checkpoint that began found
        variables to copy.
    """

    feature_config: Any
    spec: config.EmbeddingSpec
    table_configs: list[Any]
    replicas: replicas.Replicas
    out_of_range: str
    backend: Backend
    is_refused: bool
    is_copied: bool = False

    def check_can_step(self, method: str):
        """Refuses steps for a TPU that is not there, and in an export."""
        if self.is_refused:
            raise RuntimeError(
                f'`{method}` is not valid when TPUEmbedding(engine="tpu") is '
                "not created under a TPUStrategy; leave `engine` out to step "
                "on the host."
            )
        if not self.backend.is_on_tpu:
            _check_not_exported(method)

    def check_built(self, method: str):
        """Refuses a call that may step, but before there are tables."""
        self.check_can_step(method)
        if not self.backend.is_built:
            raise RuntimeError(
                f"`{method}` needs a built TPUEmbedding; call `enqueue` or "
                "`build` first."
            )

    def check_optimizers(self, what: str, to_serve: str):
        """Refuses updates where a table only serves.

        Args:
          what: Which call needs an optimizer.
          to_serve: What a program without one does instead.
        """
        for table in self.spec.tables:
            if table.optimizer is None:
                raise RuntimeError(
                    f"{what} needs an optimizer for every table; table "
                    f"{table.name!r} has none. Pass `optimizer=` when the "
                    "TPUEmbedding is made, or to the TableConfig; to serve "
                    f"only, {to_serve}."
                )

    def check_training(self, training: Any):
        """Refuses what is no bool, and a true one where tables only serve.

        Of a tensor, the engine does the latter.
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
        """Returns the built backend, which must be the host's."""
        self.check_built(method)
        if self.backend.is_on_tpu:
            raise RuntimeError(
                f"`{method}` is of the host engine; a TPU keeps its steps to "
                "itself."
            )
        return cast(EngineBackend, self.backend)


def _check_not_exported(method: str):
    """Refuses a step in a graph that would need this package to be loaded."""
    if tf_private.in_save_context():
        raise RuntimeError(
            f"`{method}` cannot be exported: a SavedModel must load without "
            "tf_layoutmap. Serve by `serving_embedding_lookup`, and keep "
            "functions that train out of the attributes of what is saved."
        )


# AutoGraph would rewrite all of this file and what it calls, at each trace.
_as_written = tf.autograph.experimental.do_not_convert


class StepMethods:
    """`enqueue`, `dequeue` and `apply_gradients` of `TPUEmbedding`."""

    _state: EmbeddingState
    _create: Callable[[], None]

    @_as_written
    def enqueue(
        self,
        features: Any,
        weights: Any = None,
        training: Any = True,
        name: str | None = None,
        device: str | None = None,
    ):
        """Hands over the ids of one step.

        Inside `strategy.run` it is the step of that replica. Outside, each
        leaf holds one value per replica, or `device` says whose step it is.

        On a TPU, dense inputs have one id per sample, batch sizes are known
        while tracing and do not change, and a call inside `strategy.run` is at
        the top of the function that is run and is given its arguments.

        Args:
          features: Structure of `feature_config`. Each leaf is a `tf.Tensor`
            `[num_samples]` or `[..., ids per sample]`, a `tf.SparseTensor`
            (row-major) of rank 2 or more, or a `tf.RaggedTensor` of rank 2,
            of integers. Forms and batch sizes may differ. Or all of them
            packed by `tlm.pack`.
          weights: None, or the same structure with None or the factors of the
            ids, in the sparse or ragged form of the ids; or what was packed
            with them.
          training: Bool or scalar bool tensor. False: forward only, nothing
            to apply. A `tf.function` that enqueues and dequeues under one
            `name` and never applies under it is forward-only anyway.
          name: Which calls of a `tf.function` belong together. Steps pair by
            their order.
          device: A device of the strategy, as `"/device:CPU:1"`; of a TPU,
            any core.

        Raises:
          TypeError: If structures differ in types, or ids are not integers.
          ValueError: If structures, sizes, ranks or weights do not match.
          RuntimeError: If `training` and a table has no optimizer, or called
            by a replica of another strategy, or in control flow inside a
            TPU's program.
          tf.errors.InvalidArgumentError: If ids, splits or weights are bad;
            it names feature, sample, id and table.
          tf.errors.FailedPreconditionError: If too many steps are pending.
        """
        self._state.check_can_step("enqueue")
        self._state.check_training(training)
        backend = self._state.backend
        batch = backend.read(features, weights, device)
        if not backend.is_built:
            self._create()
        backend.enqueue(batch, training, name)

    @_as_written
    def dequeue(self, name: str | None = None) -> Any:
        """Returns the activations of the oldest step enqueued.

        Args:
          name: That of its `enqueue`.

        Returns:
          Structure of `feature_config` with float32 tensors: `[num_samples,
          dim]`, `[*output_shape, dim]`, or `[num_samples,
          max_sequence_length, dim]` of a sequence feature. A sample without
          ids is zeros.

        Raises:
          RuntimeError: If not built, or outside `strategy.run` with several
            replicas.
          tf.errors.FailedPreconditionError: If no step is enqueued, or the
            step before still waits for its gradients.
        """
        self._state.check_built("dequeue")
        return tf.nest.pack_sequence_as(
            self._state.feature_config, self._state.backend.dequeue(name)
        )

    @_as_written
    def apply_gradients(self, gradients: Any, name: str | None = None):
        """Updates the tables with the gradients of the step dequeued last.

        The update runs when the last replica has applied. Dynamic learning
        rates are called once each.

        Args:
          gradients: Structure of `feature_config` with the gradient of each
            activation, float32 and of its shape. None counts as zeros, with
            a warning.
          name: That of the step's `enqueue`.

        Raises:
          TypeError: If the structure differs in types.
          ValueError: If the structure differs in size, or a gradient is no
            tensor or of another type or shape.
          RuntimeError: If not built, a table has no optimizer, or outside
            `strategy.run` with several replicas; or while a function is
            traced that enqueues under this name with `training=False`.
          tf.errors.FailedPreconditionError: If no step was dequeued, or it
            was enqueued with `training=False`.
          tf.errors.InvalidArgumentError: If a learning rate is negative or
            not finite; it names the table.
        """
        self._state.check_built("apply_gradients")
        self._state.check_optimizers("`apply_gradients`", FORWARD_STEPS)
        inputs.check_same_structure(
            gradients, "gradients", self._state.feature_config, "feature_config"
        )
        self._state.backend.apply(tf.nest.flatten(gradients), name)

    @property
    def _verify_output_shapes_on_enqueue(self) -> bool:
        """Whether `enqueue` checks shapes; programs switch it off."""
        return self._state.backend.checks_shapes

    @_verify_output_shapes_on_enqueue.setter
    def _verify_output_shapes_on_enqueue(self, value: bool):
        # The host engine's checks are cheap and protect memory: they stay.
        if self._state.backend.is_on_tpu:
            self._state.backend.checks_shapes = value
