"""Programs for keras.distribution run after only their import is changed."""

import threading

import keras
import numpy as np
import pytest

from tests.layout import pairs
from tests.layout.meshes import axes_of, mesh_of
from tf_layoutmap import distribution as ours
from tf_layoutmap.layout.keras3.variable import MeshVariable

CPUS = [f"cpu:{i}" for i in range(4)]


@pytest.fixture(autouse=True)
def clear_distribution():
    yield
    ours.set_distribution(None)


def program(distribution, **options):
    """Runs a keras.distribution program that uses `distribution` instead."""
    assert distribution.get_device_count("cpu") >= 4
    mesh = distribution.DeviceMesh(
        shape=(2, 2),
        axis_names=("batch", "model"),
        devices=distribution.list_devices("cpu")[:4],
    )
    layout_map = distribution.LayoutMap(mesh)
    layout_map["d1/kernel"] = distribution.TensorLayout((None, "model"), mesh)
    layout_map[".*d2.*kernel"] = ("model", None)
    parallel = distribution.ModelParallel(
        layout_map=layout_map,
        batch_dim_name="batch",
        auto_shard_dataset=True,
        **options,
    )
    distribution.set_distribution(parallel)
    assert distribution.distribution() is parallel
    keras.utils.set_random_seed(3)
    model = pairs.dense_model()
    history = pairs.fit(model, validation_split=0.25)
    return model, history, model.predict(pairs.FEATURES, verbose=0)


@pytest.mark.exhaustive
def test_a_program_runs_after_changing_only_the_import():
    plain = pairs.plain(pairs.dense_model)
    expected = pairs.fit(plain, validation_split=0.25)
    model, history, predicted = program(ours)
    pairs.assert_alike(expected, history)
    pairs.assert_same_weights(plain, model)
    assert not isinstance(plain.layers[0].kernel, MeshVariable)
    np.testing.assert_allclose(
        plain.predict(pairs.FEATURES, verbose=0), predicted, **pairs.TOLERANCE
    )
    assert axes_of(model.layers[0].kernel) == (None, "model")
    assert axes_of(model.layers[-1].kernel) == ("model", None)
    assert pairs.assert_slots_have_layouts_of_weights(model) > 0
    ours.set_distribution(None)
    assert ours.distribution() is None
    assert not isinstance(keras.Variable(0.0), MeshVariable)


def test_scopes_override_set_distribution_and_end():
    outer, inner = (ours.DataParallel(mesh_of(batch=n)) for n in (4, 2))
    ours.set_distribution(outer)
    with inner.scope():
        assert ours.distribution() is inner
        assert keras.Variable(np.zeros(4)).mesh.size == 2
    assert ours.distribution() is outer
    assert keras.Variable(np.zeros(4)).mesh.size == 4
    with pytest.raises(KeyError), inner.scope():
        raise KeyError
    assert ours.distribution() is outer
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ours.distribution()))
    thread.start()
    thread.join()
    assert seen == [None]


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("verb", ["fit", "train_on_batch", "evaluate"])
@pytest.mark.parametrize("compiled", ["before", "after"])
def test_a_model_created_earlier_raises_until_the_distribution_is_reset(
    verb, compiled
):
    def compile_it():
        model.compile("adam", pairs.loss(), metrics=["accuracy"])

    def use():
        options = {} if verb == "train_on_batch" else {"verbose": 0}
        return getattr(model, verb)(pairs.FEATURES, pairs.LABELS, **options)

    model = pairs.plain(pairs.dense_model)
    expected = model.predict(pairs.FEATURES, verbose=0)
    if compiled == "before":
        compile_it()
    ours.set_distribution(ours.DataParallel(mesh_of(batch=4)))
    if compiled == "after":
        compile_it()
    with pytest.raises(
        (RuntimeError, ValueError),
        match=(
            "created after set_distribution .or inside the scope.*after "
            "set_distribution .*set_distribution.None."
        ),
    ):
        use()
    # `predict` does not train the model or create variables.
    np.testing.assert_array_equal(
        model.predict(pairs.FEATURES, verbose=0), expected
    )
    ours.set_distribution(None)
    compile_it()
    use()
    assert not any(isinstance(v, MeshVariable) for v in model.variables)


def test_an_unbuilt_model_created_earlier_raises():
    model = keras.Sequential([keras.layers.Dense(4)])
    with ours.DataParallel(mesh_of(batch=4)).scope():
        with pytest.raises(RuntimeError, match="outside the scope"):
            model.predict(pairs.FEATURES, verbose=0)
        model.compile("sgd", "mse")
        with pytest.raises(RuntimeError, match="for train on mesh .'batch'"):
            model.fit(pairs.FEATURES, pairs.FEATURES, verbose=0)


def test_a_distribution_returns_its_layouts():
    layout_map = ours.LayoutMap(
        ours.DeviceMesh((2, 2), ("batch", "model"), CPUS)
    )
    layout_map["d1.kernel"] = (None, "model")
    parallel = ours.ModelParallel(layout_map=layout_map)
    assert parallel.num_model_replicas == 2 and parallel.num_processes == 1
    assert parallel.get_data_layout((8, 3, 3)).axes == ("batch", None, None)
    assert parallel.get_tensor_layout("m.d1.kernel").axes == (None, "model")
    assert parallel.get_tensor_layout("m.d2.kernel") is None
    variable = keras.Variable(np.zeros((4, 4)), name="other")
    assert parallel.get_variable_layout(variable).axes == (None, None)
    with parallel.scope():
        dense = keras.layers.Dense(4, name="d1")
        dense.build((None, 4))
    assert parallel.get_variable_layout(dense.kernel).axes == (None, "model")
    data = object()
    assert parallel.distribute_dataset(data) is data


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a:1,b:1", 3, 0), "an address for each of the 3"),
        (("a:1,b:1", 2, 2), "below `num_processes`"),
        ((None, 2, 0), "an address for each of the 2"),
    ],
)
def test_inconsistent_process_arguments_raise(arguments, words):
    with pytest.raises(ValueError, match=words):
        ours.initialize(*arguments)


def test_initialize_with_one_process_does_nothing(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "1")
    assert ours.initialize() is None
