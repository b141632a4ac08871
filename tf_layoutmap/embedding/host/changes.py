"""Copies the rows of an engine's tables that changed since the last copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.vocabulary import state

Array = np.ndarray[Any, Any]
# Variables of a vocabulary that have one value for each row.
LANES = {
    state.KEYS: tf.int64,
    state.LAST_STEPS: tf.int32,
    state.COUNTS: tf.int32,
}
# Names of small variables, which are always copied in full.
WHOLE = (state.SKETCH, state.SKETCH_SUMS, state.NUMBERS, tables.ROUNDING_STEPS)


@dataclasses.dataclass(frozen=True, eq=False)
class TableChanges:
    """The rows of one table that were written.

    Attributes:
      rows: `[num_rows]` int64 row numbers in ascending order.
      values: Values of the rows by variable name. Values of the table and its
        slot variables are `[num_rows, dim]`, and values of a vocabulary are
        `[num_rows]`. The row that unknown keys share has the empty key.
      whole: Full values of small variables, by name.
    """

    rows: Array
    values: dict[str, Array]
    whole: dict[str, Array]


class Changes:
    """A recorder of the rows that are written to the tables of an engine.

    Attributes:
      num_replaced: Number of times that all values may have been replaced.
    """

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        engine: tf.Tensor,
    ):
        """Starts to record; `take` of earlier recorders then raises an error.

        Args:
          spec: The tables.
          variables: Variables that `tables.create_tables` created for `spec`.
          engine: Handle of the engine.
        """
        self.num_replaced = 0
        self._spec = spec
        self._variables = variables
        self._engine = engine
        with tf.device(engine.device):
            self._watch = ops.watch_changes(engine=engine)

    def take(self, also: Mapping[str, Array]) -> dict[str, TableChanges]:
        """Copies the rows written since the last call; see `EngineChanges`.

        The method holds the locks of all variables while it copies. Training
        waits for these locks, and continues when the method returns.
        """
        shards, slots, lanes, small, dtypes = [], [], [], [], []
        for table in self._spec.tables:
            by_name = self._variables[table.name]
            shards += tables.shards_of(by_name[tables.PARAMETERS])
            dtypes += [tf.int64, tf.as_dtype(table.dtype)]
            for name in _slots(table):
                slots += tables.shards_of(by_name[name])
                dtypes.append(tf.float32)
            if state.KEYS in by_name:
                for name, dtype in LANES.items():
                    lanes += tables.shards_of(by_name[name])
                    dtypes.append(dtype)
        for table in self._spec.tables:
            small += _small_variables(self._variables[table.name]).values()
        try:
            with tf.device(self._engine.device):
                changed = ops.take_changes(
                    engine=self._engine,
                    watch=self._watch,
                    also=[
                        tf.constant(also.get(one.name, ()), tf.int64)
                        for one in self._spec.tables
                    ],
                    shards=_handles(shards),
                    slots=_handles(slots),
                    lanes=_handles(lanes),
                    whole=_handles(small),
                    open_tables=[
                        number
                        for number, one in enumerate(self._spec.tables)
                        if state.KEYS in self._variables[one.name]
                    ],
                    Tvalues=[*dtypes, *(one.dtype for one in small)],
                )
        except tf.errors.FailedPreconditionError as error:
            raise RuntimeError(error.message) from None
        return self._by_table([one.numpy() for one in changed])

    def _by_table(self, arrays: list[Array]) -> dict[str, TableChanges]:
        rest = iter(arrays)
        by_table = {}
        for table in self._spec.tables:
            rows = next(rest)
            names = [tables.PARAMETERS, *_slots(table)]
            if state.KEYS in self._variables[table.name]:
                names += LANES
            by_table[table.name] = TableChanges(
                rows, {name: next(rest) for name in names}, {}
            )
        for table in self._spec.tables:
            for name in _small_variables(self._variables[table.name]):
                by_table[table.name].whole[name] = next(rest)
        return by_table


def _slots(table: config.TableSpec) -> list[str]:
    return [slot.name for slot in table.slots]


def _small_variables(by_name: Mapping[str, Any]) -> dict[str, Any]:
    return {name: by_name[name] for name in WHOLE if name in by_name}


def _handles(variables: Any) -> list[tf.Tensor]:
    return [one.handle for one in variables]
