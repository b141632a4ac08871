"""DLRM (Naumov et al., 2019, arXiv:1906.00091) in Keras.

The bottom MLP maps the dense features to a vector as wide as an embedding row.
The top MLP takes this vector and the dot products of all pairs of rows, and
returns the logit of a click.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from clicks.criteo import CATEGORIES, NUM_NUMBERS
from clicks.settings import Settings
from tf_layoutmap.layers import DotInteraction, TPUEmbedding

# Importing the layers registers them with Keras, so that Keras can load a saved
# model.
from tf_layoutmap.vocabulary import OpenVocabulary

TABLES = "tables"


def build_model(
    table_rows: list[int] | None, settings: Settings
) -> keras.Model:
    """Returns the compiled model.

    Args:
      table_rows: Number of rows of each category's table, or None for tables
        with open vocabularies.
      settings: Settings of the run.

    Returns:
      A model that maps the result of `criteo.read_features` to a logit, `[B,
      1]`.
    """
    tpu = tf.tpu.experimental.embedding
    vocabularies = None
    if table_rows is None:
        table_rows = [settings.capacity] * len(CATEGORIES)
        vocabularies = {
            # All values that occurred fewer than twice share one row.
            name: OpenVocabulary(
                settings.capacity,
                admission="count",
                min_count=2,
                oov_embedding="trainable",
            )
            for name in CATEGORIES
        }
    features = {
        name: tpu.FeatureConfig(
            tpu.TableConfig(
                num_rows,
                settings.dim,
                keras.initializers.RandomNormal(
                    stddev=settings.dim**-0.5 / 2, seed=settings.seed + number
                ),
                combiner="sum",
                name=name,
            )
        )
        for number, (name, num_rows) in enumerate(
            zip(CATEGORIES, table_rows, strict=True)
        )
    }
    tables = TPUEmbedding(
        features,
        tpu.Adagrad(settings.table_rate),
        name=TABLES,
        vocabularies=vocabularies,
    )

    numbers = keras.Input([NUM_NUMBERS], name="numbers")
    dtype = "int64" if vocabularies is None else "string"
    categories = {
        name: keras.Input([], dtype=dtype, name=name) for name in CATEGORIES
    }
    found = tables(categories)
    model = keras.Model(
        {"numbers": numbers, **categories},
        logit_of(numbers, [found[name] for name in CATEGORIES], settings.dim),
    )
    model.compile(
        keras.optimizers.Adam(settings.rate),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def logit_of(numbers, found: list, dim: int):
    """Applies the bottom MLP, the dot products and the top MLP.

    Args:
      numbers: Dense features, `[B, NUM_NUMBERS]`.
      found: Embedding row of each category, `[B, dim]`.
      dim: Width of the rows.

    Returns:
      The logit of a click, `[B, 1]`.
    """
    bottom = numbers
    for width in (64, dim):
        bottom = keras.layers.Dense(width, "relu")(bottom)
    products = DotInteraction()([bottom, *found])
    top = keras.layers.Concatenate()([bottom, products])
    for width in (128, 64):
        top = keras.layers.Dense(width, "relu")(top)
    return keras.layers.Dense(1, name="logit")(top)


def predict_probabilities(
    model: keras.Model, batches: tf.data.Dataset
) -> np.ndarray:
    """Returns the predicted click probability of each line."""
    logits = model.predict(batches, verbose=0)[:, 0].astype(np.float64)
    return 1 / (1 + np.exp(-logits))
