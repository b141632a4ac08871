"""Compares ops for which DTensor has no rule with numpy.

Each op runs forward and backward, eagerly and in a function, on a sharded
tensor.
"""

import numpy as np
import pytest
import tensorflow as tf

import tests.strategies  # noqa: F401  (splits the CPU before the first op)
import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap._core import dtensor_ops

# Segments have one, two or four rows, so their means are exact.
SEGMENTS = np.array([0, 0, 1, 1, 1, 1, 2, 3])
# The values are distinct integers, so results are exact and each segment has a
# single maximum.
X = 1.0 + np.random.default_rng(0).permutation(32).reshape(8, 4).astype(
    np.float32
)
REFERENCES = {
    "ReverseV2": (lambda x: tf.reverse(x, [0]), lambda x: x[::-1]),
    "Roll": (lambda x: tf.roll(x, 1, 0), lambda x: np.roll(x, 1, 0)),
    "MatrixDiagPartV3": (tf.linalg.diag_part, np.diag),
    "MatrixDiagV3": (
        tf.linalg.diag,
        lambda x: x[:, :, None] * np.eye(4, dtype=np.float32),
    ),
    "MatrixSetDiagV3": (
        lambda x: tf.linalg.set_diag(x, tf.zeros([4])),
        lambda x: np.where(np.eye(8, 4, dtype=bool), 0, x),
    ),
} | {
    f"Segment{kind}": (
        lambda x, kind=kind: getattr(tf.math, f"segment_{kind.lower()}")(
            x, tf.constant(SEGMENTS)
        ),
        lambda x, fold=fold: np.stack(
            [fold(x[SEGMENTS == i], axis=0) for i in range(4)]
        ),
    )
    for kind, fold in dict(
        Sum=np.sum, Mean=np.mean, Max=np.max, Min=np.min, Prod=np.prod
    ).items()
}

# These ops occur only in gradients of layers, which
# test_agreement_of_missing_ops covers.
GRADIENTS = {
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "AvgPoolGrad",
    "AvgPool3DGrad",
}


def both_ways(op, x, upstream):
    """Returns the result of `op` and its gradient for `upstream`."""
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
        g = tlm.layout.to_mesh(
            upstream, layout_of(mesh, *[None] * upstream.ndim)
        )
        for run in (both_ways, tf.function(both_ways, autograph=False)):
            for actual, reference in zip(run(op, x, g), expected):
                np.testing.assert_array_equal(
                    tlm.layout.to_host(actual), reference, err_msg=name
                )


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "axes", [("batch", "model"), (None, "batch"), ("model", None)], ids=str
)
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.filterwarnings("ignore:DTensor cannot shard function")
def test_a_missing_op_is_replicated_forward_and_backward(name, axes):
    check(name, axes)


def test_stateful_ops_and_ops_that_call_functions_are_excluded():
    mesh_of(batch=2)
    tlm.dtensor.enable_missing_ops()
    for name in (
        "PyFunc",
        "EagerPyFunc",
        "QueueDequeueV2",
        "StatelessIf",
        "ResourceScatterMul",
        "StringLower",
        "Print",
        "LookupTableFindV2",
        "XlaReduceScatter",
    ):
        assert not dtensor_ops.is_replicated_op(name), name
        assert not dtensor_ops.can_shard(name), name


def test_all_other_ops_have_a_rule():
    tlm.dtensor.enable_missing_ops()
    assert tlm.dtensor.enable_missing_ops() == ()
    for name in (
        *REFERENCES,
        *GRADIENTS,
        "Qr",
        "FFT",
        "ResizeBilinear",
        "MatrixInverse",
        "DepthToSpace",
        "RandomStandardNormal",
        "XlaDynamicSlice",
        "XlaDynamicUpdateSlice",
    ):
        assert dtensor_ops.can_shard(name), name


def test_results_of_elementwise_ops_stay_sharded():
    mesh = mesh_of(batch=2, model=2)
    value = np.linspace(0.5, 4, 32, dtype=np.float32).reshape(8, 4)
    names = sorted(dtensor_ops._ELEMENTWISE)
    with tlm.layout.default_mesh(mesh):
        x = tlm.layout.to_mesh(value, layout_of(mesh, "batch", "model"))
        for name in names:
            y = getattr(tf.raw_ops, name)(x=x)
            assert tf.experimental.dtensor.fetch_layout(y).sharding_specs == [
                "batch",
                "model",
            ], name
            np.testing.assert_array_equal(
                tlm.layout.to_host(y),
                getattr(tf.raw_ops, name)(x=tf.constant(value)),
                err_msg=name,
            )


def test_rules_of_dtensor_are_not_replaced():
    assert not dtensor_ops.is_replicated_op("MatMul")
    assert not dtensor_ops.is_replicated_op("RandomUniform")
