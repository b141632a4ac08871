"""Trains small models, and writes their numbers to a file.

    python tests/aarch64/programs.py NUMBERS.npz [PROGRAM ...]

`make test-aarch64` runs this program on x86-64 and on aarch64, and compares the
files. The name of an array starts with `exact` if kernels of this package
compute it, and operations of TensorFlow that round each result once. These
arrays are bitwise identical. The other arrays start with `close`, because they
depend on operations of TensorFlow that round differently on each architecture:
products of matrices in `Dense`, and `tf.pow`.
"""

import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

TPU = tf.tpu.experimental.embedding
OPTIMIZERS = {
    "sgd": lambda: TPU.SGD(0.1),
    "adagrad": lambda: TPU.Adagrad(0.1),
    "adagrad_momentum": lambda: TPU.AdagradMomentum(0.1, momentum=0.9),
    "adam": lambda: TPU.Adam(0.1),
    "ftrl": lambda: TPU.FTRL(0.1),
    # This step calls `powf` of the C library.
    "ftrl_with_power": lambda: TPU.FTRL(0.1, learning_rate_power=-0.3),
}
NUM_ROWS, DIM = 50, 21


def values(seed, *shape):
    """Returns random numbers, the same on each architecture."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype("float32")


def constant(array):
    """Returns an initializer that returns `array`."""
    return lambda shape, dtype=None, **_: tf.constant(array, dtype)


def ragged_ids(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, 16)
    ids = rng.integers(0, NUM_ROWS, lengths.sum())
    return tf.RaggedTensor.from_row_lengths(ids, lengths)


def table(name):
    """Trains tables with the host engine, one for each combiner."""
    embedding = tlm.TPUEmbedding(
        {
            combiner: TPU.FeatureConfig(
                TPU.TableConfig(
                    NUM_ROWS,
                    DIM,
                    initializer=constant(values(index, NUM_ROWS, DIM)),
                    combiner=combiner,
                    name=combiner,
                )
            )
            for index, combiner in enumerate(("sum", "mean", "sqrtn"))
        },
        OPTIMIZERS[name](),
        partitioner=tlm.partitioners.FixedShardsPartitioner(3),
    )
    found = {}
    for step in range(4):
        features = {
            combiner: ragged_ids(3 * step + index)
            for index, combiner in enumerate(("sum", "mean", "sqrtn"))
        }
        embedding.enqueue(features)
        activations = embedding.dequeue()
        for combiner, one in activations.items():
            found[f"activations_{step}_{combiner}"] = one.numpy()
        embedding.apply_gradients(
            {
                combiner: one - values(step, *one.shape)
                for combiner, one in activations.items()
            }
        )
    for config, rows in embedding.embedding_tables.items():
        found[f"rows_{config.name}"] = np.asarray(rows)
    return {f"exact_{name}_{key}": one for key, one in found.items()}


def tables():
    found = {}
    for name in OPTIMIZERS:
        found |= table(name)
    return found


def compiled(model, optimizer):
    model.compile(optimizer, "mse")
    return model


def fit(model, ids, labels, epochs):
    model.fit(
        ids, labels, batch_size=8, epochs=epochs, shuffle=False, verbose=0
    )


IDS = np.random.default_rng(5).integers(0, NUM_ROWS, (16, 3))


def layer_model(prefix):
    """Returns a model that outputs the rows of its table, and a score."""
    ids = keras.Input([3], dtype="int64")
    rows = tlm.layers.ShardedEmbedding(
        NUM_ROWS,
        DIM,
        num_shards=3,
        embeddings_initializer=constant(values(1, NUM_ROWS, DIM)),
        name=f"{prefix}_table",
        optimizer="adagrad",
    )(ids)
    flat = keras.layers.Flatten(name=f"{prefix}_rows")(rows)
    score = keras.layers.Dense(
        2,
        kernel_initializer=constant(values(2, 3 * DIM, 2)),
        name=f"{prefix}_score",
    )(flat)
    return ids, flat, score


def fitted():
    """Trains a Keras model with a table in `fit`, with and without `Dense`."""
    found = {}
    ids, flat, score = layer_model("fit")
    model = compiled(keras.Model(ids, score), keras.optimizers.Adam(0.1))
    fit(model, IDS, values(3, 16, 2), epochs=3)
    for index, one in enumerate(model.get_weights()):
        found[f"close_dense_{index}"] = one
    ids, flat, score = layer_model("rows")
    model = compiled(keras.Model(ids, flat), keras.optimizers.Adam(0.1))
    fit(model, IDS, values(3, 16, 3 * DIM), epochs=3)
    for index, one in enumerate(model.get_weights()):
        found[f"exact_rows_{index}"] = one
    return found


def mesh():
    """Trains on a mesh of two devices."""
    found = {}
    device_mesh = tlm.distribution.DeviceMesh(
        (1, 2), ["batch", "model"], ["cpu:0", "cpu:1"]
    )
    layout_map = tlm.distribution.LayoutMap(device_mesh)
    layout_map["table.embeddings"] = ("model", None)
    layout_map["hidden.kernel"] = (None, "model")
    with tlm.layout_map_scope(layout_map):
        ids = keras.Input([3], dtype="int32")
        rows = keras.layers.Embedding(
            NUM_ROWS,
            DIM,
            embeddings_initializer=constant(values(1, NUM_ROWS, DIM)),
            name="table",
        )(ids)
        flat = keras.layers.Flatten()(rows)
        rows_only = compiled(keras.Model(ids, flat), keras.optimizers.SGD(0.1))
        hidden = keras.layers.Dense(
            4,
            activation="tanh",
            kernel_initializer=constant(values(2, 3 * DIM, 4)),
            name="hidden",
        )(flat)
        score = keras.layers.Dense(
            1, kernel_initializer=constant(values(3, 4, 1)), name="score"
        )(hidden)
        model = compiled(keras.Model(ids, score), keras.optimizers.Adam(0.1))
    # The ids of a batch are unique, so no gradients are summed.
    unique = np.random.default_rng(5).permutation(NUM_ROWS)[:48].reshape(16, 3)
    fit(rows_only, unique, values(4, 16, 3 * DIM), epochs=2)
    found["exact_mesh_rows"] = rows_only.get_weights()[0]
    found["exact_mesh_outputs"] = rows_only.predict(unique, verbose=0)
    fit(model, IDS, values(5, 16, 1), epochs=3)
    for index, one in enumerate(model.get_weights()):
        found[f"close_mesh_{index}"] = one
    return found


def sharded_variable():
    """Looks up and updates rows of a `ShardedVariable`."""
    found = {}
    shards = np.array_split(values(1, NUM_ROWS, DIM), 3)
    variable = tlm.ShardedVariable([tf.Variable(one) for one in shards])
    ids = tf.constant(IDS.reshape(-1))
    found["exact_variable_lookup"] = tf.nn.embedding_lookup(
        variable, ids
    ).numpy()
    ragged = ragged_ids(7)
    weights = ragged.with_values(
        tf.constant(values(8, *ragged.flat_values.shape) + 2)
    )
    for combiner in ("sum", "mean", "sqrtn"):
        # For sqrtn, TensorFlow computes the squares of weights with `tf.pow`.
        kind = "close" if combiner == "sqrtn" else "exact"
        found[f"{kind}_variable_{combiner}"] = (
            tf.nn.safe_embedding_lookup_sparse(
                variable,
                ragged.to_sparse(),
                weights.to_sparse(),
                combiner=combiner,
            ).numpy()
        )
    optimizer = keras.optimizers.SGD(0.1)
    for step in range(2):
        with tf.GradientTape() as tape:
            rows = tf.gather(variable, ids)
            loss = tf.reduce_sum(rows * values(step, len(ids), DIM))
        gradients = tape.gradient(loss, list(variable.variables))
        optimizer.apply(gradients, list(variable.variables))
    found["exact_variable_trained"] = np.concatenate(
        [one.numpy() for one in variable.variables]
    )
    return found


def export():
    """Exports a trained model, and calls the exported model."""
    found = {}
    ids, flat, score = layer_model("export")
    model = keras.Model(ids, [flat, score])
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
    with tempfile.TemporaryDirectory() as folder:
        model.export(f"{folder}/stock", verbose=False)
        stock = tf.saved_model.load(f"{folder}/stock")
        rows, scores = stock.serve(IDS)
        found["exact_export_rows"] = rows.numpy()
        found["close_export_scores"] = scores.numpy()
        tlm.export(model, f"{folder}/small", row_format="int8")
        small = tf.saved_model.load(f"{folder}/small")
        rows, _ = small.serve(IDS)
        found["exact_export_int8_rows"] = rows.numpy()
    return found


PROGRAMS = {
    "tables": tables,
    "fitted": fitted,
    "mesh": mesh,
    "sharded_variable": sharded_variable,
    "export": export,
}


def main(path, names):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    found = {}
    for name in names or PROGRAMS:
        found |= PROGRAMS[name]()
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
