"""After a step that failed, everything on a mesh goes on."""

import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh

dtensor = tf.experimental.dtensor

MESH = mesh_of(batch=2, model=2)
WHOLE, BATCH = layout_of(MESH, None), layout_of(MESH, "batch")


@tf.function(autograph=False)
def step(table, ids):
    return tf.reduce_sum(tf.gather(table, ids))


def run(ids):
    with default_mesh(MESH):
        return step(to_mesh(np.ones(8, np.float32), WHOLE),
                    to_mesh(np.array(ids), BATCH))


@pytest.mark.parametrize(
    "read", [to_host, lambda x: x.numpy()], ids=["to_host", "numpy"])
def test_copies_and_moves_go_on_after_a_failed_step(read):
    # One device knows the cause, another may only know that it was stopped.
    with pytest.raises(tf.errors.OpError):
        read(run([1, 2, 3, 99]))
    ones = np.ones(4, np.float32)
    if read is not to_host:
        # TensorFlow raised it, and devices may raise it once more.
        try:
            dtensor.copy_to_mesh(tf.constant(ones), WHOLE)
        except tf.errors.InvalidArgumentError:
            pass
    for _ in range(2):
        copied = dtensor.copy_to_mesh(tf.constant(ones), WHOLE)
        np.testing.assert_array_equal(copied.numpy(), ones)
        moved = dtensor.relayout(to_mesh(ones, BATCH), WHOLE)
        np.testing.assert_array_equal(to_host(moved), ones)
    assert to_host(run([1, 2, 3, 4])) == 4


def test_an_error_that_nobody_read_is_raised_by_the_copy_that_follows():
    run([1, 2, 3, 99])
    with pytest.raises(tf.errors.OpError):
        for _ in range(2):  # The step may still run at the first.
            dtensor.copy_to_mesh(tf.ones([4]), WHOLE).numpy()
            to_host(run([1, 2, 3, 4]))
    assert dtensor.copy_to_mesh(tf.ones([4]), WHOLE).numpy().sum() == 4
    assert to_host(run([1, 2, 3, 4])) == 4


def test_the_cause_is_raised_and_not_that_a_device_was_stopped():
    with pytest.raises(tf.errors.InvalidArgumentError, match="99 is not in"):
        to_host(run([1, 2, 3, 99]))
