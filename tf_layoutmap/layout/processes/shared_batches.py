"""Batches of which several processes take the same part."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def leaves(batch: Any) -> list[tuple[str, Any]]:
    """Returns path and value of each tensor of a batch, None included."""
    return [
        (
            "/".join(map(str, path)) or "0",
            None
            if x is None or isinstance(x, tf.experimental.Optional)
            else x
            if hasattr(x, "shape")
            else np.asarray(x),
        )
        for path, x in keras.tree.flatten_with_path(batch)
    ]


def cut(batch: Any, size: int) -> Any:
    """Returns the first `size` samples of a batch."""
    return keras.tree.map_structure(
        lambda x: (
            x
            if x is None or isinstance(x, tf.experimental.Optional)
            else x[:size]
        ),
        batch,
    )
