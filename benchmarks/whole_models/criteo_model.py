"""The DLRM of `criteo_dlrm` and `start_up`, with Criteo's 26 tables.

This module imports tf_layoutmap only if a model uses it, so that a process can
measure Keras alone.
"""

import keras
import numpy as np
import tensorflow as tf

from benchmarks import workloads

LEARNING_RATE = 0.05


def _stock_pairs(rows: list):
    """Returns the dot products of all pairs of rows, by Keras' operations."""
    count = len(rows)
    rows = keras.ops.stack(rows, axis=1)
    products = keras.ops.matmul(rows, keras.ops.transpose(rows, [0, 2, 1]))
    return keras.ops.take(
        keras.ops.reshape(products, [-1, count * count]),
        np.ravel_multi_index(np.tril_indices(count, -1), (count, count)),
        axis=1,
    )


def _pairs(kind: str, rows: list):
    if kind == "keras":
        return _stock_pairs(rows)
    import tf_layoutmap as tlm

    return tlm.layers.DotInteraction()(rows)


def _logit(
    kind: str, numbers: keras.KerasTensor, rows: list, size: workloads.Dlrm
):
    bottom = numbers
    for width in (*size.bottom, size.dim):
        bottom = keras.layers.Dense(width, "relu")(bottom)
    pairs = _pairs(kind, [bottom, *rows])
    top = keras.layers.Concatenate()([bottom, pairs])
    for width in size.top:
        top = keras.layers.Dense(width, "relu")(top)
    return keras.layers.Dense(1)(top)


def names(size: workloads.Dlrm) -> list[str]:
    """Returns the names of the tables."""
    return [f"C{number}" for number in range(1, len(size.num_rows) + 1)]


def look_up(kind: str, size: workloads.Dlrm):
    """Creates the tables, and looks up rows.

    Args:
      kind: `"tlm"` for packed batches, `"features"` for one tensor of ids per
        table, or `"keras"` for one `keras.layers.Embedding` per table.
      size: Sizes of the model.

    Returns:
      The inputs of the tables, and the row of each table.
    """
    inputs = {
        name: keras.Input([], dtype="int64", name=name) for name in names(size)
    }
    if kind == "keras":
        return inputs, [
            keras.layers.Embedding(num_rows, size.dim)(ids)
            for ids, num_rows in zip(inputs.values(), size.num_rows)
        ]
    import tf_layoutmap as tlm

    tpu = tf.tpu.experimental.embedding
    layer = tlm.layers.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    num_rows,
                    size.dim,
                    tf.random_uniform_initializer(-0.05, 0.05, seed=i),
                    combiner="sum",
                    name=name,
                )
            )
            for i, (name, num_rows) in enumerate(zip(inputs, size.num_rows))
        },
        tpu.Adagrad(LEARNING_RATE),
    )
    layer_inputs = (
        keras.Input([1 + 2 * len(inputs)], dtype="int64")
        if kind == "tlm"
        else inputs
    )
    rows = layer(layer_inputs)
    return layer_inputs, [rows[name] for name in inputs]


def compiled(
    kind: str,
    inputs,
    rows: list,
    size: workloads.Dlrm,
    steps_per_execution: int = 1,
) -> keras.Model:
    """Returns the compiled model of the results of `look_up`."""
    numbers = keras.Input([size.num_numbers])
    model = keras.Model((numbers, inputs), _logit(kind, numbers, rows, size))
    model.compile(
        keras.optimizers.Adagrad(LEARNING_RATE),
        keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
    )
    return model


def batches(kind: str, size: workloads.Dlrm, distribution: str) -> list:
    """Returns the batches of a contestant: dense features and ids, labels."""
    prepared = []
    for values, ids, labels in size.draw(distribution):
        features = dict(zip(names(size), map(tf.constant, ids)))
        if kind == "tlm":
            import tf_layoutmap as tlm

            features = tlm.pack(features)
        prepared.append(((tf.constant(values), features), tf.constant(labels)))
    return prepared
