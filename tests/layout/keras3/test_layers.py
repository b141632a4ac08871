"""Checks that layers with sharded weights match a single device.

Layouts that DTensor does not support raise an error when the layer is built.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import axes_of, layout_of, mesh_of

L = keras.layers
HEAD = {"d2.kernel": ("model", None)}


def attention():
    """Returns an attention model with four heads, one per device."""
    inputs = keras.Input((6,))
    x = L.Embedding(16, 8, name="e")(inputs)
    x = L.LayerNormalization(name="n")(
        x + L.MultiHeadAttention(4, 2, name="att")(x, x, use_causal_mask=True)
    )
    return keras.Model(
        inputs, L.Dense(4, name="d2")(L.GlobalAveragePooling1D()(x))
    )


def concatenation():
    inputs = keras.Input((8,))
    parts = [L.Dense(4, name=name)(inputs) for name in ("a", "b")]
    return keras.Model(inputs, L.Dense(4, name="d2")(L.Concatenate()(parts)))


ATTENTION = {
    "att.(query|key|value)_dense.kernel": (None, "model", None),
    "att.(query|key|value)_dense.bias": ("model", None),
    "att.output_dense.kernel": ("model", None, None),
    "e.embeddings": (None, "model"),
    "n.gamma": ("model",),
    **HEAD,
}


def stack(shape, *layers):
    return lambda: pairs.sequential(shape, *(make() for make in layers))


# Time steps that contain only zeros are masked. Some samples have more masked
# steps than others.
MASKED = pairs.SERIES.copy()
MASKED[:, 4:] = MASKED[::2, 1] = 0

FAST = {
    "attention": (attention, pairs.TOKENS, ATTENTION),
    "images": (
        stack(
            (8, 8, 3),
            lambda: L.Rescaling(0.5),
            lambda: L.ZeroPadding2D(),
            lambda: L.Conv2D(4, 3, use_bias=False),
            lambda: L.BatchNormalization(name="bn"),
            lambda: L.ReLU(),
            lambda: L.MaxPooling2D(),
        ),
        pairs.IMAGES,
        {"bn.gamma": ("model",), **HEAD},
    ),
    "LSTM": (
        stack((6, 8), lambda: L.LSTM(8, name="r")),
        pairs.SERIES,
        {"r.cell.kernel": ("model", None), **HEAD},
    ),
    "EinsumDense": (
        stack(
            (6, 8),
            lambda: L.EinsumDense(
                "abc,cd->abd",
                (6, 16),
                bias_axes="d",
                name="e",
                kernel_regularizer="l2",
                kernel_constraint="max_norm",
            ),
        ),
        pairs.SERIES,
        {"e.kernel": (None, "model"), "e.bias": ("model",), **HEAD},
    ),
}
SLOW = {
    "Concatenate": (
        concatenation,
        pairs.FEATURES,
        {"a.kernel": (None, "model"), **HEAD},
    ),
    "Conv1D": (
        stack(
            (6, 8),
            lambda: L.Conv1D(4, 3, padding="causal"),
            lambda: L.MaxPooling1D(),
        ),
        pairs.SERIES,
        HEAD,
    ),
    "Conv2DTranspose": (
        stack((8, 8, 3), lambda: L.Conv2DTranspose(2, 3)),
        pairs.IMAGES,
        HEAD,
    ),
    "Conv3D": (
        stack(
            (8, 8, 3), lambda: L.Reshape((8, 8, 3, 1)), lambda: L.Conv3D(2, 2)
        ),
        pairs.IMAGES,
        HEAD,
    ),
    "global pooling": (
        stack(
            (8, 8, 3), lambda: L.Conv2D(4, 3), lambda: L.GlobalMaxPooling2D()
        ),
        pairs.IMAGES,
        HEAD,
    ),
    "average pooling": (
        stack(
            (8, 8, 3),
            lambda: L.AveragePooling2D(2),
            lambda: L.UpSampling2D(),
            lambda: L.Cropping2D(),
        ),
        pairs.IMAGES,
        HEAD,
    ),
    "GroupNormalization": (
        stack((6, 8), lambda: L.GroupNormalization(2)),
        pairs.SERIES,
        HEAD,
    ),
    "UnitNormalization": (
        stack(
            (6, 8), lambda: L.UnitNormalization(), lambda: L.RMSNormalization()
        ),
        pairs.SERIES,
        HEAD,
    ),
    "GRU": (
        stack(
            (6, 8),
            lambda: L.Masking(),
            lambda: L.GRU(
                8, name="r", go_backwards=True, return_sequences=True
            ),
        ),
        MASKED,
        {
            "r.cell.kernel": ("model", None),
            "r.cell.recurrent_kernel": ("batch", None),
        },
    ),
    "SimpleRNN": (
        stack((6, 8), lambda: L.SimpleRNN(8, name="r", return_sequences=True)),
        pairs.SERIES,
        {"r.cell.kernel": (None, "model"), **HEAD},
    ),
    "Bidirectional": (
        stack(
            (6, 8),
            lambda: L.Bidirectional(L.LSTM(4, return_sequences=True), name="r"),
        ),
        pairs.SERIES,
        HEAD,
    ),
    "ConvLSTM": (
        stack(
            (6, 8), lambda: L.Reshape((6, 4, 2, 1)), lambda: L.ConvLSTM2D(4, 2)
        ),
        pairs.SERIES,
        HEAD,
    ),
    "cells": (
        stack((6, 8), lambda: L.RNN([L.GRUCell(4), L.LSTMCell(4)])),
        pairs.SERIES,
        HEAD,
    ),
    "any number of steps": (
        lambda: keras.Sequential(
            [keras.Input((None, 8)), L.GRU(8), L.Dense(4, name="d2")]
        ),
        pairs.SERIES,
        HEAD,
    ),
    "stateful": (
        lambda: keras.Sequential(
            [
                keras.Input(batch_shape=(8, 6, 8)),
                L.LSTM(8, stateful=True),
                L.Dense(4, name="d2"),
            ]
        ),
        pairs.SERIES,
        HEAD,
    ),
    "TimeDistributed": (
        stack((6, 8), lambda: L.TimeDistributed(L.Dense(4))),
        pairs.SERIES,
        HEAD,
    ),
    "PReLU": (
        stack((8,), lambda: L.PReLU(name="p"), lambda: L.Softmax()),
        pairs.FEATURES,
        {"p.alpha": ("model",), **HEAD},
    ),
    "SpectralNormalization": (
        stack((8,), lambda: L.SpectralNormalization(L.Dense(16))),
        pairs.FEATURES,
        HEAD,
    ),
    "RepeatVector": (
        stack((8,), lambda: L.RepeatVector(3), lambda: L.Permute((2, 1))),
        pairs.FEATURES,
        HEAD,
    ),
    "embedding rows": (
        stack((6,), lambda: L.Embedding(16, 8, name="e")),
        pairs.TOKENS,
        {"e.embeddings": ("model", None)},
    ),
}


def optimizer_of(sizes):
    # Adam amplifies the rounding errors of gradients near zero. Sums over four
    # shards cause such errors, so models with four shards use SGD.
    return pairs.adam if sizes["model"] == 2 else sgd


def sgd():
    return keras.optimizers.SGD(0.1)


def cases():
    """Yields all pairs of a layer and a mesh.

    A layout that works with two shards of a dimension may fail with four
    shards. `make test` runs each layer on one mesh and alternates between the
    meshes.
    """
    for number, name in enumerate([*FAST, *SLOW]):
        for place, model in enumerate((2, 4)):
            marks = []
            if name in SLOW or model == 4:
                marks.append(pytest.mark.slow)
            if place != number % 2:
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(
                name,
                dict(batch=2, model=model),
                marks=marks,
                id=f"{name}-2x{model}",
            )


@pytest.mark.parametrize("name, sizes", list(cases()))
def test_layer_trains_as_on_a_single_device(name, sizes):
    make, x, axes = {**FAST, **SLOW}[name]
    model = pairs.assert_trains_alike(
        make,
        x,
        axes,
        mesh=mesh_of(**sizes),
        optimizer=optimizer_of(sizes),
    )
    assert any(any(axes_of(w)) for w in model.weights)


@pytest.mark.exhaustive
@pytest.mark.slow  # The layer traces eleven transformations of images.
def test_rand_augment_trains_as_on_a_single_device():
    def make():
        return pairs.sequential(
            (4, 4, 3),
            keras.layers.RandAugment(value_range=(0, 255), num_ops=1, seed=3),
            keras.layers.Rescaling(1 / 255),
        )

    images = np.random.default_rng(0).uniform(0, 255, [8, 4, 4, 3])
    found = []
    for model in (
        pairs.plain(make),
        pairs.on_mesh(make, {"d2.kernel": ("model", None)}),
    ):
        history = pairs.fit(
            model, images, pairs.LABELS[:8], batch_size=4, run_eagerly=False
        )
        found.append([history, model.predict(images, verbose=0)])
    pairs.assert_alike(*found)


def test_each_device_holds_only_its_shards_of_weights_and_slots():
    mesh = mesh_of(model=4)
    layout_map = tlm.LayoutMap(mesh)
    layout_map[".*kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [
                keras.Input((64,)),
                L.Dense(128, use_bias=False),
                L.Dense(64, use_bias=False),
            ]
        )
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((4, 64)), np.ones((4, 64)))
    held, total = [0] * 4, 0
    for variable in (*model.weights, *model.optimizer.variables):
        total += variable.numpy().nbytes
        parts = tf.experimental.dtensor.unpack(variable.value.read_value())
        for device, part in enumerate(parts):
            held[device] += part.numpy().nbytes
    assert total > 3 * 2 * 64 * 128 * 4
    assert max(held) <= total / 4 * 1.05


def error_of_strict_map(make, axes):
    """Returns the message of the error that a strict map raises.

    Without `strict`, the layout map gathers the weight for its layer instead.
    """
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=True)
    for key, value in axes.items():
        layout_map[key] = layout_of(mesh, *value)
    # The error is raised at the end of the scope, if the model still exists.
    models = []
    with pytest.raises(ValueError) as caught, tlm.layout_map_scope(layout_map):
        models.append(make())
    text = str(caught.value)
    assert "nothing was allocated" in text
    return text


def test_error_for_a_convolution_that_gathers_its_kernel_names_the_kernel():
    text = error_of_strict_map(
        lambda: pairs.sequential((8, 8, 3), L.Conv2D(4, 2, name="c")),
        {"c.kernel": ("model", None, None, None)},
    )
    assert "c.kernel (2, 2, 3, 4)" in text
    assert "layer 'c' (Conv2D)" in text
    assert "only the channels" in text
    assert "use (None, None, None, None)" in text
