"""Where the tables of an exported model are, and how lookups reach them."""

# DOC-MERGE: The keys of a table with an open vocabulary, in an exported model.
# DOC-MERGE: Which variable of an exported model holds which table, from which row on.
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.serving import id_checks
from tf_layoutmap.serving.packing import RowFormat
from tf_layoutmap.serving.stored_variable import StoredVariable
from tf_layoutmap.vocabulary import key_tensors, state, stock_find


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table that is some rows of a variable.

    Attributes:
      variable: Where its rows are.
      start: Row of the variable that is row 0 of the table.
      num_rows: Its rows.
    """

    variable: StoredVariable
    start: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Ids of one input, as `gather` takes them.

    Attributes:
      table: Whose rows.
      ids: `[num_ids]` int64.
      message: The error about an id that is outside.
    """

    table: StoredTable
    ids: tf.Tensor
    message: str


@dataclasses.dataclass(frozen=True)
class Found:
    """Rows of one input.

    Attributes:
      rows: `[num_ids, dim]` float32, zeros where an id was dropped.
      is_inside: `[num_ids]` bool, False where one was; None if none was.
    """

    rows: tf.Tensor
    is_inside: tf.Tensor | None


def gather(wanted: Sequence[Wanted], out_of_range: str) -> list[Found]:
    """Returns the rows of several inputs, with one gather for each variable.

    Args:
      wanted: In any order.
      out_of_range: `"error"`, `"drop"` or `"clip"`.

    Returns:
      What was found for each of `wanted`.
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
    """The rows of inputs whose tables are in one variable."""
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


class StoredKeys:
    """One variable, whatever the shards of the table.

    Attributes:
      variable: `[num_buckets, 8]` int64, as of `Vocabulary.key_variable`.
    """

    def __init__(self, vocabulary: state.Vocabulary):
        """Copies the keys that have rows now."""
        self._name = vocabulary.name
        self._num_buckets = int(vocabulary.key_variable.shape[0])
        self._are = vocabulary.stats()["keys_are"]
        with tf.device("CPU:0"):
            self.variable = tf.Variable(
                tf.concat(state.shards_of(vocabulary.key_variable), axis=0),
                trainable=False,
                name="keys",
            )

    def rows_of(self, keys: tf.Tensor, kind: int) -> tf.Tensor:
        """Returns the row of each key; the last where it has none.

        Args:
          keys: `[num_keys]` int64, strings hashed.
          kind: What they were, of `key_tensors.KINDS`.

        Raises:
          ValueError: If the table has keys of another kind.
        """
        if self._are not in (None, key_tensors.KINDS[kind]):
            raise ValueError(
                f"The ids of table {self._name!r} must be {self._are}, as "
                f"those before. Received: {key_tensors.KINDS[kind]}."
            )
        return stock_find.find_rows(self.variable, self._num_buckets, keys)


def id_type(vocabulary: state.Vocabulary) -> tf.DType:
    """Returns the type of a table's ids; int64 if there were none yet."""
    is_strings = (
        vocabulary.stats()["keys_are"]
        == (key_tensors.KINDS[key_tensors.STRINGS])
    )
    return tf.string if is_strings else tf.int64


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a table is.

    Attributes:
      variable: Index of the variable.
      start: The row of the variable that is row 0 of the table.
    """

    variable: int
    start: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where all tables are.

    Attributes:
      places: A place for each table.
      formats: A format for each variable.
      num_rows: Rows of each variable.
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
    """Returns a plan: tables in one format follow each other in a variable.

    >>> form = RowFormat("float32", 4)
    >>> plan = make_plan([(form, 10), (form, 5)], fuse=True)
    >>> [place.start for place in plan.places], plan.num_rows
    ([0, 10], (15,))

    Args:
      tables: Format and number of rows of each table.
      fuse: Whether tables share variables; else each has one of its own.
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
    """Returns rows.

    Args:
      stored: A variable `[num_rows, form.width]`.
      ids: `[num_ids]` int64, each a row of it.
      form: How the rows are stored.

    Returns:
      `[num_ids, form.dim]` float32.
    """
    rows = tf.gather(stored, ids)
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
