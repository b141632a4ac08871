"""Checkpoints of tables, made anew for other vocabularies."""

# DOC-MERGE: One table of a checkpoint, as another kind of table would have it.
# DOC-MERGE: Where the rows of keys go in a vocabulary of another capacity.
from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, ops
from tf_layoutmap.embedding.spec import optimizer_specs
from tf_layoutmap.vocabulary import (
    bucket_layout,
    checkpoint_files,
    key_tensors,
    state,
)
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Conversion

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class MovedRows:
    """The rows of keys, before and after.

    Attributes:
      sources: `[num_kept]` int64, the rows that keys had.
      targets: The rows that they get.
      dropped: `[num_dropped]` int64, rows of keys that found no place.
      num_rows: Of the new table, that of unknown keys among them.
      vocabulary: Its variables by name.
    """

    sources: Array
    targets: Array
    dropped: Array
    num_rows: int
    vocabulary: dict[str, Array]

    @property
    def conversion(self) -> state.Conversion:
        """What became of the keys."""
        return state.Conversion(len(self.targets), len(self.dropped))

    def of(self, value: Array) -> Array:
        """Returns the rows of the new table, `[num_rows, dim]`.

        Rows without a key are zeros, until a key gets them. The last one, of
        unknown keys, stays.

        Args:
          value: The rows of the old one.
        """
        rows = np.zeros((self.num_rows, *value.shape[1:]), value.dtype)
        rows[self.targets] = value[self.sources]
        rows[-1] = value[-1]
        return rows


def move_rows(
    keys: Array,
    last_steps: Array,
    counts: Array,
    numbers: Array,
    settings: OpenVocabulary,
) -> MovedRows:
    """Finds a place for keys in a vocabulary of these settings.

    Where there is not room for all, those with the highest score stay, by its
    `evict`. What was counted of keys without a row is forgotten.

    Args:
      keys: Of any shape, int64; -2^63 where none is.
      last_steps: Of each, int32.
      counts: Of each, int32.
      numbers: What the old vocabulary has counted.
      settings: Of the new one.
    """
    stored = keys.ravel()
    found = ops.native.put_keys(
        stored,
        last_steps.ravel(),
        counts.ravel(),
        step=int(numbers[0]),
        capacity=settings.capacity,
        evict=settings.evict,
        half_life_steps=settings.half_life_steps or 0,
    )
    by_bucket = (-1, bucket_layout.KEYS_PER_BUCKET)
    sketch = bucket_layout.sketch_shape(settings.num_buckets)
    vocabulary = {
        state.KEYS: found["keys"].reshape(by_bucket),
        state.LAST_STEPS: found["last_step"].reshape(by_bucket),
        state.COUNTS: found["count"].reshape(by_bucket),
        state.SKETCH: np.zeros(sketch, np.uint8),
        state.SKETCH_SUMS: np.zeros(sketch[:1], np.int64),
        state.NUMBERS: numbers,
    }
    had_row = np.flatnonzero(stored != bucket_layout.EMPTY_KEY)
    return MovedRows(
        found["from"],
        found["to"],
        np.setdiff1d(had_row, found["from"]),
        settings.num_rows,
        vocabulary,
    )


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
    moved = move_rows(
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
    moved = move_rows(
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


_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def convert_vocabularies(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    vocabularies: Mapping[str, Any],
    optimizer: Any = None,
) -> dict[str, Conversion]:
    """Writes a checkpoint whose tables are restored into other ones.

    - A table with keys into one of another capacity: keys keep their rows, slot
      variables, counts and steps. Where there is not room for all, those with
      the highest score stay, by the `evict` of the new vocabulary: the key
      that was used last, or most. What was counted of keys without a row is
      forgotten.
    - A table of n rows into one with keys: they are 0 to n - 1, each used once,
      before the first step. Where there is not room, the lowest stay.
    - A table with keys into one of n rows: keys 0 to n - 1 keep their values,
      other keys are dropped, and rows without a key start as in a new table.

    All else is copied. One variable at a time is in memory, as it was and as
    it will be.

    Args:
      source: Prefix of a checkpoint of TensorFlow, as `tf.train.Checkpoint`
        returned it.
      target: Prefix of the new one, another one. A checkpoint there is
        replaced at the end: also of a process that is killed, the old or the
        new one is left.
      vocabularies: By name of the table, what it will be restored into: a
        `tlm.OpenVocabulary`, or the `TableConfig` of a table without one.
        Tables that are not named stay as they are.
      optimizer: Of tables that have keys in one of the two checkpoints only:
        says what slot variables start with. None: that of the `TableConfig`.

    Returns:
      By name of the table, how many of its keys were kept and dropped.

    Raises:
      TypeError: If a vocabulary is neither.
      ValueError: If `target` is `source`, there is no such table, or several,
        what slot variables start with is not known, or keys that are strings
        would become rows, or `source` was cut or altered. Nothing is written
        then.
      OSError: If `target` cannot be written, or is being written by another
        process; a checkpoint that was there before is as it was.
    """
    source, target = map(checkpoint_files.prefix_of, (source, target))
    if checkpoint_files.is_same_checkpoint(source, target):
        raise ValueError(
            checks.message("target", "another prefix than `source`", target)
        )
    for name, wanted in vocabularies.items():
        if not (
            isinstance(wanted, OpenVocabulary)
            or hasattr(wanted, "vocabulary_size")
        ):
            raise TypeError(
                checks.message(
                    "vocabularies",
                    "a mapping to tlm.OpenVocabulary or TableConfig",
                    wanted,
                    f"table {name!r}",
                )
            )
    reader = _Reader(source)
    shapes = reader.shapes
    prefixes = _prefixes(shapes, source, vocabularies)
    converted = {
        prefix: _converted(
            reader, prefix, shapes, table, vocabularies[table], optimizer
        )
        for prefix, table in prefixes.items()
    }
    checkpoint_files.write_checkpoint(
        target, _tensors(reader, shapes, converted)
    )
    return {
        table: converted[prefix].conversion
        for prefix, table in prefixes.items()
    }


class _Reader:
    """The tensors of a checkpoint.

    Attributes:
      shapes: By name.
    """

    def __init__(self, prefix: str):
        """Opens it.

        Raises:
          ValueError: If there is none.
        """
        try:
            self._reader = tf.train.load_checkpoint(prefix)
        except (tf.errors.OpError, ValueError) as error:
            raise ValueError(
                "Argument `source` must be the prefix of a checkpoint of "
                f"TensorFlow. Received: source={prefix!r} ({error})."
            ) from None
        self._prefix = prefix
        self.shapes = {
            key: tuple(shape)
            for key, shape in self._reader.get_variable_to_shape_map().items()
        }

    def get_tensor(self, key: str) -> Any:
        """Returns a tensor.

        Raises:
          ValueError: If its bytes are not those that were written.
        """
        try:
            return self._reader.get_tensor(key)
        except (tf.errors.OpError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"Tensor {key!r} cannot be read from the checkpoint at "
                f"{self._prefix!r}, which was cut or altered: {error}."
            ) from None


def _prefixes(
    shapes: Mapping[str, Any],
    source: str,
    vocabularies: Mapping[str, Any],
) -> dict[str, str]:
    """By what the names of its tensors begin with, each table to convert."""
    end = f"/{PARAMETERS}{_VALUE}"
    found = {
        key.removesuffix(end.removeprefix("/")): _unescaped(
            key.removesuffix(end).rpartition("/")[2]
        )
        for key in shapes
        if key.endswith(end)
    }
    names = list(found.values())
    for table in vocabularies:
        if names.count(table) != 1:
            raise ValueError(
                "Argument `vocabularies` must name tables that the checkpoint "
                f"has once, of {sorted(names)} in {source!r}. Received: "
                f"{table!r}."
            )
    return {
        prefix: table
        for prefix, table in found.items()
        if table in vocabularies
    }


def _converted(
    reader: _Reader,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    table: str,
    wanted: Any,
    optimizer: Any,
) -> Converted:
    """What the table of a prefix becomes."""
    names = {
        key.removeprefix(prefix).removesuffix(_VALUE): shape
        for key, shape in shapes.items()
        if key.startswith(prefix)
    }

    def read(name):
        return reader.get_tensor(prefix + name + _VALUE)

    has_keys = state.KEYS in names
    if isinstance(wanted, OpenVocabulary):
        if has_keys:
            return to_another_capacity(read, names, wanted)
        return to_open(
            read, names, wanted, _slot_values(names, table, optimizer)
        )
    if not has_keys:
        raise ValueError(
            "Argument `vocabularies` must be a tlm.OpenVocabulary for a table "
            f"without keys. Received: {wanted!r} (table {table!r})."
        )
    if wanted.dim != names[PARAMETERS][1]:
        raise ValueError(
            f"Table {table!r} must have dim={names[PARAMETERS][1]}, as in the "
            f"checkpoint. Received: dim={wanted.dim}."
        )
    try:
        return to_closed(
            read,
            names,
            wanted.vocabulary_size,
            wanted.initializer,
            _slot_values(names, table, optimizer or wanted.optimizer),
        )
    except ValueError as error:
        raise ValueError(
            f"Table {table!r} without keys must be made of {error}."
        ) from None


def _slot_values(
    names: Mapping[str, tuple[int, ...]],
    table: str,
    optimizer: Any,
) -> dict[str, float]:
    """What the slot variables of a table start with, by name."""
    rows = names[PARAMETERS][0]
    slots = {
        name
        for name, shape in names.items()
        if name != PARAMETERS
        and name not in state.NAMES
        and shape[:1] == (rows,)
    }
    spec = optimizer_specs.read_optimizer(optimizer, table=table)
    found = {
        slot.name: slot.initial_value for slot in (spec.slots if spec else ())
    }
    if slots - found.keys():
        raise ValueError(
            "Argument `optimizer` must be the one that the table is trained "
            f"with, which has slot variables {sorted(slots)}. Received: "
            f"{optimizer!r} (table {table!r})."
        )
    return found


def _tensors(
    reader: _Reader,
    shapes: Mapping[str, Any],
    converted: Mapping[str, Converted],
) -> Iterator[tuple[str, Any]]:
    """All tensors of the new checkpoint, each when it is needed."""
    values = {
        prefix + name + _VALUE: value
        for prefix, one in converted.items()
        for name, value in one.values.items()
    }
    removed = {
        prefix + name + _VALUE
        for prefix, one in converted.items()
        for name in one.removed
    }
    if checkpoint_files.OBJECT_GRAPH_KEY in shapes:
        siblings = {
            prefix + PARAMETERS + _VALUE: {
                name: prefix + name + _VALUE
                for name in one.values
                if prefix + name + _VALUE not in shapes
            }
            for prefix, one in converted.items()
        }
        values[checkpoint_files.OBJECT_GRAPH_KEY] = functools.partial(
            checkpoint_files.changed_object_graph,
            reader.get_tensor(checkpoint_files.OBJECT_GRAPH_KEY),
            siblings,
            removed,
        )
    for key in sorted({*shapes, *values} - removed):
        yield key, values[key]() if key in values else reader.get_tensor(key)


def _unescaped(name: str) -> str:
    """The name of an attribute, as checkpoints write it."""
    return re.sub(
        r"\.([.S])", lambda found: {"S": "/", ".": "."}[found[1]], name
    )
