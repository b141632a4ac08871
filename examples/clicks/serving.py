"""Exports the model, and runs the exported model without tf_layoutmap."""

from __future__ import annotations

import tempfile
from pathlib import Path

import elsewhere
import keras
import numpy as np
import tensorflow as tf

from clicks.criteo import read_features

_ANSWERING = Path(__file__).with_name("answering.py")


class Served(tf.Module):
    """The exported module, which predicts clicks from lines of `test.txt`.

    The module contains only TensorFlow's own operations.
    """

    def __init__(self, model: keras.Model, table_rows: list[int] | None):
        """Wraps a trained model; its tables are exported unsharded."""
        super().__init__()
        self._model = model
        # TensorFlow would track a list as a part of the SavedModel, but not a
        # tuple.
        self._table_rows = table_rows and tuple(table_rows)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def probabilities(self, lines):
        """Returns the click probability of each line, `[num_lines]` float32."""
        features = read_features(lines, self._table_rows)
        return tf.sigmoid(self._model(features, training=False))[:, 0]


def export(served: Served, folder: Path) -> int:
    """Writes a SavedModel to `folder` and returns its size in bytes."""
    tf.saved_model.save(served, str(folder))
    return sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file()
    )


def ask_elsewhere(folder: Path, lines: list[bytes]) -> np.ndarray:
    """Runs the exported model in a process that cannot import tf_layoutmap.

    Args:
      folder: Folder of the SavedModel.
      lines: Lines in the format of `test.txt`.

    Returns:
      The click probabilities, `[num_lines]` float32.

    Raises:
      RuntimeError: The process failed. The message contains its error output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch, "asked.txt"), Path(scratch, "out.npy")
        asked.write_bytes(b"\n".join(lines))
        elsewhere.run(_ANSWERING, folder, asked, answered)
        return np.load(answered)
