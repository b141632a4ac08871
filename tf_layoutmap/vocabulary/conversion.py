"""Checkpoints of tables with keys, made anew for another capacity."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.vocabulary import moved_rows, state
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.state import Conversion

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def convert_vocabularies(
    source: str, target: str, vocabularies: Mapping[str, OpenVocabulary],
) -> dict[str, Conversion]:
    """Writes a checkpoint whose tables with keys have another capacity.

    Keys keep their rows, slot variables, counts and steps. Where there is not
    room for all, those with the highest score stay, by the `evict` of the new
    vocabulary: the key that was used last, or most. What was counted of keys
    without a row is forgotten. All else is copied.

    One table at a time is held in memory, as it was and as it will be.

    Args:
      source: Prefix of a checkpoint of TensorFlow, as `tf.train.Checkpoint`
        returned it.
      target: Prefix of the new one, another one.
      vocabularies: By name of the table, what it will be restored into. Tables
        that are not named stay as they are.

    Returns:
      By name of the table, how many of its keys were kept and dropped.

    Raises:
      TypeError: If a vocabulary is none.
      ValueError: If `target` is `source`, or there is no such table with keys.
    """
    if str(source) == str(target):
        raise ValueError(_checks.message(
            "target", "another prefix than `source`", target))
    for name, settings in vocabularies.items():
        if not isinstance(settings, OpenVocabulary):
            raise TypeError(_checks.message(
                "vocabularies", "a mapping to tlm.OpenVocabulary", settings,
                f"table {name!r}"))
    reader = tf.train.load_checkpoint(str(source))
    keys = sorted(reader.get_variable_to_shape_map())
    prefixes = {key.removesuffix(state.KEYS + _VALUE) for key in keys
                if key.endswith(f"/{state.KEYS}{_VALUE}")}
    by_prefix = {prefix: _unescaped(prefix.rstrip("/").rpartition("/")[2])
                 for prefix in prefixes}
    missing = sorted(set(vocabularies) - set(by_prefix.values()))
    if missing:
        raise ValueError(
            "Argument `vocabularies` must name tables with keys, which are "
            f"{sorted(by_prefix.values())} in checkpoint {str(source)!r}. "
            f"Received: {missing}.")
    converted: dict[str, Any] = {}
    found = {}
    for prefix, table in by_prefix.items():
        if table in vocabularies:
            tensors, found[table] = _converted(
                reader, prefix, [key for key in keys if
                                 key.startswith(prefix)],
                vocabularies[table])
            converted.update(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(target), tensor_names=keys,
        shape_and_slices=[""] * len(keys),
        tensors=[converted[key] if key in converted
                 else tf.constant(reader.get_tensor(key)) for key in keys])
    return found


def _unescaped(name: str) -> str:
    """The name of an attribute, as checkpoints write it."""
    return re.sub(r"\.([.S])", lambda found: {"S": "/", ".": "."}[found[1]],
                  name)


def _converted(
    reader: Any, prefix: str, keys: list[str], settings: OpenVocabulary,
) -> tuple[dict[str, tf.Tensor], Conversion]:
    """The tensors of one table in its new capacity."""
    def read(name):
        return reader.get_tensor(prefix + name + _VALUE)

    moved = moved_rows.move(
        read(state.KEYS), read(state.LAST_STEPS), read(state.COUNTS),
        read(state.NUMBERS), settings)
    num_rows = read(state.KEYS).size + 1
    result = {}
    for key in keys:
        name = key.removeprefix(prefix).removesuffix(_VALUE)
        value = moved.vocabulary.get(name)
        if value is None:
            value = reader.get_tensor(key)
            if value.shape[:1] == (num_rows,):
                value = moved.of(value)
        result[key] = tf.constant(value)
    return result, moved.conversion
