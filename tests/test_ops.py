"""Tests `tlm.ops`: checks of arguments, and the choice of the operations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies  # noqa: F401
from tests.layout.meshes import mesh_of
from tests.reference import dot_interaction as reference

OPTIONS = [
    {"self_interaction": own, "skip_gather": full}
    for own in (False, True)
    for full in (False, True)
]
dtensor = tf.experimental.dtensor


def batch(num_features=4, num_samples=6, dim=3) -> list[np.ndarray]:
    """Returns small integers, whose products are exact in all dtypes."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(-3, 4, [num_samples, dim]).astype(np.float32)
        for _ in range(num_features)
    ]


def op_types(function, *args) -> set[str]:
    """Returns the types of the ops in the graph of a function."""
    graph = function.get_concrete_function(*args).graph
    graphs = [graph]
    types = set()
    while graphs:
        definition = graphs.pop().as_graph_def()
        types |= {node.op for node in definition.node}
        for inner in definition.library.function:
            types |= {node.op for node in inner.node_def}
    return types


def has_op(function, *args) -> bool:
    return "LayoutMap>DotInteraction" in op_types(function, *args)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float32_uses_the_op(options):
    features = batch()
    expected = reference.products(features, **options)
    found = tlm.ops.dot_interaction(features, **options)
    np.testing.assert_array_equal(found, expected)
    function = tf.function(lambda x: tlm.ops.dot_interaction(x, **options))
    tensors = list(map(tf.constant, features))
    assert has_op(function, tensors)
    np.testing.assert_array_equal(function(tensors), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_dtypes_use_stock_operations(dtype, options):
    features = [tf.cast(one, dtype) for one in batch()]
    found = tlm.ops.dot_interaction(features, **options)
    assert found.dtype == dtype
    np.testing.assert_array_equal(
        tf.cast(found, tf.float32), reference.products(batch(), **options)
    )
    function = tf.function(lambda x: tlm.ops.dot_interaction(x, **options))
    assert not has_op(function, features)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_xla_compiles_stock_operations_with_their_gradient(options):
    features = list(map(tf.constant, batch()))
    of_products = tf.ones_like(tlm.ops.dot_interaction(features, **options))

    def run(features):
        with tf.GradientTape() as tape:
            tape.watch(features)
            products = tlm.ops.dot_interaction(features, **options)
        return products, tape.gradient(products, features, of_products)

    compiled = tf.function(run, jit_compile=True)
    assert not has_op(compiled, features)
    tf.nest.map_structure(
        np.testing.assert_array_equal, compiled(features), run(features)
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("axis", ["batch", dtensor.UNSHARDED])
def test_tensors_on_a_mesh_are_accepted(axis, options):
    mesh = mesh_of(batch=2)
    layout = dtensor.Layout([axis, dtensor.UNSHARDED], mesh)
    replicated = dtensor.Layout.replicated(mesh, 2)
    features = [
        dtensor.relayout(dtensor.copy_to_mesh(one, replicated), layout)
        for one in map(tf.constant, batch())
    ]
    expected = reference.products(batch(), **options)
    for call in (tlm.ops.dot_interaction, tf.function(tlm.ops.dot_interaction)):
        found = dtensor.relayout(call(features, **options), replicated)
        np.testing.assert_array_equal(
            dtensor.unpack(found)[0].numpy(), expected
        )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_symbolic_keras_tensors_become_layers_of_a_model(options):
    inputs = [keras.Input([3]) for _ in range(4)]
    products = tlm.ops.dot_interaction(inputs, **options)
    expected = reference.products(batch(), **options)
    assert products.shape == (None, expected.shape[1])
    model = keras.Model(inputs, products)
    np.testing.assert_array_equal(model.predict_on_batch(batch()), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_symbolic_tf_keras_tensors_become_layers_of_a_model(options):
    tf_keras = pytest.importorskip("tf_keras")
    inputs = [tf_keras.Input([3]) for _ in range(4)]
    model = tf_keras.Model(inputs, tlm.ops.dot_interaction(inputs, **options))
    np.testing.assert_array_equal(
        model.predict_on_batch(batch()),
        reference.products(batch(), **options),
    )


def test_a_saved_model_contains_stock_operations(tmp_path):
    module = tf.Module()
    module.run = tf.function(
        tlm.ops.dot_interaction,
        input_signature=[[tf.TensorSpec([None, 3])] * 4],
    )
    tf.saved_model.save(module, str(tmp_path))
    saved = tf.saved_model.load(str(tmp_path))
    function = saved.signatures["serving_default"]
    assert not any(
        "LayoutMap" in op.type for op in function.graph.get_operations()
    )
    assert "LayoutMap" not in str(function.graph.as_graph_def())
    np.testing.assert_array_equal(
        saved.run(list(map(tf.constant, batch()))),
        reference.products(batch(), self_interaction=False, skip_gather=False),
    )


def test_variables_and_arrays_are_accepted():
    features = batch()
    expected = tlm.ops.dot_interaction(features)
    for kind in (tf.Variable, keras.Variable, np.ndarray.tolist):
        found = tlm.ops.dot_interaction([kind(one) for one in features])
        np.testing.assert_array_equal(found, expected)


def test_jacobians_equal_those_of_stock_operations():
    features = list(map(tf.constant, batch(3, 2, 2)))

    def jacobians(dtype):
        cast = [tf.cast(one, dtype) for one in features]
        with tf.GradientTape() as tape:
            tape.watch(cast)
            products = tlm.ops.dot_interaction(cast)
        return tape.jacobian(products, cast)

    for one, wanted in zip(
        jacobians(tf.float32), jacobians(tf.float64), strict=True
    ):
        np.testing.assert_array_equal(one, wanted)


def test_forward_mode_equals_differences():
    features = list(map(tf.constant, batch(3, 2, 2)))
    tangents = [tf.ones_like(one) for one in features]
    with tf.autodiff.ForwardAccumulator(features, tangents) as accumulator:
        products = tlm.ops.dot_interaction(features)
    # The products are quadratic, so central differences are exact.
    above, below = (
        tlm.ops.dot_interaction([one + step for one in features])
        for step in (1.0, -1.0)
    )
    np.testing.assert_array_equal(
        accumulator.jvp(products), (above - below) / 2
    )


def test_vectorized_map_equals_a_loop():
    values = tf.constant(np.stack(batch(4, 6, 3)))
    found = tf.vectorized_map(
        lambda one: tlm.ops.dot_interaction([one, one + 1.0, 2.0 * one]), values
    )
    expected = [
        tlm.ops.dot_interaction([one, one + 1.0, 2.0 * one]) for one in values
    ]
    np.testing.assert_array_equal(found, tf.stack(expected))


@pytest.mark.parametrize(
    ("features", "error", "words"),
    [
        ([], ValueError, "`features` must contain at least one.*empty list"),
        (tf.zeros([2, 3]), TypeError, "list or tuple.*Received: "),
        ([tf.zeros([2, 3, 1])], ValueError, r"rank 2.*\(2, 3, 1\) at index 0"),
        ([[1.0, 2.0]], ValueError, r"rank 2.*\(2,\) at index 0"),
        (
            [tf.zeros([2, 3]), tf.zeros([2, 4])],
            ValueError,
            r"same shape.*\(2, 4\) at index 1, shape \(2, 3\).*Dense",
        ),
        (
            [tf.zeros([2, 3]), tf.zeros([2, 3], tf.float64)],
            TypeError,
            "same floating-point dtype.*float32, float64",
        ),
        ([tf.zeros([2, 3], tf.int32)], TypeError, "floating-point.*int32"),
        (
            [keras.KerasTensor([None, 3]), keras.KerasTensor([None, 4])],
            ValueError,
            "same shape",
        ),
    ],
)
def test_invalid_features_raise(features, error, words):
    with pytest.raises(error, match=words):
        tlm.ops.dot_interaction(features)


def test_unknown_shapes_are_checked_when_the_op_runs():
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    def run(one, other):
        return tlm.ops.dot_interaction([one, other])

    np.testing.assert_array_equal(
        run(tf.ones([2, 3]), tf.ones([2, 3])), [[3.0], [3.0]]
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="same shape"):
        run(tf.ones([2, 3]), tf.ones([1, 3]))
