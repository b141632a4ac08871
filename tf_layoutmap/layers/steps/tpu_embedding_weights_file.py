"""Tables and slot variables of a `TPUEmbedding` in a file of weights."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from tf_layoutmap.embedding.api.layer_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
from tf_layoutmap.vocabulary import state


def save(embedding: TPUEmbedding, store: MutableMapping[str, Any]):
    """Writes each as one array, whatever its shards.

    Rows of 16 bits are written as those bits, since HDF5 knows no bfloat16;
    their key ends with their dtype.
    """
    for key, variable in variables_by_key(embedding).items():
        values = variable.numpy()
        store[key] = values.view(np.uint16) if _is_half(variable) else values


def load(
    embedding: TPUEmbedding, store: MutableMapping[str, Any], *, layer: str
):
    """Reads what `save` of any number of shards wrote.

    Args:
      embedding: A built one.
      store: What was saved.
      layer: Name of the layer, for messages.

    Raises:
      ValueError: If tables, dtypes, optimizers or shapes are others; nothing
        is changed then.
    """
    variables = variables_by_key(embedding)
    if set(store.keys()) != set(variables):
        raise ValueError(
            f"The saved weights of layer {layer!r} must hold "
            f"{sorted(variables)}. Received: {sorted(store.keys())}."
        )
    for key, variable in variables.items():
        saved = tuple(store[key].shape)
        if key.endswith(f".{state.KEYS}") and saved != tuple(variable.shape):
            raise ValueError(
                f"An open vocabulary of layer {layer!r} has room for "
                f"{math.prod(variable.shape)} keys, and must be loaded from "
                f"one with as much. Received: room for {math.prod(saved)} "
                "keys. Load into a layer of the saved capacity, then call "
                "`resize` of its vocabulary; or convert a tf.train.Checkpoint "
                "by tlm.convert_vocabularies."
            )
    for key, variable in variables.items():
        if tuple(store[key].shape) != tuple(variable.shape):
            raise ValueError(
                f"Weight {key!r} of layer {layer!r} must be of shape "
                f"{tuple(variable.shape)}. Received: "
                f"{tuple(store[key].shape)}."
            )
    for key, variable in variables.items():
        values = store[key][...]
        variable.assign(
            values.view(variable.dtype.as_numpy_dtype)
            if _is_half(variable)
            else values
        )
    LayerAccess(embedding).load_variables()


def variables_by_key(embedding: TPUEmbedding) -> dict[str, Any]:
    """Returns all variables, by table number and name of the variable."""
    found = {}
    for number, by_name in enumerate(LayerAccess(embedding).variables()):
        for name, variable in by_name.items():
            dtype = f".{variable.dtype.name}" * _is_half(variable)
            found[f"{number}.{name}{dtype}"] = variable
    updates = getattr(embedding, "schedule_updates", None)
    if updates is not None:
        found["schedule_updates"] = updates
    return found


def _is_half(variable: Any) -> bool:
    return variable.dtype.size == 2
