"""Finds the tables and other variables of the objects to export."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.embedding.configs import open_tables
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore
from tf_layoutmap.serving.feature_lookup import FeatureLookup, RowLookup
from tf_layoutmap.serving.sources import Source
from tf_layoutmap.serving.stored_tables import StoredKeys, StoredTable


@dataclasses.dataclass(frozen=True)
class Holder:
    """A layer or an embedding that contains tables.

    Attributes:
      owner: The object for which `placeholders.placeholder_of` is called.
      name: Prefix for the name of a table if several holders have a table with
        this name.
      sources: The tables.
      make_lookup: Function that takes the stored tables, and returns the
        function that replaces the lookup.
      variables: Keras variables that are not exported with the rest of the
        model.
      keys: Keys of the tables with open vocabularies.
    """

    owner: object
    name: str
    sources: tuple[Source, ...]
    make_lookup: Callable[[Sequence[StoredTable]], Callable[..., Any]]
    variables: tuple[Any, ...] = ()
    keys: tuple[StoredKeys, ...] = ()


def holders_of(one: Any) -> list[Holder]:
    """Returns all holders of a model, with unique names of tables.

    Raises:
      TypeError: If the model contains no holder.
      RuntimeError: If tables are on a TPU.
      ValueError: If a layer is not built.
    """
    parts = layers_of(one) if is_layer(one) else [one]
    holders = [
        holder for part in parts if (holder := _holder_of(part)) is not None
    ]
    if not holders:
        raise TypeError(
            "Argument `model_or_embedding` must be a tlm.TPUEmbedding, or a "
            "model or layer with tables of `tlm.layers`. Received: "
            f"{one!r}. For a Keras model without such tables, use its `export`."
        )
    names = [source.name for holder in holders for source in holder.sources]
    return [
        dataclasses.replace(
            holder,
            sources=tuple(
                source
                if names.count(source.name) == 1
                else dataclasses.replace(
                    source, name=f"{holder.name}/{source.name}"
                )
                for source in holder.sources
            ),
        )
        for holder in holders
    ]


def _holder_of(one: Any) -> Holder | None:
    """Returns the `Holder` of a layer or embedding; None for other objects."""
    if isinstance(one, TPUEmbedding):
        return _holder_of_embedding(one, "embedding")
    variables = tuple(getattr(one, "variables", ()))
    if not isinstance(one, EmbeddingCore | TPUEmbeddingCore):
        return None
    if not one.built:
        raise ValueError(
            f"Layer {one.name!r} must be built before it is exported; call "
            "the model, or `build`, first."
        )
    if isinstance(one, TPUEmbeddingCore):
        return dataclasses.replace(
            _holder_of_embedding(one.embedding, one.name), variables=variables
        )
    if one.vocabulary is not None:
        found = _holder_of_embedding(one.embedding, one.name)
        (source,) = found.sources
        return dataclasses.replace(
            found,
            variables=variables,
            sources=(
                dataclasses.replace(source, name=one.name, aliases=(one,)),
            ),
        )
    return Holder(
        one,
        one.name,
        (
            Source(
                one.name,
                one.input_dim,
                one.output_dim,
                tf.as_dtype(one.variable_dtype).name,
                lambda: _variable_of(one.embeddings),
                (one,),
                lambda: one.embeddings,
            ),
        ),
        lambda tables: RowLookup(tables[0], one.name),
        variables,
    )


def _variable_of(rows: Any) -> Any:
    """Returns the DVariable of a weight on a mesh, or the table itself."""
    if not isinstance(rows, keras.Variable):
        return rows
    return getattr(rows, "divided_value", rows.value)


def _holder_of_embedding(embedding: TPUEmbedding, name: str) -> Holder:
    tables = embedding.embedding_tables
    access = LayerAccess(embedding)
    spec = access.spec
    sources = tuple(
        Source(
            table.name,
            table.num_rows,
            table.dim,
            tf.as_dtype(variable.dtype).name,
            lambda variable=variable: variable,
            (config,),
        )
        for table, (config, variable) in zip(spec.tables, tables.items())
    )
    # Tables that share a vocabulary share one copy of its keys.
    copies = {
        number: StoredKeys(embedding.vocabularies[table.name])
        for number, table in enumerate(spec.tables)
        if table.vocabulary is not None and table.vocabulary.owner is None
    }
    keys = {
        number: copies[open_tables.owner_of(spec, number)]
        for number, table in enumerate(spec.tables)
        if table.vocabulary is not None
    }
    return Holder(
        embedding,
        name,
        sources,
        lambda stored: FeatureLookup(spec, stored, access.out_of_range, keys),
        keys=tuple(copies.values()),
    )


def layers_of(model: Any) -> list[Any]:
    """Returns a model or layer and all layers inside it, without duplicates."""
    return list(model._flatten_layers())


def other_variables(one: Any, holders: Sequence[Holder]) -> list[Any]:
    """Returns the TensorFlow variables of a model, except its tables.

    TensorFlow Serving can restore only TensorFlow variables.
    """
    if not is_layer(one):
        return []
    tables = {
        id(variable) for holder in holders for variable in holder.variables
    }
    return [
        _variable_of(variable)
        for variable in one.variables
        if id(variable) not in tables
    ]


def resources_of(one: Any) -> list[Any]:
    """Returns the lookup tables of layers such as `StringLookup`."""
    if not is_layer(one):
        return []
    return [
        part
        for part in tf.train.TrackableView(one).descendants()
        if isinstance(part, tf.saved_model.experimental.TrackableResource)
    ]


def is_layer(one: Any) -> bool:
    """Returns whether `one` is a layer or model of Keras 3 or tf_keras."""
    return isinstance(one, keras.layers.Layer) or is_tf_keras(one)


def is_tf_keras(one: Any) -> bool:
    """Returns whether `one` is a layer or model of tf_keras."""
    tf_keras = keras_private.imported_tf_keras()
    return tf_keras is not None and isinstance(one, tf_keras.layers.Layer)
