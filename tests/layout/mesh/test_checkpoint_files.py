"""Checks checkpoints that are written as in DTensor's documentation."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

dtensor = tf.experimental.dtensor
VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)
FEATURES = np.ones((8, 4), np.float32)


def d_variable(scale):
    """Returns a DVariable that user code creates without this package."""
    layout = layout_of(mesh_of(batch=2, model=2), "batch", "model")
    return dtensor.DVariable(tlm.layout.to_mesh(scale * VALUES, layout))


def table(scale):
    return tlm.ShardedVariable(
        [tf.Variable(scale * VALUES), tf.Variable(scale * VALUES[:3] + 1)]
    )


def model(version, scale):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    layout_map["d1.kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        trained_model = version.Sequential(
            [version.layers.Dense(4, name="d1"), version.layers.Dense(1)]
        )
    trained_model.compile("adam", "mse")
    trained_model.fit(
        FEATURES * scale, FEATURES[:, :1], batch_size=4, verbose=0
    )
    return trained_model


def everything(scale):
    return tf.train.Checkpoint(
        dvariable=d_variable(scale),
        table=table(scale),
        plain=tf.Variable(scale * VALUES),
        keras=model(keras, scale),
        tf_keras=model(tf_keras, scale),
    )


def values(held):
    """Returns all values in one array."""
    found = (
        [held]
        if not isinstance(held, tf.train.Checkpoint)
        else [held.dvariable, held.table, held.plain, held.keras, held.tf_keras]
    )
    flat = []
    for one in found:
        if hasattr(one, "optimizer"):
            variables = one.optimizer.variables
            flat += [
                *one.weights,
                *(variables() if callable(variables) else variables),
            ]
        else:
            flat.append(one)
    return np.concatenate(
        [
            np.ravel(
                tlm.layout.to_host(v)
                if isinstance(v, dtensor.DVariable)
                else v.numpy()
            )
            for v in flat
        ]
    )


MAKERS = {"DVariable": d_variable, "ShardedVariable": table, "all": everything}


@pytest.fixture
def dtensor_options():
    tlm.layout.to_mesh(VALUES, layout_of(mesh_of(x=1), None, None))
    return tf.train.CheckpointOptions(
        experimental_io_device=dtensor.device_name()
    )


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("verbs", [("save", "restore"), ("write", "read")])
def test_dtensor_device_writes_and_reads_checkpoints(
    make, verbs, dtensor_options, tmp_path
):
    saved, restored = make(2.0), make(0.5)
    assert not np.array_equal(values(saved), values(restored))
    checkpoints = [tf.train.Checkpoint(x=x) for x in (saved, restored)]
    path = getattr(checkpoints[0], verbs[0])(
        str(tmp_path / "c"), options=dtensor_options
    )
    getattr(checkpoints[1], verbs[1])(
        path, options=dtensor_options
    ).assert_consumed()
    np.testing.assert_array_equal(values(saved), values(restored))
    # The options object that the program passed must not be changed.
    assert dtensor_options.experimental_io_device == dtensor.device_name()


@pytest.mark.exhaustive
def test_one_checkpoint_holds_mesh_and_host_variables(tmp_path):
    saved, restored = everything(2.0), everything(0.5)
    path = tf.train.Checkpoint(x=saved).write(str(tmp_path / "c"))
    tf.train.Checkpoint(x=restored).read(path).assert_consumed()
    np.testing.assert_array_equal(values(saved), values(restored))
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(path).get_tensor(
            "x/dvariable/.ATTRIBUTES/VARIABLE_VALUE"
        ),
        2 * VALUES,
    )


@pytest.mark.exhaustive
def test_tf_keras_model_is_exported(dtensor_options, tmp_path):
    trained = model(tf_keras, 2.0)
    tf.saved_model.save(
        trained,
        str(tmp_path),
        options=(
            tf.saved_model.SaveOptions(
                experimental_io_device=dtensor_options.experimental_io_device
            )
        ),
    )
    loaded = tf.saved_model.load(str(tmp_path))
    for a, b in zip(trained.trainable_variables, loaded.trainable_variables):
        np.testing.assert_array_equal(tlm.layout.to_host(a), b.numpy())


@pytest.mark.exhaustive
def test_tf_keras_weights_are_saved_as_in_the_guide(dtensor_options, tmp_path):
    saved, restored = model(tf_keras, 2.0), model(tf_keras, 0.5)
    saved.save_weights(str(tmp_path / "w"), options=dtensor_options)
    restored.load_weights(str(tmp_path / "w"), options=dtensor_options)
    for a, b in zip(saved.weights, restored.weights):
        np.testing.assert_array_equal(
            tlm.layout.to_host(a), tlm.layout.to_host(b)
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make", [d_variable, lambda scale: model(keras, scale)]
)
def test_dtensor_checkpoint_saves_and_restores_variables(make, tmp_path):
    saved, restored = make(2.0), make(0.5)
    mesh = mesh_of(batch=2, model=2)
    path = dtensor.DTensorCheckpoint(mesh, x=saved).save(str(tmp_path / "c"))
    dtensor.DTensorCheckpoint(mesh, x=restored).restore(path)
    np.testing.assert_array_equal(values(saved), values(restored))


def test_save_as_bf16_is_respected(dtensor_options, tmp_path):
    saved, restored = d_variable(1.0), d_variable(0.0)
    saved.save_as_bf16 = restored.save_as_bf16 = True
    path = tf.train.Checkpoint(x=saved).write(
        str(tmp_path / "c"), options=dtensor_options
    )
    assert (
        tf.train.load_checkpoint(path).get_variable_to_dtype_map()[
            "x/.ATTRIBUTES/VARIABLE_VALUE"
        ]
        == tf.bfloat16
    )
    tf.train.Checkpoint(x=restored).read(path)
    np.testing.assert_array_equal(values(saved), values(restored))


def test_other_io_device_is_respected(tmp_path):
    saved, restored = d_variable(2.0), d_variable(0.0)
    options = tf.train.CheckpointOptions(
        experimental_io_device="/job:localhost"
    )
    path = tf.train.Checkpoint(x=saved).write(
        str(tmp_path / "c"), options=options
    )
    tf.train.Checkpoint(x=restored).read(path, options=options)
    np.testing.assert_array_equal(values(saved), values(restored))
