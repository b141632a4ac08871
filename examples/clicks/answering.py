"""Runs a SavedModel in a process that has only TensorFlow."""

from pathlib import Path

import numpy as np
import tensorflow as tf


def answer(folder: str, asked: str, answered: str) -> None:
    """Loads a SavedModel and predicts the click probability of each line.

    Args:
      folder: Folder of the SavedModel.
      asked: File with the lines.
      answered: File for the predictions.
    """
    model = tf.saved_model.load(folder)
    np.save(
        answered,
        model.probabilities(
            tf.constant(Path(asked).read_bytes().split(b"\n"))
        ).numpy(),
    )
