"""Checkpoints by DTensor's device for files, as its documentation has them."""

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
    """One that the program makes itself."""
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
        made = version.Sequential(
            [version.layers.Dense(4, name="d1"), version.layers.Dense(1)]
        )
    made.compile("adam", "mse")
    made.fit(FEATURES * scale, FEATURES[:, :1], batch_size=4, verbose=0)
    return made


def everything(scale):
    return tf.train.Checkpoint(
        theirs=d_variable(scale),
        table=table(scale),
        plain=tf.Variable(scale * VALUES),
        keras=model(keras, scale),
        tf_keras=model(tf_keras, scale),
    )


def values(held):
    """All numbers, in one array."""
    found = (
        [held]
        if not isinstance(held, tf.train.Checkpoint)
        else [held.theirs, held.table, held.plain, held.keras, held.tf_keras]
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
def by_dtensor():
    tlm.layout.to_mesh(VALUES, layout_of(mesh_of(x=1), None, None))
    return tf.train.CheckpointOptions(
        experimental_io_device=dtensor.device_name()
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("verbs", [("save", "restore"), ("write", "read")])
def test_dtensors_device_writes_and_reads(make, verbs, by_dtensor, tmp_path):
    saved, restored = make(2.0), make(0.5)
    assert not np.array_equal(values(saved), values(restored))
    checkpoints = [tf.train.Checkpoint(x=x) for x in (saved, restored)]
    path = getattr(checkpoints[0], verbs[0])(
        str(tmp_path / "c"), options=by_dtensor
    )
    getattr(checkpoints[1], verbs[1])(
        path, options=by_dtensor
    ).assert_consumed()
    np.testing.assert_array_equal(values(saved), values(restored))
    # Nothing that the program gave is changed.
    assert by_dtensor.experimental_io_device == dtensor.device_name()


def test_one_file_holds_what_is_on_a_mesh_and_what_is_not(tmp_path):
    saved, restored = everything(2.0), everything(0.5)
    path = tf.train.Checkpoint(x=saved).write(str(tmp_path / "c"))
    tf.train.Checkpoint(x=restored).read(path).assert_consumed()
    np.testing.assert_array_equal(values(saved), values(restored))
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(path).get_tensor(
            "x/theirs/.ATTRIBUTES/VARIABLE_VALUE"
        ),
        2 * VALUES,
    )


def test_a_trained_model_of_tf_keras_is_exported(by_dtensor, tmp_path):
    trained = model(tf_keras, 2.0)
    tf.saved_model.save(
        trained,
        str(tmp_path),
        options=(
            tf.saved_model.SaveOptions(
                experimental_io_device=by_dtensor.experimental_io_device
            )
        ),
    )
    loaded = tf.saved_model.load(str(tmp_path))
    for a, b in zip(trained.trainable_variables, loaded.trainable_variables):
        np.testing.assert_array_equal(tlm.layout.to_host(a), b.numpy())


def test_weights_of_tf_keras_are_saved_as_its_guide_says(by_dtensor, tmp_path):
    saved, restored = model(tf_keras, 2.0), model(tf_keras, 0.5)
    saved.save_weights(str(tmp_path / "w"), options=by_dtensor)
    restored.load_weights(str(tmp_path / "w"), options=by_dtensor)
    for a, b in zip(saved.weights, restored.weights):
        np.testing.assert_array_equal(
            tlm.layout.to_host(a), tlm.layout.to_host(b)
        )


@pytest.mark.parametrize(
    "make", [d_variable, lambda scale: model(keras, scale)]
)
def test_a_dtensor_checkpoint_takes_variables_as_it_knows_them(make, tmp_path):
    saved, restored = make(2.0), make(0.5)
    mesh = mesh_of(batch=2, model=2)
    path = dtensor.DTensorCheckpoint(mesh, x=saved).save(str(tmp_path / "c"))
    dtensor.DTensorCheckpoint(mesh, x=restored).restore(path)
    np.testing.assert_array_equal(values(saved), values(restored))


def test_a_variable_that_is_saved_in_bfloat16_still_is(by_dtensor, tmp_path):
    saved, restored = d_variable(1.0), d_variable(0.0)
    saved.save_as_bf16 = restored.save_as_bf16 = True
    path = tf.train.Checkpoint(x=saved).write(
        str(tmp_path / "c"), options=by_dtensor
    )
    assert (
        tf.train.load_checkpoint(path).get_variable_to_dtype_map()[
            "x/.ATTRIBUTES/VARIABLE_VALUE"
        ]
        == tf.bfloat16
    )
    tf.train.Checkpoint(x=restored).read(path)
    np.testing.assert_array_equal(values(saved), values(restored))


def test_another_device_writes_where_it_is_told(tmp_path):
    saved, restored = d_variable(2.0), d_variable(0.0)
    options = tf.train.CheckpointOptions(
        experimental_io_device="/job:localhost"
    )
    path = tf.train.Checkpoint(x=saved).write(
        str(tmp_path / "c"), options=options
    )
    tf.train.Checkpoint(x=restored).read(path, options=options)
    np.testing.assert_array_equal(values(saved), values(restored))
