"""Checkpoints of tables, made anew for other vocabularies."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.embedding.spec import optimizer_specs
from tf_layoutmap.vocabulary import (
    checkpoint_parts,
    object_graph,
    state,
    table_conversions,
)
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Conversion
from tf_layoutmap.vocabulary.table_conversions import PARAMETERS, Converted

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
    source, target = map(checkpoint_parts.prefix_of, (source, target))
    if checkpoint_parts.is_same(source, target):
        raise ValueError(
            _checks.message("target", "another prefix than `source`", target)
        )
    for name, wanted in vocabularies.items():
        if not (
            isinstance(wanted, OpenVocabulary)
            or hasattr(wanted, "vocabulary_size")
        ):
            raise TypeError(
                _checks.message(
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
    checkpoint_parts.write(target, _tensors(reader, shapes, converted))
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
            return table_conversions.to_another_capacity(read, names, wanted)
        return table_conversions.to_open(
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
        return table_conversions.to_closed(
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
    if object_graph.KEY in shapes:
        siblings = {
            prefix + PARAMETERS + _VALUE: {
                name: prefix + name + _VALUE
                for name in one.values
                if prefix + name + _VALUE not in shapes
            }
            for prefix, one in converted.items()
        }
        values[object_graph.KEY] = functools.partial(
            object_graph.changed,
            reader.get_tensor(object_graph.KEY),
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
