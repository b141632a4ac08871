"""Access to the tables of an embedding outside of steps.

`TableAccess` contains public properties and methods of `TPUEmbedding`.
`LayerAccess` is the interface for Keras layers that contain an embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import inputs, tables, tpu_program
from tf_layoutmap.embedding.backend import EngineBackend, ShardedBackend
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.state import EmbeddingState
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.vocabulary import kept_strings, key_rows, parts, state
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary

# Without this decorator, each trace would run AutoGraph on the methods of this
# module and on all functions that they call.
_no_autograph = tf.autograph.experimental.do_not_convert


class TableAccess:
    """Tables, slot variables, vocabularies and statistics of `TPUEmbedding`."""

    _state: EmbeddingState
    _variables: dict[str, dict[str, Any]]
    # The strings of vocabularies that keep strings, by the name of the table
    # that owns the vocabulary. `build` assigns an instance attribute, which
    # checkpoints contain, if there is such a vocabulary.
    _kept_strings: Mapping[str, kept_strings.KeptStrings] = {}
    build: Callable[[], None]

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """Dict from each `TableConfig` to the rows of its table.

        The rows are a `tf.Variable` of shape `[num_rows, dim]`, or a
        `ShardedVariable` if the table is sharded. Outside of `tf.function`, the
        property first applies a pending pipelined update. Under `TPUStrategy`,
        the property first copies the rows of all tables from the TPU. A change
        of these copies does not change the rows on the TPU.

        Raises:
          RuntimeError: Under `TPUStrategy`, inside `tf.function` or before
            `build`.
        """
        self._update_variables("embedding_tables")
        return {
            name: self._variables[spec.name][tables.PARAMETERS]
            for name, spec in self._tables()
        }

    @property
    def slot_variables(self) -> dict[Any, dict[str, Any]]:
        """Dict from each `TableConfig` to a dict of its slot variables by name.

        Raises:
          RuntimeError: See `embedding_tables`.
        """
        self._update_variables("slot_variables")
        return {
            name: {
                name: slot
                for name, slot in self._variables[spec.name].items()
                if name not in (tables.PARAMETERS, tables.ROUNDING_STEPS)
                and name not in parts.NAMES
            }
            for name, spec in self._tables()
        }

    @property
    def vocabularies(self) -> dict[str, state.Vocabulary]:
        """Dict from names of tables to their open vocabularies.

        The dict contains all tables with an open vocabulary.
        """
        if not self._state.spec.has_open_tables:
            return {}
        self.build()
        backend = cast(EngineBackend, self._state.backend)
        return {
            spec.name: state.Vocabulary(
                spec.title or spec.name,
                functools.partial(self._current_vocabulary, number),
                functools.partial(backend.evict_keys, number),
                functools.partial(self._resize, number),
                self._row_access(number),
            )
            for number, spec in enumerate(self._state.spec.tables)
            if spec.vocabulary is not None
        }

    def _tables_to_export(self) -> list[TableToExport]:
        """Returns the tables that `tlm.export` stores in a SavedModel."""
        all_rows = self._rows_to_export()
        vocabularies = self.vocabularies
        return [
            TableToExport(
                owner=self,
                name_in_owner=spec.name,
                name=spec.name,
                weight=all_rows[table_config],
                num_rows=spec.num_rows,
                dim=spec.dim,
                dtype=tf.as_dtype(all_rows[table_config].dtype).name,
                alias=table_config,
                vocabulary=vocabularies.get(
                    tables.owner_of(self._state.spec, spec).name
                ),
            )
            for table_config, spec in self._tables()
        ]

    def _rows_to_export(self) -> Mapping[Any, Any]:
        """Returns the rows of the tables by `TableConfig`."""
        return self.embedding_tables

    def _current_vocabulary(
        self, table: int
    ) -> tuple[OpenVocabulary, dict[str, Any]]:
        """Returns the settings and the variables of a vocabulary."""
        spec = self._state.spec.tables[table]
        owner = tables.owner_of(self._state.spec, spec)
        return spec.vocabulary.settings, {
            name: variable
            for name, variable in self._variables[owner.name].items()
            if name in parts.NAMES
        }

    def _row_access(self, table: int) -> key_rows.RowAccess:
        """Returns access to the rows of a table with an open vocabulary."""
        backend = cast(EngineBackend, self._state.backend)
        spec = self._state.spec.tables[table]
        return key_rows.RowAccess(
            spec.dim,
            tf.as_dtype(spec.dtype),
            {slot.name: slot.dim(spec.dim) for slot in spec.slots},
            table,
            lambda: backend.store,
            backend.before_read,
            functools.partial(backend.write_rows, table),
            self._kept_strings.get(
                tables.owner_of(self._state.spec, spec).name
            ),
            backend.report_evicted,
        )

    def _resize(self, table: int, capacity: int) -> Any:
        """Changes the capacity of a table; see `Vocabulary.resize`."""
        backend = cast(EngineBackend, self._state.backend)
        resized = backend.resize(table, capacity)
        self._state.spec = resized.spec
        # The assignment to the attribute makes the new variables trackable, so
        # that checkpoints contain them.
        self._variables = {**self._variables, **resized.variables}
        return resized.conversion

    @_no_autograph
    def flush(self):
        """Applies the pending pipelined update, if any.

        The following operations also apply this update: reading
        `embedding_tables` outside of `tf.function`, saving, restoring, and
        forward-only steps.
        """
        self._state.require_host("flush").flush()

    @_no_autograph
    def reset(self):
        """Discards all steps in flight, for example after an interruption.

        The method first applies a pending pipelined update, because the step of
        this update is not in flight.
        """
        self._state.require_host("reset").reset()

    def stats(self) -> dict[str, Any]:
        """Returns the engine's statistics.

        Returns:
          A dict of statistics, with the following entries.

          - `pending`: For each replica, the number of steps that wait for
            `dequeue`.
          - `awaiting`: For each replica, whether a dequeued step waits for
            gradients.
          - `num_updates`: Number of applied updates.
          - `poisoned`: Reason why the program must call `reset`, or an empty
            string.
          - `held`: Whether a pipelined update is pending.
          - `features`: For each feature, counts over all steps. `num_samples`
            and `num_ids` are the numbers of samples and ids. `num_dropped`,
            `num_clipped` and `num_truncated` are the numbers of ids that were
            dropped, that were clipped, or that were after the last position of
            a sequence.
          - `tables`: For each table, its size as `num_bytes` and
            `num_slot_bytes`, and counts over all training steps. `num_lookups`
            and `num_unique_rows` are the numbers of lookups and of distinct
            rows, summed over all steps. `unique_ratio` is
            `num_unique_rows / num_lookups`.

          On parameter servers, the dict does not contain `features` and the
          counts of lookups, because only workers could count the ids. The dict
          has these additional entries:

          - `staleness`: Dict with `mean` and `max`, the mean and maximum number
            of updates that a server applied after it sent the rows of a step
            and before it applied the gradients of the step.
          - `num_repeated`: Number of closures that workers sent again after
            they had been applied.
          - `servers`: For each server device, `num_updates`.
          - `wire_dtype`: Dtype of rows and gradients in messages.
        """
        backend = self._state.require_host("stats")
        if not tf.executing_eagerly():
            raise RuntimeError("`stats` must be called outside tf.function.")
        return backend.describe()

    def _variables_of_tables(self) -> dict[str, dict[str, Any]]:
        """Returns a dict from table names to variables by name."""
        return self._variables

    def _update_variables(self, attribute: str):
        """Updates the variables before a program reads `attribute`."""
        if not self._state.backend.is_on_tpu:
            self.build()
            self._state.backend.before_read()
            return
        in_export = tf_private.in_save_context()
        if not in_export and not tf.executing_eagerly():
            raise RuntimeError(
                f"`{attribute}` must be read outside tf.function under "
                "TPUStrategy: the rows are on the TPU, and are copied to the "
                "host when the attribute is read."
            )
        self._state.check_built(attribute)
        if not in_export:
            self._state.backend.retrieve_variables()

    def _tables(self):
        return zip(self._state.table_configs, self._state.spec.tables)


# Type of a function that takes the gradients of activations, and returns their
# mark.
Follow = Callable[[Sequence[tf.Tensor]], tf.Tensor]


class LayerAccess:
    """Lookups and variables of a `TPUEmbedding` for a Keras layer."""

    def __init__(self, embedding: TableAccess):
        """Wraps `embedding`. The embedding does not have to be built."""
        self._embedding = embedding
        self._state: EmbeddingState = embedding._state

    @property
    def spec(self) -> config.EmbeddingSpec:
        """Specs of the tables and features."""
        return self._state.spec

    @property
    def feature_config(self) -> Any:
        """The argument `feature_config` of the embedding."""
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
    def has_ordered_steps(self) -> bool:
        """Whether gradients belong to a step only by the order of the calls."""
        return self._state.backend.has_ordered_steps

    @property
    def is_built(self) -> bool:
        """Whether the tables exist."""
        return self._state.backend.is_built

    @property
    def is_sharded(self) -> bool:
        """Whether the tables are sharded over processes."""
        return self._state.backend.is_sharded

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the float32 mark that represents a lookup's gradients."""
        return self._state.backend.mark_shape

    @property
    def variable_device(self) -> str:
        """Device of the small variables that a layer's steps use."""
        return self._state.backend.variable_device

    @property
    def num_replicas(self) -> int:
        """Number of replicas that participate in each step."""
        return self._state.replicas.num_replicas

    @property
    def can_apply_in_cond(self) -> bool:
        """Whether `apply_marks` can be called in a `tf.cond`.

        A step of a TPU program cannot be skipped. If each process has several
        replicas, they exchange marks by `merge_call`, which TensorFlow does not
        support in a `tf.cond`.
        """
        replicas = self._state.replicas
        return not self.has_ordered_steps and (
            not replicas.has_processes or replicas.num_local == 1
        )

    def require_replica(self, method: str) -> int:
        """Returns the index of the calling replica.

        Raises:
          RuntimeError: If there are several replicas, and the caller is not one
            of these replicas.
        """
        return self._state.replicas.require_current(method)

    def is_last_here(self, replica: int) -> bool:
        """Whether `replica` is the last replica of this process.

        True in a TPU program, which is traced once for all replicas.
        """
        return tpu_program.is_replicated() or self._state.replicas.is_last_here(
            replica
        )

    def is_in_program(self) -> bool:
        """Whether the caller is being traced as part of a TPU program."""
        return self._state.backend.is_in_program()

    def check_can_train(self, layer: str):
        """Checks that a training step is possible.

        Args:
          layer: Name of the layer, for messages.

        Raises:
          RuntimeError: If the graph is exported, or if a table has no
            optimizer.
        """
        self._state.check_can_step("call")
        self._state.check_optimizers(
            f"Layer {layer!r} in a training step",
            "create the layer with `trainable=False`",
        )

    def open(self, inputs: Any, weights: Any) -> tuple[Follow, list[tf.Tensor]]:
        """Looks up a batch, whose gradients can be passed to a function later.

        Args:
          inputs: Ids in the structure of the feature config.
          weights: None, or the same structure with None or weights as leaves.

        Returns:
          A tuple of a function and the activations of each feature. The
          function takes the gradients of the activations, one per feature. The
          function returns the mark of these gradients, float32 of `mark_shape`.
        """
        backend = self._engine_backend()
        lookup, activations = backend.open(inputs, weights)
        return functools.partial(backend.follow, lookup), activations

    @property
    def has_row_steps(self) -> bool:
        """Whether `open_rows` is supported."""
        return self._state.backend.has_row_steps

    def open_rows(self, inputs: Any) -> Any:
        """Finds the rows of keys in a training step of the vocabulary.

        The rows stay assigned to their keys until a gradient of the rows is
        passed to `apply_recorded`, or is discarded.

        Args:
          inputs: Keys in the structure of the feature config, at most one per
            sample.

        Returns:
          A `RowLookup`.
        """
        return self._row_backend().open_rows(inputs)

    def record_gradient(self, rows: tf.Tensor) -> tf.Tensor:
        """Records the gradient of the lookups whose rows `open_rows` returned.

        Args:
          rows: `[num_rows]` int64, rows of a sparse gradient. Empty if the
            gradient is dense.

        Returns:
          The same rows, which identify the gradient in `apply_recorded`.
        """
        return self._row_backend().record_gradient(rows)

    def apply_recorded(
        self, rows: tf.Tensor, gradients: tf.Tensor, *, is_dense: bool
    ) -> None:
        """Applies a gradient that was computed from recorded gradients.

        Args:
          rows: `[num_rows]` int64, the row of each gradient.
          gradients: `[num_rows, dim]` float32.
          is_dense: Whether `rows` are all rows of the table, in order.
        """
        self._row_backend().apply_recorded(rows, gradients, is_dense=is_dense)

    def look_up(self, inputs: Any, weights: Any) -> list[tf.Tensor]:
        """Looks up activations without gradients, for `is_sharded` tables.

        Args:
          inputs: Ids in the structure of the feature config.
          weights: None, or the same structure with None or weights as leaves.

        Raises:
          RuntimeError: If the graph is exported, or if the caller is not a
            replica.
        """
        self._state.check_can_step("call")
        return self._sharded_backend().look_up(inputs, weights)

    def rows_of_ids(
        self, features: Sequence[inputs.FeatureIds | None]
    ) -> list[tf.Tensor]:
        """Returns the row of each id, for `is_sharded` tables.

        Args:
          features: For each feature, its ids, or None if no rows are needed.

        Returns:
          For each feature, `[num_ids, dim]` float32.
        """
        return self._sharded_backend().rows_of_ids(features)

    def _sharded_backend(self) -> ShardedBackend:
        # The callers check `is_sharded`.
        return cast(ShardedBackend, self._state.backend)

    def apply_marks(self, marks: tf.Tensor):
        """Applies the gradients that a sum of marks represents.

        Args:
          marks: Sum of marks, float32 of `mark_shape`.
        """
        self._engine_backend().apply_followed(marks)

    def variables(self) -> list[dict[str, Any]]:
        """Returns a dict of up-to-date variables by name for each table."""
        if self.is_on_tpu:
            self._state.check_built("save or load")
            self._state.backend.retrieve_variables()
        else:
            self._embedding.build()
            self._embedding.flush()
        variables = self._embedding._variables_of_tables()
        return [variables[table.name] for table in self.spec.tables]

    def unsharded_tables(self) -> dict[Any, Any]:
        """Returns the rows of each table, by `TableConfig`."""
        return {
            table_config: variables[tables.PARAMETERS]
            for table_config, variables in zip(
                self._state.table_configs, self.variables()
            )
        }

    def strings(self) -> list[kept_strings.KeptStrings | None]:
        """Returns the strings of each table's vocabulary, or None.

        If tables share a vocabulary, only the element of the table that owns
        the vocabulary contains the strings.
        """
        return [
            self._embedding._kept_strings.get(table.name)
            for table in self.spec.tables
        ]

    def load_variables(self):
        """Copies the values of the variables to the backend."""
        self._state.backend.load_variables()

    def _row_backend(self) -> Any:
        # Callers check `has_row_steps`.
        return self._state.backend

    def _engine_backend(self) -> EngineBackend:
        return cast(EngineBackend, self._state.backend)
