"""Reads the argument `vocabularies` into specs of open-vocabulary tables.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tf_layoutmap.embedding.spec import config


@dataclasses.dataclass(frozen=True)
class OpenTableSpec:
    """Additional spec of a table with an open vocabulary.

    Attributes:
      settings: The `OpenVocabulary`.
      first_values: The `FirstValues` of the table, which computes the initial
        values of rows.
    """

    settings: Any
    first_values: Any


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
      vocabularies: None, or a mapping from tables to `OpenVocabulary`. Tables
        are table names or `TableConfig` objects.
      settings_class: `OpenVocabulary`.
      read_initializer: `vocabulary.first_values.read_initializer`.

    Raises:
      TypeError: If `vocabularies` is not a mapping to `OpenVocabulary`.
      ValueError: If a table does not exist, if the mapping contains a table
        twice, if two tables share a vocabulary, or if a table and its
        vocabulary have different sizes. The message names the table.
    """
    if vocabularies is None:
        return spec
    if not isinstance(vocabularies, Mapping):
        raise TypeError(
            "Argument `vocabularies` must be a mapping from names of tables "
            f"to tlm.OpenVocabulary. Received: {vocabularies!r}."
        )
    tables = list(spec.tables)
    seen: dict[int, str] = {}
    by_table = cast("Mapping[Any, Any]", vocabularies)
    for key, settings in by_table.items():
        index = config.index_of_table(key, spec, table_configs, "vocabularies")
        table = tables[index]
        if not isinstance(settings, settings_class):
            raise TypeError(
                "Argument `vocabularies` must hold tlm.OpenVocabulary. "
                f"Received: {settings!r} (table {table.name!r})."
            )
        if table.vocabulary is not None:
            raise ValueError(
                "Argument `vocabularies` must name a table once. Received: "
                f"table {table.name!r} by its name and by its TableConfig."
            )
        if id(settings) in seen:
            raise ValueError(
                "Each table must have a separate tlm.OpenVocabulary, because "
                "the rows of a table belong to its keys. Received: the same "
                f"object for tables {seen[id(settings)]!r} and {table.name!r}."
            )
        seen[id(settings)] = table.name
        if table.num_rows != settings.capacity:
            raise ValueError(
                "The `vocabulary_size` of a TableConfig must equal the "
                "`capacity` of its tlm.OpenVocabulary. Received: "
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
            ),
        )
    return dataclasses.replace(spec, tables=tuple(tables))
