"""Copies the rows of tables that changed since the last copy.

Each engine, and each server, records which of its rows change. A `Recorder`
calls the op that copies these rows. `Changes` combines the rows of all parts of
a table. The values stay where the op has copied them: a server writes the
values of its rows to a part of a delta (`tf_layoutmap/deltas/parts.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.table_store import TableStore
from tf_layoutmap.vocabulary.parts import (
    COUNTS,
    KEYS,
    LAST_STEPS,
    NUMBERS,
    SKETCH,
    SKETCH_SUMS,
    Part,
)

Array = np.ndarray[Any, Any]
# Variables of a vocabulary that have one value for each row.
LANES = {
    KEYS: tf.int64,
    LAST_STEPS: tf.int32,
    COUNTS: tf.int32,
}
# Names of small variables, which are always copied in full.
WHOLE = (
    SKETCH,
    SKETCH_SUMS,
    NUMBERS,
    tables.ROUNDING_STEPS,
)


@dataclasses.dataclass(frozen=True, eq=False)
class PartOfRows:
    """The values of changed rows that one op has copied.

    Attributes:
      device: Device of the server that holds the values, or None if this
        process holds them.
      first: Index of the first row among the changed rows of the table.
      values: Tensor with the values.
    """

    device: str | None
    first: int
    values: Any


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedValues:
    """The values of the changed rows of a variable.

    Attributes:
      parts: The values, in the order of the rows.
      shape: Shape of all values.
      dtype: Dtype of the values.
    """

    parts: Sequence[PartOfRows]
    shape: tuple[int, ...]
    dtype: tf.DType

    def numpy(self) -> Array:
        """Copies all values to one array in this process."""
        arrays = [part.values.numpy() for part in self.parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class TableChanges:
    """The rows of one table that were written.

    Attributes:
      rows: `[num_rows]` int64 row numbers in ascending order. If tables are
        sharded over processes, the rows of this process.
      values: Values of the rows by variable name. Values of the table and its
        slot variables are `[num_rows, dim]`, and values of a vocabulary are
        `[num_rows]`. The row that unknown keys share has the empty key.
      whole: Full values of small variables, by name.
    """

    rows: Array
    values: dict[str, ChangedValues]
    whole: dict[str, Array]


class Recorder:
    """A record of the rows that one engine or one server writes.

    Attributes:
      parts: The parts of tables in the engine or on the server.
      device: Device of the server, or None for the engine of this process.
    """

    def __init__(
        self,
        watch: Callable[[], tf.Tensor],
        take: Callable[..., Sequence[tf.Tensor]],
        parts: Sequence[Part],
        where: str,
        *,
        is_server: bool,
    ):
        """Starts to record; `take` of earlier recorders then raises an error.

        Args:
          watch: Op that starts to record, and returns the number of the record.
          take: Op that copies the rows.
          parts: The parts, in the order in which the engine or the server
            numbers them.
          where: Device of the ops.
          is_server: Whether a server has the parts.
        """
        self.parts = parts
        self.device = where if is_server else None
        self._take = take
        self._where = where
        with tf.device(where):
            self._watch = watch()

    def take(
        self,
        spec: config.EmbeddingSpec,
        also: Sequence[Array],
        **small: Any,
    ) -> tuple[list[tuple[Array, list[tf.Tensor]]], list[tf.Tensor]]:
        """Copies the rows written since the last call.

        The op holds the locks of all variables while it copies. Training waits
        for these locks, and continues when the op has finished.

        Args:
          spec: The tables.
          also: For each part, additional rows to copy.
          **small: Arguments of the op for small variables. The list `whole`
            contains variables that are copied in full.

        Returns:
          A tuple of two elements. The first element contains for each part the
          numbers of its rows, and one tensor for each name in `names_of`. The
          second element contains the values of `whole`.

        Raises:
          RuntimeError: If a later recorder exists, or if the engine or server
            does not exist any more.
        """
        shards, slots, lanes, dtypes = [], [], [], []
        for part in self.parts:
            table = spec.tables[part.table]
            shards += part.variables[tables.PARAMETERS]
            dtypes += [tf.int64, tf.as_dtype(table.dtype)]
            for slot in table.slots:
                slots += part.variables[slot.name]
                dtypes.append(tf.float32)
            if KEYS in part.variables:
                for name, dtype in LANES.items():
                    lanes += part.variables[name]
                    dtypes.append(dtype)
        whole = small.get("whole", ())
        try:
            with tf.device(self._where):
                values = self._take(
                    watch=self._watch,
                    also=[tf.constant(rows, tf.int64) for rows in also],
                    shards=tables.handles(shards),
                    slots=tables.handles(slots),
                    lanes=tables.handles(lanes),
                    Tvalues=[*dtypes, *(variable.dtype for variable in whole)],
                    **{**small, "whole": tables.handles(whole)}
                    if small
                    else {},
                )
                # An op on a server returns before it has copied the rows.
                rest = iter(values)
                by_part = [
                    (
                        next(rest).numpy(),
                        [next(rest) for _ in _names_of(spec, part)],
                    )
                    for part in self.parts
                ]
        except tf.errors.FailedPreconditionError as error:
            raise RuntimeError(error.message) from None
        return by_part, list(rest)


def recorder_of_engine(engine: tf.Tensor, store: TableStore) -> Recorder:
    """Returns the recorder of the engine of this process.

    Args:
      engine: Handle of the engine.
      store: Store of the tables.
    """

    def take(**arguments: Any) -> Sequence[tf.Tensor]:
        return ops.take_changes(engine=engine, **arguments)

    return Recorder(
        lambda: ops.watch_changes(engine=engine),
        take,
        [
            part
            for number in range(len(store.spec.tables))
            for part in store.local_parts(number)
        ],
        engine.device,
        is_server=False,
    )


class Changes:
    """A recorder of the rows that are written to tables.

    Attributes:
      num_replaced: Number of times that all values may have been replaced.
    """

    def __init__(
        self,
        store: TableStore,
        recorders: Sequence[Recorder],
        in_flight: Callable[[], Any] = lambda: None,
    ):
        """Stores the recorders.

        Args:
          store: Store of the tables.
          recorders: Recorders of all parts of this process.
          in_flight: Function that returns counters, which change whenever a
            step begins or ends on a server.
        """
        self.num_replaced = 0
        self._store = store
        self._recorders = recorders
        self._in_flight = in_flight
        # Rows that a failed call of `take` has removed from the records, by
        # recorder and part.
        self._failed: dict[tuple[int, int], Array] = {}

    def take(self, also: Mapping[str, Array]) -> dict[str, TableChanges]:
        """Copies the rows written since the last call; see `EngineChanges`.

        If tables are sharded over processes, all processes must call the method
        together.

        Raises:
          RuntimeError: If a later recorder exists, if an engine was replaced or
            a server has restarted, or if steps of workers run during the call.
            The next call returns the rows.
        """
        before = self._in_flight()
        spec = self._store.spec
        whole: list[dict[str, Array]] = [{} for _ in spec.tables]
        by_table: list[list[tuple[Part, Array, Any, str | None]]] = [
            [] for _ in spec.tables
        ]
        for index, recorder in enumerate(self._recorders):
            small = {} if recorder.device else self._small_arguments()
            by_part, copied = recorder.take(
                spec,
                [
                    self._also(index, place, part, also)
                    for place, part in enumerate(recorder.parts)
                ],
                **small,
            )
            for place, (part, (rows, values)) in enumerate(
                zip(recorder.parts, by_part)
            ):
                self._failed[index, place] = rows
                by_table[part.table].append(
                    (part, rows + part.rows.start, values, recorder.device)
                )
            for (number, name, _), value in zip(
                self._copied_with_rows(), copied
            ):
                whole[number][name] = value.numpy()
        for number, table in enumerate(spec.tables):
            whole[number] = self._whole(table.name, whole[number])
        if self._in_flight() != before:
            raise RuntimeError(
                "The changes of tables on servers can be copied only while no "
                "step is in flight: call `join` of the coordinator first. "
                "Received: steps that ran during the call."
            )
        self._failed = {}
        return {
            table.name: self._changes_of(by_table[number], whole[number])
            for number, table in enumerate(spec.tables)
        }

    def _whole(self, table: str, copied: dict[str, Array]) -> dict[str, Array]:
        """Returns the full values of small variables.

        Args:
          table: Name of the table.
          copied: Values that an engine has copied with the rows.
        """
        variables = self._store.variables[table]
        return {
            name: copied[name]
            if name in copied
            else np.asarray(variables[name].numpy())
            for name in WHOLE
            if name in variables
        }

    def _small_arguments(self) -> dict[str, Any]:
        """Returns the arguments of an engine's op for small variables."""
        return {
            "whole": [variable for _, _, variable in self._copied_with_rows()],
            "open_tables": [
                part.table
                for part in self._recorders[0].parts
                if KEYS in part.variables
            ],
        }

    def _copied_with_rows(self) -> list[tuple[int, str, Any]]:
        """Returns the small variables that an engine copies with the rows.

        Each element contains the index of the table, the name and the variable.
        """
        return [
            (number, name, variable)
            for number, table in enumerate(self._store.spec.tables)
            for name in WHOLE
            if isinstance(
                variable := self._store.variables[table.name].get(name),
                tf.Variable,
            )
        ]

    def _also(
        self, index: int, place: int, part: Part, also: Mapping[str, Array]
    ) -> Array:
        """Returns the rows that must be copied besides recorded rows."""
        table = self._store.spec.tables[part.table]
        rows = np.asarray(also.get(table.name, ()), np.int64) - part.rows.start
        if len(self._store.local_parts(part.table)) > 1:
            rows = rows[(rows >= 0) & (rows < len(part.rows))]
        return np.concatenate(
            [rows, self._failed.get((index, place), np.zeros([0], np.int64))]
        )

    def _changes_of(
        self,
        parts: list[tuple[Part, Array, Any, str | None]],
        whole: dict[str, Array],
    ) -> TableChanges:
        """Returns the changes of a table from the changes of its parts."""
        parts.sort(key=lambda rule: rule[0].index)
        values: dict[str, ChangedValues] = {}
        for place, name in enumerate(_names_of(self._store.spec, parts[0][0])):
            copied, first = [], 0
            for _, rows, tensors, device in parts:
                copied.append(PartOfRows(device, first, tensors[place]))
                first += len(rows)
            like: Any = parts[0][2][place]
            values[name] = ChangedValues(
                copied, (first, *like.shape[1:]), like.dtype
            )
        return TableChanges(
            np.concatenate([rows for _, rows, _, _ in parts]), values, whole
        )


def _names_of(spec: config.EmbeddingSpec, part: Part) -> list[str]:
    """Returns the names of the variables that have a value per row."""
    names = [tables.PARAMETERS]
    names += [slot.name for slot in spec.tables[part.table].slots]
    if KEYS in part.variables:
        names += LANES
    return names
