"""Where the tables of an exported model are, and how lookups reach them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_layoutmap.serving.tables import id_checks, unpacking
from tf_layoutmap.serving.tables.stored_variable import StoredVariable


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
    rows = unpacking.gather(variable.in_graph, found.rows, variable.form)
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
