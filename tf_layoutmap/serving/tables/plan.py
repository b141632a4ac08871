"""Which variable of an exported model holds which table, from which row on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_layoutmap.serving.tables.packing import RowFormat


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
