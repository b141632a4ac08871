"""Runs a SavedModel in a process that has only TensorFlow."""

import numpy as np
import tensorflow as tf


def answer(folder: str, asked: str, answered: str) -> None:
    """Loads a SavedModel and predicts the next items for positions in a file.

    Args:
      folder: Folder of the SavedModel.
      asked: File with the features of the positions.
      answered: File for the predicted items and their scores.
    """
    model = tf.saved_model.load(folder)
    with np.load(asked) as arrays:
        arrays = dict(arrays)
    names = {name.partition("/")[0] for name in arrays if "/" in name}
    answers = model.complete(
        {
            name: tf.RaggedTensor.from_row_splits(
                arrays[f"{name}/values"], arrays[f"{name}/splits"]
            )
            for name in names
        },
        tf.constant(arrays["num_offers"]),
    )
    np.savez(
        answered,
        scores=answers["scores"].numpy(),
        names=answers["names"].numpy().astype("S"),
    )
