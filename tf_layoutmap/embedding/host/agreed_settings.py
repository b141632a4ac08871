"""Checks that an embedding has equal settings in all processes.

If the settings differed, for example in a learning rate, the copies of a table
would differ between the processes, and no later check would raise an error.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import processes
from tf_layoutmap.embedding.configs import config

# Fields of a table that may differ between processes. Only the first process
# calls `on_evict`. All copies of a table start with the initial values of the
# first process, so initializers may differ.
_PER_PROCESS_FIELDS = ("initializer", "on_evict", "first_values")


def describe_settings(
    spec: config.EmbeddingSpec, arguments: dict[str, Any]
) -> list[tuple[str, str]]:
    """Returns the settings that must be equal in all processes.

    Args:
      spec: Tables and features.
      arguments: Other arguments of `TPUEmbedding` by name, including
        `over_processes`.

    Returns:
      A list of `(description, value)` pairs of strings.
    """
    settings = [
        (f"argument `{name}`", _text(value))
        for name, value in arguments.items()
    ]
    settings.append(("tables", _text([table.name for table in spec.tables])))
    settings.append(
        ("features", _text([feature.name for feature in spec.features]))
    )
    for table in spec.tables:
        settings += _fields(f"of table {table.name!r}", table)
        if arguments["over_processes"] == "sharded":
            # Each process initializes its own shard, so the initializers must
            # be equal.
            settings.append(
                (
                    f"`initializer` of table {table.name!r}",
                    _initializer(table.initializer),
                )
            )
    for feature in spec.features:
        where = f"of feature {feature.name!r}"
        settings += [
            (f"`table` {where}", spec.table_of(feature).name),
            (
                f"`max_sequence_length` {where}",
                _text(feature.max_sequence_length),
            ),
        ]
    return settings


def check_agreed_settings(
    strategy: tf.distribute.Strategy, settings: Sequence[tuple[str, str]]
) -> None:
    """Checks that the settings are equal in all processes.

    All processes must call this function.

    Args:
      strategy: A `MultiWorkerMirroredStrategy`, in cross-replica context.
      settings: Settings that `describe_settings` returned.

    Raises:
      ValueError: If the settings of the processes differ. All processes raise
        this error.
    """
    texts = processes.of_strategy(strategy).gather_texts(json.dumps(settings))
    first, *others = [dict(json.loads(text)) for text in texts]
    for number, other in enumerate(others, start=1):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                raise ValueError(
                    "A TPUEmbedding must be the same in all processes of a "
                    f"MultiWorkerMirroredStrategy. Received: {name}: "
                    f"{first.get(name, 'none')} in process 0, "
                    f"{other.get(name, 'none')} in process {number}."
                )


def _fields(where: str, value: Any) -> list[tuple[str, str]]:
    settings = []
    for definition in dataclasses.fields(value):
        field = getattr(value, definition.name)
        if definition.name in _PER_PROCESS_FIELDS:
            continue
        if dataclasses.is_dataclass(field):
            settings += _fields(f"of the {definition.name} {where}", field)
        else:
            settings.append((f"`{definition.name}` {where}", _text(field)))
    return settings


def _initializer(value: Any) -> str:
    """Describes the class and settings of an initializer, without its seed.

    The seed can be random, and can therefore differ between processes.
    """
    settings = getattr(value, "get_config", dict)()
    settings.pop("seed", None)
    return f"{type(value).__name__} {_text(sorted(settings.items()))}"


def _text(value: Any) -> str:
    """Returns a string for a value that is equal in all processes."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item) for item in value)}]"
    if callable(value):
        return "a function"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
