"""What may be read of an embedding outside of its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.api.backend import EngineBackend
from tf_layoutmap.embedding.api.state import EmbeddingState
from tf_layoutmap.embedding.variables import tables
from tf_layoutmap.vocabulary import state as vocabulary_state

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
                and name not in vocabulary_state.NAMES
            }
            for one, spec in self._tables()
        }

    @property
    def vocabularies(self) -> dict[str, vocabulary_state.Vocabulary]:
        """From the name of each table with an open vocabulary to its keys."""
        if not self._state.spec.has_open_tables:
            return {}
        self.build()
        backend = cast(EngineBackend, self._state.backend)
        return {
            spec.name: vocabulary_state.Vocabulary(
                spec.vocabulary.settings,
                spec.title or spec.name,
                {
                    name: variable
                    for name, variable in self._variables[spec.name].items()
                    if name in vocabulary_state.NAMES
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
                if name in vocabulary_state.NAMES
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
        if not _tf_private.in_save_context():
            raise RuntimeError(
                f"Unable to retrieve `{what}` under TPUStrategy: the rows are "
                "on the TPU. Save a checkpoint, and restore it into a "
                "TPUEmbedding that was created under another strategy."
            )
        self._state.check_built(what)

    def _tables(self):
        return zip(self._state.table_configs, self._state.spec.tables)
