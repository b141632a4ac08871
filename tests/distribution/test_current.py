"""keras.distribution programs run with another import."""

import threading

import keras
import numpy as np
import pytest

import tf_layoutmap as tlm
from tests.layout import twins
from tests.layout.meshes import axes_of, mesh_of
from tf_layoutmap import distribution as ours
from tf_layoutmap.layout.mesh_variable import MeshVariable

CPUS = [f"cpu:{i}" for i in range(4)]


@pytest.fixture(autouse=True)
def none_left_behind():
    yield
    ours.set_distribution(None)


def program(distribution, **options):
    """As one writes it for keras.distribution, which is the argument."""
    assert distribution.get_device_count("cpu") >= 4
    mesh = distribution.DeviceMesh(
        shape=(2, 2), axis_names=("batch", "model"),
        devices=distribution.list_devices("cpu")[:4])
    layout_map = distribution.LayoutMap(mesh)
    layout_map["d1/kernel"] = distribution.TensorLayout((None, "model"), mesh)
    layout_map[".*d2.*kernel"] = ("model", None)
    parallel = distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch",
        auto_shard_dataset=True, **options)
    distribution.set_distribution(parallel)
    assert distribution.distribution() is parallel
    keras.utils.set_random_seed(3)
    model = twins.dense_model()
    history = twins.fit(model, validation_split=0.25)
    return model, history, model.predict(twins.FEATURES, verbose=0)


def test_a_whole_program_needs_another_import_only():
    plain = twins.plain(twins.dense_model)
    expected = twins.fit(plain, validation_split=0.25)
    model, history, predicted = program(ours, init="host")
    twins.assert_alike(expected, history)
    twins.assert_same_weights(plain, model)
    assert not isinstance(plain.layers[0].kernel, MeshVariable)
    np.testing.assert_allclose(
        plain.predict(twins.FEATURES, verbose=0), predicted,
        **twins.TOLERANCE)
    assert axes_of(model.layers[0].kernel) == (None, "model")
    assert axes_of(model.layers[-1].kernel) == ("model", None)
    assert twins.assert_slots_lie_like_weights(model) > 0
    ours.set_distribution(None)
    assert ours.distribution() is None
    assert not isinstance(keras.Variable(0.0), MeshVariable)


def test_scopes_go_before_what_is_set_and_end():
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


def test_layouts_can_be_asked_for():
    layout_map = ours.LayoutMap(ours.DeviceMesh(
        (2, 2), ("batch", "model"), CPUS))
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


def test_objects_of_keras_are_converted_or_refused():
    theirs = keras.distribution
    mesh = theirs.DeviceMesh((2, 2), ["batch", "model"], np.array(CPUS))
    layout = theirs.TensorLayout((None, "model"), mesh)
    layout_map = ours.LayoutMap(mesh)
    layout_map["d1.kernel"] = layout
    with ours.ModelParallel(layout_map=layout_map).scope():
        model = twins.plain(twins.dense_model)
    assert axes_of(model.layers[0].kernel) == (None, "model")
    spread = ours.distribute_tensor(np.zeros((4, 4), np.float32), layout)
    np.testing.assert_array_equal(tlm.layout.to_host(spread), np.zeros((4, 4)))
    keras_map = theirs.LayoutMap(mesh)
    keras_map["d1.kernel"] = layout
    with pytest.raises(TypeError, match="match whole names where ours"):
        ours.ModelParallel(layout_map=keras_map)
    with pytest.raises(TypeError, match="shards nothing on TensorFlow; use "
                                        "tlm.distribution.ModelParallel"):
        ours.set_distribution(theirs.ModelParallel(layout_map=keras_map))
    with pytest.raises(TypeError, match="a ModelParallel, a DataParallel or"):
        ours.set_distribution("data")


@pytest.mark.parametrize(("arguments", "words"), [
    (("a:1,b:1", 3, 0), "an address for each of the 3"),
    (("a:1,b:1", 2, 2), "below `num_processes`"),
    ((None, 2, 0), "an address for each of the 2")])
def test_processes_that_do_not_suit_each_other_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        ours.initialize(*arguments)


def test_one_process_has_nothing_to_join(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "1")
    assert ours.initialize() is None
