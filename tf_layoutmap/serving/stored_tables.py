"""The tables of an exported model, and lookups of their rows.

`make_plan` assigns tables to variables. `gather` looks up rows, and
`StoredKeys` holds the keys of a table with an open vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.deltas.served.packing import RowFormat
from tf_layoutmap.serving import id_checks
from tf_layoutmap.serving.stored_variable import StoredVariable
from tf_layoutmap.vocabulary import (
    bucket_layout,
    key_tensors,
    state,
    stock_find,
)


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table that is stored in consecutive rows of a variable.

    Attributes:
      variable: The variable with the rows.
      start: Row of the variable that contains row 0 of the table.
      num_rows: Number of rows of the table.
    """

    variable: StoredVariable
    start: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Ids of one input of `gather`.

    Attributes:
      table: The table to look up.
      ids: `[num_ids]` int64.
      message: Error message for out-of-range ids.
    """

    table: StoredTable
    ids: tf.Tensor
    message: str


@dataclasses.dataclass(frozen=True)
class Found:
    """Rows of one input of `gather`.

    Attributes:
      rows: `[num_ids, dim]` float32; zeros for dropped ids.
      is_inside: `[num_ids]` bool, False for dropped ids; None if no id was
        dropped.
    """

    rows: tf.Tensor
    is_inside: tf.Tensor | None


def gather(wanted: Sequence[Wanted], out_of_range: str) -> list[Found]:
    """Returns the rows of several inputs, with one gather for each variable.

    Args:
      wanted: The ids to look up, in any order.
      out_of_range: Handling of out-of-range ids: `"error"`, `"drop"` or
        `"clip"`.

    Returns:
      The rows of each element of `wanted`.
    """
    found: list[Found | None] = [None] * len(wanted)
    by_variable: dict[int, list[int]] = {}
    for index, one in enumerate(wanted):
        by_variable.setdefault(id(one.table.variable), []).append(index)
    for indices in by_variable.values():
        inputs = [wanted[index] for index in indices]
        for index, one in zip(indices, _gather(inputs, out_of_range)):
            found[index] = one
    return [one for one in found if one is not None]


def _gather(inputs: Sequence[Wanted], out_of_range: str) -> list[Found]:
    """Returns the rows of inputs whose tables share one variable."""
    variable = inputs[0].table.variable
    found = id_checks.rows_of(
        [
            id_checks.TableIds(
                one.ids, one.table.num_rows, one.table.start, one.message
            )
            for one in inputs
        ],
        out_of_range,
    )
    rows = gather_unpacked(variable.in_graph, found.rows, variable.form)
    is_inside = found.is_inside
    if is_inside is not None:
        rows = tf.where(is_inside[:, tf.newaxis], rows, 0.0)
    if len(inputs) == 1:
        return [Found(rows, is_inside)]
    num = len(inputs)
    return [
        Found(rows_of_one, is_inside_of_one)
        for rows_of_one, is_inside_of_one in zip(
            tf.split(rows, found.sizes, num=num),
            [None] * num
            if is_inside is None
            else tf.split(is_inside, found.sizes, num=num),
        )
    ]


def read_all(table: StoredTable, dtype: tf.DType) -> tf.Tensor:
    """Returns all rows of a stored table, unpacked.

    Args:
      table: The table to read.
      dtype: Dtype of the result.

    Returns:
      `[num_rows, dim]`, with the same values as lookups of the table.
    """
    form = table.variable.form
    stop = table.start + table.num_rows
    rows = _unpacked(table.variable.in_graph[table.start : stop], form)
    return tf.cast(tf.ensure_shape(rows, [table.num_rows, form.dim]), dtype)


class StoredKeys:
    """A copy of the keys of a vocabulary in one unsharded variable.

    Attributes:
      variable: `[num_buckets, 8]` int64, in the layout of
        `Vocabulary.key_variable`.
    """

    def __init__(self, vocabulary: state.Vocabulary):
        """Initializes the copy with the current keys."""
        self._name = vocabulary.name
        self._num_buckets = int(vocabulary.key_variable.shape[0])
        self._kind_name = vocabulary.stats()["key_type"]
        with tf.device("CPU:0"):
            self.variable = tf.Variable(
                vocabulary.read_keys_by_row(),
                trainable=False,
                name="keys",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of `variable`."""
        return self._num_buckets, bucket_layout.KEYS_PER_BUCKET

    def rows_of(self, keys: tf.Tensor, kind: int) -> tf.Tensor:
        """Returns the row of each key; the last row for an unknown key.

        Args:
          keys: `[num_keys]` int64; hashes if the ids are strings.
          kind: Kind of the ids, one of `key_tensors.KINDS`.

        Raises:
          ValueError: If the table has keys of a different kind.
        """
        if self._kind_name not in (None, key_tensors.KINDS[kind]):
            raise ValueError(
                f"The ids of table {self._name!r} must be {self._kind_name}, "
                f"as those before. Received: {key_tensors.KINDS[kind]}."
            )
        return stock_find.find_rows(self.variable, self._num_buckets, keys)


def id_type(vocabulary: state.Vocabulary) -> tf.DType:
    """Returns the dtype of a table's ids; int64 for a table without keys."""
    is_strings = (
        vocabulary.stats()["key_type"]
        == (key_tensors.KINDS[key_tensors.STRINGS])
    )
    return tf.string if is_strings else tf.int64


@dataclasses.dataclass(frozen=True)
class Place:
    """The variable that contains a table, and the position of the table.

    Attributes:
      variable: Index of the variable.
      start: Row of the variable that contains row 0 of the table.
    """

    variable: int
    start: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The assignment of all tables to variables.

    Attributes:
      places: A `Place` for each table.
      formats: Format of each variable.
      num_rows: Number of rows of each variable.
    """

    places: tuple[Place, ...]
    formats: tuple[RowFormat, ...]
    num_rows: tuple[int, ...]

    def tables_of(self, variable: int) -> list[int]:
        """Returns the tables of a variable, in the order of their rows."""
        return [
            table
            for table, place in enumerate(self.places)
            if place.variable == variable
        ]


def make_plan(tables: Sequence[tuple[RowFormat, int]], *, fuse: bool) -> Plan:
    """Returns a plan in which tables with the same format share a variable.

    >>> form = RowFormat("float32", 4)
    >>> plan = make_plan([(form, 10), (form, 5)], fuse=True)
    >>> [place.start for place in plan.places], plan.num_rows
    ([0, 10], (15,))

    Args:
      tables: Format and number of rows of each table.
      fuse: Whether tables share variables. If False, each table has a separate
        variable.
    """
    formats: list[RowFormat] = []
    num_rows: list[int] = []
    places: list[Place] = []
    for form, size in tables:
        if fuse and form in formats:
            variable = formats.index(form)
        else:
            variable = len(formats)
            formats.append(form)
            num_rows.append(0)
        places.append(Place(variable, num_rows[variable]))
        num_rows[variable] += size
    return Plan(tuple(places), tuple(formats), tuple(num_rows))


def gather_unpacked(stored: Any, ids: tf.Tensor, form: RowFormat) -> tf.Tensor:
    """Gathers packed rows of a variable, and then unpacks them.

    The function uses only operations of TensorFlow. `packing.unpack` is the
    same function for numpy arrays.

    Args:
      stored: A variable `[num_rows, form.width]`.
      ids: `[num_ids]` int64, rows of the variable.
      form: Format of the stored rows.

    Returns:
      `[num_ids, form.dim]` float32.
    """
    return _unpacked(tf.gather(stored, ids), form)


def _unpacked(rows: Any, form: RowFormat) -> tf.Tensor:
    """Returns packed rows as float32."""
    if form.kind == "float16":
        rows = tf.bitcast(rows, tf.float16)
    if not form.is_packed:
        return tf.cast(rows, tf.float32)
    codes, scale, lowest = tf.split(rows, [form.num_codes, 4, 4], axis=1)
    if form.kind == "int4":
        low_bits = tf.bitwise.bitwise_and(codes, tf.constant(15, tf.uint8))
        high_bits = tf.bitwise.right_shift(codes, tf.constant(4, tf.uint8))
        codes = tf.concat([low_bits, high_bits], axis=1)
        if form.dim % 2:
            codes = codes[:, : form.dim]
    return tf.cast(codes, tf.float32) * _float_column(scale) + _float_column(
        lowest
    )


def _float_column(four_bytes: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(four_bytes, tf.float32)[:, tf.newaxis]
