import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.mesh import tracing, transfer


def test_devices_with_the_same_values_have_the_same_shard():
    layout = layout_of(mesh_of(batch=2, model=2), None, "model")
    shards = transfer.unique_shards((3, 8), layout)
    assert [(s.bounds, s.devices) for s in shards] == [
        (((0, 3), (0, 4)), [0, 2]),
        (((0, 3), (4, 8)), [1, 3]),
    ]


def test_replicated_tensor_is_one_shard():
    layout = layout_of(mesh_of(batch=2, model=2), None)
    (shard,) = transfer.unique_shards((5,), layout)
    assert (shard.slices, shard.devices) == ((slice(0, 5),), [0, 1, 2, 3])


def test_packed_shards_equal_the_tensor():
    layout = layout_of(mesh_of(batch=2, model=2), "model", "batch")
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    shards = transfer.unique_shards(value.shape, layout)
    tensor = transfer.packed(
        shards, [value[shard.slices] for shard in shards], layout
    )
    assert np.array_equal(transfer.to_host(tensor), value)
    for part, shard in zip(tf.experimental.dtensor.unpack(tensor), shards):
        assert np.array_equal(part, value[shard.slices])


@pytest.mark.parametrize(
    "axes", [("batch", "model"), (None, "model"), ("batch", None), (None, None)]
)
def test_to_host_reads_tensors_with_any_layout(axes):
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensor = transfer.to_mesh(
        value, layout_of(mesh_of(batch=2, model=2), *axes)
    )
    for read in (
        lambda x: x.numpy(),
        np.asarray,
        np.array,
        keras.ops.convert_to_numpy,
    ):
        assert np.array_equal(read(tensor), value)
    assert np.array_equal(np.asarray(tensor, np.float64), value)


def test_error_for_an_unsharded_tensor_is_raised_unchanged():
    def original(tensor):
        raise tf.errors.UnimplementedError(None, None, "as it is")

    with pytest.raises(tf.errors.UnimplementedError, match="as it is"):
        transfer.numpy_of(original, tf.constant(1.0))


def device_mesh():
    return tlm.distribution.DeviceMesh(
        (2, 2), ["batch", "model"], [f"cpu:{i}" for i in range(4)]
    )


def test_custom_loops_accept_the_names_of_keras_distribution():
    mesh = device_mesh()
    layout = tlm.distribution.TensorLayout(("batch", None), mesh)
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    tensor = tlm.layout.to_mesh(value, layout)
    assert tf.experimental.dtensor.fetch_layout(tensor) == layout.to_dtensor()
    with tlm.layout.default_mesh(mesh):
        doubled = tf.function(lambda x: x + x)(tensor)
    assert np.array_equal(tlm.layout.to_host(doubled), 2 * value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tlm.layout.to_mesh(np.ones([2, 2]), ("batch", None)),
        lambda: tlm.layout.default_mesh("cpu:0").__enter__(),
    ],
)
def test_another_type_of_layout_or_mesh_raises(call):
    with pytest.raises(TypeError, match="must be a .*dtensor"):
        call()


@pytest.mark.parametrize(
    "axes",
    [("model", None), (None, "batch"), ("batch", "model"), (None, None)],
)
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "bfloat16"])
def test_to_host_tensor_returns_a_tensor_of_the_host(axes, dtype):
    mesh = mesh_of(batch=2, model=2)
    value = tf.cast(tf.reshape(tf.range(24), [4, 6]), dtype)
    found = transfer.to_host_tensor(
        transfer.to_mesh(value, layout_of(mesh, *axes))
    )
    assert not tracing.on_mesh(found)
    assert found.numpy().tobytes() == value.numpy().tobytes()
