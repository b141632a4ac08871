"""Converts the tables in checkpoints to other vocabularies.

In this module, an open table is a table with an open vocabulary. A closed table
has a fixed number of rows, and its ids are row indices. `convert`
is the public function. The functions `convert_capacity`, `convert_to_open` and
`convert_to_closed` each convert one table. `move_rows` assigns the keys of a
vocabulary to the rows of a vocabulary with another capacity.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, ops
from tf_layoutmap.embedding.configs import optimizer_specs
from tf_layoutmap.vocabulary import (
    bucket_layout,
    checkpoint_files,
    key_tensors,
    parts,
    shared,
    sketch_conversion,
    state,
)
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Conversion

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TableConfig

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class MovedRows:
    """The old and the new row of each key in a vocabulary.

    Attributes:
      sources: `[num_kept]` int64, old rows of the keys that are kept.
      targets: `[num_kept]` int64, new rows of these keys.
      dropped: `[num_dropped]` int64, old rows of the keys that are dropped.
      num_rows: Number of rows of the new table, including the row of unknown
        keys.
      vocabulary: Variables of the new vocabulary, by name.
    """

    sources: Array
    targets: Array
    dropped: Array
    num_rows: int
    vocabulary: dict[str, Array]

    @property
    def conversion(self) -> state.Conversion:
        """The numbers of keys that were kept and dropped."""
        return state.Conversion(len(self.targets), len(self.dropped))

    def of(self, value: Array) -> Array:
        """Returns the rows of the new table, `[num_rows, dim]`.

        Rows without a key are zeros. The last row, which all unknown keys
        share, is copied.

        Args:
          value: The rows of the old table.
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
    sketch: tuple[Array, Array] | None = None,
) -> MovedRows:
    """Assigns keys to the rows of a vocabulary with other settings.

    If there are too many keys, the keys with the highest score according to
    `settings.evict` are kept. `sketch_conversion` converts the counts of keys
    without a row.

    Args:
      keys: int64 keys, of any shape; -2^63 marks empty places.
      last_steps: Step of the last use of each key, int32.
      counts: Count of each key, int32.
      numbers: The variable `NUMBERS` of the old vocabulary.
      settings: Settings of the new vocabulary.
      sketch: The variables `SKETCH` and `SKETCH_SUMS` of the old vocabulary, or
        None if the old vocabulary does not have them.
    """
    stored = keys.ravel()
    placed = ops.native.put_keys(
        stored,
        last_steps.ravel(),
        counts.ravel(),
        step=int(numbers[0]),
        capacity=settings.capacity,
        evict=settings.evict,
        half_life_steps=settings.half_life_steps or 0,
    )
    by_bucket = (-1, bucket_layout.KEYS_PER_BUCKET)
    vocabulary = {
        parts.KEYS: placed["keys"].reshape(by_bucket),
        parts.LAST_STEPS: placed["last_step"].reshape(by_bucket),
        parts.COUNTS: placed["count"].reshape(by_bucket),
        parts.NUMBERS: numbers,
    }
    if settings.has_sketch:
        cells, sums = _converted_sketch(sketch, settings.num_buckets)
        vocabulary |= {parts.SKETCH: cells, parts.SKETCH_SUMS: sums}
    had_row = np.flatnonzero(stored != bucket_layout.EMPTY_KEY)
    return MovedRows(
        placed["from"],
        placed["to"],
        np.setdiff1d(had_row, placed["from"]),
        settings.num_rows,
        vocabulary,
    )


def _converted_sketch(
    sketch: tuple[Array, Array] | None, num_buckets: int
) -> tuple[Array, Array]:
    """Returns the converted sketch, or an empty sketch."""
    if sketch is not None:
        return sketch_conversion.convert(*sketch, num_buckets)
    shape = bucket_layout.sketch_shape(num_buckets)
    return np.zeros(shape, np.uint8), np.zeros(shape[:1], np.int64)


# Type of a function that takes the name of a variable and returns its saved
# value.
Read = Callable[[str], Array]
PARAMETERS = "parameters"


@dataclasses.dataclass(frozen=True, eq=False)
class Converted:
    """A converted table.

    Attributes:
      conversion: The numbers of keys that were kept and dropped.
      values: Functions that compute the values of replaced and new variables,
        by variable name.
      removed: Names of variables that the converted table does not have.
    """

    conversion: Conversion
    values: dict[str, Callable[[], Any]]
    removed: frozenset[str] = frozenset()


def convert_capacity(
    read: Read,
    names: Mapping[str, tuple[int, ...]],
    settings: OpenVocabulary,
) -> Converted:
    """Converts an open table into an open table with other settings.

    Args:
      read: Reader of the variables of the old table.
      names: Shapes of the variables of the old table, by name.
      settings: Settings of the new table.
    """
    moved = move_vocabulary(read, settings, has_sketch=parts.SKETCH in names)
    values = {
        name: _constant(value) for name, value in moved.vocabulary.items()
    }
    for name in _names_of_rows(names):
        values[name] = lambda name=name: moved.of(read(name))
    # If keys are not admitted by count, the new table has no sketch.
    return Converted(
        moved.conversion, values, frozenset(names) & (parts.NAMES - set(values))
    )


def move_vocabulary(
    read: Read, settings: OpenVocabulary, *, has_sketch: bool
) -> MovedRows:
    """Assigns rows of a new table to the keys of a vocabulary.

    Args:
      read: Reader of the variables of the vocabulary.
      settings: Settings of the new table.
      has_sketch: Whether the vocabulary has a sketch.
    """
    return move_rows(
        read(parts.KEYS),
        read(parts.LAST_STEPS),
        read(parts.COUNTS),
        read(parts.NUMBERS),
        settings,
        (read(parts.SKETCH), read(parts.SKETCH_SUMS)) if has_sketch else None,
    )


def convert_shared(
    read: Read,
    names: Mapping[str, tuple[int, ...]],
    moved: MovedRows,
) -> Converted:
    """Converts an open table that uses the vocabulary of another table.

    Args:
      read: Reader of the variables of the old table.
      names: Shapes of the variables of the old table, by name.
      moved: The rows of the keys in the table that owns the vocabulary.
    """
    return Converted(
        moved.conversion,
        {
            name: lambda name=name: moved.of(read(name))
            for name in _names_of_rows(names)
        },
    )


def convert_to_open(
    read: Read,
    names: Mapping[str, tuple[int, ...]],
    settings: OpenVocabulary,
    slot_values: Mapping[str, float],
) -> Converted:
    """Converts a closed table of n rows into an open table.

    The keys are 0 to n - 1. Each key has the count 1, and its last use is
    before the first step.

    Args:
      read: Reader of the variables of the old table.
      names: Shapes of the variables of the old table, by name.
      settings: Settings of the new table.
      slot_values: Initial values of slot variables, by name. The row of unknown
        keys gets these values.
    """
    keys = np.arange(names[PARAMETERS][0])
    numbers = np.zeros([len(parts.NUMBERS_HELD)], np.int64)
    numbers[1] = key_tensors.INTEGERS
    moved = move_rows(
        keys,
        np.zeros(keys.shape, np.int32),
        np.ones(keys.shape, np.int32),
        numbers,
        settings,
    )
    values = {
        name: _constant(value) for name, value in moved.vocabulary.items()
    }

    def rows(name):
        values = moved.of(read(name))
        values[-1] = slot_values.get(name, 0.0)
        return values

    for name in _names_of_rows(names):
        values[name] = lambda name=name: rows(name)
    return Converted(moved.conversion, values)


def convert_to_closed(
    read: Read,
    names: Mapping[str, tuple[int, ...]],
    num_rows: int,
    initializer: Callable[..., Any],
    slot_values: Mapping[str, float],
) -> Converted:
    """Converts an open table into a closed table, in which key k has row k.

    Args:
      read: Reader of the variables of the old table.
      names: Shapes of the variables of the old table, by name.
      num_rows: Number of rows of the new table.
      initializer: Initializer for rows whose key is not in the old table.
      slot_values: Initial values of the slot variables of these rows, by name.

    Raises:
      ValueError: If the keys are hashes of strings.
    """
    if read(parts.NUMBERS)[1] == key_tensors.STRINGS:
        raise ValueError("keys that are integers. Received: hashes of strings")
    keys = read(parts.KEYS).ravel()
    has_key = keys != bucket_layout.EMPTY_KEY
    sources = np.flatnonzero(has_key & (keys >= 0) & (keys < num_rows))
    targets = keys[sources]

    def rows(name):
        value = read(name)
        shape = (num_rows, *value.shape[1:])
        values = np.array(
            tf.cast(initializer(shape), value.dtype)
            if name == PARAMETERS
            else np.full(shape, slot_values[name], value.dtype)
        )
        values[targets] = value[sources]
        return values

    return Converted(
        Conversion(len(sources), int(has_key.sum()) - len(sources)),
        {name: lambda name=name: rows(name) for name in _names_of_rows(names)},
        frozenset(names) & parts.NAMES,
    )


def _names_of_rows(names: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns names of variables that have as many rows as the table."""
    return [
        name
        for name, shape in names.items()
        if name not in parts.NAMES
        and tuple(shape[:1]) == tuple(names[PARAMETERS][:1])
    ]


def _constant(value: Array) -> Callable[[], Array]:
    return lambda: value


_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    vocabularies: Mapping[str, OpenVocabulary]
    | Mapping[str, TableConfig]
    | Mapping[str, OpenVocabulary | TableConfig]
    | Mapping[str, OpenVocabulary | str],
    optimizer: optimizer_specs.TableOptimizer | None = None,
) -> dict[str, Conversion]:
    """Converts a checkpoint for tables with other vocabularies.

    Three conversions of a table are supported. A closed table is a table
    without an open vocabulary.

    - From an open vocabulary to another capacity: keys keep the values of their
      rows and slot variables, their counts and their steps. If there are too
      many keys for the new capacity, the most recently used or the most
      frequently used keys are kept, according to `evict` of the new vocabulary.
      The counts of keys without a row are kept. If the new sketch has fewer or
      other cells than the old sketch, these counts can become too high, but not
      too low.
    - From a closed table of n rows to an open vocabulary: the keys are the row
      indices 0 to n - 1. Each key has the count 1, and its last use is before
      the first step. If there are too many keys for the new capacity, the
      lowest keys are kept.
    - From an open vocabulary to a closed table of n rows: keys 0 to n - 1 keep
      their values. Other keys are dropped. Rows without a key are initialized
      as in a new table.

    If tables share a vocabulary, all of them must be converted together, from
    an open vocabulary to another capacity: `{"deep":
    tlm.vocabulary.OpenVocabulary(5000), "wide": "deep"}`, as for
    `tlm.TPUEmbedding`.

    All other variables are copied. The function holds the old and the new value
    of only one variable at a time in memory.

    Args:
      source: Prefix of a TensorFlow checkpoint, such as the result of
        `tf.train.Checkpoint.save`.
      target: Prefix of the new checkpoint. `target` must differ from `source`.
        An existing checkpoint is replaced when the new checkpoint is complete.
        If the process is killed, either the old or the new checkpoint remains.
      vocabularies: The tables to convert. Maps each table name to a
        `tlm.vocabulary.OpenVocabulary`, to the name of the table whose
        vocabulary the table shares, or to the `TableConfig` of a closed table.
        Other tables are copied.
      optimizer: Optimizer that defines the initial values of slot variables.
        The optimizer is used for tables that get or lose an open vocabulary.
        None: the optimizer of the `TableConfig`.

    Returns:
      The numbers of keys that were kept and dropped, by table name.

    Raises:
      TypeError: If a value of `vocabularies` has an unsupported type.
      ValueError: If `target` equals `source`, a table does not exist or is not
        unique, the initial values of slot variables are not known, a table with
        string keys would become closed, tables share a vocabulary in only one
        of the checkpoints, or `source` is truncated or corrupted. In this case,
        no file is written.
      OSError: If `target` cannot be written, or if another process is writing
        it. An existing checkpoint is not changed.
    """
    source, target = map(checkpoint_files.prefix_of, (source, target))
    if checkpoint_files.is_same_checkpoint(source, target):
        raise ValueError(
            checks.message("target", "another prefix than `source`", target)
        )
    for name, wanted in vocabularies.items():
        if not (
            isinstance(wanted, OpenVocabulary | str)
            or hasattr(wanted, "vocabulary_size")
        ):
            raise TypeError(
                checks.message(
                    "vocabularies",
                    "a mapping to tlm.vocabulary.OpenVocabulary, TableConfig "
                    "or the name of a table",
                    wanted,
                    f"table {name!r}",
                )
            )
    reader = checkpoint_files.Reader(source)
    shapes = reader.shapes
    prefixes = _prefixes(shapes, source, vocabularies)
    _check_owners(reader, prefixes, vocabularies)
    converted = {
        prefix: _convert_table(reader, prefix, shapes, table, wanted, optimizer)
        for prefix, table in prefixes.items()
        if not isinstance(wanted := vocabularies[table], str)
    }
    prefix_of = {table: prefix for prefix, table in prefixes.items()}
    for table, owner in _names_in(vocabularies).items():
        prefix = prefix_of[table]
        settings: Any = vocabularies[owner]
        converted[prefix] = convert_shared(
            _read_of(reader, prefix),
            _names_below(shapes, prefix),
            move_vocabulary(
                _read_of(reader, prefix_of[owner]),
                settings,
                has_sketch=parts.SKETCH
                in _names_below(shapes, prefix_of[owner]),
            ),
        )
    checkpoint_files.write_checkpoint(
        target, _tensors(reader, shapes, converted)
    )
    return {
        table: converted[prefix].conversion
        for prefix, table in prefixes.items()
    }


def _prefixes(
    shapes: Mapping[str, Any],
    source: str,
    vocabularies: Mapping[str, Any],
) -> dict[str, str]:
    """Returns the tables to convert, by the prefix of their tensors."""
    end = f"/{PARAMETERS}{_VALUE}"
    tables = {
        key.removesuffix(end.removeprefix("/")): _unescape(
            key.removesuffix(end).rpartition("/")[2]
        )
        for key in shapes
        if key.endswith(end)
    }
    names = list(tables.values())
    for table in vocabularies:
        if names.count(table) != 1:
            raise ValueError(
                "Argument `vocabularies` must name tables that the checkpoint "
                f"contains exactly once, from {sorted(names)} in {source!r}. "
                f"Received: {table!r}."
            )
    return {
        prefix: table
        for prefix, table in tables.items()
        if table in vocabularies
    }


def _convert_table(
    reader: checkpoint_files.Reader,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    table: str,
    wanted: Any,
    optimizer: Any,
) -> Converted:
    """Converts the table whose tensor names begin with `prefix`."""
    names = _names_below(shapes, prefix)
    read = _read_of(reader, prefix)
    has_keys = parts.KEYS in names
    if isinstance(wanted, OpenVocabulary):
        if has_keys:
            return convert_capacity(read, names, wanted)
        return convert_to_open(
            read, names, wanted, _slot_values(names, table, optimizer)
        )
    if not has_keys:
        raise ValueError(
            "Argument `vocabularies` must be a tlm.vocabulary.OpenVocabulary "
            f"for a table without keys. Received: {wanted!r} (table {table!r})."
        )
    if wanted.dim != names[PARAMETERS][1]:
        raise ValueError(
            f"Table {table!r} must have dim={names[PARAMETERS][1]}, as in the "
            f"checkpoint. Received: dim={wanted.dim}."
        )
    try:
        return convert_to_closed(
            read,
            names,
            wanted.vocabulary_size,
            wanted.initializer,
            _slot_values(names, table, optimizer or wanted.optimizer),
        )
    except ValueError as error:
        raise ValueError(
            f"A closed table {table!r} must be converted from {error}."
        ) from None


def _names_below(
    shapes: Mapping[str, tuple[int, ...]], prefix: str
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the variables of a table, by name."""
    return {
        key.removeprefix(prefix).removesuffix(_VALUE): shape
        for key, shape in shapes.items()
        if key.startswith(prefix)
    }


def _read_of(reader: checkpoint_files.Reader, prefix: str) -> Read:
    """Returns a reader of the variables of a table."""
    return lambda name: reader.get_tensor(prefix + name + _VALUE)


def _names_in(vocabularies: Mapping[str, Any]) -> dict[str, str]:
    return {
        table: owner
        for table, owner in vocabularies.items()
        if isinstance(owner, str)
    }


def _check_owners(
    reader: checkpoint_files.Reader,
    prefixes: Mapping[str, str],
    vocabularies: Mapping[str, Any],
) -> None:
    """Checks that tables share vocabularies as in the checkpoint.

    Args:
      reader: Reader of the checkpoint.
      prefixes: Tables to convert, by the prefix of their tensors.
      vocabularies: The argument of `convert`.

    Raises:
      ValueError: If a table shares a vocabulary only in the checkpoint or only
        in `vocabularies`.
    """
    saved: dict[str, str] = {}
    for prefix in prefixes:
        # The prefix ends with the attribute of the tables and the name of the
        # table.
        parent = prefix.rstrip("/").split("/")[:-2]
        key = "/".join([*parent, shared.OWNERS]) + _VALUE
        if key in reader.shapes:
            saved.update(shared.decode_owners(reader.get_tensor(key)))
    wanted = _names_in(vocabularies)
    tables = set(prefixes.values())
    for table, owner in {**saved, **wanted}.items():
        if not tables & {table, owner}:
            continue
        if saved.get(table) != wanted.get(table) or not isinstance(
            vocabularies.get(owner), OpenVocabulary
        ):
            raise ValueError(
                "Argument `vocabularies` must convert tables that share a "
                "vocabulary together, as they are saved: "
                f"{{{owner!r}: tlm.vocabulary.OpenVocabulary(...), {table!r}: "
                f"{owner!r}}}. Tables that share a vocabulary in the "
                f"checkpoint: {saved}. Received: {dict(vocabularies)}."
            )


def _slot_values(
    names: Mapping[str, tuple[int, ...]],
    table: str,
    optimizer: Any,
) -> dict[str, float]:
    """Returns the initial values of the slot variables of a table, by name."""
    rows = names[PARAMETERS][0]
    slots = {
        name
        for name, shape in names.items()
        if name != PARAMETERS
        and name not in parts.NAMES
        and shape[:1] == (rows,)
    }
    spec = optimizer_specs.read_optimizer(optimizer, table=table)
    values = {
        slot.name: slot.initial_value for slot in (spec.slots if spec else ())
    }
    if slots - values.keys():
        raise ValueError(
            "Argument `optimizer` must be the optimizer that trains the table, "
            f"which has slot variables {sorted(slots)}. Received: "
            f"{optimizer!r} (table {table!r})."
        )
    return values


def _tensors(
    reader: checkpoint_files.Reader,
    shapes: Mapping[str, Any],
    converted: Mapping[str, Converted],
) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of the new checkpoint, computed on demand."""
    values = {
        prefix + name + _VALUE: value
        for prefix, table in converted.items()
        for name, value in table.values.items()
    }
    removed = {
        prefix + name + _VALUE
        for prefix, table in converted.items()
        for name in table.removed
    }
    if checkpoint_files.OBJECT_GRAPH_KEY in shapes:
        siblings = {
            prefix + PARAMETERS + _VALUE: {
                name: prefix + name + _VALUE
                for name in table.values
                if prefix + name + _VALUE not in shapes
            }
            for prefix, table in converted.items()
        }
        values[checkpoint_files.OBJECT_GRAPH_KEY] = functools.partial(
            checkpoint_files.changed_object_graph,
            reader.get_tensor(checkpoint_files.OBJECT_GRAPH_KEY),
            siblings,
            removed,
        )
    for key in sorted({*shapes, *values} - removed):
        yield key, values[key]() if key in values else reader.get_tensor(key)


def _unescape(name: str) -> str:
    """Returns the attribute name for an escaped name in a checkpoint key."""
    return re.sub(
        r"\.([.S])", lambda match: {"S": "/", ".": "."}[match[1]], name
    )
