"""Answers from a SavedModel, with nothing but TensorFlow."""

import numpy as np
import tensorflow as tf


def answer(folder: str, asked: str, answered: str) -> None:
    """Loads a SavedModel's folder; reads and writes the files named.

    Args:
      folder: Of the SavedModel.
      asked: File with the questions.
      answered: File for the answers.
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
