"""Answers from a SavedModel, with nothing but TensorFlow."""

from pathlib import Path

import numpy as np
import tensorflow as tf


def answer(folder: str, asked: str, answered: str) -> None:
    """Loads a SavedModel's folder; reads and writes the files named.

    Args:
      folder: Of the SavedModel.
      asked: File with the lines.
      answered: File for the answers.
    """
    model = tf.saved_model.load(folder)
    np.save(
        answered,
        model.chances(
            tf.constant(Path(asked).read_bytes().split(b"\n"))
        ).numpy(),
    )
