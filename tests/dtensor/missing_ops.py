"""Run by test_policies: enables missing ops and compares them with numpy."""

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tests.strategies  # noqa: F401  splits the CPU before the first op
from tests.dtensor.test_sharded_rows import on_mesh, to_numpy
from tf_layoutmap import _ops
from tf_layoutmap import dtensor as tlm_dtensor
from tf_layoutmap.dtensor import policies


@tf.function
def missing_ops(x, segments):
    return (tf.reverse(x, [0]), tf.roll(x, 1, 0),
            tf.math.segment_sum(x, segments))


def main():
    mesh = dtensor.create_mesh(
        [("batch", 2), ("model", 2)], devices=[f"CPU:{i}" for i in range(4)])
    enabled = tlm_dtensor.enable_missing_ops()
    assert enabled and set(enabled) <= set(policies.MISSING_OPS), enabled
    assert tlm_dtensor.enable_missing_ops() == ()
    assert all(map(_ops.native.has_expander, policies.MISSING_OPS))
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    reverse, rolled, summed = missing_ops(
        on_mesh(x, ["batch", "model"], mesh),
        on_mesh(np.array([0, 0, 1, 1, 1, 2, 2, 3]), ["batch"], mesh))
    np.testing.assert_array_equal(to_numpy(reverse, mesh), x[::-1])
    np.testing.assert_array_equal(to_numpy(rolled, mesh), np.roll(x, 1, 0))
    np.testing.assert_array_equal(
        to_numpy(summed, mesh), np.add.reduceat(x, [0, 2, 5, 7]))
    print("all equal")


if __name__ == "__main__":
    main()
