"""Keras' own tests of keras.distribution, applied to this package's classes."""

import keras
import numpy as np
import pytest

from tests.distribution import stock
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.distribution import (
    DataParallel,
    DeviceMesh,
    Distribution,
    LayoutMap,
    ModelParallel,
    TensorLayout,
    distribution,
)

CPUS = [f"cpu:{i}" for i in range(4)]
# Meshes are created on first use, so these devices need not exist.
MANY = [f"cpu:{i}" for i in range(100, 108)]


@pytest.fixture
def mesh():
    return DeviceMesh((4, 2), ["data", "model"], MANY)


@pytest.mark.parametrize("shape", [(4, 2), [4, 2]])
@pytest.mark.parametrize("names", [["a", "b"], ("a", "b")])
def test_a_mesh_stores_its_arguments(shape, names):
    mesh = DeviceMesh(shape, names, MANY)
    assert mesh.shape is shape and mesh.axis_names is names
    assert mesh.devices.shape == (4, 2) and mesh.size == 8
    assert (
        repr(mesh)
        == str(mesh)
        == (f"<DeviceMesh shape={shape}, axis_names={names}>")
    )


@pytest.mark.parametrize(
    ("shape", "names", "words"),
    [
        ((4,), "", "Shape and axis_names cannot be empty"),
        ((), [], "Shape and axis_names cannot be empty"),
        ((4, 2), ["batch"], "Shape and axis_names should have same size"),
        ((4, 4), ["a", "b"], "Shape does not match the number of devices"),
    ],
)
def test_an_invalid_mesh_raises_the_keras_error(shape, names, words):
    for library in (DeviceMesh, keras.distribution.DeviceMesh):
        with pytest.raises(ValueError, match=words):
            library(shape, names, MANY)


def test_an_invalid_layout_raises_the_keras_error(mesh):
    words = "Invalid axis names for Layout"
    with pytest.raises(ValueError, match=words):
        TensorLayout(("data", "unknown", None), mesh)
    layout = TensorLayout(["data", "unknown", None])
    assert layout.axes == ("data", "unknown", None)
    with pytest.raises(ValueError, match=words):
        layout.device_mesh = mesh
    assert layout.device_mesh is None
    layout = TensorLayout(("data",), mesh)
    with pytest.raises(ValueError, match="Cannot override device mesh value"):
        layout.device_mesh = mesh
    with pytest.raises(ValueError, match="Cannot create sharding when device"):
        TensorLayout(("data",)).backend_layout  # noqa: B018
    with pytest.raises(TypeError, match="device_mesh.*a DeviceMesh"):
        TensorLayout(("data",), "mesh")


def test_a_map_returns_its_layouts(mesh):
    layouts = [TensorLayout([None, "model"]), TensorLayout(["model"])]
    layout_map = LayoutMap(mesh)
    layout_map["dense/kernel"], layout_map["dense/bias"] = layouts
    layout_map[".*dense.*kernel"] = layouts[0]
    assert (
        layout_map["dense/kernel"]
        is layout_map["dense_2/kernel"]
        is (layouts[0])
    )
    assert layouts[0].device_mesh is mesh
    assert list(layout_map.values()) == [*layouts, layouts[0]]
    assert layout_map.pop("dense/bias") is layouts[1]
    with pytest.raises(KeyError):
        layout_map.pop(".*bias")


def test_a_map_raises_the_keras_errors(mesh):
    layout_map = LayoutMap(mesh)
    layout_map["dense/kernel"] = (None, "model")
    with pytest.raises(ValueError, match="dense/kernel already exist"):
        layout_map["dense/kernel"] = ("model", None)
    for wrong in (["a", "b"], ("model", "model"), ("model", 3), "model", None):
        with pytest.raises(
            (ValueError, TypeError), match=("should be a TensorLayout")
        ):
            layout_map["conv.kernel"] = wrong
    layout_map["dense.*"] = layout_map[".*bias"] = ("model",)
    with pytest.raises(
        ValueError,
        match=(
            "Path 'dense_2/bias' matches multiple layout specification keys: "
            r"\['dense\.\*', '\.\*bias'\]"
        ),
    ):
        layout_map["dense_2/bias"]
    # A key that equals the path takes precedence over keys that match as
    # patterns.
    assert layout_map["dense/kernel"].axes == (None, "model")


def test_a_weight_that_two_keys_match_raises():
    layout_map = LayoutMap(DeviceMesh((2, 2), ["batch", "model"], CPUS))
    layout_map["d.*kernel"] = (None, "model")
    layout_map["d1"] = ("model", None)
    with pytest.raises(ValueError, match="matches multiple layout"):
        with ModelParallel(layout_map=layout_map).scope():
            keras.layers.Dense(4, name="d1").build((None, 4))


def test_the_base_class_has_a_mesh_and_a_scope(mesh):
    first, second = Distribution(mesh), Distribution(mesh, "data", False)
    assert first.device_mesh is mesh and first.batch_dim_name is None
    assert second.batch_dim_name == "data" and not second.auto_shard_dataset
    assert first.num_processes == 1 and first.distribute_dataset(3) == 3
    with first.scope():
        assert distribution() is first
        with second.scope():
            assert distribution() is second
        assert distribution() is first
        assert type(keras.Variable(0.0)) is keras.Variable
    assert distribution() is None
    for ask in (
        lambda: first.num_model_replicas,
        lambda: first.get_data_layout((1,)),
        lambda: first.get_variable_layout(None),
        lambda: first.get_tensor_layout("a"),
    ):
        with pytest.raises(NotImplementedError):
            ask()
    with pytest.raises(TypeError, match="a DeviceMesh or a dtensor.Mesh"):
        Distribution("mesh")


@pytest.mark.parametrize("library", [None, keras.distribution])
def test_a_distribution_returns_layouts_on_its_mesh(library):
    kind = DeviceMesh if library is None else library.DeviceMesh
    mesh = kind((2, 2), ["data", "model"], CPUS)
    layout_map = LayoutMap(mesh)
    layout_map[".*kernel"] = TensorLayout([None, "model"])
    layout_map["/model/layer/tensor"] = ("data", None)
    parallel = ModelParallel(layout_map=layout_map, batch_dim_name="data")
    assert parallel.device_mesh is mesh and parallel.layout_map is layout_map
    data = parallel.get_data_layout((4, 2, 2))
    assert data.device_mesh is mesh and data.axes == ("data", None, None)
    kernel = keras.Variable(np.zeros((8, 4)), name="kernel")
    assert parallel.get_variable_layout(kernel) is layout_map[".*kernel"]
    seed = keras.Variable([0, 1], name="seed", dtype="int32")
    replicated = parallel.get_variable_layout(seed)
    assert replicated.axes == (None,) and replicated.device_mesh is mesh
    found = parallel.get_tensor_layout("/model/layer/tensor")
    assert found is layout_map["/model/layer/tensor"]
    assert parallel.get_tensor_layout("/model/layer/other_tensor") is None
    given = keras.distribution.TensorLayout(
        ["x"], DeviceMesh((4,), ["x"], CPUS)
    )
    variable = keras.Variable([1.0] * 4, name="kernel", layout=given)
    assert parallel.get_variable_layout(variable) is (
        given if stock.VARIABLES_KEEP_LAYOUTS else layout_map[".*kernel"]
    )


def test_a_map_of_dtensor_layouts_returns_tensor_layouts():
    import tf_layoutmap as tlm

    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    layout_map[".*kernel"] = layout_of(mesh, None, "model")
    parallel = ModelParallel(layout_map=layout_map)
    assert parallel.device_mesh is mesh
    assert parallel.get_tensor_layout("a/kernel") == TensorLayout(
        (None, "model"), mesh
    )


def test_invalid_arguments_of_distributions_raise_the_keras_errors():
    with pytest.raises(ValueError, match="You must specify a layout_map"):
        ModelParallel()
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match="must be a `LayoutMap` instance"):
            ModelParallel(layout_map={})
        with pytest.raises(
            kind, match="Expect `mesh` to be an instance of `DeviceMesh`"
        ):
            DataParallel("mesh")
    layout_map = LayoutMap(mesh_of(batch=2))
    # Programs written for older Keras versions also pass `device_mesh`.
    assert ModelParallel(layout_map=layout_map, device_mesh=None)
    with pytest.raises(TypeError, match="'devices'"):
        ModelParallel(layout_map=layout_map, devices=CPUS)


def test_data_parallel_over_two_axes_warns_and_uses_the_first():
    with pytest.warns(UserWarning, match="Expect the input mesh to be 1D"):
        parallel = DataParallel(DeviceMesh((2, 2), ["a", "b"], CPUS))
    assert parallel.batch_dim_name == "a"
    assert parallel.num_model_replicas == 2
    assert parallel.get_tensor_layout("path/to/tensor") is None
    parallel = DataParallel(devices=CPUS)
    assert parallel.device_mesh.axis_names == ["batch"]
    assert len(parallel.device_mesh.devices) == 4
