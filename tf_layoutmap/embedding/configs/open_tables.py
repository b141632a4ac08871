"""Reads the argument `vocabularies` into specs of open-vocabulary tables.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tf_layoutmap.embedding.configs import config


@dataclasses.dataclass(frozen=True)
class OpenTableSpec:
    """Additional spec of a table with an open vocabulary.

    Attributes:
      settings: The `OpenVocabulary`.
      first_values: The `FirstValues` of the table, which computes the initial
        values of rows.
      owner: Index of the table whose vocabulary this table uses, or None if the
        table owns its vocabulary.
    """

    settings: Any
    first_values: Any
    owner: int | None = None


def owner_of(spec: config.EmbeddingSpec, table: int) -> int:
    """Returns the index of the table that owns the vocabulary of a table."""
    owner = spec.tables[table].vocabulary.owner
    return table if owner is None else owner


def sharing(spec: config.EmbeddingSpec, table: int) -> list[int]:
    """Returns the indices of all tables that use the vocabulary of a table.

    The first index is the owner of the vocabulary.
    """
    owner = owner_of(spec, table)
    return [owner] + [
        number
        for number, table in enumerate(spec.tables)
        if table.vocabulary is not None and table.vocabulary.owner == owner
    ]


def spec_of_sharing(
    spec: config.EmbeddingSpec, table: int
) -> config.EmbeddingSpec:
    """Returns the spec of only the tables that use the vocabulary of a table.

    The first table owns the vocabulary. The spec has no features.
    """
    owner, *others = (spec.tables[number] for number in sharing(spec, table))
    return dataclasses.replace(
        spec,
        tables=(
            owner,
            *(
                dataclasses.replace(
                    table,
                    vocabulary=dataclasses.replace(table.vocabulary, owner=0),
                )
                for table in others
            ),
        ),
        features=(),
    )


def owners_by_name(spec: config.EmbeddingSpec) -> dict[str, str]:
    """Returns a dict from tables that share a vocabulary to its owner.

    The dict does not contain the owners.
    """
    return {
        table.name: spec.tables[owner_of(spec, number)].name
        for number, table in enumerate(spec.tables)
        if table.vocabulary is not None and table.vocabulary.owner is not None
    }


def with_vocabularies(
    spec: config.EmbeddingSpec,
    table_configs: Sequence[Any],
    vocabularies: Any,
    settings_class: type,
    read_initializer: Any,
) -> config.EmbeddingSpec:
    """Returns the spec with the vocabularies of the argument `vocabularies`.

    Args:
      spec: Spec in which no table has a vocabulary.
      table_configs: The `TableConfig` of each table in `spec`.
      vocabularies: None, or a mapping from tables to `OpenVocabulary`, or to
        the table whose vocabulary they share. Tables are table names or
        `TableConfig` objects.
      settings_class: `OpenVocabulary`.
      read_initializer: `vocabulary.first_values.read_initializer`.

    Raises:
      TypeError: If `vocabularies` is not a mapping to `OpenVocabulary` and
        tables.
      ValueError: If a table does not exist, if the mapping contains a table
        twice, if two tables have the same `OpenVocabulary` object, if a table
        shares the vocabulary of a table that does not own one, or if a table
        and its vocabulary have different sizes. The message names the table.
    """
    if vocabularies is None:
        return spec
    if not isinstance(vocabularies, Mapping):
        raise TypeError(
            "Argument `vocabularies` must be a mapping from names of tables "
            f"to tlm.vocabulary.OpenVocabulary. Received: {vocabularies!r}."
        )
    tables = list(spec.tables)
    by_table = cast("Mapping[Any, Any]", vocabularies)
    settings_of: dict[int, Any] = {}
    for key, value in by_table.items():
        index = config.index_of_table(key, spec, table_configs, "vocabularies")
        if index in settings_of:
            raise ValueError(
                "Argument `vocabularies` must name a table once. Received: "
                f"table {tables[index].name!r} by its name and by its "
                "TableConfig."
            )
        settings_of[index] = value
    owners = {
        index: _owner(index, value, spec, table_configs, settings_class)
        for index, value in settings_of.items()
    }
    _check_owners(spec, settings_of, owners)
    for index, owner in owners.items():
        table = tables[index]
        settings = settings_of[index if owner is None else owner]
        if table.num_rows != settings.capacity:
            raise ValueError(
                "The `vocabulary_size` of a TableConfig must equal the "
                "`capacity` of its tlm.vocabulary.OpenVocabulary. Received: "
                f"{table.num_rows} and {settings.capacity} (table "
                f"{table.name!r})."
            )
        tables[index] = dataclasses.replace(
            table,
            num_rows=settings.num_rows,
            vocabulary=OpenTableSpec(
                settings,
                read_initializer(
                    table.initializer,
                    seed=settings.seed,
                    table=table.name,
                    dtype=table.dtype,
                ),
                owner,
            ),
        )
    return dataclasses.replace(spec, tables=tuple(tables))


def _owner(
    table: int,
    value: Any,
    spec: config.EmbeddingSpec,
    table_configs: Sequence[Any],
    settings_class: type,
) -> int | None:
    """Returns the table whose vocabulary a table shares, or None.

    Args:
      table: Index of the table.
      value: Value of `vocabularies` for the table.
      spec: Spec of all tables.
      table_configs: The `TableConfig` of each table in `spec`.
      settings_class: `OpenVocabulary`.
    """
    if isinstance(value, settings_class):
        return None
    if isinstance(value, str) or any(
        value is table_config for table_config in table_configs
    ):
        return config.index_of_table(value, spec, table_configs, "vocabularies")
    raise TypeError(
        "Argument `vocabularies` must hold tlm.vocabulary.OpenVocabulary, or "
        "the name of the table whose vocabulary is shared. Received: "
        f"{value!r} (table {spec.tables[table].name!r})."
    )


def _check_owners(
    spec: config.EmbeddingSpec,
    settings_of: Mapping[int, Any],
    owners: Mapping[int, int | None],
) -> None:
    """Checks that each vocabulary belongs to one table.

    Args:
      spec: Spec of all tables.
      settings_of: Values of the argument `vocabularies`, by table.
      owners: Results of `_owner`, by table.
    """
    seen: dict[int, str] = {}
    for table, owner in owners.items():
        name = spec.tables[table].name
        if owner is None:
            other = seen.setdefault(id(settings_of[table]), name)
            if other != name:
                raise ValueError(
                    "Each table must have a separate "
                    "tlm.vocabulary.OpenVocabulary, because the rows of a "
                    "table belong to its keys. If the tables share their keys, "
                    f"pass the name of the first table: {{{other!r}: "
                    f"tlm.vocabulary.OpenVocabulary(...), {name!r}: {other!r}}}"
                    ". Received: the same object for tables "
                    f"{other!r} and {name!r}."
                )
        elif owners.get(owner, owner) is not None:
            raise ValueError(
                "Argument `vocabularies` must hold the name of a table that "
                "has a tlm.vocabulary.OpenVocabulary in this argument. "
                f"Received: {spec.tables[owner].name!r} (table {name!r})."
            )
