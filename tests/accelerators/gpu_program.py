"""Trains tables in a process with GPUs in host memory.

    python -m tests.accelerators.gpu_program LIBRARY NUM_GPUS CASE ...

A case is the name of a Keras library, a table and a way to train it. For each
case, the program prints the losses, the sums of the weights, and the types of
the devices that store the table. `test_gpu.py` compares the results of
processes with and without GPUs.
"""

import contextlib
import functools
import json
import sys

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.accelerators import fake_gpu

NUM_ROWS, WIDTH = 40, 4
config = tf.tpu.experimental.embedding


def tpu_embedding(layers, **options):
    table = config.TableConfig(NUM_ROWS, WIDTH, name="words", combiner="mean")
    return layers.TPUEmbedding(
        config.FeatureConfig(table), config.Adagrad(0.1), **options
    )


def open_vocabulary(layers):
    return tpu_embedding(
        layers, vocabularies={"words": tlm.vocabulary.OpenVocabulary(NUM_ROWS)}
    )


# Each function returns the embedding layer of a model.
TABLES = {
    "optimizer of the model": lambda layers: layers.ShardedEmbedding(
        NUM_ROWS, WIDTH, num_shards=3, optimizer="model"
    ),
    "separate optimizer": lambda layers: layers.ShardedEmbedding(
        NUM_ROWS, WIDTH, optimizer="adagrad"
    ),
    "Adam, several shards": lambda layers: layers.ShardedEmbedding(
        NUM_ROWS, WIDTH, num_shards=2, optimizer=config.Adam(0.1)
    ),
    "no optimizer": lambda layers: layers.ShardedEmbedding(
        NUM_ROWS, WIDTH, num_shards=3
    ),
    "open vocabulary": lambda layers: layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(NUM_ROWS), WIDTH, optimizer="adagrad"
    ),
    "TPUEmbedding": tpu_embedding,
    "TPUEmbedding, open vocabulary": open_vocabulary,
}
WAYS = ("fit", "run_eagerly", "device scope", "tape", "two replicas")


def cases():
    """Returns the names of all cases."""
    return [
        f"{library}/{table}/{way}"
        for library in ("keras", "tf_keras")
        for table in TABLES
        for way in WAYS
        if way != "two replicas" or "TPUEmbedding" in table
    ]


def libraries():
    return {
        "keras": (keras, tlm.layers),
        "tf_keras": (tf_keras, tlm.layers.tf_keras),
    }


def batches():
    random = np.random.default_rng(0)
    x = random.integers(0, NUM_ROWS, [32, 3])
    return x, random.normal(size=[32, 1]).astype(np.float32)


def train(keras, make, way):
    """Trains a model, and returns its losses."""
    keras.utils.set_random_seed(1)
    ids = keras.Input([3], dtype="int64")
    rows = make()(ids)
    score = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    model = keras.Model(ids, score)
    x, y = batches()
    optimizer = keras.optimizers.Adagrad(0.1)
    if way != "tape":
        model.compile(
            optimizer,
            "mse",
            run_eagerly=way == "run_eagerly",
            jit_compile=False,
        )
        losses = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
        ).history["loss"]
        return model, [*losses, float(model.predict(x, verbose=0).sum())]

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.math.squared_difference(model(x, training=True), y)
            )
        variables = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables)
        )
        return loss

    return model, [float(step(x[:8], y[:8])) for _ in range(3)]


def strategy_of(way, num_gpus):
    if way != "two replicas":
        return None
    kind = "GPU" if num_gpus else "CPU"
    return tf.distribute.MirroredStrategy(
        [f"{kind}:{number}" for number in range(2)],
        # The default requires NCCL.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def run(keras, make, way, num_gpus):
    """Returns the losses, the sums of weights, and the devices of tables."""
    strategy = strategy_of(way, num_gpus)
    if strategy is not None:
        scope = strategy.scope()
    elif way == "device scope":
        scope = tf.device("CPU:0")
    else:
        scope = contextlib.nullcontext()
    try:
        with scope:
            model, losses = train(keras, make, way)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-1000:]}"
    weights = sorted(float(np.sum(one)) for one in model.get_weights())
    table = getattr(model.layers[1], "embeddings", None)
    devices = {
        tf.DeviceSpec.from_string(one).device_type
        for one in getattr(table, "devices", ())
    }
    return losses, weights, sorted(devices)


def main():
    path, num_gpus, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    fake_gpu.load(path, num_gpus)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    found = {}
    for name in names:
        library, table, way = name.split("/")
        keras, layers = libraries()[library]
        make = functools.partial(TABLES[table], layers)
        found[name] = run(keras, make, way, num_gpus)
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
