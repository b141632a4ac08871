"""First programs, and files of models that other versions have written.

`make acceptance` runs this file with each pair of versions of TensorFlow and
Keras. All pairs write into one folder, then each pair reads all files.
"""

import json
import os
import pathlib
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.docs import test_snippets
from tf_layoutmap._core import requirements

# The folder of the files. Without it, the tests use only files of their own.
FOLDER = os.environ.get("TF_LAYOUTMAP_MODEL_FILES")
WRITTEN = sorted(pathlib.Path(FOLDER).glob("*.keras")) if FOLDER else []
IDS = np.array([[0, 3, 9], [3, 9, 1], [5, 5, 2], [9, 1, 0]])
FEATURES = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
LABELS = np.array([[0.0], [1.0], [1.0], [0.0]], dtype="float32")
# Versions of Keras and layouts can add numbers in different orders.
TOLERANCE = 1e-5


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md"])
def test_the_program_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    test_snippets.test_the_snippets_of_a_page_run_in_order(
        test_snippets.ROOT / page, tmp_path, monkeypatch, capsys
    )


def tables():
    """Returns a model with a table for each kind of optimizer."""
    ids = keras.Input([3], dtype="int64")
    adagrad = tlm.layers.ShardedEmbedding(
        10, 4, num_shards=3, name="adagrad", optimizer="adagrad"
    )
    adam = tlm.layers.ShardedEmbedding(
        10, 4, num_shards=2, name="adam", optimizer="model"
    )
    pair = tlm.layers.DotInteraction()(
        [keras.layers.Flatten()(table(ids)) for table in (adagrad, adam)]
    )
    return compiled(keras.Model(ids, pair))


def mesh():
    """Returns a model whose weights and slot variables are sharded."""
    distribution = tlm.distribution
    device_mesh = distribution.DeviceMesh(
        (1, 2), ["batch", "model"], ["cpu:0", "cpu:1"]
    )
    layout_map = distribution.LayoutMap(device_mesh)
    layout_map["hidden.kernel"] = (None, "model")
    with tlm.layout_map_scope(layout_map):
        return compiled(
            keras.Sequential(
                [
                    keras.Input([8]),
                    keras.layers.Dense(6, activation="tanh", name="hidden"),
                    keras.layers.Dense(1),
                ]
            )
        )


MODELS = {"tables": (tables, IDS), "mesh": (mesh, FEATURES)}


def compiled(model):
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def step(model, inputs, epochs=1):
    model.fit(
        inputs, LABELS, batch_size=4, epochs=epochs, shuffle=False, verbose=0
    )


def write(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Saves a trained model, its outputs, and its outputs after a step."""
    keras.utils.set_random_seed(1)
    make, inputs = MODELS[name]
    model = make()
    step(model, inputs, epochs=3)
    path = folder / f"{name}-tf{tf.__version__}-keras{keras.__version__}.keras"
    model.save(path)
    saved = model.predict(inputs, verbose=0)
    step(model, inputs)
    next_step = model.predict(inputs, verbose=0)
    np.savez(path.with_suffix(".npz"), saved=saved, next_step=next_step)
    return path


def load(path: pathlib.Path) -> keras.Model:
    """Loads a model; only its weights if Keras itself cannot load its layers.

    Keras 3.12 raises an error for each `Dense` of a newer version.
    """
    with zipfile.ZipFile(path) as file:
        config = json.loads(file.read("config.json"))
    try:
        for layer in config["config"]["layers"]:
            if layer["module"] == "keras.layers":
                keras.layers.deserialize(layer)
    except TypeError:
        make, _ = MODELS[path.name.partition("-")[0]]
        model = make()
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
        return model
    return keras.models.load_model(path)


def check_file(path: pathlib.Path) -> None:
    """Checks that a model continues as in the program that has saved it."""
    _, inputs = MODELS[path.name.partition("-")[0]]
    expected = np.load(path.with_suffix(".npz"))
    model = load(path)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), expected["saved"], atol=TOLERANCE
    )
    # The step depends on all slot variables.
    step(model, inputs)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), expected["next_step"], atol=TOLERANCE
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_write_a_file_and_continue_from_it(name, tmp_path):
    check_file(write(name, pathlib.Path(FOLDER or tmp_path)))


@pytest.mark.skipif(FOLDER is None, reason="needs files of `make acceptance`")
@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_read_a_file(path):
    check_file(path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_step_without_slot_variables_differs(tmp_path):
    """Otherwise, `check_file` would not find lost slot variables."""
    path = write("mesh", tmp_path)
    model = keras.models.load_model(path)
    step(compiled(model), FEATURES)
    expected = np.load(path.with_suffix(".npz"))["next_step"]
    found = model.predict(FEATURES, verbose=0)
    assert np.max(np.abs(found - expected)) > 100 * TOLERANCE


def test_the_versions_are_supported():
    assert requirements.minor(tf.__version__) == requirements.built_for()
    assert requirements.minor(keras.__version__) in requirements.KERAS
