"""Strings of steps, for tables with `keep_strings=True`.

Each vocabulary that keeps strings has one `KeptStrings`, also if several tables
share the vocabulary. The dicts of this module contain the `KeptStrings` by the
name of the table that owns the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config, open_tables
from tf_layoutmap.vocabulary import kept_strings, key_tensors, parts


def create_stores(
    spec: config.EmbeddingSpec, variables: Mapping[str, Mapping[str, Any]]
) -> dict[str, kept_strings.KeptStrings]:
    """Creates an empty `KeptStrings` for each vocabulary that keeps strings.

    Args:
      spec: Tables and features.
      variables: Variables that `tables.create_tables` created, by table name.
    """
    return {
        table.name: kept_strings.KeptStrings(
            table.name, tables.shards_of(variables[table.name][parts.KEYS])
        )
        for number, table in enumerate(spec.tables)
        if table.vocabulary is not None
        and table.vocabulary.settings.keep_strings
        and open_tables.owner_of(spec, number) == number
    }


def use_variables(
    stores: Mapping[str, kept_strings.KeptStrings],
    variables: Mapping[str, Mapping[str, Any]],
) -> None:
    """Replaces the variables of keys after a resize.

    Args:
      stores: Results of `create_stores`.
      variables: New variables, by table name. Tables that were not resized are
        not included.
    """
    for name, store in stores.items():
        if name in variables:
            store.use_keys(tables.shards_of(variables[name][parts.KEYS]))


def store_of(
    spec: config.EmbeddingSpec,
    table: int,
    stores: Mapping[str, kept_strings.KeptStrings],
) -> kept_strings.KeptStrings | None:
    """Returns the strings of a table's vocabulary, or None without strings."""
    return stores.get(spec.tables[open_tables.owner_of(spec, table)].name)


def keep(
    spec: config.EmbeddingSpec,
    stores: Mapping[str, kept_strings.KeptStrings],
    inputs: Sequence[embedding_inputs.FeatureIds],
    training: Any,
) -> None:
    """Stores the strings of a step whose keys have got rows.

    Args:
      spec: Tables and features.
      stores: Results of `create_stores`.
      inputs: Inputs of all features for replica 0, then for replica 1, and so
        on.
      training: Whether the step trains.
    """
    if training is False:
        return
    for name, store in stores.items():
        keys, strings = [], []
        for index, feature_ids in enumerate(inputs):
            if (
                feature_ids.string_keys is not None
                and feature_ids.strings is not None
                and _owner(spec, index) == name
            ):
                keys.append(feature_ids.string_keys)
                strings.append(feature_ids.strings)
        store.keep(keys, strings, training)


def check_inputs(
    spec: config.EmbeddingSpec,
    table: int,
    inputs: Sequence[embedding_inputs.FeatureIds],
) -> None:
    """Checks that the inputs of a table that keeps strings contain strings.

    Inputs of the type `StoredKeys` need not contain strings, because their keys
    have a row.

    Args:
      spec: Tables and features.
      table: Index of the table. The inputs of all tables with the same
        vocabulary are checked.
      inputs: Same as for `keep`.

    Raises:
      ValueError: If a batch is packed, so that it contains only hashes, or if
        the keys are integers.
    """
    sharing = open_tables.sharing(spec, table)
    for index, feature_ids in enumerate(inputs):
        feature = spec.features[index % len(spec.features)]
        if feature.table not in sharing:
            continue
        name = spec.tables[feature.table].name
        if not isinstance(feature_ids.kind, int):
            raise ValueError(
                "The inputs of a table with `keep_strings=True` must contain "
                "the strings. Received: only hashes, as in a packed batch, for "
                f"{feature.name!r} (table {name!r}); pass the features without "
                "tlm.pack."
            )
        key_tensors.require_strings(feature_ids.kind, name)


def _owner(spec: config.EmbeddingSpec, index: int) -> str | None:
    """Returns the table that owns the vocabulary of an input.

    Args:
      spec: Tables and features.
      index: Index of the input, as in `keep`.

    Returns:
      The name of the table, or None if the ids of the input are not keys.
    """
    feature = spec.features[index % len(spec.features)]
    if spec.table_of(feature).vocabulary is None:
        return None
    return spec.tables[open_tables.owner_of(spec, feature.table)].name
