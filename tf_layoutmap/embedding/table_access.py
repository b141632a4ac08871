"""What may be read of an embedding outside of its steps."""

# DOC-MERGE: What a Keras layer asks of the embedding that it holds.
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

# AutoGraph would rewrite all of this file and what it calls, at each trace.
_as_written = tf.autograph.experimental.do_not_convert


class TableAccess:
    """Tables, slot variables and counts of `TPUEmbedding`."""

    _state: EmbeddingState
    _variables: dict[str, dict[str, Any]]
    build: Callable[[], None]

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """From each `TableConfig` to its rows, `[num_rows, dim]` float32.

        A `tf.Variable`, or a `ShardedVariable` of a table in shards. Outside
        of `tf.function` a pipelined update lands first.

        Raises:
          RuntimeError: Under `TPUStrategy`, where the rows are on the TPU,
            except while a SavedModel is made; all shards go into it.
        """
        self._make_readable("embedding_tables")
        return {
            one: self._variables[spec.name][tables.PARAMETERS]
            for one, spec in self._tables()
        }

    @property
    def slot_variables(self) -> dict[Any, dict[str, Any]]:
        """From each `TableConfig` to its slot variables by name.

        Raises:
          RuntimeError: As of `embedding_tables`.
        """
        self._make_readable("slot_variables")
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
        """From the name of each table with an open vocabulary to its keys."""
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
        """Gives a table another capacity; see `Vocabulary.resize`."""
        backend = cast(EngineBackend, self._state.backend)
        found = backend.resize(table, capacity)
        spec = found.spec.tables[table]
        self._state.spec = found.spec
        # Trackable as the first ones: a checkpoint finds the new variables.
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

    @_as_written
    def flush(self):
        """Lands the update that pipelining still holds back, if any.

        Reading `embedding_tables` outside of `tf.function`, saving, restoring
        and forward-only steps do so by themselves.
        """
        self._state.require_host("flush").flush()

    @_as_written
    def reset(self):
        """Forgets every step in flight, as after an interrupted one.

        A step that was applied is none of them: pipelined, it lands first.
        """
        self._state.require_host("reset").reset()

    def stats(self) -> dict[str, Any]:
        """Returns what the engine holds.

        Returns:
          `pending`: steps that wait for a dequeue, by replica; `awaiting`:
          whether a dequeued one waits for gradients, by replica; `num_updates`:
          updates made; `poisoned`: why a reset is needed, or empty; `held`:
          whether a pipelined update waits to land. `features`: by name, of
          all steps, `num_samples`, `num_ids` and of these `num_dropped`,
          `num_clipped` and `num_truncated` behind a sequence's last position.
          `tables`: by name, `num_bytes`, `num_slot_bytes`, and of all
          training steps `num_lookups`, `num_unique_rows` and their
          `unique_ratio`.

          Over parameter servers, without `features` and what workers know of
          ids: `staleness`: `mean` and `max` of the updates that a server made
          between sending the rows of a step and applying its gradients;
          `num_repeated`: closures that came again after they were applied;
          `servers`: by device, `num_updates`; `wire_dtype`: how rows travel.
        """
        backend = self._state.require_host("stats")
        if not tf.executing_eagerly():
            raise RuntimeError("`stats` must be called outside tf.function.")
        return backend.describe()

    def _make_readable(self, what: str):
        """Sees to it that the variables hold what the tables are."""
        if not self._state.backend.is_on_tpu:
            self.build()
            self._state.backend.before_read()
            return
        if not tf_private.in_save_context():
            raise RuntimeError(
                f"Unable to retrieve `{what}` under TPUStrategy: the rows are "
                "on the TPU. Save a checkpoint, and restore it into a "
                "TPUEmbedding that was created under another strategy."
            )
        self._state.check_built(what)

    def _tables(self):
        return zip(self._state.table_configs, self._state.spec.tables)


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
