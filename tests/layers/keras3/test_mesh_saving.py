"""Tests saving and loading a model on different meshes.

The model has a table and a Dense layer.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import axes_of, layout_of, mesh_of

pytestmark = pytest.mark.slow

rules = tf.tpu.experimental.embedding

NUM_ROWS, DIM, LENGTH = 16, 8, 3
RNG = np.random.default_rng(2)
IDS = RNG.integers(0, NUM_ROWS, (32, LENGTH))
Y = RNG.normal(size=(32, 4)).astype(np.float32)
# Meshes on which a model is saved or loaded, or None for no mesh.
PLACES = {
    "none": None,
    "2x2": dict(batch=2, model=2),
    "1x4": dict(batch=1, model=4),
}
WAYS = [("2x2", "1x4"), ("2x2", "none"), ("none", "2x2")]
# Optimizer of the table's layer (None if the model's optimizer trains the
# table), and the layout of the table.
TRAINERS = {
    "its own": (lambda: rules.Adagrad(0.1), ("model", None)),
    "the model's": (lambda: None, (None, "model")),
}


def at(place, trainer, build):
    """Builds the model by calling `build()`, as user code does."""
    if PLACES[place] is None:
        return build()
    mesh = mesh_of(**PLACES[place])
    layout_map = tlm.LayoutMap(mesh)
    layout_map["words.embeddings"] = layout_of(mesh, *TRAINERS[trainer][1])
    layout_map["d1.kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        return build()


def model_at(place, trainer, seed):
    def build():
        return keras.Sequential(
            [
                keras.Input([LENGTH], dtype="int64"),
                tlm.layers.ShardedEmbedding(
                    NUM_ROWS,
                    DIM,
                    optimizer=TRAINERS[trainer][0](),
                    name="words",
                ),
                keras.layers.Flatten(),
                keras.layers.Dense(4, name="d1"),
            ]
        )

    keras.utils.set_random_seed(seed)
    model = at(place, trainer, build)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model):
    return model.fit(IDS, Y, batch_size=8, shuffle=False, verbose=0).history[
        "loss"
    ]


def state(model):
    """Returns copies of all state that training changes."""
    layer = model.get_layer("words")
    found = [*model.weights, *model.optimizer.variables]
    if layer.optimizer is not None:
        found += [*layer.optimizer.slots.values(), layer.optimizer.iterations]
    return [variable.numpy() for variable in found]


def assert_equal_bits(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)


def keras_format(model, path):
    model.save(path / "model.keras")
    return lambda place, trainer: at(
        place, trainer, lambda: keras.saving.load_model(path / "model.keras")
    )


def weights_h5(model, path):
    model.save_weights(path / "model.weights.h5")

    def load(place, trainer):
        other = model_at(place, trainer, seed=9)
        other.optimizer.build(other.trainable_variables)
        other.load_weights(path / "model.weights.h5")
        return other

    return load


def checkpoint(model, path):
    prefix = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(
        path / "ckpt"
    )

    def load(place, trainer):
        other = model_at(place, trainer, seed=9)
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(
            prefix
        ).assert_existing_objects_matched()
        return other

    return load


@pytest.fixture(scope="module", params=TRAINERS)
def trainer(request):
    return request.param


@pytest.fixture(scope="module")
def trained_models(trainer):
    """Returns a trained model, its state and its results, by mesh."""
    trained = {}
    for place in {writer for writer, _ in WAYS}:
        model = model_at(place, trainer, seed=4)
        fit(model)
        trained[place] = model, state(model)
    return trained


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(("writer", "reader"), WAYS)
@pytest.mark.parametrize("save", [keras_format, weights_h5, checkpoint])
def test_all_state_is_loaded_bitwise_equal(
    trained_models, trainer, writer, reader, save, tmp_path
):
    source, expected = trained_models[writer]
    model = save(source, tmp_path)(reader, trainer)
    assert_equal_bits(expected, state(model))
    assert_equal_bits(expected, state(source))
    table = model.get_layer("words").embeddings
    if reader != "none":
        assert axes_of(table) == TRAINERS[trainer][1]
        assert axes_of(model.get_layer("d1").kernel) == (None, "model")


@pytest.mark.exhaustive
@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(("writer", "reader"), WAYS)
def test_a_loaded_model_continues_training_like_the_saved_one(
    trainer, writer, reader, tmp_path
):
    source = model_at(writer, trainer, seed=4)
    fit(source)
    resumed = keras_format(source, tmp_path)(reader, trainer)
    # Sums over devices are computed in a different order.
    np.testing.assert_allclose(fit(resumed), fit(source), rtol=1e-5)
    for a, b in zip(state(source), state(resumed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_an_export_serves_without_a_mesh(trained_models, tmp_path):
    source, expected = trained_models["2x2"]
    source.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(
        served.serve(IDS).numpy(),
        source.predict(IDS, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )
    assert_equal_bits(expected, state(source))
