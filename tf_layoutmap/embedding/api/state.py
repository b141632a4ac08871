"""What a `TPUEmbedding` knows, and which calls it allows now."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.api.backend import Backend, EngineBackend
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import replicas

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
    if _tf_private.in_save_context():
        raise RuntimeError(
            f"`{method}` cannot be exported: a SavedModel must load without "
            "tf_layoutmap. Serve by `serving_embedding_lookup`, and keep "
            "functions that train out of the attributes of what is saved."
        )
