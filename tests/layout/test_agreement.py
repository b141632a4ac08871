"""Many steps on a mesh give the losses of the same steps without one.

Each layer, each setting of an optimizer and each mesh comes up at least once,
paired off. TF_LAYOUTMAP_EXPLORE=1 takes 200 steps, pairs them off in other
ways too, and prints by how much the losses differ.
"""

import os

import keras
import numpy as np
import pytest

from tests.layout import test_keras_layers, twins
from tests.layout.meshes import axes_of, mesh_of

O = keras.optimizers  # noqa: E741 - a table of optimizers follows.
L = keras.layers
EXPLORE = os.environ.get("TF_LAYOUTMAP_EXPLORE") == "1"
STEPS = 200 if EXPLORE else 24
PER_EPOCH = 4  # steps

# bfloat16 keeps 8 bits, so a sum in another order moves the last of them.
BFLOAT16 = 2e-2
CLOSE = 1e-5

MESHES = [(1, 1), (2, 1), (1, 4), (2, 2)]

OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.05),
    "SGD nesterov, clipvalue": lambda: O.SGD(
        0.02, momentum=0.9, nesterov=True, clipvalue=0.1),
    "SGD EMA": lambda: O.SGD(0.05, use_ema=True, ema_momentum=0.9,
                             ema_overwrite_frequency=5),
    "SGD weight decay": lambda: O.SGD(0.05, weight_decay=0.01),
    "Adam": lambda: O.Adam(0.003),
    "Adam global_clipnorm": lambda: O.Adam(0.003, global_clipnorm=0.1),
    "Adam clipnorm": lambda: O.Adam(0.003, clipnorm=0.1),
    "Adam schedule": lambda: O.Adam(O.schedules.CosineDecay(0.005, STEPS)),
    "AdamW": lambda: O.AdamW(0.003, weight_decay=0.01),
    "Adamax": lambda: O.Adamax(0.003),
    "Nadam": lambda: O.Nadam(0.003),
    "Adagrad": lambda: O.Adagrad(0.05),
    "Adadelta": lambda: O.Adadelta(0.5),
    "RMSprop": lambda: O.RMSprop(0.001, momentum=0.5),
    "Ftrl": lambda: O.Ftrl(0.05),
    "Lamb": lambda: O.Lamb(0.003),
}


def attention():
    """Four heads, so that four devices have one each."""
    inputs = keras.Input((6,))
    x = L.Embedding(16, 8, name="e")(inputs)
    x = L.LayerNormalization(name="n")(
        x + L.MultiHeadAttention(4, 2, name="att")(x, x, use_causal_mask=True))
    return keras.Model(inputs, L.Dense(4, name="d2")(
        L.GlobalAveragePooling1D()(x)))


LAYERS = {
    "Dense": (twins.dense_model, twins.FEATURES, twins.DENSE),
    "Embedding rows": (
        lambda: twins.sequential((6,), L.Embedding(16, 8, name="e")),
        twins.TOKENS, {"e.embeddings": ("model", None)}),
    "Embedding columns": (
        lambda: twins.sequential((6,), L.Embedding(16, 8, name="e")),
        twins.TOKENS, {"e.embeddings": (None, "model")}),
    "BatchNormalization": (
        lambda: twins.sequential(
            (8,), L.Dense(16, use_bias=False, name="d1"),
            L.BatchNormalization(name="bn"), L.ReLU()),
        twins.FEATURES, {"d1.kernel": (None, "model"),
                         "bn.gamma": ("model",), **test_keras_layers.HEAD}),
    **test_keras_layers.FAST,
    "attention": (attention, twins.TOKENS, test_keras_layers.ATTENTION),
    **{name: test_keras_layers.SLOW[name] for name in (
        "Conv1D", "Conv2DTranspose", "average pooling",
        "GroupNormalization", "GRU", "TimeDistributed",
        "UnitNormalization")},
}


def pairs():
    """Yields a layer, an optimizer and a mesh, each of them at least once."""
    names, settings = list(LAYERS), list(OPTIMIZERS)
    for shift in (0, 3, 6) if EXPLORE else (0,):
        for index in range(max(len(names), len(settings))):
            yield pytest.param(
                names[index % len(names)],
                settings[(index + shift) % len(settings)],
                MESHES[(index + shift) % len(MESHES)])


class Losses(keras.callbacks.Callback):
    """Notes the loss after each step."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(float(logs["loss"]))


def losses_of(model, x, optimizer):
    noted = Losses()
    twins.fit(model, x, optimizer=optimizer, metrics=(), callbacks=[noted],
              epochs=STEPS // PER_EPOCH)
    assert len(noted.found) == STEPS
    return np.array(noted.found)


def compare(make, x, axes, optimizer, sizes, tolerance):
    batch, model = sizes
    first = twins.plain(make)
    second = twins.on_mesh(make, axes, mesh_of(batch=batch, model=model))
    assert any(map(any, map(axes_of, second.weights)))
    expected = losses_of(first, x, optimizer())
    # Means over an epoch: the last one is below the first.
    assert expected[-1] < expected[PER_EPOCH - 1]
    difference = np.max(np.abs(losses_of(second, x, optimizer()) - expected))
    if EXPLORE:
        print(f"\n{difference:.1e} after {STEPS} steps on {batch}x{model}",
              end=" ")
    assert difference < tolerance
    twins.assert_same_weights(first, second, rtol=100 * tolerance,
                              atol=100 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("layer, setting, sizes", list(pairs()))
def test_losses_agree(layer, setting, sizes):
    make, x, axes = LAYERS[layer]
    compare(make, x, axes, OPTIMIZERS[setting], sizes, CLOSE)


@pytest.mark.slow
def test_losses_agree_in_bfloat16_as_far_as_it_goes():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        compare(*LAYERS["Dense"], OPTIMIZERS["Adam"], (2, 2), BFLOAT16)
    finally:
        keras.mixed_precision.set_global_policy("float32")
