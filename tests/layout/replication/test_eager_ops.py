"""Checks that eager ops that DTensor does not support match one device."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs, unsupported
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import atomic_step, errors
from tf_layoutmap.layout.replication import captured_tensors, replicated_ops

L = keras.layers
MESH = mesh_of(batch=2, model=2)


@pytest.fixture(autouse=True)
def _no_warning_issued(monkeypatch):
    monkeypatch.setattr(replicated_ops, "_warned", set())


def images(*axes):
    return tlm.layout.to_mesh(pairs.IMAGES[:8], layout_of(MESH, *axes))


USES = {
    "resize": lambda x: tf.image.resize(x, (4, 4)),
    "split": lambda x: unsupported.split(x, 2, axis=1)[1],
    "convolution": lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 3, 2]), 2, "SAME"),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore:DTensor cannot shard an eager")
def test_ops_and_their_gradients_match_a_single_device(name):
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = USES[name](x)
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, x)

    plain = both(tf.constant(pairs.IMAGES[:8]))
    with tlm.layout.default_mesh(MESH):
        on_mesh = both(images("batch", "model", None, None))
    pairs.assert_alike(
        *[
            [np.asarray(x) for x in plain],
            [tlm.layout.to_host(x) for x in on_mesh],
        ]
    )


def test_each_op_warns_once():
    x = images("batch", "model", None, None)
    with pytest.warns(
        tlm.layout.LayoutMapWarning,
        match=r"eager Split operation \('tf.Split' op",
    ):
        USES["split"](x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlm.layout.LayoutMapWarning)
        USES["split"](x)


def test_other_errors_are_unchanged():
    with pytest.raises(tf.errors.OpError, match="(?i)split"):
        unsupported.split(images("batch", None, None, None), 3, axis=1)


def test_strict_map_raises():
    class Halves(L.Layer):
        def call(self, x):
            return unsupported.split(x, 2, axis=-1)[0]

    def model_of_map(strict):
        layout_map = tlm.LayoutMap(MESH, strict=strict)
        layout_map["d1.kernel"] = layout_of(MESH, None, "model")
        with tlm.layout_map_scope(layout_map):
            return keras.Sequential(
                [keras.Input((8,)), L.Dense(16, name="d1"), Halves()]
            )

    with pytest.warns(tlm.layout.LayoutMapWarning, match="Split"):
        model_of_map(False)(pairs.FEATURES)
    with pytest.raises(tf.errors.OpError, match="'tf.Split' op"):
        model_of_map(True)(pairs.FEATURES)


def call_with_layout(function, layout, *args, **kwargs):
    return tf.experimental.dtensor.call_with_layout(
        function, layout, *args, **kwargs
    )


@pytest.mark.parametrize("draw", [tf.random.normal, tf.random.uniform])
def test_random_numbers_have_the_requested_layout(draw):
    layout = layout_of(MESH, "batch", "model")
    tf.random.set_seed(5)
    drawn = call_with_layout(draw, layout, [8, 8], seed=3)
    assert tf.experimental.dtensor.fetch_layout(drawn) == layout
    # DTensor draws all numbers on each device, and each device keeps its shard.
    assert len(np.unique(tlm.layout.to_host(drawn))) == 64


def test_copy_has_the_requested_layout():
    layout = layout_of(MESH, None, None)
    copied = call_with_layout(
        lambda: tf.experimental.dtensor.copy_to_mesh(tf.ones([4, 4]), layout),
        layout,
    )
    np.testing.assert_array_equal(tlm.layout.to_host(copied), np.ones([4, 4]))


def test_lookup_in_sharded_rows_raises_the_error_of_dtensor():
    """Checks the error of an op on a variable handle.

    A variable handle cannot be gathered, so the error of DTensor is raised and
    the op does not run a second time.
    """
    rows = tf.experimental.dtensor.DVariable(
        tlm.layout.to_mesh(
            np.ones([8, 4], np.float32), layout_of(MESH, "batch", None)
        )
    )
    ids = tlm.layout.to_mesh(np.arange(4), layout_of(MESH, None))
    for _ in range(2):
        with pytest.raises(
            tf.errors.UnknownError,
            match="does not support sharded 0th dimension",
        ):
            tf.nn.embedding_lookup(rows, ids)


def test_cached_objects_are_per_dtensor_device():
    held = tf.constant(pairs.FEATURES)
    first = captured_tensors.packed(held, MESH)
    assert captured_tensors.packed(held, MESH) is first
    sink = atomic_step.token_sink(MESH)
    assert atomic_step.token_sink(MESH) is sink
    device = tf_private.dtensor_api._dtensor_singleton
    try:
        tf_private.dtensor_api._dtensor_singleton = None
        assert captured_tensors.packed(held, MESH) is not first
        other = atomic_step.token_sink(MESH)
        assert other is not sink
        assert other.handle.device != sink.handle.device
        with errors.errors_once(MESH):
            assert errors.queued_error(MESH) is None
        del other
    finally:
        tf_private.dtensor_api._dtensor_singleton = device
    assert atomic_step.token_sink(MESH) is sink
