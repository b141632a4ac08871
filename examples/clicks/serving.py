"""Exports the model, and asks it in a process without tf_layoutmap."""

from __future__ import annotations

import tempfile
from pathlib import Path

import elsewhere
import keras
import numpy as np
import tensorflow as tf

from clicks.criteo import read_facts

_ANSWERING = Path(__file__).with_name("answering.py")


class Served(tf.Module):
    """From lines of `test.txt` to chances, by stock TensorFlow ops only."""

    def __init__(self, model: keras.Model, table_rows: list[int] | None):
        """Takes a trained model; its tables are exported whole."""
        super().__init__()
        self._model = model
        # Not a list, which would be tracked.
        self._table_rows = table_rows and tuple(table_rows)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def chances(self, lines):
        """Returns the chance of a click, `[num_lines]` float32."""
        features = read_facts(lines, self._table_rows)
        return tf.sigmoid(self._model(features, training=False))[:, 0]


def export(served: Served, folder: Path) -> int:
    """Writes a SavedModel into `folder`; returns its size in bytes."""
    tf.saved_model.save(served, str(folder))
    return sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file()
    )


def ask_elsewhere(folder: Path, lines: list[bytes]) -> np.ndarray:
    """Asks the exported model in a process that cannot import tf_layoutmap.

    Args:
      folder: Of the SavedModel.
      lines: As in `test.txt`.

    Returns:
      The chances, `[num_lines]` float32.

    Raises:
      RuntimeError: The process failed; holds what it said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch, "asked.txt"), Path(scratch, "out.npy")
        asked.write_bytes(b"\n".join(lines))
        elsewhere.run(_ANSWERING, folder, asked, answered)
        return np.load(answered)
