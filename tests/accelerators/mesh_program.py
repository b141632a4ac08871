"""Trains models on a mesh of GPUs in host memory, and without a mesh.

    python -m tests.accelerators.mesh_program LIBRARY CASE ...

For each case, the program prints the losses on the CPU and on the mesh, and
the ops without a kernel on accelerators, or the error.
"""

import json
import sys
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.accelerators import fake_gpu, kernel_lists
from tf_layoutmap._core import keras_private

layers = keras.layers


def sequence_model(make):
    return keras.Sequential([keras.Input([5, 4]), make(), layers.Dense(2)])


def table_model(make):
    ids = keras.Input([3], dtype="int64")
    return keras.Model(ids, layers.Dense(2)(layers.Flatten()(make()(ids))))


def attention():
    x = keras.Input([5, 4])
    y = layers.MultiHeadAttention(2, 4)(x, x)
    return keras.Model(x, layers.Dense(2)(layers.Flatten()(y)))


def convolutions():
    return keras.Sequential(
        [
            keras.Input([8, 8, 3]),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )


def decoder():
    """A decoder whose table also computes the logits."""
    ids = keras.Input([6], dtype="int64")
    table = layers.ReversibleEmbedding(40, 8)
    x = table(ids)
    y = layers.LayerNormalization()(x)
    x += layers.GroupQueryAttention(4, 2, 1)(y, y, use_causal_mask=True)
    x += layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
    logits = table(layers.RMSNormalization()(x), reverse=True)
    return keras.Model(ids, layers.Dense(2)(layers.Flatten()(logits)))


def experts():
    """A mixture of two experts; each sample uses one of them."""
    x = keras.Input([8])
    gates = layers.Softmax()(layers.Dense(2)(x))
    values, chosen = keras.ops.top_k(gates, 1)
    hidden = layers.EinsumDense("bi,ieo->beo", [2, 4], activation="relu")(x)
    mask = keras.ops.one_hot(keras.ops.squeeze(chosen, 1), 2) * values
    mixed = keras.ops.einsum("beo,be->bo", hidden, mask)
    return keras.Model(x, layers.Dense(2)(mixed))


# Each case has a function that returns a model, and a layout map.
CASES = {
    "dense": (
        lambda: sequence_model(layers.Flatten),
        {"dense.*kernel": (None, "model")},
    ),
    "rows of a table": (
        lambda: table_model(lambda: layers.Embedding(40, 8)),
        {".*embeddings": ("model", None)},
    ),
    "columns of a table": (
        lambda: table_model(lambda: layers.Embedding(40, 8)),
        {".*embeddings": (None, "model")},
    ),
    "ShardedEmbedding": (
        lambda: table_model(lambda: tlm.layers.ShardedEmbedding(40, 8)),
        {".*embeddings": (None, "model")},
    ),
    "ShardedEmbedding with Adagrad": (
        lambda: table_model(
            lambda: tlm.layers.ShardedEmbedding(40, 8, optimizer="adagrad")
        ),
        {".*embeddings": ("model", None)},
    ),
    "ShardedEmbedding with Adam": (
        lambda: table_model(
            lambda: tlm.layers.ShardedEmbedding(
                40, 8, optimizer=tf.tpu.experimental.embedding.Adam(0.01)
            )
        ),
        {".*embeddings": ("model", None)},
    ),
    "LSTM": (
        lambda: sequence_model(lambda: layers.LSTM(8)),
        {".*kernel": (None, "model")},
    ),
    "GRU": (
        lambda: sequence_model(lambda: layers.GRU(8)),
        {".*kernel": (None, "model")},
    ),
    "attention": (attention, {".*query/kernel": (None, "model", None)}),
    "decoder": (
        decoder,
        {
            ".*embeddings": ("model", None),
            ".*query/kernel": (None, "model", None),
        },
    ),
    "experts": (experts, {"einsum_dense.*kernel": (None, "model", None)}),
    "convolutions": (
        convolutions,
        {"conv2d.*kernel": (None, None, None, "model")},
    ),
}


def losses(make):
    keras.utils.set_random_seed(0)
    model = make()
    random = np.random.default_rng(0)
    shape = [16, *model.input_shape[1:]]
    x = (
        random.integers(0, 40, shape)
        if model.inputs[0].dtype == "int64"
        else random.normal(size=shape).astype(np.float32)
    )
    y = random.normal(size=[16, 2]).astype(np.float32)
    model.compile("adam", "mse", jit_compile=False)
    found = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [*found.history["loss"], float(np.sum(model.predict(x, verbose=0)))]


def main():
    path, *names = sys.argv[1:]
    fake_gpu.load(path, 4)
    mesh = tlm.distribution.DeviceMesh(
        (2, 2), ["batch", "model"], tlm.distribution.list_devices("gpu")
    )
    found = {}
    for name in names:
        make, layouts = CASES[name]
        layout_map = tlm.distribution.LayoutMap(mesh)
        for key, axes in layouts.items():
            layout_map[key.replace("/", ".")] = axes

        def make_on_mesh():
            with tlm.layout_map_scope(layout_map):
                return make()

        try:
            # Recurrent layers would call cuDNN, which does not exist here.
            with mock.patch.object(
                keras_private.backend_rnn, "cudnn_ok", return_value=False
            ):
                plain = losses(make)
            before = kernel_lists.function_names()
            on_mesh = losses(make_on_mesh)
            found[name] = (
                plain,
                on_mesh,
                kernel_lists.missing_kernels(
                    kernel_lists.function_names() - before
                ),
            )
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[-1000:]}"
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
