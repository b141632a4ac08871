"""Table of a `ShardedEmbedding` with an open vocabulary.

The class uses a `tlm.TPUEmbedding` with one table and one feature. Each id of a
call is one sample of that feature. Row assignment, gradients and saved files
therefore use the same code as in all other tables with open vocabularies.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import strategies
from tf_layoutmap._core.strategies import on_host
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.serving import serving_embedding_lookup
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers import evaluation
from tf_layoutmap.layers.base import (
    ordered_steps,
    row_gradients,
    steps,
    tables,
    weight_files,
)
from tf_layoutmap.layers.base.mark_weights import AccessedTables
from tf_layoutmap.sharded.routing import checks as routing_checks
from tf_layoutmap.vocabulary import (
    evicted,
    first_values,
    key_tensors,
    stored_keys,
)
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Vocabulary

_tpu = tf.tpu.experimental.embedding

# The name of the table is fixed, because checkpoints must not depend on the
# name of the layer.
_TABLE = "embeddings"


class KeyTable(AccessedTables):
    """A table with keys as ids, which the host engine trains.

    Attributes:
      embedding: The `tlm.TPUEmbedding` that holds the table.
      access: Access to `embedding`.
      layer_name: Name of the layer.
      table_names: Empty, because the layer itself is the only table.
    """

    def __init__(
        self,
        layer: str,
        settings: OpenVocabulary,
        dim: int,
        *,
        initializer: Any,
        optimizer: Any,
        num_shards: int,
        mask_zero: bool,
    ):
        """Creates the embedding; `build` creates its variables.

        Args:
          layer: Name of the layer. Initial values depend on this name.
          settings: Settings of the vocabulary.
          dim: Number of columns.
          initializer: Initializer of the layer.
          optimizer: The layer's `RowOptimizer`.
          num_shards: Number of shards of the table.
          mask_zero: Whether the key 0, or the empty string, is padding.

        Raises:
          ValueError: If the initializer cannot draw the values of a single key.
        """
        self._settings = settings
        self.layer_name = layer
        self.table_names: list[str] = []
        self._is_built = False
        self._open_rows: row_gradients.OpenRows | None = None
        self._dim = dim
        self._optimizer = optimizer
        self._mask_zero = mask_zero
        # The initializer is validated here, so that error messages contain the
        # name of the layer.
        first_values.read_initializer(
            initializer, seed=settings.seed, table=layer
        )
        # The seed depends on the name of the layer, because two layers must not
        # have the same initial values.
        own_seed = hashlib.sha256(f"{settings.seed}/{layer}".encode())
        own_settings = dataclasses.replace(
            settings,
            seed=int.from_bytes(own_seed.digest()[:8], "little", signed=True),
        )
        if settings.on_evict is not None:
            own_settings = dataclasses.replace(
                own_settings,
                on_evict=evicted.under_name(settings.on_evict, layer),
            )
        table = _tpu.TableConfig(
            settings.capacity, dim, initializer, combiner="sum", name=_TABLE
        )
        setattr(table, config.TITLE, f"{layer}/{_TABLE}")
        self.embedding = TPUEmbedding(
            _tpu.FeatureConfig(table, name=layer),
            optimizer._engine_rule(),
            partitioner=partition.FixedShardsPartitioner(num_shards),
            vocabularies={_TABLE: own_settings},
            # The host engine trains open vocabularies also beside a TPU.
            engine="auto"
            if strategies.on_servers(tf.distribute.get_strategy())
            else "host",
        )
        self.access = LayerAccess(self.embedding)
        self._ordered = (
            ordered_steps.OrderedSteps(self.embedding, layer)
            if self.has_ordered_steps
            else None
        )
        self._config = table

    def build(
        self,
        row_class: type[row_gradients.OpenRows] | None = row_gradients.OpenRows,
    ) -> None:
        """Creates the variables of the table.

        Args:
          row_class: Class of `open_rows`. None: the gradient of the table is
            always a mark.
        """
        self.embedding.build()
        self._is_built = True
        if row_class is not None and self.access.has_row_steps:
            self._open_rows = row_class.of_table(self)

    @property
    def open_rows(self) -> Any:
        """The rows as a source of gradients. None: gradients are marks."""
        rows = self._open_rows
        if rows is not None:
            rows.update_rows()
        return rows

    @property
    def settings(self) -> OpenVocabulary:
        """Settings of the vocabulary, including its current capacity."""
        if not self._is_built:
            return self._settings
        capacity = self.embedding.vocabularies[_TABLE].settings.capacity
        return dataclasses.replace(self._settings, capacity=capacity)

    @property
    def rows(self) -> Any:
        """The rows, `[num_rows, dim]`."""
        return self.embedding.embedding_tables[self._config]

    @property
    def slots(self) -> dict[str, Any]:
        """Slot variables by name."""
        return self.embedding.slot_variables[self._config]

    @property
    def vocabulary(self) -> Vocabulary:
        """The built vocabulary, with the name and the settings of the layer."""
        vocabulary = self.embedding.vocabularies[_TABLE]
        vocabulary._show_as(
            self.layer_name,
            lambda settings: dataclasses.replace(
                settings,
                seed=self._settings.seed,
                on_evict=self._settings.on_evict,
            ),
        )
        return vocabulary

    # Lookup.

    def look_up(
        self,
        keys: tf.Tensor | stored_keys.StoredKeys,
        marks_variable: tf.Variable,
        *,
        is_trained: bool,
    ) -> tf.Tensor:
        """Returns the rows of keys.

        If a gradient tape records, the lookup is a training step of the
        vocabulary, in which new keys can be added. Otherwise TensorFlow's ops
        read the existing rows, and no key is added.

        Args:
          keys: Keys of any shape, int64, strings or `StoredKeys`.
          marks_variable: The mark weight, whose gradient identifies the step.
          is_trained: Whether the layer is trainable.

        Returns:
          `keys.shape + [dim]` float32; zeros for padding if `mask_zero`.
        """
        if self._ordered is not None and ordered_steps.is_in_program():
            return self._look_up_in_program(keys, marks_variable, is_trained)
        open_rows = self.open_rows
        if open_rows is not None:
            if not (is_trained and open_rows.is_recorded()):
                return self.rows_of(keys)
            self.access.check_can_train(self.layer_name)
            return self._shaped_like(
                keys, open_rows.look_up(self._samples(keys))
            )
        if not is_trained or not steps.may_be_recorded(
            marks_variable, None, adds_keys=True
        ):
            return self.rows_of(keys)
        if routing_checks.in_vectorized_map():
            # TensorFlow would drop the gradient function of the mark.
            raise NotImplementedError(
                "With several replicas or over servers, a table with an open "
                "vocabulary cannot be trained in `tf.vectorized_map`; call the "
                f"layer with all keys. Received: layer {self.layer_name!r}."
            )
        return self._start_step(self.access.open, keys, marks_variable)

    def _look_up_in_program(
        self, keys: Any, marks_variable: tf.Variable, is_trained: bool
    ) -> tf.Tensor:
        """Returns the rows of keys in a TPU program, which cannot read them."""
        assert self._ordered is not None
        if not is_trained or not steps.may_be_recorded(
            marks_variable, None, adds_keys=True
        ):
            return self._shaped_like(
                keys, self._ordered.look_up(self._samples(keys), None)
            )
        return self._start_step(self._ordered.start, keys, marks_variable)

    def _start_step(
        self,
        start: Callable[[Any, None], tuple[Callable[..., Any], Any]],
        keys: Any,
        marks_variable: tf.Variable,
    ) -> tf.Tensor:
        """Returns the rows of a training step, connected to its mark.

        Args:
          start: Function that starts the step for samples without weights, and
            returns the arguments `record_gradients` and `activations` of
            `steps.connect_mark`.
          keys: Keys of any shape.
          marks_variable: The mark weight, whose gradient identifies the step.
        """
        self.access.check_can_train(self.layer_name)
        record_gradients, activations = start(self._samples(keys), None)
        (rows,) = steps.connect_mark(
            record_gradients,
            tf.convert_to_tensor(marks_variable),
            activations,
            self.num_replicas,
        )
        return self._shaped_like(keys, rows)

    def rows_of(self, keys: tf.Tensor | stored_keys.StoredKeys) -> tf.Tensor:
        """Returns the rows of keys without a training step; adds no key.

        In `evaluate` and `predict`, ops of this package find the keys, because
        these graphs are never exported. Otherwise TensorFlow's ops find them.
        """
        tables.watch_table(self.embedding)
        rows = self.embedding._look_up(
            _flat(keys), None, may_fuse=evaluation.is_running()
        )
        return self._without_padding(keys, rows)

    def rows_in(
        self, table: Any, keys: tf.Tensor | stored_keys.StoredKeys
    ) -> tf.Tensor:
        """Returns the rows of keys in another table, and adds no key.

        Args:
          table: `[num_rows, dim]`, a table with the rows of this table.
          keys: Keys of any shape, int64, strings or `StoredKeys`.
        """
        rows = serving_embedding_lookup(
            _flat(keys),
            None,
            {self._config: table},
            self.access.feature_config,
            vocabularies=self.embedding.vocabularies,
        )
        return self._without_padding(keys, rows)

    def _without_padding(self, keys: Any, rows: tf.Tensor) -> tf.Tensor:
        """Returns the rows in the shape of the keys; zeros for padding.

        The lookup has an id for padding, too, because shapes that depend on the
        number of keys are not supported in `tf.vectorized_map` and by XLA.
        """
        rows = self._shaped_like(keys, rows)
        if not self._mask_zero:
            return rows
        return tf.where(
            tf.expand_dims(is_not_padding(keys), -1), rows, tf.zeros_like(rows)
        )

    def open(self, keys: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Runs a training step of the vocabulary without a gradient tape.

        Args:
          keys: Keys of any shape, int64 or strings.

        Returns:
          The rows, and a function that stores the gradients of the rows and
          returns their mark.
        """
        self.access.check_can_train(self.layer_name)
        record_gradients, (rows,) = self.access.open(self._samples(keys), None)

        def store_gradients(gradients: tf.Tensor) -> tf.Tensor:
            return record_gradients([tf.reshape(gradients, [-1, self._dim])])

        return self._shaped_like(keys, rows), store_gradients

    @on_host
    def _samples(self, keys: Any) -> Any:
        """Returns the input of the embedding: one sample for each key.

        A sample has one id, or no id if the key is padding.
        """
        if not self._mask_zero:
            return _flat(keys)
        is_key = tf.reshape(is_not_padding(keys), [-1])
        splits = tf.concat(
            [tf.zeros([1], tf.int64), tf.cumsum(tf.cast(is_key, tf.int64))],
            axis=0,
        )
        return _with_ids(
            keys,
            lambda values: tf.RaggedTensor.from_row_splits(  # pyright: ignore[reportAttributeAccessIssue] Missing in the stubs.
                tf.boolean_mask(tf.reshape(values, [-1]), is_key),
                splits,
                validate=False,
            ),
        )

    def _shaped_like(self, keys: Any, rows: tf.Tensor) -> tf.Tensor:
        is_stored = isinstance(keys, stored_keys.StoredKeys)
        values: Any = keys.values if is_stored else keys
        rows = tf.reshape(rows, tf.concat([tf.shape(values), [self._dim]], 0))
        rows.set_shape(values.shape.concatenate([self._dim]))
        return rows

    # Interface of the mark weight (`mark_weights.MarkedTables`).

    @property
    def can_accumulate(self) -> bool:
        """Whether `apply` can be called in a `tf.cond`.

        Several replicas count a step together, by `merge_call`.
        """
        return self._ordered is None and self.num_replicas == 1

    def apply(self, sum_of_marks: Any) -> None:
        """Applies the gradients of the lookups that the marks identify.

        Args:
          sum_of_marks: Sum of marks, or the gradient of `open_rows`.
        """
        open_rows = self.open_rows
        if self._ordered is not None:
            self._ordered.apply(sum_of_marks)
        elif open_rows is None:
            self.access.apply_marks(sum_of_marks)
        else:
            open_rows.apply_to_rows(sum_of_marks)
        if self.num_replicas == 1:
            self._optimizer.iterations.assign_add(1)
            return
        # Each replica has a copy of the variable. The copies are updated
        # together, once per step of all replicas.
        tf.distribute.get_replica_context().merge_call(
            lambda _: self._optimizer.iterations.assign_add(1)
        )

    # Saved state.

    @property
    def unlisted(self) -> str:
        """Why the table is not a weight in tf_keras."""
        return "with an open vocabulary"

    @property
    def has_copies(self) -> bool:
        """Whether this process can copy the tables now."""
        return self._is_built

    def save(self, store: Any) -> None:
        """Writes rows, slot variables and keys."""
        weight_files.save_tables(self.embedding, store)

    def load(self, store: Any) -> None:
        """Reads what `save` wrote; the number of shards may differ."""
        if "0" in store.keys():
            raise ValueError(
                f"Layer {self.layer_name!r} has an open vocabulary and must be "
                "loaded from the file of a layer with an open vocabulary. "
                "Received: a table without keys."
            )
        weight_files.load_tables(self.embedding, store, layer=self.layer_name)


def _flat(keys: Any) -> Any:
    """Returns keys of any shape as `[num_keys]`."""
    return _with_ids(keys, lambda values: tf.reshape(values, [-1]))


def _with_ids(keys: Any, change: Callable[[Any], Any]) -> Any:
    """Returns `change` of the values of keys, of the same type as `keys`."""
    if not isinstance(keys, stored_keys.StoredKeys):
        return change(keys)
    return stored_keys.StoredKeys(change(keys.values), keys.kind, keys.strings)


def is_not_padding(ids: Any) -> tf.Tensor:
    """Returns whether each id is neither 0 nor the empty string."""
    if isinstance(ids, stored_keys.StoredKeys):
        keys: Any = ids.values
        if ids.kind == stored_keys.ANY:
            # Keys that were read from the vocabulary are never padding.
            return tf.ones_like(keys, tf.bool)
        padding = (
            key_tensors.hash_strings(tf.constant(""))
            if ids.kind == key_tensors.STRINGS
            else tf.zeros([], tf.int64)
        )
        return tf.not_equal(keys, padding)
    return tf.not_equal(
        ids, "" if ids.dtype == tf.string else tf.zeros([], ids.dtype)
    )


def read_keys(inputs: Any, layer: str) -> tf.Tensor | stored_keys.StoredKeys:
    """Returns the inputs of a layer as int64, strings or `StoredKeys`.

    Raises:
      TypeError: If the inputs are neither integers that fit in int64 nor
        strings.
    """
    if isinstance(inputs, stored_keys.StoredKeys):
        return inputs
    keys = tf.convert_to_tensor(inputs)
    if keys.dtype in (tf.int64, tf.string):
        return keys
    if keys.dtype.is_integer and keys.dtype != tf.uint64:
        return tf.cast(keys, tf.int64)
    raise TypeError(
        "Ids of an open vocabulary must be integers that fit in int64, or "
        'strings; declare them, as by keras.Input(shape, dtype="int64"). '
        f"Received: dtype {keys.dtype.name} (layer {layer!r})."
    )
