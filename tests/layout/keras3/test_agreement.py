"""Checks that the losses of many steps match with and without a mesh.

Layers, optimizer settings and meshes are combined so that each of them occurs
in at least one case. With TF_LAYOUTMAP_EXPLORE=1, every layer and every setting
run on every mesh for 200 steps, and the differences of the losses are printed.
"""

import functools
import os
import sys

import keras
import numpy as np
import pytest

from tests.layout import pairs
from tests.layout.keras3 import test_layers
from tests.layout.meshes import axes_of, mesh_of

pytestmark = pytest.mark.slow

O = keras.optimizers  # noqa: E741 - A table of optimizers follows.
L = keras.layers
EXPLORE = os.environ.get("TF_LAYOUTMAP_EXPLORE") == "1"
STEPS = 200 if EXPLORE else 32
PER_EPOCH = 4  # steps

CLOSE = 1e-5
# bfloat16 has 8 bits of precision, and sums in a different order can differ in
# the last bit.
BFLOAT16 = 2e-2

# This bias is added to all scores of a query, and the softmax cancels it. Its
# gradient therefore consists of rounding errors. Optimizers that use only the
# sign of a gradient, such as Lion, turn these errors into full steps.
ROUNDING = ("att_key_bias",)

MESHES = [(1, 1), (2, 1), (1, 4), (2, 2), (2, 4)]

OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.05),
    "Adagrad": lambda: O.Adagrad(0.05),
    "Adam global_clipnorm": lambda: O.Adam(0.003, global_clipnorm=0.1),
    "SGD EMA": lambda: O.SGD(
        0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5
    ),
    "SGD weight decay": lambda: O.SGD(0.05, weight_decay=0.01),
    "Adam clipnorm": lambda: O.Adam(0.003, clipnorm=0.1),
    "Adam": lambda: O.Adam(0.003),
    "Adam schedule": lambda: O.Adam(O.schedules.CosineDecay(0.005, STEPS)),
    "AdamW": lambda: O.AdamW(0.003, weight_decay=0.01),
    "Adamax": lambda: O.Adamax(0.003),
    "Nadam": lambda: O.Nadam(0.003),
    "SGD nesterov, clipvalue": lambda: O.SGD(
        0.02, momentum=0.9, nesterov=True, clipvalue=0.1
    ),
    "Adadelta": lambda: O.Adadelta(0.5),
    "RMSprop": lambda: O.RMSprop(0.001, momentum=0.5),
    "Ftrl": lambda: O.Ftrl(0.05),
    "Lamb": lambda: O.Lamb(0.003),
    "Adafactor": lambda: O.Adafactor(0.003),
    "Lion": lambda: O.Lion(0.0003),
    "Muon": lambda: O.Muon(0.003),
    "Adam amsgrad": lambda: O.Adam(0.003, amsgrad=True),
}


def embedding():
    return pairs.sequential((6,), L.Embedding(16, 8, name="e"))


stack, HEAD = test_layers.stack, test_layers.HEAD

# Layers and optimizers are paired by their positions. The order is chosen so
# that Embedding trains with SGD and Adagrad, which support sparse gradients.
LAYERS = {
    "Embedding rows": (
        embedding,
        pairs.TOKENS,
        {"e.embeddings": ("model", None)},
    ),
    "Embedding columns": (
        embedding,
        pairs.TOKENS,
        {"e.embeddings": (None, "model")},
    ),
    "Dense": (pairs.dense_model, pairs.FEATURES, pairs.DENSE),
    "BatchNormalization": (
        stack(
            (8,),
            lambda: L.Dense(16, use_bias=False, name="d1"),
            lambda: L.BatchNormalization(name="bn"),
            lambda: L.ReLU(),
        ),
        pairs.FEATURES,
        {"d1.kernel": (None, "model"), "bn.gamma": ("model",), **HEAD},
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
    "Conv3D": (
        stack(
            (8, 8, 3),
            lambda: L.Reshape((8, 8, 3, 1)),
            lambda: L.Conv3D(2, 2),
            lambda: L.MaxPooling3D((2, 2, 1)),
        ),
        pairs.IMAGES,
        HEAD,
    ),
    "attention": test_layers.FAST["attention"],
    "LayerNormalization": (
        stack((6, 8), lambda: L.LayerNormalization(name="n")),
        pairs.SERIES,
        {"n.gamma": ("model",), **HEAD},
    ),
    "RMSNormalization": (
        stack(
            (6, 8),
            lambda: L.UnitNormalization(),
            lambda: L.RMSNormalization(name="n"),
        ),
        pairs.SERIES,
        {"n.scale": ("model",), **HEAD},
    ),
    # test_agreement_of_missing_ops covers SeparableConv2D with trainable
    # weights.
    "fixed SeparableConv2D": (
        stack((8, 8, 3), lambda: L.SeparableConv2D(4, 3, trainable=False)),
        pairs.IMAGES,
        HEAD,
    ),
    "GRU": (
        stack((6, 8), lambda: L.GRU(8, unroll=True, name="r")),
        pairs.SERIES,
        {
            "r.cell.kernel": ("model", None),
            "r.cell.recurrent_kernel": ("batch", None),
        },
    ),
    "Dropout": (
        stack(
            (8,),
            lambda: L.Dense(16, activation="tanh", name="d1"),
            lambda: L.Dropout(0.3),
        ),
        pairs.FEATURES,
        pairs.DENSE,
    ),
    **{
        name: test_layers.FAST[name]
        for name in ("EinsumDense", "images", "LSTM")
    },
    **{
        name: test_layers.SLOW[name]
        for name in (
            "Conv2DTranspose",
            "average pooling",
            "GroupNormalization",
            "global pooling",
            "TimeDistributed",
        )
    },
}
assert len(LAYERS) == len(OPTIMIZERS)


# Additional pairs, each of which runs on one mesh. The pairs cover both
# shardings of a table with both sparse optimizers, and norms of sharded
# gradients.
MORE_PAIRS = [
    ("attention", "Adam clipnorm"),
    ("Embedding rows", "Adagrad"),
    ("Embedding columns", "SGD"),
    ("attention", "Adam global_clipnorm"),
    ("EinsumDense", "Adam clipnorm"),
]


def cases():
    """Yields triples of layer, setting and mesh.

    Yields each layer and each setting once, and then `MORE_PAIRS`.

    In exploration mode, yields each layer and each setting once per mesh.
    """
    settings = list(OPTIMIZERS)
    for index, (layer, *more) in enumerate(
        [(layer,) for layer in LAYERS] + MORE_PAIRS
    ):
        own = (index + 1) % len(MESHES)
        for place, sizes in enumerate(MESHES):
            if EXPLORE or place == own:
                shifted = index + len(MESHES) * (place - own)
                yield (
                    layer,
                    *(more or [settings[shifted % len(settings)]]),
                    sizes,
                )


class Losses(keras.callbacks.Callback):
    """Callback that records the loss after each step."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(float(logs["loss"]))


def losses_of(model, x, optimizer):
    recorded = Losses()
    pairs.fit(
        model,
        x,
        optimizer=optimizer,
        metrics=(),
        callbacks=[recorded],
        epochs=STEPS // PER_EPOCH,
    )
    assert len(recorded.found) == STEPS
    return np.array(recorded.found)


@functools.cache
def without_a_mesh(layer, setting, policy):
    """Returns the trained model and its losses."""
    make, x, _ = LAYERS[layer]
    model = pairs.plain(make)
    losses = losses_of(model, x, OPTIMIZERS[setting]())
    # Training must reduce the loss after the first epoch.
    assert losses[-1] < losses[PER_EPOCH - 1]
    return model, losses


def compare(layer, setting, sizes, tolerance, policy="float32"):
    batch, parts = sizes
    expected, losses = without_a_mesh(layer, setting, policy)
    make, x, axes = LAYERS[layer]
    model = pairs.on_mesh(make, axes, mesh_of(batch=batch, model=parts))
    assert any(map(any, map(axes_of, model.weights)))
    difference = np.max(
        np.abs(losses_of(model, x, OPTIMIZERS[setting]()) - losses)
    )
    if EXPLORE:
        print(
            f"\n{difference:.1e} {layer}, {setting} on {batch}x{parts}",
            file=sys.stderr,
        )
    assert difference < tolerance
    pairs.assert_slots_have_layouts_of_weights(model)
    pairs.assert_same_weights(
        expected,
        model,
        but=ROUNDING,
        rtol=100 * tolerance,
        atol=100 * tolerance,
    )


def marked_cases():
    """Yields all cases. Of `MORE_PAIRS`, `make test` runs only one pair."""
    for number, case in enumerate(cases()):
        is_extra = not EXPLORE and number > len(LAYERS)
        yield pytest.param(
            *case, marks=[pytest.mark.exhaustive] if is_extra else []
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer, setting, sizes", list(marked_cases()))
def test_losses_agree(layer, setting, sizes):
    compare(layer, setting, sizes, CLOSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes", MESHES if EXPLORE else MESHES[-1:], ids="{0[0]}x{0[1]}".format
)
def test_losses_agree_within_the_precision_of_bfloat16(sizes):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        compare("Dense", "Adam", sizes, BFLOAT16, "mixed_bfloat16")
    finally:
        keras.mixed_precision.set_global_policy("float32")
