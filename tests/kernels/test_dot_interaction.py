"""The ops of dot products equal a numpy reference."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import dot_interaction
from tf_layoutmap._core import op_gradients, ops

OPTIONS = [
    {"self_interaction": own, "skip_gather": full}
    for own in (False, True)
    for full in (False, True)
]


def integers(*shape: int, seed: int) -> np.ndarray:
    """Returns integers as floats, so that sums of products are exact."""
    values = np.random.default_rng(seed).integers(-8, 9, shape)
    return values.astype(np.float32)


def batch(num_features: int, num_samples: int, dim: int) -> list[np.ndarray]:
    return [
        integers(num_samples, dim, seed=seed) for seed in range(num_features)
    ]


def check(features: list, **options: bool) -> None:
    arrays = [np.asarray(one) for one in features]
    found = ops.dot_interaction(features=features, **options)
    expected = dot_interaction.products(arrays, **options)
    np.testing.assert_array_equal(found, expected)
    of_products = integers(*expected.shape, seed=99)
    gradients = ops.dot_interaction_grad(
        features=features, gradients=of_products, **options
    )
    for one, wanted in zip(
        gradients,
        dot_interaction.gradients(arrays, of_products, **options),
        strict=True,
    ):
        np.testing.assert_array_equal(one, wanted)
    for one, wanted in zip(
        op_gradients.dot_interaction_grad(
            list(map(tf.constant, arrays)), tf.constant(of_products), **options
        ),
        gradients,
        strict=True,
    ):
        np.testing.assert_array_equal(one, wanted)


@given(
    num_features=st.integers(1, 20),
    num_samples=st.integers(0, 40),
    dim=st.integers(0, 40),
    options=st.sampled_from(OPTIONS),
)
def test_products_and_gradients_equal_the_reference(
    num_features, num_samples, dim, options
):
    check(batch(num_features, num_samples, dim), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 4), (2, 3, 1), (27, 300, 16), (5, 0, 3), (3, 2, 0), (30, 9, 700)],
    ids=str,
)
def test_edge_cases_equal_the_reference(shape, options):
    check(batch(*shape), **options)


def test_features_can_be_slices_of_one_tensor():
    values = tf.constant(integers(7, 5, 9, seed=3))
    check([values[i] for i in range(7)], **OPTIONS[0])
    check([values[0, :, 3:6], values[1, :, 1:4]], **OPTIONS[1])
    check(tf.split(values[0], 3, axis=1), **OPTIONS[2])


def test_one_tensor_can_be_several_features():
    one, other = map(tf.constant, batch(2, 4, 3))
    check([one, other, one], **OPTIONS[1])


def test_a_row_of_another_sample_is_not_read():
    features = batch(3, 40, 5)
    for one in features:
        one[7] = np.nan
    found = ops.dot_interaction(features=features).numpy()
    assert np.isnan(found[7]).all()
    assert not np.isnan(np.delete(found, 7, axis=0)).any()
    for one in ops.dot_interaction_grad(
        features=features, gradients=np.ones([40, 3], np.float32)
    ):
        assert np.isnan(one.numpy()[7]).all()
        assert not np.isnan(np.delete(one.numpy(), 7, axis=0)).any()


def test_shapes_are_inferred():
    @tf.function(input_signature=[[tf.TensorSpec([None, 4])] * 3])
    def run(features):
        found = {}
        for options in OPTIONS:
            products = ops.dot_interaction(features=features, **options)
            gradients = ops.dot_interaction_grad(
                features=features, gradients=products, **options
            )
            assert [one.shape.as_list() for one in gradients] == [[None, 4]] * 3
            found[str(options)] = products
        return found

    shapes = [
        one.shape.as_list()
        for one in run.get_concrete_function().structured_outputs.values()
    ]
    assert sorted(shapes) == [[None, 3], [None, 6], [None, 9], [None, 9]]


@pytest.mark.parametrize("shape", [(3, 4), (2, 5), (12,), (2, 2, 2)], ids=str)
def test_features_of_different_shapes_raise(shape):
    features = [tf.zeros([2, 4]), tf.zeros(shape)]
    with pytest.raises(tf.errors.InvalidArgumentError):
        ops.dot_interaction(features=features)

    @tf.function(input_signature=[[tf.TensorSpec(None)] * 2])
    def run(features):
        return ops.dot_interaction(features=features)

    with pytest.raises(
        tf.errors.InvalidArgumentError, match="same shape.*index 1"
    ):
        run(features)


def test_gradients_of_another_shape_raise():
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    def run(feature, gradients):
        return ops.dot_interaction_grad(
            features=[feature, feature], gradients=gradients
        )

    run(tf.zeros([2, 4]), tf.zeros([2, 1]))
    for shape in [(2, 2), (1, 1), (2,)]:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="`gradients`.*Received"
        ):
            run(tf.zeros([2, 4]), tf.zeros(shape))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="`features` must have rank 2"
    ):
        run(tf.zeros([2]), tf.zeros([2, 1]))


def derivatives(function, features: list) -> list:
    """Returns results, gradients and second derivatives of a function."""
    with tf.GradientTape() as outer:
        outer.watch(features)
        with tf.GradientTape() as inner:
            inner.watch(features)
            products = function(features)
            loss = tf.reduce_sum(products**3)
        gradients = inner.gradient(loss, features)
        sums = tf.add_n([tf.reduce_sum(one**2) for one in gradients])
    return [products, *gradients, *outer.gradient(sums, features)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_derivatives_equal_those_of_stock_operations(options):
    random = np.random.default_rng(0)
    features = [
        tf.constant(random.uniform(-1, 1, [6, 5]), tf.float32) for _ in range(4)
    ]
    found = derivatives(
        lambda x: ops.dot_interaction(features=x, **options), features
    )
    expected = derivatives(
        lambda x: op_gradients.dot_interaction(x, **options), features
    )
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_equal_differences(options):
    features = [tf.constant(one / 8) for one in batch(3, 2, 4)]
    theoretical, numeric = tf.test.compute_gradient(
        lambda *x: ops.dot_interaction(features=x, **options), features
    )
    for one, wanted in zip(theoretical, numeric, strict=True):
        np.testing.assert_allclose(one, wanted, atol=2e-3)


def test_gradients_of_the_gradient_equal_differences():
    features = [tf.constant(one / 8) for one in batch(3, 2, 4)]
    of_products = tf.constant(integers(2, 6, seed=9) / 8)

    def gradient(*inputs):
        return tf.concat(
            ops.dot_interaction_grad(
                features=inputs[:-1], gradients=inputs[-1], **OPTIONS[2]
            ),
            axis=1,
        )

    theoretical, numeric = tf.test.compute_gradient(
        gradient, [*features, of_products]
    )
    for one, wanted in zip(theoretical, numeric, strict=True):
        np.testing.assert_allclose(one, wanted, atol=2e-3)
