"""Finds the tables and other variables of the objects to export."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.deltas.weights import variable_of
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore


def tables_of(subject: Any) -> list[TableToExport]:
    """Returns all tables of a model or an embedding, with unique names.

    Raises:
      TypeError: If `subject` has no tables.
      RuntimeError: If tables are on a TPU and were not built.
      ValueError: If a layer is not built.
    """
    if isinstance(subject, EmbeddingBase):
        prefixed = [
            ("embedding", table) for table in subject._tables_to_export()
        ]
    else:
        prefixed = [
            (layer.name, table)
            for layer in _layers_with_tables(subject)
            for table in layer._tables_to_export()
        ]
    if not prefixed:
        raise TypeError(
            "Argument `model_or_embedding` must be a tlm.TPUEmbedding, or a "
            "model or layer with tables of `tlm.layers`. Received: "
            f"{subject!r}. For a Keras model without such tables, use its "
            "`export`."
        )
    names = [table.name for _, table in prefixed]
    return [
        table
        if names.count(table.name) == 1
        else dataclasses.replace(table, name=f"{prefix}/{table.name}")
        for prefix, table in prefixed
    ]


def _layers_with_tables(subject: Any) -> list[Any]:
    """Returns the layers of a model that offer tables."""
    layers = [
        layer
        for layer in (subject._flatten_layers() if is_layer(subject) else ())
        if isinstance(layer, EmbeddingCore | TPUEmbeddingCore)
    ]
    for layer in layers:
        if not layer.built:
            raise ValueError(
                f"Layer {layer.name!r} must be built before it is exported; "
                "call the model, or `build`, first."
            )
    return layers


def other_variables(subject: Any) -> list[Any]:
    """Returns the TensorFlow variables of a model, except its tables.

    TensorFlow Serving can restore only TensorFlow variables.
    """
    if not is_layer(subject):
        return []
    of_tables = {
        id(variable)
        for layer in _layers_with_tables(subject)
        for variable in layer.variables
    }
    return [
        variable_of(variable)
        for variable in subject.variables
        if id(variable) not in of_tables
    ]


def resources_of(subject: Any) -> list[Any]:
    """Returns the lookup tables of layers such as `StringLookup`."""
    if not is_layer(subject):
        return []
    return [
        part
        for part in tf.train.TrackableView(subject).descendants()
        if isinstance(part, tf.saved_model.experimental.TrackableResource)
    ]


def is_layer(subject: Any) -> bool:
    """Returns whether `subject` is a layer or model of Keras 3 or tf_keras."""
    return isinstance(subject, keras.layers.Layer) or is_tf_keras(subject)


def is_tf_keras(subject: Any) -> bool:
    """Returns whether `subject` is a layer or model of tf_keras."""
    tf_keras = keras_private.imported_tf_keras()
    return tf_keras is not None and isinstance(subject, tf_keras.layers.Layer)
