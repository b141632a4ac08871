"""Resizing of tables with open vocabularies.

`resize` creates new variables for a table with another capacity, and copies the
rows to these variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.sharded.routing import checks
from tf_layoutmap.vocabulary import conversion as vocabulary_conversion
from tf_layoutmap.vocabulary import state

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
    """The result of resizing a table.

    Attributes:
      spec: Spec of the embedding with the new capacity.
      variables: New variables by name, by the name of the table. The dict
        contains all tables that share the vocabulary.
      conversion: Numbers of kept and dropped keys.
      dropped: Arrays with the dropped keys, their rows and the values of their
        slot variables, by index of the table.
    """

    spec: config.EmbeddingSpec
    variables: dict[str, dict[str, Any]]
    conversion: state.Conversion
    dropped: dict[int, list[Array]]


def spec_with_capacity(
    spec: config.EmbeddingSpec,
    table: int,
    capacity: int,
) -> config.EmbeddingSpec:
    """Returns the spec with a new capacity for one vocabulary.

    Raises:
      TypeError: If `OpenVocabulary` does not accept the type of `capacity`.
      ValueError: If `OpenVocabulary` does not accept the value of `capacity`.
    """
    settings = dataclasses.replace(
        spec.tables[table].vocabulary.settings, capacity=capacity
    )
    new_tables = list(spec.tables)
    for number in open_specs.sharing(spec, table):
        old = new_tables[number]
        new_tables[number] = dataclasses.replace(
            old,
            num_rows=settings.num_rows,
            vocabulary=dataclasses.replace(old.vocabulary, settings=settings),
        )
    return dataclasses.replace(spec, tables=tuple(new_tables))


def resize(
    spec: config.EmbeddingSpec,
    table: int,
    old: Mapping[str, Mapping[str, Any]],
    partitioner: tables.Partitioner | None = None,
    create: Callable[[config.EmbeddingSpec, int], dict[str, Any]] | None = None,
) -> Resized:
    """Creates variables for tables with a new capacity, and copies the rows.

    The old variables are not changed. The memory must hold the old variables,
    the new variables, and a copy of one variable at a time.

    Args:
      spec: Spec with the new capacity.
      table: Index of a table. All tables with the same vocabulary are resized.
      old: Old variables by name, by the name of the table.
      partitioner: Partitioner of the tables, or None.
      create: Function of the spec and of the index of a table, which creates
        the variables of the table. None: `tables.create_table`.
    """
    owner, *_ = sharing = open_specs.sharing(spec, table)
    vocabulary = old[spec.tables[owner].name]
    keys = _gathered(vocabulary[state.KEYS])
    moved = vocabulary_conversion.move_vocabulary(
        lambda name: (
            keys if name == state.KEYS else _gathered(vocabulary[name])
        ),
        spec.tables[owner].vocabulary.settings,
        has_sketch=state.SKETCH in vocabulary,
    )
    resized = Resized(spec, {}, moved.conversion, {})
    for number in sharing:
        name = spec.tables[number].name
        variables = (
            tables.create_table(spec, number, partitioner)
            if create is None
            else create(spec, number)
        )
        dropped = _copy_moved(old[name], variables, moved)
        resized.variables[name] = variables
        resized.dropped[number] = [keys.ravel()[moved.dropped], *dropped]
    return resized


def _copy_moved(
    old: Mapping[str, Any],
    variables: Mapping[str, Any],
    moved: vocabulary_conversion.MovedRows,
) -> list[Array]:
    """Copies the variables of a table; returns the rows of dropped keys."""
    dropped = []
    for name, variable in variables.items():
        value = moved.vocabulary.get(name)
        if value is None:
            value = _gathered(old[name])
            if name != tables.ROUNDING_STEPS:
                dropped.append(value[moved.dropped])
                value = moved.of(value)
        first = 0
        for shard in tables.shards_of(variable):
            if not value.ndim:  # Counter of rounding steps.
                shard.assign(value)
                continue
            size = checks.known_size(shard)
            shard.assign(value[first : first + size])
            first += size
    return dropped


def empty_variables(old: Mapping[str, Any]) -> None:
    """Frees the memory of variables that a resize has replaced.

    A function that was traced before the resize still uses these variables.
    Because the variables are empty, lookups in this function raise errors
    instead of returning outdated rows.
    """
    for variable in old.values():
        empty_shards(tables.shards_of(variable))


def empty_shards(shards: Iterable[Any]) -> None:
    """Assigns values without rows; see `empty_variables`."""
    for shard in shards:
        with tf.device(shard.device):
            tf.raw_ops.AssignVariableOp(
                resource=shard.handle,
                validate_shape=False,
                value=tf.zeros([0, *shard.shape[1:]], shard.dtype),
            )


def resize_scope(variables: Mapping[str, Any]) -> Any:
    """Returns the strategy scope in which the variables were created."""
    shard = tables.shards_of(variables[tables.PARAMETERS])[0]
    strategy = getattr(shard, "_distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _gathered(variable: Any) -> Array:
    shards = [shard.numpy() for shard in tables.shards_of(variable)]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)
