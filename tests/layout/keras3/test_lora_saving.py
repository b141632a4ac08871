"""Checks that LoRA models on a mesh are saved with merged weights."""

import keras
import numpy as np
import pytest

from tests.layout import pairs
from tests.layout.meshes import axes_of

pytestmark = pytest.mark.slow

L = keras.layers
MODELS = {
    "Dense": (
        lambda: pairs.sequential((8,), L.Dense(16, name="d1")),
        pairs.FEATURES,
        "d1.kernel",
        (None, "model"),
    ),
    "EinsumDense": (
        lambda: pairs.sequential(
            (6, 8), L.EinsumDense("abc,cd->abd", (6, 16), name="d1")
        ),
        pairs.SERIES,
        "d1.kernel",
        ("model", None),
    ),
    "Embedding": (
        lambda: pairs.sequential((6,), L.Embedding(16, 8, name="d1")),
        pairs.TOKENS,
        "d1.embeddings",
        (None, "model"),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_lora_weights_train_and_are_saved_merged(name, tmp_path):
    make, x, key, axes = MODELS[name]

    def run(model):
        start = pairs.fit(model, x, epochs=1)
        layer = model.get_layer("d1")
        keras.utils.set_random_seed(5)
        layer.enable_lora(2)
        path = tmp_path / f"{id(model)}.keras"
        history = pairs.fit(model, x)
        model.save(path)
        loaded = keras.saving.load_model(path)
        expected = model.predict(x, verbose=0)
        np.testing.assert_allclose(
            loaded.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-5
        )
        return start, history, expected

    sharded = pairs.on_mesh(make, {key: axes})
    pairs.assert_alike(run(pairs.plain(make)), run(sharded))
    weight = next(
        w
        for w in sharded.get_layer("d1").weights
        if w.path.endswith(key.rpartition(".")[2])
    )
    assert axes_of(weight) == axes
