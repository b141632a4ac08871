"""Copies of tables in the arrays that Keras' `get_weights` returns.

The tables of a layer with a mark weight are not Keras weights. `get_weights`
returns one small array for the mark weight. This array holds a copy of the
tables, and `set_weights` restores the tables from the copy. Callbacks such as
EarlyStopping can therefore restore the best weights of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tf_layoutmap.layers.base.steps import StepCommitHook


class _MarksWithTables(np.ndarray):
    """Value of a mark weight, with a copy of the tables.

    The copy belongs to this object. It is not written to files, and a copy of
    the array does not have it.
    """

    tables: dict[str, np.ndarray] | None = None


def marks_with_tables(
    one: StepCommitHook, value: np.ndarray | None = None
) -> np.ndarray:
    """Returns the value of a weight, which holds a copy of the tables.

    If this process cannot copy the tables, the result holds no copy.

    Args:
      one: The tables.
      value: Value of the weight. By default, zeros of `mark_shape`.
    """
    if value is None:
        value = np.zeros(one.mark_shape, np.float32)
    if not one.has_copies:
        return value
    store: dict[str, Any] = {}
    one.save(store)
    # The array owns its memory. A view of the array, such as the result of
    # `np.asarray`, therefore has the array as its base.
    marks = _MarksWithTables(value.shape, np.float32)
    marks[...] = value
    marks.tables = {key: np.array(value) for key, value in store.items()}
    return marks


def tables_in(value: Any) -> dict[str, np.ndarray] | None:
    """Returns the copy that an array of `get_weights` holds, or None."""
    for one in (value, getattr(value, "base", None)):
        if isinstance(one, _MarksWithTables):
            return one.tables
    return None
