"""Functions for a mesh are compiled without Grappler; others with it."""

import threading

import keras
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.keras3 import initial_values

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


def test_it_is_off_inside_only_and_nested(mesh):
    before = tf_private.function_call_options()
    with tlm.layout.default_mesh(mesh):
        assert without_grappler()
        with tlm.layout.default_mesh(mesh):
            assert without_grappler()
        assert without_grappler()
    assert tf_private.function_call_options() is before
    assert not without_grappler()


def test_an_error_restores_it(mesh):
    with pytest.raises(KeyError), tlm.layout.default_mesh(mesh):
        raise KeyError
    assert not without_grappler()


def test_every_thread_has_its_own(mesh):
    seen = []
    with tlm.layout.default_mesh(mesh):
        thread = threading.Thread(
            target=lambda: seen.append(without_grappler())
        )
        thread.start()
        thread.join()
    assert seen == [False]


def test_weights_are_drawn_without_it(mesh, monkeypatch):
    seen = []
    dtensor = tf.experimental.dtensor
    call = dtensor.call_with_layout
    monkeypatch.setattr(
        dtensor,
        "call_with_layout",
        lambda *args: seen.append(without_grappler()) or call(*args),
    )
    initial_values.initial_value(
        keras.initializers.GlorotUniform(1),
        (4, 6),
        "float32",
        layout_of(mesh, "batch", None),
        "sharded",
    )
    assert seen == [True]
    assert not without_grappler()


@pytest.mark.usefixtures("restored_options")
def test_what_a_user_chose_is_kept(mesh):
    _optimizer.set_experimental_options({"auto_mixed_precision": True})
    with tlm.layout.default_mesh(mesh):
        assert not without_grappler()


@pytest.mark.usefixtures("restored_options")
def test_a_choice_made_inside_is_kept(mesh):
    with tlm.layout.default_mesh(mesh):
        _optimizer.set_experimental_options({"constant_folding": False})
    config = tf.compat.v1.ConfigProto.FromString(
        tf_private.function_call_options().config_proto_serialized
    )
    assert config.graph_options.rewrite_options.constant_folding == 2
    assert not without_grappler()
