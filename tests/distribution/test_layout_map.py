"""Tests the documented example of `keras.distribution.LayoutMap`."""

import pytest

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of
from tf_layoutmap.distribution import DeviceMesh, LayoutMap, TensorLayout


@pytest.fixture(scope="module")
def device_mesh():
    return DeviceMesh(
        (2, 2), ("batch", "model"), [f"cpu:{i}" for i in range(4)]
    )


@pytest.fixture(params=["with mesh", "without"])
def filled(request, device_mesh):
    layout_map = LayoutMap(
        device_mesh=device_mesh if request.param == "with mesh" else None
    )
    layout_map["dense.*kernel"] = (None, "model")
    layout_map["dense.*bias"] = ("model",)
    layout_map["conv2d.*kernel"] = TensorLayout((None, None, None, "model"))
    layout_map["conv2d.*bias"] = TensorLayout(("model",))
    return layout_map


@pytest.mark.parametrize(
    ("key", "axes"),
    [
        ("dense_1.kernel", (None, "model")),
        ("dense_1.bias", ("model",)),
        ("dense_2.kernel", (None, "model")),
        ("dense_2.bias", ("model",)),
        ("my_model/conv2d_123/kernel", (None, None, None, "model")),
        ("my_model/conv2d_123/bias", ("model",)),
    ],
)
def test_the_documented_lookups(filled, key, axes):
    assert filled[key].axes == axes
    assert filled[key].device_mesh is filled.device_mesh


@pytest.mark.parametrize(
    "key", ["my_model/conv3d_1/kernel", "my_model/conv3d_1/bias"]
)
def test_the_documented_misses(filled, key):
    assert filled[key] is None


def test_lists_are_accepted_as_tuples(device_mesh):
    layout_map = LayoutMap(device_mesh)
    layout_map["a"] = [None, "batch"]
    assert layout_map["a"] == TensorLayout((None, "batch"), device_mesh)


def test_keras_layouts_are_accepted():
    keras = pytest.importorskip("keras")
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ("batch", "model"), [f"cpu:{i}" for i in range(4)]
    )
    layout_map = LayoutMap(mesh)
    layout_map["a"] = keras.distribution.TensorLayout((None, "model"))
    assert layout_map["a"].axes == (None, "model")
    assert layout_map.mesh_in_use().shape() == [2, 2]


def test_a_dtensor_mesh_is_accepted():
    mesh = mesh_of(batch=2, model=2)
    layout_map = LayoutMap(mesh)
    layout_map["a"] = ("model",)
    assert layout_map["a"].to_dtensor().mesh == mesh
    assert layout_map.get_default_mesh() == mesh


def test_setting_a_layout_with_an_unknown_axis_raises(device_mesh):
    layout_map = LayoutMap(device_mesh)
    with pytest.raises(ValueError, match="did you mean 'model'"):
        layout_map["a"] = (None, "modle")
    assert "a" not in layout_map


@pytest.mark.parametrize("wrong", ["model", 3, None])
def test_setting_a_value_that_is_not_a_layout_raises(device_mesh, wrong):
    with pytest.raises(TypeError, match="should be a TensorLayout"):
        LayoutMap(device_mesh)["a"] = wrong


def test_a_strict_map_raises_if_two_keys_match(device_mesh):
    layout_map = LayoutMap(device_mesh, strict=True)
    layout_map["kernel"] = (None, "model")
    layout_map["dense"] = ("model", None)
    with pytest.raises(ValueError, match="matched by 'kernel', 'dense'"):
        layout_map["dense_1.kernel"]


def test_both_maps_are_one_class():
    assert issubclass(LayoutMap, tlm.LayoutMap)
