"""What a Keras layer asks of the embedding that it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap.embedding.api.backend import EngineBackend
from tf_layoutmap.embedding.api.state import EmbeddingState
from tf_layoutmap.embedding.api.table_access import TableAccess
from tf_layoutmap.embedding.spec import config

# Takes the gradients of a lookup's activations, and returns their mark.
Follow = Callable[[Sequence[tf.Tensor]], tf.Tensor]


class LayerAccess:
    """The lookups and variables of a `TPUEmbedding` inside of a model."""

    def __init__(self, embedding: TableAccess):
        """Takes the embedding, which need not be built."""
        self._embedding = embedding
        self._state: EmbeddingState = embedding._state

    @property
    def spec(self) -> config.EmbeddingSpec:
        """Its tables and features."""
        return self._state.spec

    @property
    def feature_config(self) -> Any:
        """The structure that it was made with."""
        return self._state.feature_config

    @property
    def out_of_range(self) -> str:
        """What becomes of an id that is no row of its table."""
        return self._state.out_of_range

    @property
    def is_on_tpu(self) -> bool:
        """Whether its tables are on a TPU, or an emulated one."""
        return self._state.backend.is_on_tpu

    @property
    def is_divided(self) -> bool:
        """Whether each process has a part of the tables."""
        return getattr(self._state.backend, "is_divided", False)

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the float32 mark of a lookup's gradients."""
        return self._state.backend.mark_shape

    @property
    def variable_device(self) -> str:
        """Where the small variables of a layer are that steps use."""
        return self._state.backend.variable_device

    @property
    def num_replicas(self) -> int:
        """Replicas that take part in each step."""
        return self._state.replicas.num_replicas

    def require_replica(self, method: str) -> int:
        """Returns the calling replica.

        Raises:
          RuntimeError: If there are several and none of them is calling.
        """
        return self._state.replicas.require_current(method)

    def is_last_here(self, replica: int) -> bool:
        """Whether no replica of this process comes after this one."""
        return self._state.replicas.is_last_here(replica)

    def is_in_program(self) -> bool:
        """Whether the caller is traced into a TPU's program."""
        return self._state.backend.is_in_program()

    def check_can_train(self, layer: str):
        """Refuses a training step.

        Args:
          layer: Its name, for messages.

        Raises:
          RuntimeError: It is exported, or a table has no optimizer.
        """
        self._state.check_can_step("call")
        self._state.check_optimizers(
            f"Layer {layer!r} in a training step",
            "make the layer with `trainable=False`",
        )

    def open(self, inputs: Any, weights: Any) -> tuple[Follow, list[tf.Tensor]]:
        """Opens a lookup of the host engine, which gradients may follow.

        Args:
          inputs: Structure of the feature config with ids.
          weights: None, or the same structure with None or weights.

        Returns:
          What takes the gradients of its activations, one per feature, and
          returns their mark, float32 of `mark_shape`; and the activations,
          as of `TPUEmbedding.dequeue`.
        """
        backend = self._engine_backend()
        lookup, activations = backend.open(inputs, weights)
        return functools.partial(backend.follow, lookup), activations

    def look_up(self, inputs: Any, weights: Any) -> list[tf.Tensor]:
        """Returns activations of divided tables, which nothing follows.

        Args:
          inputs: As of `open`.
          weights: As of `open`.

        Raises:
          RuntimeError: It is exported, or no replica is calling.
        """
        self._state.check_can_step("call")
        return self._state.backend.look_up(inputs, weights)  # pyright: ignore[reportAttributeAccessIssue] Only divided ones are asked.

    def apply_marks(self, marks: tf.Tensor):
        """Applies the gradients that marks stand for.

        Args:
          marks: A sum of marks, float32 of `mark_shape`.
        """
        self._engine_backend().apply_followed(marks)

    def variables(self) -> list[dict[str, Any]]:
        """Returns rows and slot variables by name, up to date, per table."""
        if self.is_on_tpu:
            self._state.check_built("save or load")
            self._state.backend.retrieve_variables()
        else:
            self._embedding.build()
            self._embedding.flush()
        return [
            self._embedding._variables[table.name] for table in self.spec.tables
        ]

    def load_variables(self):
        """Lets the steps use what was written to `variables()`."""
        self._state.backend.load_variables()

    def _engine_backend(self) -> EngineBackend:
        return cast(EngineBackend, self._state.backend)
