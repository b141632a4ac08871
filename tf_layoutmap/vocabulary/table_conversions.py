"""One table of a checkpoint, as another kind of table would have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.vocabulary import (
    bucket_layout,
    key_tensors,
    moved_rows,
    state,
)
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Conversion

Array = np.ndarray[Any, Any]
# Of a variable's name, its value in the checkpoint.
Read = Callable[[str], Array]
PARAMETERS = "parameters"


@dataclasses.dataclass(frozen=True, eq=False)
class Converted:
    """What a table becomes.

    Attributes:
      conversion: What became of its keys.
      values: By name, variables that others take the place of, or that are
        new; each is computed when it is called.
      removed: Names of variables that are gone.
    """

    conversion: Conversion
    values: dict[str, Callable[[], Any]]
    removed: frozenset[str] = frozenset()


def to_another_capacity(
    read: Read,
    names: Mapping[str, tuple[int, ...]],
    settings: OpenVocabulary,
) -> Converted:
    """From an open table into one of other settings.

    Args:
      read: Of the table.
      names: Its variables and their shapes.
      settings: Of the new one.
    """
    moved = moved_rows.move(
        read(state.KEYS),
        read(state.LAST_STEPS),
        read(state.COUNTS),
        read(state.NUMBERS),
        settings,
    )
    values = {
        name: _constant(value)
        for name, value in moved.vocabulary.items()
        if name in names
    }
    for name in _names_of_rows(names):
        values[name] = lambda name=name: moved.of(read(name))
    return Converted(moved.conversion, values)


def to_open(
    read: Read,
    names: Mapping[str, tuple[int, ...]],
    settings: OpenVocabulary,
    slot_values: Mapping[str, float],
) -> Converted:
    """From a closed table of n rows into an open one with keys 0 to n - 1.

    Each counts as used once, before the first step.

    Args:
      read: Of the table.
      names: Its variables and their shapes.
      settings: Of the new one.
      slot_values: What slot variables start with, which the row of unknown
        keys has.
    """
    keys = np.arange(names[PARAMETERS][0])
    numbers = np.zeros([len(state.NUMBERS_HELD)], np.int64)
    numbers[1] = key_tensors.INTEGERS
    moved = moved_rows.move(
        keys,
        np.zeros(keys.shape, np.int32),
        np.ones(keys.shape, np.int32),
        numbers,
        settings,
    )
    values = {
        name: _constant(value)
        for name, value in moved.vocabulary.items()
        if settings.has_sketch or name not in (state.SKETCH, state.SKETCH_SUMS)
    }

    def rows(name):
        found = moved.of(read(name))
        found[-1] = slot_values.get(name, 0.0)
        return found

    for name in _names_of_rows(names):
        values[name] = lambda name=name: rows(name)
    return Converted(moved.conversion, values)


def to_closed(
    read: Read,
    names: Mapping[str, tuple[int, ...]],
    num_rows: int,
    initializer: Callable[..., Any],
    slot_values: Mapping[str, float],
) -> Converted:
    """From an open table into a closed one: key k gets row k.

    Args:
      read: Of the table.
      names: Its variables and their shapes.
      num_rows: Of the new one.
      initializer: Of rows whose key is not there.
      slot_values: What their slot variables start with.

    Raises:
      ValueError: If its keys are hashes of strings.
    """
    if read(state.NUMBERS)[1] == key_tensors.STRINGS:
        raise ValueError("keys that are integers. Received: hashes of strings")
    keys = read(state.KEYS).ravel()
    has_key = keys != bucket_layout.EMPTY_KEY
    sources = np.flatnonzero(has_key & (keys >= 0) & (keys < num_rows))
    targets = keys[sources]

    def rows(name):
        value = read(name)
        shape = (num_rows, *value.shape[1:])
        found = np.array(
            tf.cast(initializer(shape), value.dtype)
            if name == PARAMETERS
            else np.full(shape, slot_values[name], value.dtype)
        )
        found[targets] = value[sources]
        return found

    return Converted(
        Conversion(len(sources), int(has_key.sum()) - len(sources)),
        {name: lambda name=name: rows(name) for name in _names_of_rows(names)},
        frozenset(names) & state.NAMES,
    )


def _names_of_rows(names: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Of the variables that have a row for each of the table's."""
    return [
        name
        for name, shape in names.items()
        if name not in state.NAMES
        and tuple(shape[:1]) == tuple(names[PARAMETERS][:1])
    ]


def _constant(value: Array) -> Callable[[], Array]:
    return lambda: value
