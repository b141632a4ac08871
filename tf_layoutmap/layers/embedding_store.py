"""Tables and slot variables of a `TPUEmbedding` in a file of weights."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding


def save(embedding: TPUEmbedding, store: MutableMapping[str, Any]):
    """Writes each as one array, whatever its shards."""
    for key, variable in variables_by_key(embedding).items():
        store[key] = variable.numpy()


def load(embedding: TPUEmbedding, store: MutableMapping[str, Any], *,
         layer: str):
    """Reads what `save` of any number of shards wrote.

    Args:
      embedding: A built one.
      store: What was saved.
      layer: Name of the layer, for messages.

    Raises:
      ValueError: If tables, optimizers or shapes are others; nothing is
        changed then.
    """
    variables = variables_by_key(embedding)
    if set(store.keys()) != set(variables):
        raise ValueError(
            f"The saved weights of layer {layer!r} must hold "
            f"{sorted(variables)}. Received: {sorted(store.keys())}.")
    for key, variable in variables.items():
        if tuple(store[key].shape) != tuple(variable.shape):
            raise ValueError(
                f"Weight {key!r} of layer {layer!r} must be of shape "
                f"{tuple(variable.shape)}. Received: "
                f"{tuple(store[key].shape)}.")
    for key, variable in variables.items():
        variable.assign(store[key][...])
    embedding._load_variables()


def variables_by_key(embedding: TPUEmbedding) -> dict[str, Any]:
    """Returns all variables, by table number and name of the variable."""
    if embedding._state.backend.is_on_tpu:
        return _host_copies(embedding)
    found = {}
    slots = embedding.slot_variables
    for number, (table, rows) in enumerate(
            embedding.embedding_tables.items()):
        found[f"{number}.{tables.PARAMETERS}"] = rows
        for name, slot in slots[table].items():
            found[f"{number}.{name}"] = slot
    return found


def _host_copies(embedding: TPUEmbedding) -> dict[str, Any]:
    """The same of a TPU, whose tables are brought to the host."""
    embedding._check_built("save or load")
    embedding._retrieve_variables()
    return {f"{number}.{name}": variable
            for number, (_, table) in enumerate(embedding._tables())
            for name, variable in embedding._variables[table.name].items()}
