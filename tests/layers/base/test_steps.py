"""Programs that change gradients before they apply them.

`tlm.layers.TPUEmbedding` returns a mark instead of the gradients of its tables.
Results are compared with `keras.layers.Embedding`.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.layers.base import steps

tpu = tf.tpu.experimental.embedding

NUM_ROWS, DIM = 12, 4
START = (
    np.random.default_rng(1).standard_normal((NUM_ROWS, DIM)).astype(np.float32)
)
# The ids of a program with two losses do not repeat, so that the norm of a
# dense gradient equals the norm of its slices.
IDS = tf.constant([3, 1, 4, 9, 2, 6])
REPEATED = tf.constant([3, 1, 4, 1, 5, 9, 2, 6, 5])
RATE = 0.5
CLOSE = dict(rtol=2e-5, atol=1e-6)


def start(shape, shard_info=None, dtype=None):
    del shape, shard_info, dtype
    return tf.constant(START)


def tpu_layer(rule=None):
    table = tpu.TableConfig(NUM_ROWS, DIM, start, combiner="sum", name="words")
    layer = tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(table), rule or tpu.SGD(RATE)
    )
    layer(IDS)
    return layer


def stock_layer():
    layer = keras.layers.Embedding(
        NUM_ROWS, DIM, keras.initializers.Constant(START)
    )
    layer(IDS)
    return layer


def rows_of(layer):
    if isinstance(layer, keras.layers.Embedding):
        return np.asarray(layer.embeddings)
    return layer.get_embedding_tables()["words"].numpy()


def values_of(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient


def with_values(gradient, values):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def elementwise(function):
    return lambda gradients: [
        with_values(one, function(values_of(one))) for one in gradients
    ]


def of_matrices(function):
    return elementwise(lambda g: function(g) if g.shape.rank == 2 else g)


def scaled_to_norm(gradients):
    return [
        with_values(one, values_of(one) * (0.3 / tf.linalg.global_norm([one])))
        for one in gradients
    ]


def clipped_by_norm(norm):
    return lambda gradients: [tf.clip_by_norm(one, norm) for one in gradients]


def clipped_by_global_norm(gradients):
    return tf.clip_by_global_norm(gradients, 0.7)[0]


def centered(values):
    return values - tf.reduce_mean(values, axis=1, keepdims=True)


# Linear operations, which must equal the operations on a stock layer.
LINEAR = {
    "nothing": lambda gradients: gradients,
    "scale": elementwise(lambda g: 0.37 * g),
    "loss scale": elementwise(lambda g: (g * 1024) / 1024),
    "negate": elementwise(lambda g: -g),
    "divide by norm": scaled_to_norm,
    "clip_by_norm": clipped_by_norm(0.25),
    "clip_by_norm without effect": clipped_by_norm(1e6),
    "clip_by_global_norm": clipped_by_global_norm,
    "times 0": elementwise(lambda g: g * 0.0),
    "zeros": elementwise(tf.zeros_like),
    "sum with itself": elementwise(lambda g: g * 0.25 + g),
    "mean of equal gradients": elementwise(lambda g: tf.add_n([g, g, g]) / 3),
}
# Other operations, which must raise an error.
OTHER = {
    "sign": elementwise(lambda g: 0.01 * tf.sign(g)),
    "clip_by_value": elementwise(lambda g: tf.clip_by_value(g, -0.01, 0.01)),
    "clip above": elementwise(lambda g: tf.minimum(g, 0.01)),
    "float16": elementwise(
        lambda g: tf.cast(tf.cast(g, tf.float16), tf.float32)
    ),
    "bfloat16": elementwise(
        lambda g: tf.cast(tf.cast(g, tf.bfloat16), tf.float32)
    ),
    "tanh": elementwise(tf.tanh),
    "absolute values": elementwise(tf.abs),
    "square": elementwise(tf.square),
    "normalize elements": elementwise(lambda g: g / (tf.abs(g) + 1e-8)),
    "mask": elementwise(lambda g: tf.where(tf.abs(g) > 1e-3, g, 0.0)),
    "dropout": of_matrices(
        lambda g: g * tf.cast(tf.range(g.shape[1]) % 2, tf.float32)
    ),
    "noise": elementwise(
        lambda g: g + tf.random.stateless_normal(g.shape, [1, 2], stddev=1e-3)
    ),
    "add": elementwise(lambda g: g + 1e-4),
    "rows to norm 1": of_matrices(lambda g: tf.linalg.l2_normalize(g, axis=1)),
    "columns to norm 1": of_matrices(
        lambda g: tf.linalg.l2_normalize(g, axis=0)
    ),
    "clip rows": of_matrices(lambda g: tf.clip_by_norm(g, 0.01, axes=[1])),
    "center rows": of_matrices(centered),
    "reverse": of_matrices(lambda g: tf.reverse(g, axis=[0])),
    "multiply matrix": of_matrices(lambda g: g @ tf.eye(g.shape[1])[:, ::-1]),
    "ones": elementwise(tf.ones_like),
}


def run(layer, change, *, steps=3, ids=REPEATED, in_function=False):
    """Runs steps of a custom loop, which applies changed gradients."""
    scale = tf.Variable(0.5)
    optimizer = keras.optimizers.SGD(RATE)
    weights = [one.value for one in layer.trainable_variables]

    def step(number):
        with tf.GradientTape() as tape:
            found = layer(ids)
            loss = tf.reduce_sum(tf.sin(found) * (number + scale)) / 4
        gradients = change(tape.gradient(loss, [*weights, scale]))
        optimizer.apply(gradients[:-1], list(layer.trainable_variables))
        scale.assign_sub(0.1 * gradients[-1])

    optimizer.build(layer.trainable_variables)
    if in_function:
        step = tf.function(step)
    for number in range(steps):
        step(tf.constant(float(number)))
    return rows_of(layer), scale.numpy()


@pytest.mark.covering(1, 12)
@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_operations_equal_a_stock_layer(name, in_function):
    found = run(tpu_layer(), LINEAR[name], in_function=in_function)
    expected = run(stock_layer(), LINEAR[name])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("name", OTHER)
def test_other_operations_raise_and_change_nothing(name):
    layer = tpu_layer()
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="clip_by_norm.*clipvalue.*ShardedEmbedding.*'words'",
    ):
        run(layer, OTHER[name], steps=1)
    np.testing.assert_array_equal(rows_of(layer), START)
    # The next step trains.
    run(layer, LINEAR["scale"], steps=1)
    assert np.abs(rows_of(layer) - START).max() > 1e-3


def test_random_operations_equal_a_stock_layer_or_raise():
    generator = np.random.default_rng(3)
    for _ in range(6):
        names = [
            str(generator.choice(list(group)))
            for group in (LINEAR, OTHER, LINEAR)
            if group is LINEAR or generator.integers(2)
        ]

        def change(gradients):
            for name in names:
                gradients = {**LINEAR, **OTHER}[name](gradients)
            return gradients

        layer = tpu_layer()
        try:
            found = run(layer, change, steps=1)
        except tf.errors.InvalidArgumentError:
            assert len(names) == 3
            np.testing.assert_array_equal(rows_of(layer), START)
            continue
        expected = run(stock_layer(), change, steps=1)
        np.testing.assert_allclose(
            found[0], expected[0], err_msg=str(names), **CLOSE
        )


def test_scaling_by_powers_of_two_is_bitwise_exact():
    expected = run(tpu_layer(), LINEAR["nothing"])[0]
    for name in ("loss scale", "mean of equal gradients"):
        np.testing.assert_array_equal(
            run(tpu_layer(), LINEAR[name])[0], expected
        )


@pytest.mark.parametrize("factor", [0.0, 1.0, 1e-20, 1e12])
def test_the_norm_of_a_gradient_is_the_norm_of_a_stock_layer(factor):
    norms = []
    for layer in (tpu_layer(), stock_layer()):
        weight = layer.trainable_variables[0].value
        with tf.GradientTape() as tape:
            # Two calls, whose ids are partly equal.
            loss = tf.reduce_sum(layer(REPEATED) ** 2) + tf.reduce_sum(
                3 * layer(IDS)
            )
            loss *= factor
        norms.append(
            float(tf.linalg.global_norm([tape.gradient(loss, weight)]))
        )
    assert norms[0] == pytest.approx(norms[1], rel=1e-6, abs=2e-18)


def pcgrad(gradients):
    """Projects two conflicting gradients (Yu et al., 2020)."""
    dense = [tf.convert_to_tensor(one) for one in gradients]
    projected = []
    for one, other in (dense, dense[::-1]):
        product = tf.reduce_sum(one * other)
        factor = tf.minimum(product, 0.0) / tf.reduce_sum(other**2)
        projected.append(one - factor * other)
    return projected[0] + projected[1]


def test_gradients_of_two_losses_can_be_projected():
    found = []
    for layer in (tpu_layer(), stock_layer()):
        weights = layer.trainable_variables
        optimizer = keras.optimizers.SGD(RATE)
        for step in range(3):
            with tf.GradientTape(persistent=True) as tape:
                rows = layer(IDS)
                losses = [
                    tf.reduce_sum(rows * [1.0, -2.0, 0.5, 1.0]),
                    tf.reduce_sum(-tf.sin(rows) * (0.7 + step)),
                ]
            optimizer.apply(
                [
                    pcgrad(
                        [tape.gradient(one, weights[0].value) for one in losses]
                    )
                ],
                weights,
            )
        found.append(rows_of(layer))
    np.testing.assert_allclose(*found, **CLOSE)


def test_a_step_times_zero_continues_the_moments_of_adam():
    results = []
    for is_masked in (True, False):
        layer = tpu_layer(tpu.Adam(0.1))
        optimizer = keras.optimizers.SGD()
        for step in range(4):
            with tf.GradientTape() as tape:
                rows = layer(IDS)
                # The reference gets a gradient of zeros.
                loss = tf.reduce_sum(rows) * (
                    1.0 if is_masked or step % 2 else 0.0
                )
            gradients = tape.gradient(loss, layer.trainable_variables)
            if is_masked:
                gradients = [one * float(step % 2) for one in gradients]
            optimizer.apply(gradients, layer.trainable_variables)
        assert layer.embedding.stats()["num_updates"] == 4
        results.append(rows_of(layer))
    np.testing.assert_array_equal(*results)
    assert np.abs(results[0] - START).max() > 0.1


def test_a_call_times_zero_is_part_of_the_step():
    layer = tpu_layer(tpu.Adam(0.1))
    optimizer = keras.optimizers.SGD()
    moved = []
    for step in range(2):
        gradients = []
        for ids in ([3, 1], [7]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.constant(ids)))
            gradients += tape.gradient(
                loss, [layer.trainable_variables[0].value]
            )
        before = rows_of(layer)
        optimizer.apply(
            [gradients[0] + gradients[1] * (1.0 - step)],
            layer.trainable_variables,
        )
        moved.append(rows_of(layer)[7] - before[7])
    # The moment of the first step still moves the row.
    assert np.all(moved[1] < -1e-3)


def test_a_skipped_step_is_not_applied():
    layer = tpu_layer(tpu.Adam(0.1))
    optimizer = keras.optimizers.SGD()
    for step in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(IDS))
        gradients = tape.gradient(loss, layer.trainable_variables)
        if step != 1:
            optimizer.apply(gradients, layer.trainable_variables)
    assert layer.embedding.stats()["num_updates"] == 2


def test_gradients_that_are_not_finite_are_applied_like_stock():
    found = []
    for layer in (tpu_layer(), stock_layer()):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                layer(IDS) * tf.constant([[np.inf, 1, 1, np.nan]])
            )
        gradients = tape.gradient(loss, layer.trainable_variables)
        assert not np.isfinite(tf.linalg.global_norm(gradients))
        keras.optimizers.SGD(RATE).apply(gradients, layer.trainable_variables)
        found.append(rows_of(layer))
    np.testing.assert_array_equal(*found)


def test_calls_in_vectorized_map_raise():
    layer = tpu_layer()
    weights = [one.value for one in layer.trainable_variables]

    @tf.function
    def forward(ids):
        return layer(ids)

    for call in (layer, forward):

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                found = tf.vectorized_map(
                    lambda one: call(one[tf.newaxis]), IDS
                )
                loss = tf.reduce_sum(found)
            return tape.gradient(loss, weights)

        with pytest.raises(
            NotImplementedError, match="vectorized_map.*ids of all iterations"
        ):
            step()
    # Evaluation and map_fn are supported.
    found = tf.vectorized_map(lambda one: layer(one[tf.newaxis]), IDS)
    np.testing.assert_array_equal(found[:, 0], START[IDS.numpy()])
    with tf.GradientTape() as tape:
        found = tf.map_fn(
            lambda one: layer(one[tf.newaxis]),
            IDS,
            fn_output_signature=tf.float32,
        )
        loss = tf.reduce_sum(found)
    keras.optimizers.SGD(RATE).apply(
        tape.gradient(loss, layer.trainable_variables),
        layer.trainable_variables,
    )
    moved = rows_of(layer) - START
    np.testing.assert_allclose(moved[IDS.numpy()], -RATE, rtol=1e-6)


@pytest.fixture
def checked_numerics():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


def test_check_numerics_accepts_a_mark(checked_numerics):
    @tf.function(autograph=False)
    def gradient_of_mark(activations):
        step = tf.ones([])
        with tf.GradientTape() as tape:
            tape.watch(step)
            found = steps.connect_mark(
                lambda gradients: tf.ones([]), step, [activations], 1
            )
        return tape.gradient(found, step)

    np.testing.assert_array_equal(gradient_of_mark(tf.ones([2, 3])), 1.0)
