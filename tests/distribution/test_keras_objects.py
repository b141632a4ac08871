"""This package and Keras accept each other's distribution objects."""

import keras
import numpy as np
import pytest

import tf_layoutmap as tlm
from tests.distribution import stock
from tests.layout import pairs
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap import distribution as ours
from tf_layoutmap.layout.explain import explain

theirs = keras.distribution
CPUS = [f"cpu:{i}" for i in range(4)]


@pytest.fixture(autouse=True)
def clear_distribution():
    yield
    ours.set_distribution(None)
    theirs.set_distribution(None)


def mesh_by(library):
    return library.DeviceMesh((2, 2), ["batch", "model"], CPUS)


def map_by(library, mesh=None, **layouts):
    layout_map = library.LayoutMap(mesh or mesh_by(library))
    layout_map["d1/kernel"] = (None, "model")
    layout_map[".*d2.(kernel|embeddings)"] = library.TensorLayout(
        ("model", None)
    )
    return layout_map


def assert_sharded(model):
    assert axes_of(model.layers[0].kernel) == (None, "model")
    assert axes_of(model.layers[-1].kernel) == ("model", None)
    assert axes_of(model.layers[-1].bias) == (None,)


def named(path):
    """Returns a layer whose variable paths begin directly with its name."""
    layer = keras.layers.Dense(4, name=path)
    layer.build((None, 4))
    return layer


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh_of_library", [ours, theirs])
def test_a_model_with_a_keras_map_matches_a_model_without_a_mesh(
    mesh_of_library,
):
    layout_map = map_by(theirs, mesh_by(mesh_of_library))
    layout_map["sequential.*/d1/kernel"] = (None, "model")
    with tlm.layout_map_scope(layout_map) as given:
        assert given is layout_map
        model = pairs.plain(pairs.dense_model)
    assert_sharded(model)
    plain = pairs.plain(pairs.dense_model)
    pairs.assert_alike(pairs.fit(plain, epochs=1), pairs.fit(model, epochs=1))
    pairs.assert_same_weights(plain, model)


@pytest.mark.parametrize(
    "place",
    [
        lambda layout_map: ours.ModelParallel(layout_map=layout_map).scope(),
        lambda layout_map: tlm.layout_map_scope(layout_map),
    ],
)
def test_keys_of_a_keras_map_match_full_paths_only(place):
    layout_map = theirs.LayoutMap(mesh_by(theirs))
    layout_map["d/kernel"] = (None, "model")
    layout_map["e.*kernel"] = ("model", None)
    with place(layout_map):
        layers = [named(name) for name in ("d", "dd", "e", "some_e")]
    assert [axes_of(layer.kernel) for layer in layers] == [
        (None, "model"),
        (None, None),
        ("model", None),
        (None, None),
    ]
    # Keras matches keys only with the path of a variable, not with its other
    # names.
    del layout_map["d/kernel"]
    layout_map[r"d\.kernel"] = ("model", None)
    with place(layout_map):
        assert axes_of(named("d").kernel) == (None, None)


def test_a_keras_map_with_two_matching_keys_raises_as_in_keras():
    layout_map = theirs.LayoutMap(mesh_by(theirs))
    layout_map["d.*kernel"] = layout_map[".*/kernel"] = (None, "model")
    with pytest.raises(ValueError, match="Path 'd/kernel' matches") as error:
        layout_map["d/kernel"]
    said = str(error.value).rstrip(".")
    with pytest.raises(ValueError, match="does not fit") as error:
        with tlm.layout_map_scope(layout_map):
            named("d")
    assert said in str(error.value)
    assert said in str(explain(layout_map, named("d")).problems())


def test_a_keras_map_is_read_when_a_variable_is_created():
    layout_map = theirs.LayoutMap(mesh_by(theirs))
    distribution = ours.ModelParallel(layout_map=layout_map)
    layout_map["d/kernel"] = (None, "model")
    with distribution.scope():
        assert axes_of(named("d").kernel) == (None, "model")
        del layout_map["d/kernel"]
        layout_map["d/kernel"] = ("model", None)
        assert axes_of(named("d").kernel) == ("model", None)


@pytest.mark.parametrize("library", [ours, theirs])
def test_set_distribution_accepts_keras_distributions(library):
    layout_map = map_by(library)
    if library is theirs:
        layout_map["sequential.*/d1/kernel"] = (None, "model")
    with stock.creating():
        distribution = library.ModelParallel(
            layout_map=layout_map, batch_dim_name="batch"
        )
        data_parallel = library.DataParallel(devices=CPUS)
    ours.set_distribution(distribution)
    assert ours.distribution() is distribution
    assert_sharded(pairs.dense_model())
    ours.set_distribution(data_parallel)
    kernel = named("d").kernel
    assert axes_of(kernel) == (None, None) and kernel.mesh.size == 4


def test_keras_set_distribution_accepts_our_distributions():
    distribution = ours.ModelParallel(layout_map=map_by(ours))
    theirs.set_distribution(distribution)
    assert ours.distribution() is theirs.distribution() is distribution
    assert_sharded(pairs.dense_model())
    # A scope of this package takes precedence over the distribution that is set
    # in Keras.
    with ours.DataParallel(mesh_of(batch=4)).scope() as layout_map:
        assert named("d").kernel.mesh == layout_map.mesh_in_use()
    theirs.set_distribution(None)
    assert ours.distribution() is None
    assert type(keras.Variable(0.0)) is keras.Variable


def test_a_custom_distribution_raises():
    class Odd(theirs.DataParallel):
        def get_variable_layout(self, variable):
            return None

    class OursOdd(ours.Distribution):
        def get_variable_layout(self, variable):
            return None

    with stock.creating():
        odd = Odd(devices=CPUS)
    with pytest.raises(TypeError, match="a ModelParallel, a DataParallel or"):
        ours.set_distribution(odd)
    with pytest.raises(TypeError, match="must be a ModelParallel"):
        ours.set_distribution(OursOdd(mesh_by(ours)))
    with pytest.raises(TypeError, match="a ModelParallel, a DataParallel or"):
        ours.set_distribution("data")
    assert ours.distribution() is None


def test_our_classes_are_instances_of_the_keras_classes():
    mesh, layout_map = mesh_by(ours), map_by(ours)
    for value, kind in [
        (mesh, theirs.DeviceMesh),
        (ours.TensorLayout((None,)), theirs.TensorLayout),
        (layout_map, theirs.LayoutMap),
        (ours.ModelParallel(layout_map=layout_map), theirs.ModelParallel),
        (ours.DataParallel(mesh_of(batch=2)), theirs.DataParallel),
    ]:
        assert isinstance(value, kind)
    assert not isinstance(
        ours.DataParallel(devices=CPUS),
        theirs.ModelParallel | ours.ModelParallel,
    )
    # Keras' classes accept objects of this package.
    their_map = theirs.LayoutMap(mesh)
    their_map["a"] = layout = ours.TensorLayout(("model",))
    assert their_map["a"] is layout and layout.device_mesh is mesh
    with stock.creating():
        parallel = theirs.ModelParallel(layout_map=layout_map)
    assert parallel.device_mesh is layout_map.device_mesh
    assert theirs.TensorLayout(("model",), mesh).backend_layout == (
        layout_of(mesh_of(batch=2, model=2), "model")
    )


@pytest.mark.parametrize("mesh_library", [ours, theirs, None])
def test_keras_layouts_are_not_converted(mesh_library):
    mesh = (
        mesh_of(batch=2, model=2)
        if mesh_library is None
        else mesh_by(mesh_library)
    )
    layout_map = ours.LayoutMap(mesh)
    layout_map["a/kernel"] = layout = theirs.TensorLayout((None, "model"))
    assert layout_map["a/kernel"] is layout
    assert layout.device_mesh is (None if mesh_library is None else mesh)
    assert layout_map.mesh_in_use() == mesh_of(batch=2, model=2)
    with tlm.layout_map_scope(layout_map):
        assert axes_of(named("a").kernel) == (None, "model")
    with pytest.raises(ValueError, match="did you mean 'model'"):
        layout_map["b"] = theirs.TensorLayout(("modle",))
    with pytest.raises(ValueError, match="dimensions 0 and 1"):
        layout_map["b"] = theirs.TensorLayout(("model", "model"))


def test_distribute_tensor_accepts_a_keras_layout():
    value = np.arange(16, dtype=np.float32).reshape(4, 4)
    layout = theirs.TensorLayout((None, "model"), mesh_by(theirs))
    spread = ours.distribute_tensor(value, layout)
    np.testing.assert_array_equal(tlm.layout.to_host(spread), value)
    with pytest.raises(ValueError, match="device mesh is not set"):
        ours.distribute_tensor(value, theirs.TensorLayout((None, "model")))


def test_a_variable_has_the_layout_passed_to_it():
    mesh, held = mesh_by(ours), []
    with tlm.layout_map_scope(map_by(theirs, mesh)):
        for library in (ours, theirs):
            layout = library.TensorLayout(("batch", None), mesh)
            variable = keras.Variable(np.zeros((4, 4)), layout=layout)
            assert axes_of(variable) == ("batch", None)
    elsewhere = ours.TensorLayout(
        ("model",), ours.DeviceMesh((4,), ["model"], CPUS)
    )
    with pytest.raises(ValueError, match="on another mesh"):
        with tlm.layout_map_scope(map_by(theirs, mesh)):
            held.append(keras.Variable(np.zeros(4), layout=elsewhere))
