"""Base class of the backends that use engines or servers.

`BaseBackend` contains the parts of the interface in
`tf_layoutmap.embedding.backend` that do not depend on the runtime: reading of
batches, and changes of vocabularies outside of steps.
"""

from __future__ import annotations

import abc
import contextlib
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from tf_layoutmap.embedding import (
    changes,
    key_editor,
    processes,
    replicas,
)
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import batches, shapes
from tf_layoutmap.embedding.table_store import TableStore, Variables
from tf_layoutmap.vocabulary import kept_strings, key_rows

if TYPE_CHECKING:
    from tf_layoutmap.embedding import resizing


class BaseBackend(abc.ABC):
    """A backend whose steps use the variables of the tables directly.

    Attributes:
      strings: The strings of vocabularies that keep strings, by the name of the
        table that owns the vocabulary; empty before `start`.
    """

    is_on_tpu: ClassVar[bool] = False
    has_ordered_steps: ClassVar[bool] = False
    is_sharded: ClassVar[bool] = False
    strings: Mapping[str, kept_strings.KeptStrings] = types.MappingProxyType({})
    # Shape checks are fast, and prevent invalid memory accesses.
    checks_shapes = True

    def __init__(
        self,
        feature_config: Any,
        spec: config.EmbeddingSpec,
        strategy_replicas: replicas.Replicas,
        store: TableStore,
        *,
        out_of_range: str,
        rounding_seed: int,
    ):
        """Stores the checked arguments of `TPUEmbedding`, and the store."""
        self._feature_config = feature_config
        self._spec = spec
        self._replicas = strategy_replicas
        self._out_of_range = out_of_range
        self._rounding_seed = rounding_seed
        self._shapes = shapes.StepShapes(spec)
        self._reader = batches.BatchReader(
            feature_config, strategy_replicas, self._shapes
        )
        # The tables, which `start` adds to the store.
        self._store = store
        # The recorder of changes, which counts replacements of all values.
        self._changes: changes.Changes | None = None

    @property
    def store(self) -> TableStore:
        """The tables; without variables before `start`."""
        return self._store

    def declare(self, shapes: Any, batch_size: int | None) -> None:
        """Records the shapes and the batch size that are passed to `build`."""
        self._shapes.samples.declare_arguments(
            self._feature_config, shapes, batch_size
        )

    def create_tables(self) -> dict[str, dict[str, Any]]:
        """Creates the variables of all tables."""
        return self._store.create(self._spec)

    def read(self, features: Any, weights: Any, device: str | None) -> Any:
        """Checks the input of a step; see `TPUEmbedding.enqueue`."""
        return self._reader.read(features, weights, device)

    def is_in_program(self) -> bool:
        """Returns False: calls are never inside a TPU program."""
        return False

    @abc.abstractmethod
    def flush(self) -> None:
        """Applies the pending pipelined update, if any."""

    # Vocabularies.

    @abc.abstractmethod
    def _key_editor(self) -> key_editor.KeyEditor:
        """Returns the object that changes keys of the current tables."""

    def evict_keys(
        self, table: int, keys: tf.Tensor, *, expired: bool
    ) -> tf.Tensor:
        """Evicts keys of an open vocabulary; see `Vocabulary`."""
        return self._key_editor().evict_keys(table, keys, expired=expired)

    def report_evicted(self) -> int:
        """Returns 0, because `on_evict` is called in the evicting step."""
        return 0

    def write_rows(
        self, table: int, written: key_rows.RowsToWrite
    ) -> tuple[Any, int]:
        """Writes the rows of keys of an open vocabulary; see `Vocabulary`."""
        return self._key_editor().write_rows(table, written)

    def resize(self, table: int, capacity: int) -> resizing.Resized:
        """Changes the capacity of a vocabulary; see `Vocabulary.resize`.

        Raises:
          RuntimeError: If steps are in flight.
        """
        # A program that does not resize tables does not need this module.
        from tf_layoutmap.embedding import resizing

        call = f"`resize` of table {self._spec.tables[table].name!r}"
        group = self._store.group
        if group is not None:
            group.require_eager(call)
            group.check_equal(f"The capacity in {call}", repr(capacity))
        spec = resizing.spec_with_capacity(self._spec, table, capacity)
        old = self._store.variables
        with self._steps_retired(call, self._spec.tables[table].name):
            resized = resizing.resize(self._store, spec, table, call)
            variables = {**old, **resized.variables}
            with processes.failing_together(group, call):
                # The user function `on_evict` may raise an error. Therefore,
                # it is called before the old variables are discarded.
                use_new_steps = self._resized_steps(
                    resized,
                    resizing.spec_with_capacity(
                        self._shapes.fix_spec(), table, capacity
                    ),
                    variables,
                )
        use_new_steps()
        self._spec = spec
        self._store = self._store.with_tables(spec, variables)
        self._shapes.replace_spec(spec)
        for resized_table in resized.variables:
            self._store.discard(old[resized_table])
        return resized

    @abc.abstractmethod
    def _steps_retired(
        self, call: str, table: str
    ) -> contextlib.AbstractContextManager[None]:
        """Lets later steps fail, because a table is resized.

        If the block raises an error, steps succeed again.

        Args:
          call: Name of the call, for messages.
          table: Name of the table.

        Raises:
          RuntimeError: If steps are in flight.
        """

    @abc.abstractmethod
    def _resized_steps(
        self,
        resized: resizing.Resized,
        spec: config.EmbeddingSpec,
        variables: Variables,
    ) -> Callable[[], None]:
        """Prepares steps with resized tables, and calls `on_evict`.

        Args:
          resized: The resized tables.
          spec: Spec of the embedding, with the known shapes of features.
          variables: Variables of all tables.

        Returns:
          A function that makes later steps use the resized tables.
        """

    # Values that are replaced.

    def load_variables(self) -> None:
        """Records that all values were replaced."""
        self._count_replacement()

    def _count_replacement(self) -> None:
        if self._changes is not None:
            self._changes.num_replaced += 1

    def retrieve_variables(self) -> None:  # noqa: B027
        """Does nothing, because steps use the variables directly."""
