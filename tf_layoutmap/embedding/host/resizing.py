"""A table with an open vocabulary, made anew for another capacity."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.variables import tables
from tf_layoutmap.sharded.routing import shards
from tf_layoutmap.vocabulary import moved_rows, state

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
    """A table after it was resized.

    Attributes:
      spec: Of the embedding, with the new capacity.
      variables: Of the table, by name.
      conversion: What became of its keys.
      dropped: Keys that found no place, their rows and slot variables.
    """

    spec: config.EmbeddingSpec
    variables: dict[str, Any]
    conversion: state.Conversion
    dropped: list[Array]


def with_capacity(
    spec: config.EmbeddingSpec,
    table: int,
    capacity: int,
) -> config.EmbeddingSpec:
    """Returns the spec with another capacity of one vocabulary.

    Raises:
      TypeError, ValueError: As of `OpenVocabulary`.
    """
    old = spec.tables[table]
    settings = dataclasses.replace(old.vocabulary.settings, capacity=capacity)
    found = list(spec.tables)
    found[table] = dataclasses.replace(
        old,
        num_rows=settings.num_rows,
        vocabulary=dataclasses.replace(old.vocabulary, settings=settings),
    )
    return dataclasses.replace(spec, tables=tuple(found))


def resize(
    spec: config.EmbeddingSpec,
    table: int,
    old: Mapping[str, Any],
    partitioner: tables.Partitioner | None,
) -> Resized:
    """Makes the variables of a table for the capacity of a spec.

    The old ones stay as they are. Both are in memory, and one variable once
    more.

    Args:
      spec: With the new capacity.
      table: The number of the table.
      old: Its variables.
      partitioner: What divides it.
    """
    one = spec.tables[table]
    keys = _whole(old[state.KEYS])
    moved = moved_rows.move(
        keys,
        _whole(old[state.LAST_STEPS]),
        _whole(old[state.COUNTS]),
        _whole(old[state.NUMBERS]),
        one.vocabulary.settings,
    )
    variables = tables.create_table(one, partitioner)
    dropped = [keys.ravel()[moved.dropped]]
    for name, variable in variables.items():
        value = moved.vocabulary.get(name)
        if value is None:
            value = _whole(old[name])
            if name != tables.ROUNDING_STEPS:
                dropped.append(value[moved.dropped])
                value = moved.of(value)
        first = 0
        for shard in tables.shards_of(variable):
            if not value.ndim:  # What counts the updates of 16-bit rows.
                shard.assign(value)
                continue
            size = shards.known_size(shard)
            shard.assign(value[first : first + size])
            first += size
    return Resized(spec, variables, moved.conversion, dropped)


def empty(old: Mapping[str, Any]) -> None:
    """Takes the memory of variables that nobody may use any more.

    A function that was traced before still has them: what it looks up is an
    error then, not a row of another time.
    """
    for variable in old.values():
        for shard in tables.shards_of(variable):
            tf.raw_ops.AssignVariableOp(
                resource=shard.handle,
                validate_shape=False,
                value=tf.zeros([0, *shard.shape[1:]], shard.dtype),
            )


def scope_of(variables: Mapping[str, Any]) -> Any:
    """Returns the scope that variables were created in."""
    shard = tables.shards_of(variables[tables.PARAMETERS])[0]
    strategy = getattr(shard, "_distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _whole(variable: Any) -> Array:
    shards = [shard.numpy() for shard in tables.shards_of(variable)]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)
