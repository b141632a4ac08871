"""Checks that a mesh stays usable after a step that failed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap._core import tf_private
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.mesh import errors

dtensor = tf.experimental.dtensor

MESH = mesh_of(batch=2, model=2)
WHOLE, BATCH = layout_of(MESH, None), layout_of(MESH, "batch")


@tf.function(autograph=False)
def step(table, ids):
    return tf.reduce_sum(tf.gather(table, ids))


def run(ids):
    with default_mesh(MESH):
        return step(
            to_mesh(np.ones(8, np.float32), WHOLE),
            to_mesh(np.array(ids), BATCH),
        )


@pytest.mark.parametrize(
    "read", [to_host, lambda x: x.numpy()], ids=["to_host", "numpy"]
)
def test_copies_and_relayouts_work_after_a_failed_step(read):
    with pytest.raises(tf.errors.InvalidArgumentError, match="99 is not in"):
        read(run([1, 2, 3, 99]))
    ones = np.ones(4, np.float32)
    for _ in range(2):
        copied = dtensor.copy_to_mesh(tf.constant(ones), WHOLE)
        np.testing.assert_array_equal(copied.numpy(), ones)
        moved = dtensor.relayout(to_mesh(ones, BATCH), WHOLE)
        np.testing.assert_array_equal(to_host(moved), ones)
    assert to_host(run([1, 2, 3, 4])) == 4


def test_error_is_raised_by_the_call_of_the_step():
    # Without a correction, the error would be raised by the next, correct op.
    with pytest.raises(tf.errors.InvalidArgumentError, match="99 is not in"):
        run([1, 2, 3, 99])
    assert to_host(run([1, 2, 3, 4])) == 4


def test_process_survives_many_failed_steps():
    for _ in range(20):
        with pytest.raises(tf.errors.InvalidArgumentError):
            run([1, 99, 3, 99])
        assert to_host(run([1, 2, 3, 4])) == 4


def test_groups_communicate_before_the_first_operation_can_fail():
    # If an eager operation fails while a group communicates for the first time,
    # all later collective operations of the process can fail.
    mesh = mesh_of(rows=2, columns=2)
    table = to_mesh(np.ones((8, 4), np.float32), layout_of(mesh, "rows", None))
    assert mesh.to_string() in tf_private.kept_with_device("complete_groups")
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.gather(
                table, to_mesh(np.array([1, 99]), layout_of(mesh, "rows"))
            )
    assert to_host(tf.reduce_sum(table)) == 32


def test_error_of_enabled_check_numerics_names_another_check():
    model = pairs.on_mesh(pairs.dense_model)
    tf.debugging.enable_check_numerics()
    try:
        with pytest.raises(
            errors.UnsupportedByDTensorError, match="TerminateOnNaN"
        ):
            model.predict(pairs.FEATURES, verbose=0)
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.parametrize(
    ("finding", "remedy"),
    [
        ("value shape is not static", r"dataset.map\(lambda x, y"),
        ("Expected shape", "leave the dimension along which the operation"),
    ],
)
def test_errors_of_the_compiler_name_the_layer(finding, remedy):
    model = keras.Sequential([keras.layers.Dense(1, name="top")], name="net")
    message = (
        f"step.py:1:1: error: {finding}\n note: see current operation: "
        f'%1 = "tf.Reshape"(%0) {{{errors.NAME_ATTRIBUTE} = '
        '"net_1/top_1/Reshape"}\ndtensor_graph_to_mlir_pass.cc:152'
    )
    with pytest.raises(
        errors.UnsupportedByDTensorError,
        match=f"a Reshape operation of layer 'top' as .*'net'.*{remedy}",
    ):
        with errors.explain_error(model, "train"):
            raise tf.errors.InternalError(None, None, message)
