"""Access to the tables of an embedding outside of its steps.

`TableAccess` contains public properties and methods of `TPUEmbedding`.
`LayerAccess` is the interface for a Keras layer that holds an embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.backend import EngineBackend
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.state import EmbeddingState
from tf_layoutmap.vocabulary import state

# Without this decorator, AutoGraph would convert the methods of this module
# and all functions that they call, in each trace.
_no_autograph = tf.autograph.experimental.do_not_convert


class TableAccess:
    """Tables, slot variables, vocabularies and statistics of `TPUEmbedding`."""

    _state: EmbeddingState
    _variables: dict[str, dict[str, Any]]
    build: Callable[[], None]

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """Dict from each `TableConfig` to its rows, `[num_rows, dim]`.

        The rows are a `tf.Variable`, or a `ShardedVariable` if the table is
        sharded. Outside of `tf.function`, a pending pipelined update is
        applied first.

        Raises:
          RuntimeError: Under `TPUStrategy`, because the rows are on the TPU. No
            error is raised while a SavedModel is written, because a SavedModel
            includes all shards.
        """
        self._update_variables("embedding_tables")
        return {
            one: self._variables[spec.name][tables.PARAMETERS]
            for one, spec in self._tables()
        }

    @property
    def slot_variables(self) -> dict[Any, dict[str, Any]]:
        """Dict from each `TableConfig` to its slot variables by name.

        Raises:
          RuntimeError: See `embedding_tables`.
        """
        self._update_variables("slot_variables")
        return {
            one: {
                name: slot
                for name, slot in self._variables[spec.name].items()
                if name not in (tables.PARAMETERS, tables.ROUNDING_STEPS)
                and name not in state.NAMES
            }
            for one, spec in self._tables()
        }

    @property
    def vocabularies(self) -> dict[str, state.Vocabulary]:
        """Dict from each table with an open vocabulary to the vocabulary.

        The keys of the dict are names of tables.
        """
        if not self._state.spec.has_open_tables:
            return {}
        self.build()
        backend = cast(EngineBackend, self._state.backend)
        return {
            spec.name: state.Vocabulary(
                spec.vocabulary.settings,
                spec.title or spec.name,
                {
                    name: variable
                    for name, variable in self._variables[spec.name].items()
                    if name in state.NAMES
                },
                functools.partial(backend.evict_keys, number),
                functools.partial(self._resize, number),
            )
            for number, spec in enumerate(self._state.spec.tables)
            if spec.vocabulary is not None
        }

    def _resize(self, table: int, capacity: int) -> tuple[Any, Any, Any]:
        """Changes the capacity of a table; see `Vocabulary.resize`."""
        backend = cast(EngineBackend, self._state.backend)
        found = backend.resize(table, capacity)
        spec = found.spec.tables[table]
        self._state.spec = found.spec
        # Assigning the attribute makes the new variables trackable, so that
        # checkpoints contain them.
        self._variables = {**self._variables, spec.name: found.variables}
        return (
            spec.vocabulary.settings,
            {
                name: variable
                for name, variable in found.variables.items()
                if name in state.NAMES
            },
            found.conversion,
        )

    @_no_autograph
    def flush(self):
        """Applies the pending pipelined update, if there is one.

        Reading `embedding_tables` outside of `tf.function`, saving, restoring
        and forward-only steps also apply this update.
        """
        self._state.require_host("flush").flush()

    @_no_autograph
    def reset(self):
        """Discards all steps in flight, for example after an interruption.

        A pending pipelined update is applied first, because its step is not in
        flight.
        """
        self._state.require_host("reset").reset()

    def stats(self) -> dict[str, Any]:
        """Returns the engine's statistics.

        Returns:
          A dict. `pending`: number of steps that wait for `dequeue`, by
          replica. `awaiting`: whether a dequeued step waits for gradients, by
          replica. `num_updates`: number of applied updates. `poisoned`: the
          reason why `reset` is required, or empty. `held`: whether a pipelined
          update is pending. `features`: counts over all steps, by name:
          `num_samples`, `num_ids`, and how many of these ids were dropped
          (`num_dropped`), clipped (`num_clipped`), or after the last position
          of a sequence (`num_truncated`). `tables`: by name, `num_bytes`,
          `num_slot_bytes`, and over all training steps `num_lookups`,
          `num_unique_rows` and their ratio `unique_ratio`.

          Over parameter servers, the dict contains neither `features` nor
          counts of ids that only workers can compute. Additional entries are
          `staleness`: `mean` and `max` number of updates that a server applied
          between sending the rows of a step and applying its gradients;
          `num_repeated`: number of closures that arrived again after they were
          applied; `servers`: `num_updates` by device; `wire_dtype`: dtype in
          which rows are sent.
        """
        backend = self._state.require_host("stats")
        if not tf.executing_eagerly():
            raise RuntimeError("`stats` must be called outside tf.function.")
        return backend.describe()

    def _update_variables(self, attribute: str):
        """Updates the variables before `attribute` is read."""
        if not self._state.backend.is_on_tpu:
            self.build()
            self._state.backend.before_read()
            return
        if not tf_private.in_save_context():
            raise RuntimeError(
                f"Unable to retrieve `{attribute}` under TPUStrategy: the "
                "rows are on the TPU. Save a checkpoint, and restore it into "
                "a TPUEmbedding that was created under another strategy."
            )
        self._state.check_built(attribute)

    def _tables(self):
        return zip(self._state.table_configs, self._state.spec.tables)


# A function that takes the gradients of activations and returns their mark.
Follow = Callable[[Sequence[tf.Tensor]], tf.Tensor]


class LayerAccess:
    """Lookups and variables of a `TPUEmbedding` for use in a Keras layer."""

    def __init__(self, embedding: TableAccess):
        """Wraps `embedding`, which need not be built."""
        self._embedding = embedding
        self._state: EmbeddingState = embedding._state

    @property
    def spec(self) -> config.EmbeddingSpec:
        """Specs of the tables and features."""
        return self._state.spec

    @property
    def feature_config(self) -> Any:
        """Argument `feature_config` of the embedding."""
        return self._state.feature_config

    @property
    def out_of_range(self) -> str:
        """How ids outside of their table are handled."""
        return self._state.out_of_range

    @property
    def is_on_tpu(self) -> bool:
        """Whether the tables are on a TPU or on an emulated TPU."""
        return self._state.backend.is_on_tpu

    @property
    def is_divided(self) -> bool:
        """Whether the tables are sharded over processes."""
        return getattr(self._state.backend, "is_divided", False)

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the float32 mark of a lookup's gradients."""
        return self._state.backend.mark_shape

    @property
    def variable_device(self) -> str:
        """Device of the small variables that a layer's steps use."""
        return self._state.backend.variable_device

    @property
    def num_replicas(self) -> int:
        """Number of replicas that participate in each step."""
        return self._state.replicas.num_replicas

    def require_replica(self, method: str) -> int:
        """Returns the index of the calling replica.

        Raises:
          RuntimeError: If there are several replicas and the caller is none of
            them.
        """
        return self._state.replicas.require_current(method)

    def is_last_here(self, replica: int) -> bool:
        """Whether `replica` is the last replica of this process."""
        return self._state.replicas.is_last_here(replica)

    def is_in_program(self) -> bool:
        """Whether the caller is being traced as part of a TPU program."""
        return self._state.backend.is_in_program()

    def check_can_train(self, layer: str):
        """Checks that a training step is possible.

        Args:
          layer: Name of the layer, for messages.

        Raises:
          RuntimeError: If the graph is exported, or a table has no optimizer.
        """
        self._state.check_can_step("call")
        self._state.check_optimizers(
            f"Layer {layer!r} in a training step",
            "create the layer with `trainable=False`",
        )

    def open(self, inputs: Any, weights: Any) -> tuple[Follow, list[tf.Tensor]]:
        """Opens a lookup of the host engine, to which gradients may be passed.

        Args:
          inputs: Structure of the feature config with ids.
          weights: None, or the same structure with None or weights.

        Returns:
          A tuple of a function and the activations of each feature. The
          function takes the gradients of the activations, one per feature, and
          returns their mark, float32 of `mark_shape`.
        """
        backend = self._engine_backend()
        lookup, activations = backend.open(inputs, weights)
        return functools.partial(backend.follow, lookup), activations

    def look_up(self, inputs: Any, weights: Any) -> list[tf.Tensor]:
        """Returns activations that have no gradients, for `is_divided` tables.

        Args:
          inputs: Structure of the feature config with ids.
          weights: None, or the same structure with None or weights.

        Raises:
          RuntimeError: If the graph is exported, or the caller is not a
            replica.
        """
        self._state.check_can_step("call")
        return self._state.backend.look_up(inputs, weights)  # pyright: ignore[reportAttributeAccessIssue] Callers check `is_divided`.

    def apply_marks(self, marks: tf.Tensor):
        """Applies the gradients that a sum of marks represents.

        Args:
          marks: A sum of marks, float32 of `mark_shape`.
        """
        self._engine_backend().apply_followed(marks)

    def variables(self) -> list[dict[str, Any]]:
        """Returns the updated rows and slot variables by name, per table."""
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
        """Copies values that were assigned to `variables()` to the backend."""
        self._state.backend.load_variables()

    def _engine_backend(self) -> EngineBackend:
        return cast(EngineBackend, self._state.backend)
