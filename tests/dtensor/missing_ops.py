"""Run by test_policies: enables missing ops and compares them with numpy.

Each op, forward and backward, eagerly and in a function, on a divided tensor,
beside the same op without a mesh; and a model that uses one.
"""

import keras
import numpy as np
import tensorflow as tf

import tests.strategies  # noqa: F401  splits the CPU before the first op
import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap import _ops
from tf_layoutmap.dtensor import policies

# Of one, two and four rows: their means are exact.
SEGMENTS = np.array([0, 0, 1, 1, 1, 1, 2, 3])
# Whole numbers, all different: no rounding, and one largest in a segment.
X = 1.0 + np.random.default_rng(0).permutation(32).reshape(8, 4).astype(
    np.float32)
REFERENCES = {
    "ReverseV2": (lambda x: tf.reverse(x, [0]), lambda x: x[::-1]),
    "Roll": (lambda x: tf.roll(x, 1, 0), lambda x: np.roll(x, 1, 0)),
    "MatrixDiagPartV3": (tf.linalg.diag_part, np.diag),
    "MatrixDiagV3": (tf.linalg.diag,
                     lambda x: x[:, :, None] * np.eye(4, dtype=np.float32)),
    "MatrixSetDiagV3": (
        lambda x: tf.linalg.set_diag(x, tf.zeros([4])),
        lambda x: np.where(np.eye(8, 4, dtype=bool), 0, x)),
} | {
    f"Segment{kind}": (
        lambda x, kind=kind: getattr(tf.math, f"segment_{kind.lower()}")(
            x, tf.constant(SEGMENTS)),
        lambda x, fold=fold: np.stack(
            [fold(x[SEGMENTS == i], axis=0) for i in range(4)]))
    for kind, fold in dict(Sum=np.sum, Mean=np.mean, Max=np.max, Min=np.min,
                           Prod=np.prod).items()}

# Ops that only gradients of layers use: see layout/agreement_of_missing_ops.
GRADIENTS = {"DepthwiseConv2dNativeBackpropFilter",
             "DepthwiseConv2dNativeBackpropInput", "AvgPoolGrad",
             "AvgPool3DGrad"}

# Their gradients choose among rows, which a graph of DTensor cannot do with
# divided columns.
WHOLE_COLUMNS = ("SegmentMax", "SegmentMin", "SegmentProd")


def both_ways(op, x, upstream):
    """What `op` gives, and its gradient for `upstream`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = op(x)
    return y, tape.gradient(y, x, output_gradients=upstream)


def check(name, axes):
    op, numpy_op = REFERENCES[name]
    mesh = mesh_of(batch=2, model=2)
    value = numpy_op(X)
    upstream = np.arange(value.size, dtype=np.float32).reshape(value.shape)
    expected = both_ways(op, tf.constant(X), tf.constant(upstream))
    np.testing.assert_array_equal(expected[0], value)
    with tlm.layout.default_mesh(mesh):
        x = tlm.layout.to_mesh(X, layout_of(mesh, *axes))
        g = tlm.layout.to_mesh(upstream, layout_of(
            mesh, *[None] * upstream.ndim))
        for run in (both_ways, tf.function(both_ways, autograph=False)):
            if (run is not both_ways and name in WHOLE_COLUMNS and
                    axes[1] is not None):
                # Refused, not wrong.
                try:
                    run(op, x, g)
                except tf.errors.OpError as error:
                    assert "layout do not agree" in str(error), error
                    continue
                raise AssertionError(f"{name} works now: say so in the docs")
            for ours, theirs in zip(run(op, x, g), expected):
                np.testing.assert_array_equal(
                    tlm.layout.to_host(ours), theirs, err_msg=name)


class Rolled(keras.layers.Layer):
    def call(self, x):
        return x + 0.5 * tf.reverse(tf.roll(x, 1, 1), [0])


def main():
    enabled = tlm.dtensor.enable_missing_ops()
    assert enabled and set(enabled) <= set(policies.MISSING_OPS), enabled
    assert tlm.dtensor.enable_missing_ops() == ()
    assert all(map(_ops.native.has_expander, policies.MISSING_OPS))
    assert REFERENCES.keys() | GRADIENTS == set(policies.MISSING_OPS)
    for name in REFERENCES:
        for axes in (("batch", "model"), (None, "batch"), ("model", None)):
            check(name, axes)
    pairs.assert_trains_alike(
        lambda: pairs.sequential((8,), keras.layers.Dense(
            16, name="d1"), Rolled()), pairs.FEATURES, pairs.DENSE)
    print("all equal")


if __name__ == "__main__":
    main()
