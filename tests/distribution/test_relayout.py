import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.distribution import (
    DeviceMesh,
    TensorLayout,
    distribute_tensor,
    list_devices,
)
from tf_layoutmap.layout import default_mesh, to_host

dtensor = tf.experimental.dtensor
CPUS = [f"cpu:{i}" for i in range(4)]
VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)


def test_list_devices_names_the_logical_cpus():
    assert list_devices("cpu")[:4] == CPUS
    assert list_devices("CPU") == list_devices() or list_devices("gpu")
    assert list_devices("tpu") == []
    with pytest.raises(ValueError, match="device_type"):
        list_devices("npu")


def test_a_device_mesh_becomes_a_dtensor_mesh():
    mesh = DeviceMesh((2, 2), ["batch", "model"], devices=CPUS)
    assert mesh.shape == (2, 2)
    assert mesh.devices.tolist() == [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
    assert mesh.to_dtensor() == mesh_of(batch=2, model=2)
    assert mesh.backend_mesh == mesh.to_dtensor()


def test_a_device_mesh_uses_all_devices_by_default():
    count = len(list_devices())
    assert DeviceMesh((count,), ("batch",)).devices.size == count


@pytest.mark.parametrize(
    ("shape", "names", "words"),
    [
        ((2, 2), ("batch",), "one axis name for each"),
        ((), (), "at least one"),
        ((2, 2), ("a", "a"), "different"),
        ((3,), ("a",), "3 devices. Received: 4"),
        ((0, 4), ("a", "b"), "at least 1"),
        ((4,), ("unsharded",), "unsharded"),
    ],
)
def test_an_invalid_mesh_raises(shape, names, words):
    with pytest.raises(ValueError, match=words):
        DeviceMesh(shape, names, devices=CPUS)


def test_a_tensor_layout_becomes_a_dtensor_layout():
    mesh = DeviceMesh((2, 2), ("batch", "model"), devices=CPUS)
    layout = TensorLayout((None, "model"), mesh)
    assert layout.to_dtensor() == layout_of(mesh.to_dtensor(), None, "model")
    assert layout.backend_layout == layout.to_dtensor()


def test_the_mesh_of_a_tensor_layout_is_set_once():
    layout = TensorLayout(("model",))
    with pytest.raises(ValueError, match="requires a device mesh"):
        layout.to_dtensor()
    mesh = DeviceMesh((4,), ("model",), devices=CPUS)
    layout.device_mesh = mesh
    with pytest.raises(ValueError, match="set only once"):
        layout.device_mesh = mesh


@pytest.mark.parametrize(
    ("axes", "kind", "words"),
    [
        (("a", "a"), ValueError, "dimensions 0 and 1"),
        (("modle",), ValueError, "did you mean 'model'"),
        ("model", TypeError, "a tuple"),
        ((3,), TypeError, "axis names or None"),
    ],
)
def test_an_invalid_layout_raises(axes, kind, words):
    mesh = DeviceMesh((4,), ("model",), devices=CPUS)
    with pytest.raises(kind, match=words):
        TensorLayout(axes, mesh)


@pytest.mark.parametrize(
    "axes", [(None, None), ("batch", None), (None, "model"), ("model", "batch")]
)
@pytest.mark.parametrize("make", [np.asarray, tf.constant, np.asfortranarray])
def test_a_host_value_is_sharded_and_read_back(axes, make):
    mesh = DeviceMesh((2, 2), ("batch", "model"), devices=CPUS)
    spread = distribute_tensor(make(VALUE), TensorLayout(axes, mesh))
    assert dtensor.fetch_layout(spread) == TensorLayout(axes, mesh).to_dtensor()
    parts = dtensor.unpack(spread)
    used = [a for a in axes if a]
    assert parts[0].shape.num_elements() == VALUE.size // 2 ** len(used)
    np.testing.assert_array_equal(to_host(spread), VALUE)


def test_later_writes_to_the_array_do_not_change_the_tensor():
    mesh = mesh_of(model=2)
    value = VALUE.copy()
    spread = distribute_tensor(value, layout_of(mesh, None, "model"))
    value[:] = -1
    np.testing.assert_array_equal(to_host(spread), VALUE)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "before", [(None, None), ("batch", None), ("model", None), (None, "model")]
)
@pytest.mark.parametrize(
    "after",
    [(None, None), (None, "batch"), ("model", None), ("batch", "model")],
)
@pytest.mark.parametrize("traced", [False, True])
def test_a_relayout_keeps_the_value(before, after, traced):
    mesh = mesh_of(batch=2, model=2)
    first = distribute_tensor(VALUE, layout_of(mesh, *before))

    def change(x):
        return distribute_tensor(x, layout_of(mesh, *after))

    second = (tf.function(change) if traced else change)(first)
    assert dtensor.fetch_layout(second) == layout_of(mesh, *after)
    np.testing.assert_array_equal(to_host(second), VALUE)


@pytest.mark.parametrize("before", [("batch", "model"), ("model", None)])
def test_a_sharded_tensor_is_copied_to_another_mesh_in_full(before):
    # `dtensor.copy_to_mesh` would copy only the first shard, without an error.
    first, second = mesh_of(batch=2, model=2), mesh_of(model=1)
    tensor = distribute_tensor(VALUE, layout_of(first, *before))
    moved = distribute_tensor(tensor, layout_of(second, None, None))
    assert moved.shape == VALUE.shape
    np.testing.assert_array_equal(to_host(moved), VALUE)


def test_a_layout_that_does_not_fit_raises():
    mesh = mesh_of(model=4)
    with pytest.raises(ValueError, match="size 6.*does not divide"):
        distribute_tensor(VALUE, layout_of(mesh, None, "model"))
    with pytest.raises(ValueError, match="rank 1"):
        distribute_tensor(VALUE, layout_of(mesh, "model"))
    with pytest.raises(TypeError, match="layout"):
        distribute_tensor(VALUE, ("model",))


@pytest.mark.parametrize("on_mesh_first", [False, True])
def test_a_function_of_a_host_tensor_returns_the_layout(on_mesh_first):
    mesh = mesh_of(batch=2, model=2)
    layout = layout_of(mesh, None, "model")

    @tf.function
    def function(x):
        return distribute_tensor(x * 2.0, layout)

    if on_mesh_first:
        with default_mesh(mesh):
            function(tf.constant(VALUE))
    for _ in range(2):
        found = function(tf.constant(VALUE))
        assert dtensor.fetch_layout(found) == layout
        np.testing.assert_array_equal(to_host(found), VALUE * 2)
