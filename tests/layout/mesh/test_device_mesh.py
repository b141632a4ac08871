"""Tests the devices of meshes, and that only meshes disable Grappler."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of
from tf_layoutmap._core import tf_private

_optimizer = tf.config.optimizer


def without_grappler() -> bool:
    config = tf.compat.v1.ConfigProto.FromString(
        tf_private.function_call_options().config_proto_serialized
    )
    return config.graph_options.rewrite_options.disable_meta_optimizer


@pytest.fixture
def mesh():
    return mesh_of(batch=2)


@pytest.fixture
def restored_options():
    before = _optimizer.get_experimental_options()
    yield
    _optimizer.set_experimental_options(
        before | {"constant_folding": True, "auto_mixed_precision": False}
    )


def test_grappler_is_off_inside_nested_scopes_only(mesh):
    before = tf_private.function_call_options()
    with tlm.layout.default_mesh(mesh):
        assert without_grappler()
        with tlm.layout.default_mesh(mesh):
            assert without_grappler()
        assert without_grappler()
    assert tf_private.function_call_options() is before
    assert not without_grappler()


def test_error_restores_grappler(mesh):
    with pytest.raises(KeyError), tlm.layout.default_mesh(mesh):
        raise KeyError
    assert not without_grappler()


def test_setting_is_per_thread(mesh):
    seen = []
    with tlm.layout.default_mesh(mesh):
        thread = threading.Thread(
            target=lambda: seen.append(without_grappler())
        )
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.usefixtures("restored_options")
def test_option_set_by_the_user_is_kept(mesh):
    _optimizer.set_experimental_options({"auto_mixed_precision": True})
    with tlm.layout.default_mesh(mesh):
        assert not without_grappler()


@pytest.mark.usefixtures("restored_options")
def test_option_set_inside_the_scope_is_kept(mesh):
    with tlm.layout.default_mesh(mesh):
        _optimizer.set_experimental_options({"constant_folding": False})
    config = tf.compat.v1.ConfigProto.FromString(
        tf_private.function_call_options().config_proto_serialized
    )
    assert config.graph_options.rewrite_options.constant_folding == 2
    assert not without_grappler()


MISSING = ["cpu:0", "cpu:90"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tlm.distribution.DeviceMesh(
            (1, 2), ["batch", "model"], MISSING
        ),
        lambda: tf.experimental.dtensor.create_mesh(
            [("batch", 1), ("model", 2)], devices=["CPU:0", "CPU:90"]
        ),
    ],
    ids=["DeviceMesh", "dtensor.Mesh"],
)
def test_a_missing_device_raises_before_the_mesh_is_used(make):
    mesh = make()
    words = "Device not found: cpu:90.*set_logical_device_configuration"
    layout_map = tlm.distribution.LayoutMap(mesh)
    with pytest.raises(ValueError, match=words):
        with tlm.layout_map_scope(layout_map):
            pass
    layout = tlm.distribution.TensorLayout(("model",), mesh)
    with pytest.raises(ValueError, match=words):
        tlm.distribution.distribute_tensor(np.ones(2), layout)
