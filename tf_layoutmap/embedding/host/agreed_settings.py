"""Refuses an embedding that is not the same in all processes of a strategy.

Each process runs its own copy of the program. Where one says something else,
copies of a table would drift apart, or the last process would be right, and
none would tell.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.host import multi_process_gather
from tf_layoutmap.embedding.spec import config

# Of a table: what may be another in each process. One of them tells which keys
# go. Where each has a copy, the first rows are those of the first process.
_OWN = ("initializer", "on_evict", "first_values")


def describe(
    spec: config.EmbeddingSpec, arguments: dict[str, Any]
) -> list[tuple[str, str]]:
    """Returns what must be the same, in order: what it is, and its value.

    Args:
      spec: Tables and features.
      arguments: Other arguments of `TPUEmbedding`, by name; `over_processes`
        among them.
    """
    found = [
        (f"argument `{name}`", _text(value))
        for name, value in arguments.items()
    ]
    found.append(("tables", _text([one.name for one in spec.tables])))
    found.append(("features", _text([one.name for one in spec.features])))
    for table in spec.tables:
        found += _fields(f"of table {table.name!r}", table)
        if arguments["over_processes"] == "divided":
            # Each process draws its own part.
            found.append(
                (
                    f"`initializer` of table {table.name!r}",
                    _initializer(table.initializer),
                )
            )
    for feature in spec.features:
        where = f"of feature {feature.name!r}"
        found += [
            (f"`table` {where}", spec.table_of(feature).name),
            (
                f"`max_sequence_length` {where}",
                _text(feature.max_sequence_length),
            ),
        ]
    return found


def check(
    strategy: tf.distribute.Strategy, settings: Sequence[tuple[str, str]]
) -> None:
    """Compares the settings of all processes, which all call it.

    Args:
      strategy: A `MultiWorkerMirroredStrategy`, outside of its replicas.
      settings: What `describe` returned.

    Raises:
      ValueError: In all processes, if one has others.
    """
    texts = _gather(strategy, json.dumps(settings))
    first, *others = [dict(json.loads(one)) for one in texts]
    for number, other in enumerate(others, start=1):
        for what in (*first, *other):
            if first.get(what) != other.get(what):
                raise ValueError(
                    "A TPUEmbedding must be the same in all processes of a "
                    f"MultiWorkerMirroredStrategy. Received: {what}: "
                    f"{first.get(what, 'none')} in process 0, "
                    f"{other.get(what, 'none')} in process {number}."
                )


def _fields(where: str, value: Any) -> list[tuple[str, str]]:
    found = []
    for one in dataclasses.fields(value):
        field = getattr(value, one.name)
        if one.name in _OWN:
            continue
        if dataclasses.is_dataclass(field):
            found += _fields(f"of the {one.name} {where}", field)
        else:
            found.append((f"`{one.name}` {where}", _text(field)))
    return found


def _initializer(value: Any) -> str:
    """Returns kind and settings; Keras draws the seed that is left out."""
    settings = getattr(value, "get_config", dict)()
    settings.pop("seed", None)
    return f"{type(value).__name__} {_text(sorted(settings.items()))}"


def _text(value: Any) -> str:
    """Returns a text that is the same in another process."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    if callable(value):
        return "a function"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _gather(strategy: tf.distribute.Strategy, text: str) -> list[str]:
    """Returns the texts of all processes, in their order."""
    # Collectives take no bytes.
    values = np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    @tf.function
    def told() -> Any:
        def of_replica():
            return [
                multi_process_gather.all_gather(tf.constant(one))
                for one in ([len(values)], values)
            ]

        return [
            strategy.experimental_local_results(one)[0]
            for one in strategy.run(of_replica)
        ]

    sizes, values_of_all = (one.numpy() for one in told())
    texts = np.split(values_of_all.astype(np.uint8), np.cumsum(sizes)[:-1])
    # All replicas of a process say the same.
    num_local = len(strategy.extended.worker_devices)
    return [one.tobytes().decode() for one in texts[::num_local]]
