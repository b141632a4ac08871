"""Tables with an open vocabulary and closed tables have equal gradients.

The tests apply operations to the gradient of a table before the optimizer
applies it. The table without a vocabulary has the same rows.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
VERSIONS = [(keras, tlm.layers), (tf_keras, tlm.layers.tf_keras)]
both = pytest.mark.parametrize(("version", "layers"), VERSIONS)
DIM = 2
KEYS = np.array([[7, 3], [7, 9], [5, -4]])


def rule(name):
    return {"sgd": tpu.SGD(0.5), "adam": tpu.Adam(0.5)}[name]


def open_layer(layers, optimizer="sgd", capacity=20, **settings):
    layer = layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(capacity, **settings),
        DIM,
        num_shards=2,
        optimizer=rule(optimizer),
        embeddings_initializer="uniform",
        name="words",
    )
    layer.build(None)
    return layer


def pair_of(layers, optimizer="sgd"):
    """Returns an open and a closed layer with the same rows for `KEYS`."""
    layer = open_layer(layers, optimizer)
    with tf.GradientTape():
        layer(KEYS)
    closed = layers.ShardedEmbedding(
        layer.embeddings.shape[0],
        DIM,
        num_shards=3,
        optimizer=rule(optimizer),
        name="closed",
    )
    closed.build(None)
    closed.embeddings.assign(tf.convert_to_tensor(layer.embeddings))
    return (layer, KEYS), (closed, layer.vocabulary.lookup(KEYS).numpy())


def slices(function):
    """Returns a function of the values of a gradient."""

    def changed(gradients, weights):
        del weights
        return [
            tf.IndexedSlices(function(one.values), one.indices, one.dense_shape)
            if isinstance(one, tf.IndexedSlices)
            else function(one)
            for one in gradients
        ]

    return changed


def dense(function):
    """Returns a function of dense gradients."""

    def changed(gradients, weights):
        del weights
        return [function(tf.convert_to_tensor(one)) for one in gradients]

    return changed


def row_mask(gradients, weights):
    del weights
    table, *others = gradients
    is_kept = tf.gather(tf.range(table.dense_shape[0]) % 3 != 0, table.indices)
    return [
        tf.IndexedSlices(
            tf.boolean_mask(table.values, is_kept),
            tf.boolean_mask(table.indices, is_kept),
            table.dense_shape,
        ),
        *others,
    ]


def summed_rows(gradients, weights):
    del weights
    table, *others = gradients
    rows, positions = tf.unique(table.indices)
    return [
        tf.IndexedSlices(
            tf.math.unsorted_segment_sum(
                table.values, positions, tf.size(rows)
            ),
            rows,
            table.dense_shape,
        ),
        *others,
    ]


def adaptive_clipping(gradients, weights):
    """Limits the norm of each row to a part of the norm of the weight."""
    clipped = []
    for gradient, weight in zip(gradients, weights):
        gradient = tf.convert_to_tensor(gradient)
        weight = tf.convert_to_tensor(weight)
        limit = 0.1 * tf.maximum(tf.norm(weight, axis=-1, keepdims=True), 1e-3)
        norm = tf.maximum(tf.norm(gradient, axis=-1, keepdims=True), 1e-9)
        clipped.append(
            tf.where(norm > limit, gradient * limit / norm, gradient)
        )
    return clipped


def norm_of(gradient):
    return tf.linalg.global_norm([gradient])


OPERATIONS = {
    "unchanged": lambda gradients, weights: gradients,
    "sign": dense(lambda one: 0.01 * tf.sign(one)),
    "sign of values": slices(lambda one: 0.01 * tf.sign(one)),
    "normalized": slices(lambda one: 0.01 * one / norm_of(one)),
    "normalized dense": dense(lambda one: 0.01 * one / tf.norm(one)),
    "clip_by_value": lambda gradients, weights: [
        tf.clip_by_value(one, -0.01, 0.01) for one in gradients
    ],
    "clip_by_norm": lambda gradients, weights: [
        tf.clip_by_norm(one, 0.01) for one in gradients
    ],
    "clip_by_global_norm": lambda gradients, weights: tf.clip_by_global_norm(
        gradients, 0.1
    )[0],
    "adaptive clipping": adaptive_clipping,
    "float16": slices(lambda one: tf.cast(tf.cast(one, tf.float16), one.dtype)),
    "row mask": row_mask,
    "summed rows": summed_rows,
    "times zero": slices(lambda one: one * 0.0),
    "dense times zero": dense(lambda one: one * 0.0),
    "weight decay": lambda gradients, weights: [
        tf.convert_to_tensor(one) + 0.1 * tf.convert_to_tensor(weight)
        for one, weight in zip(gradients, weights)
    ],
    "twice negated": dense(lambda one: tf.negative(tf.negative(one))),
}


def train(version, layer, ids, *operations, is_function, num_steps=3):
    """Returns the norms of the gradients of all steps."""
    optimizer = version.optimizers.SGD(0.5)
    kernel = version.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    kernel.build([None, DIM])
    weights = layer.trainable_variables + kernel.trainable_variables
    if hasattr(optimizer, "build"):
        optimizer.build(weights)

    def step(ids, factor):
        with tf.GradientTape() as tape:
            rows = layer(ids)
            loss = tf.reduce_sum(kernel(rows) * (1 + rows) * factor)
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        for name in operations:
            gradients = OPERATIONS[name](gradients, weights)
        optimizer.apply_gradients(zip(gradients, weights))
        return norm

    run = tf.function(step) if is_function else step
    norms = [
        run(tf.constant(ids[: 3 - number % 2]), tf.constant(1.0 + number))
        for number in range(num_steps)
    ]
    return [*norms, *(tf.convert_to_tensor(one) for one in weights)]


@pytest.mark.covering(1, 2)
@both
@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("is_function", [False, True])
def test_any_operation_on_gradients_equals_a_closed_table(
    version, layers, operation, optimizer, is_function
):
    found = [
        train(version, layer, ids, operation, is_function=is_function)
        for layer, ids in pair_of(layers, optimizer)
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_of_operations_equal_a_closed_table(seed):
    random = np.random.default_rng(seed)
    # These two operations require a sparse gradient.
    sparse = [str(random.choice(["row mask", "summed rows"]))]
    others = sorted(set(OPERATIONS) - {"row mask", "summed rows"})
    names = sparse[: seed % 2] + [str(random.choice(others)) for _ in range(4)]
    found = [
        train(keras, layer, ids, *names, is_function=True)
        for layer, ids in pair_of(tlm.layers, "adam")
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=1e-5, atol=1e-6, err_msg=str(names)
        )


@both
def test_a_gradient_times_zero_continues_the_moments_of_adam(version, layers):
    (layer, keys), _ = pair_of(layers, "adam")
    train(version, layer, keys, "unchanged", is_function=True, num_steps=1)
    before = tf.convert_to_tensor(layer.embeddings).numpy()
    moments = tf.convert_to_tensor(layer.optimizer.slots["momenta"]).numpy()
    assert moments.any()
    train(version, layer, keys, "times zero", is_function=True, num_steps=1)
    assert int(layer.optimizer.iterations) == 2
    after = tf.convert_to_tensor(layer.embeddings).numpy()
    rows = np.unique(layer.vocabulary.lookup(keys))
    assert (after[rows] != before[rows]).all()
    np.testing.assert_allclose(
        tf.convert_to_tensor(layer.optimizer.slots["momenta"]),
        0.9 * moments,
        rtol=1e-6,
    )


@both
def test_conflicting_gradients_are_projected(version, layers):
    """PCGrad combines the gradients of two losses of a persistent tape."""

    def step(layer, ids):
        weights = layer.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            rows = layer(ids)
            losses = [
                tf.reduce_sum(rows),
                tf.reduce_sum(rows[:2] * (rows[:2] - 3)),
            ]
        first, second = (
            tf.convert_to_tensor(tape.gradient(one, weights)[0])
            for one in losses
        )
        product = tf.reduce_sum(first * second)
        assert product < 0
        combined = (
            first
            - product / tf.reduce_sum(second**2) * second
            + second
            - product / tf.reduce_sum(first**2) * first
        )
        version.optimizers.SGD(1.0).apply_gradients([(combined, weights[0])])
        return tf.convert_to_tensor(layer.embeddings)

    (layer, keys), (closed, ids) = pair_of(layers)
    for _ in range(20):
        np.testing.assert_allclose(
            step(layer, keys), step(closed, ids), rtol=1e-5, atol=1e-6
        )
    # The lookups of earlier steps have expired.
    assert layer.embedding.stats()["followed"][0] < 20


@both
@pytest.mark.parametrize("is_dense", [False, True])
def test_gradients_of_several_steps_are_added(version, layers, is_dense):
    def step(layer, ids):
        weights = layer.trainable_variables
        gradients = []
        for number in range(3):
            with tf.GradientTape() as tape:
                rows = layer(ids[number : number + 1])
                loss = tf.reduce_sum(rows * rows) * (number + 1.0)
            gradients.append(tape.gradient(loss, weights)[0])
        total = (
            tf.add_n([tf.convert_to_tensor(one) for one in gradients])
            if is_dense
            else tf.IndexedSlices(
                tf.concat([one.values for one in gradients], 0),
                tf.concat([one.indices for one in gradients], 0),
                gradients[0].dense_shape,
            )
        )
        version.optimizers.SGD(1.0).apply_gradients([(total, weights[0])])
        return tf.convert_to_tensor(layer.embeddings)

    (layer, keys), (closed, ids) = pair_of(layers)
    np.testing.assert_allclose(step(layer, keys), step(closed, ids), rtol=1e-6)
    counts = layer.embedding.stats()
    # The lookup of `pair_of` has no gradient.
    assert (counts["open"], counts["followed"]) == ([1], [0])


@both
def test_pending_gradients_are_applied_one_by_one(version, layers):
    def step(layer, ids):
        weights = layer.trainable_variables
        optimizer = version.optimizers.SGD(1.0)
        gradients = []
        for number in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids) * (number + 1.0))
            gradients.append(tape.gradient(loss, weights)[0])
        gradients[1:3] = [tf.convert_to_tensor(one) for one in gradients[1:3]]
        for one in reversed(gradients):
            optimizer.apply_gradients([(one, weights[0])])
        return tf.convert_to_tensor(layer.embeddings)

    (layer, keys), (closed, ids) = pair_of(layers)
    np.testing.assert_allclose(step(layer, keys), step(closed, ids), rtol=1e-6)


@both
@pytest.mark.parametrize("is_dense", [False, True])
def test_an_expired_gradient_raises_and_changes_no_row(
    version, layers, is_dense
):
    """The row of the first key is assigned to another key in the meantime."""
    layer = open_layer(layers, capacity=8)
    optimizer = version.optimizers.SGD(1.0)
    (weight,) = layer.trainable_variables

    def gradient_of(key):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([key])))
        return tape.gradient(loss, weight)

    old = gradient_of(0)
    if is_dense:
        old = tf.convert_to_tensor(old)
    for key in range(1, 70):
        optimizer.apply_gradients([(gradient_of(key), weight)])
    assert not layer.vocabulary.contains([0]).numpy().any()
    before = tf.convert_to_tensor(layer.embeddings).numpy()
    count = int(layer.optimizer.iterations)
    match = "no lookup|has expired"
    with pytest.raises(tf.errors.FailedPreconditionError, match=match):
        optimizer.apply_gradients([(old, weight)])
    np.testing.assert_array_equal(
        tf.convert_to_tensor(layer.embeddings), before
    )
    assert int(layer.optimizer.iterations) == count
    optimizer.apply_gradients([(gradient_of(0), weight)])


@both
def test_a_pending_gradient_keeps_its_rows(version, layers):
    """The vocabulary is full, so that other keys get no row."""
    del version
    layer = open_layer(layers, capacity=8)
    (weight,) = layer.trainable_variables
    keys = np.arange(layer.vocabulary.settings.num_rows - 1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(keys))
    gradient = tape.gradient(loss, weight)
    known = layer.vocabulary.contains(keys).numpy()
    for key in range(100, 170):
        with tf.GradientTape():
            layer(tf.constant([key]))
    np.testing.assert_array_equal(layer.vocabulary.contains(keys), known)
    assert gradient.values.shape[0] == known.sum()


@both
def test_keys_without_a_row_have_no_gradient(version, layers):
    del version
    layer = open_layer(layers, admission="count", min_count=2)
    (weight,) = layer.trainable_variables
    for expected in (0, 3):
        with tf.GradientTape() as tape:
            rows = layer(tf.constant([4, 5, 6]))
            loss = tf.reduce_sum(rows)
        gradient = tape.gradient(loss, weight)
        assert gradient.indices.shape == [expected]
        assert np.any(rows.numpy()) == (expected > 0)


@both
def test_a_lookup_in_a_loop_has_a_gradient(version, layers):
    def step(layer, ids):
        weights = layer.trainable_variables

        @tf.function
        def gradient():
            with tf.GradientTape() as tape:
                loss = 0.0
                for number in tf.range(3):
                    loss += tf.reduce_sum(layer(ids) ** 2) * tf.cast(
                        number + 1, tf.float32
                    )
            return tf.convert_to_tensor(tape.gradient(loss, weights)[0])

        version.optimizers.SGD(1.0).apply_gradients([(gradient(), weights[0])])
        return tf.convert_to_tensor(layer.embeddings)

    (layer, keys), (closed, ids) = pair_of(layers)
    for _ in range(2):
        np.testing.assert_allclose(
            step(layer, tf.constant(keys)),
            step(closed, tf.constant(ids)),
            rtol=1e-5,
        )


@both
def test_a_gradient_before_a_change_of_the_capacity_raises(version, layers):
    layer = open_layer(layers)
    (weight,) = layer.trainable_variables

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(KEYS))
        return tape.gradient(loss, weight)

    old = gradient()
    layer.vocabulary.resize(200)
    optimizer = version.optimizers.SGD(1.0)
    new = gradient()
    with pytest.raises(ValueError, match=r"must have shape \(2\d\d, 2\)"):
        optimizer.apply_gradients([(old, weight)])
    optimizer.apply_gradients([(new, weight)])


def test_fit_with_a_global_norm_of_all_gradients_equals_a_closed_table():
    class Clipped(keras.Model):
        def train_step(self, data):
            ids, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(ids, y, self(ids, training=True))
            weights = self.trainable_variables
            gradients, norm = tf.clip_by_global_norm(
                tape.gradient(loss, weights), 0.05
            )
            self.optimizer.apply_gradients(zip(gradients, weights))
            return {"norm": norm}

    found = []
    for layer, ids in pair_of(tlm.layers):
        inputs = keras.Input([2], dtype="int64")
        outputs = keras.layers.Dense(1, kernel_initializer="ones")(
            keras.layers.Flatten()(layer(inputs))
        )
        model = Clipped(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.5), "mse")
        history = model.fit(
            ids, np.ones([3, 1]), epochs=4, verbose=0, shuffle=False
        )
        found.append(
            [*history.history["norm"], tf.convert_to_tensor(layer.embeddings)]
        )
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("kind", ["open", "closed", "shards"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_stateless_call_uses_the_passed_table(kind, num_shards):
    layer = tlm.layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(20) if kind == "open" else 10,
        DIM,
        num_shards=num_shards,
        optimizer=None if kind == "shards" else "sgd",
        embeddings_initializer="ones",
    )
    layer.build(None)
    ids = tf.constant([3, 4, 3])
    if kind == "open":
        with tf.GradientTape():
            layer(ids)
    passed = [
        tf.fill(weight.shape, 3.0) for weight in layer.trainable_variables
    ]
    stats = layer.vocabulary.stats() if kind == "open" else None
    with tf.GradientTape() as tape:
        tape.watch(passed)
        rows, _ = layer.stateless_call(passed, [], ids)
        loss = tf.reduce_sum(rows * rows)
    np.testing.assert_array_equal(rows, np.full([3, DIM], 3.0))
    gradients = [
        tf.convert_to_tensor(one) for one in tape.gradient(loss, passed)
    ]
    assert tf.reduce_sum(tf.concat(gradients, 0)) == 3 * DIM * 6
    np.testing.assert_array_equal(layer(ids), np.ones([3, DIM]))
    if kind == "open":
        assert layer.vocabulary.stats() == stats
    with keras.StatelessScope():
        np.testing.assert_array_equal(layer(ids), np.ones([3, DIM]))


@both
def test_lookups_in_a_vectorized_map_train(version, layers):
    def losses(layer, ids):
        weights = layer.trainable_variables
        optimizer = version.optimizers.SGD(1.0)
        if hasattr(optimizer, "build"):
            optimizer.build(weights)

        @tf.function
        def step(ids):
            with tf.GradientTape() as tape:
                found = tf.vectorized_map(
                    lambda one: tf.reduce_sum(layer(one)), ids
                )
                loss = tf.reduce_sum(found)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, weights), weights)
            )
            return loss

        return [step(tf.constant(ids)) for _ in range(3)]

    (layer, keys), (closed, ids) = pair_of(layers)
    np.testing.assert_allclose(
        losses(layer, keys), losses(closed, ids), rtol=1e-5, atol=1e-6
    )


@both
def test_a_forward_pass_in_a_function_trains_with_a_tape_outside(
    version, layers
):
    layer = open_layer(layers)
    weights = layer.trainable_variables
    optimizer = version.optimizers.SGD(1.0)
    forward = tf.function(lambda keys: tf.reduce_sum(layer(keys)))
    found = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = forward(tf.constant([3, 4]))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        found.append(float(loss))
    np.testing.assert_allclose(np.diff(found), [-2.0, -2.0], rtol=1e-5)


@both
def test_a_forward_pass_that_was_traced_without_a_tape_trains(version, layers):
    """The function is traced again, so that the lookup adds new keys."""
    layer = open_layer(layers)
    weights = layer.trainable_variables
    forward = tf.function(lambda keys: tf.reduce_sum(layer(keys)))
    forward(tf.constant([3]))
    with tf.GradientTape() as tape:
        loss = forward(tf.constant([3]))
    gradients = tape.gradient(loss, weights)
    version.optimizers.SGD(1.0).apply_gradients(zip(gradients, weights))
    before = float(loss)
    np.testing.assert_allclose(
        forward(tf.constant([3])) - before, -0.5 * layer.output_dim, rtol=1e-5
    )


def test_a_step_in_a_stateless_scope_raises():
    (layer, keys), (closed, ids) = pair_of(tlm.layers)
    for one, batch in ((layer, keys), (closed, ids)):
        optimizer = keras.optimizers.SGD(1.0)
        weights = one.trainable_variables
        optimizer.build(weights)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(one(batch))
        gradients = tape.gradient(loss, weights)
        before = tf.convert_to_tensor(one.embeddings).numpy()
        with (
            keras.StatelessScope(),
            pytest.raises(NotImplementedError, match="StatelessScope"),
        ):
            optimizer.apply(gradients, weights)
        np.testing.assert_array_equal(
            tf.convert_to_tensor(one.embeddings), before
        )


@both
@pytest.mark.parametrize(
    "strategy",
    [tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy],
)
def test_loss_scaling_under_a_strategy_trains(version, layers, strategy):
    with strategy(
        "/cpu:0" if strategy is tf.distribute.OneDeviceStrategy else ["/cpu:0"]
    ).scope():
        layer = open_layer(layers)
        inputs = version.Input([2], dtype="int64")
        model = version.Model(inputs, layer(inputs))
        optimizer = version.optimizers.SGD(0.1)
        model.compile(
            version.optimizers.LossScaleOptimizer(optimizer)
            if version is keras
            else version.mixed_precision.LossScaleOptimizer(optimizer),
            "mse",
        )
    model.fit(KEYS, np.ones([3, 2, DIM], np.float32), verbose=0)
    assert int(layer.optimizer.iterations.numpy()) == 1
