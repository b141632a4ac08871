"""Several calls of a layer per step on servers, compared with one process."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.servers import local
from tf_layoutmap.embedding.servers import lookups

tpu = tf.tpu.experimental.embedding


def table(name, num_rows, dim, combiner):
    rows = np.random.default_rng(dim).normal(size=[num_rows, dim])

    def initializer(shape, shard_info=None, dtype=None):
        del shape, dtype
        first = shard_info.offset[0]
        return rows[first : first + shard_info.shape[0]].astype(np.float32)

    return tpu.TableConfig(num_rows, dim, initializer, None, combiner, name)


def make_layer(**options):
    ads, words = table("ads", 11, 4, "mean"), table("words", 7, 3, "sum")
    layer = tlm.layers.TPUEmbedding(
        {
            "shown": tpu.FeatureConfig(ads, name="shown"),
            "bag": tpu.FeatureConfig(words, name="bag"),
            "text": tpu.FeatureConfig(
                words, max_sequence_length=2, name="text"
            ),
        },
        tpu.Adagrad(0.3),
        **options,
    )
    layer.build()
    return layer


def make_layers(num_servers=2, **options):
    """Returns two equal layers, one on servers and one in one process."""
    with local.servers(num_servers, 3):
        distributed = make_layer(**options)
    return distributed, make_layer(**options)


def ragged(seed, num_samples, num_rows):
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 4, num_samples)
    return tf.RaggedTensor.from_row_lengths(
        random.integers(0, num_rows, sizes.sum()), sizes
    )


def dense(seed, num_samples, num_rows, width=2):
    return tf.constant(
        np.random.default_rng(seed).integers(0, num_rows, [num_samples, width])
    )


def sparse(seed, num_samples, num_rows):
    """Returns ids with empty positions between them."""
    ids = dense(seed, num_samples, num_rows, 3)
    indices = tf.where(dense(seed + 1, num_samples, 2, 3) > 0)
    return tf.SparseTensor(
        indices, tf.gather_nd(ids, indices), [num_samples, 3]
    )


FORMS = {"dense": dense, "ragged": ragged, "sparse": sparse}
# Forms of the three calls of a step.
CALLS = {
    "dense": ["dense"] * 3,
    "ragged": ["ragged"] * 3,
    "sparse": ["sparse"] * 3,
    "mixed": ["dense", "ragged", "sparse"],
    "mixed_without_sparse": ["ragged", "dense", "dense"],
}
SAMPLES = [3, 0, 2]


def batches(name, step):
    return [
        {
            feature: FORMS[form](
                100 * step + 10 * call + place, num_samples, rows
            )
            for place, (feature, rows) in enumerate(
                [("shown", 11), ("bag", 7), ("text", 7)]
            )
        }
        for call, (form, num_samples) in enumerate(zip(CALLS[name], SAMPLES))
    ]


def loss_of(activations, factor=1.0):
    return factor * tf.add_n(
        [tf.reduce_sum(tf.sin(7 * one)) for one in tf.nest.flatten(activations)]
    )


def train(layer, calls, weights=None, optimizer=None):
    """Applies one step with several calls of the layer; returns the result."""
    weights = weights or [None] * len(calls)
    with tf.GradientTape() as tape:
        found = [
            layer(inputs, weight, training=True)
            for inputs, weight in zip(calls, weights)
        ]
        loss = tf.add_n([loss_of(one) for one in found])
    apply(layer, tape.gradient(loss, layer.trainable_variables), optimizer)
    return found


def apply(layer, gradients, optimizer=None):
    optimizer = optimizer or optimizer_of(layer)
    optimizer.apply(gradients, layer.trainable_variables)


def optimizer_of(layer):
    optimizer = keras.optimizers.SGD()
    optimizer.build(layer.trainable_variables)
    return optimizer


def assert_equal(distributed, host):
    for (_, found), (config, expected) in zip(
        distributed.embedding_tables.items(), host.embedding_tables.items()
    ):
        np.testing.assert_array_equal(
            found.numpy(), expected.numpy(), config.name
        )
    for found, expected in zip(
        distributed.embedding.slot_variables.values(),
        host.embedding.slot_variables.values(),
    ):
        for name, slot in expected.items():
            np.testing.assert_array_equal(found[name].numpy(), slot.numpy())


def test_several_calls_in_a_function_are_bitwise_equal():
    distributed, host = make_layers()
    for layer in (distributed, host):
        optimizer = optimizer_of(layer)
        step = tf.function(functools.partial(train, layer, optimizer=optimizer))
        for number in range(2):
            step(batches("mixed", number))
    assert_equal(distributed, host)


def test_some_calls_may_have_weights():
    distributed, host = make_layers()
    calls = batches("ragged", 0)
    weights = [
        None
        if call == 1
        else {
            "shown": one["shown"].with_values(
                tf.linspace(0.5, 2.0, tf.size(one["shown"].flat_values))
            ),
            "bag": None,
            "text": None,
        }
        for call, one in enumerate(calls)
    ]
    for layer in (distributed, host):
        train(layer, calls, weights)
    assert_equal(distributed, host)


def test_packed_batches_are_joined_with_other_batches():
    configs = {
        name: tpu.FeatureConfig(table(name, 9, 4, "sum"), name=name)
        for name in ("a", "b")
    }

    def make():
        layer = tlm.layers.TPUEmbedding(configs, tpu.Adagrad(0.3))
        layer.build()
        return layer

    with local.servers(2):
        distributed = make()
    host = make()
    ids = [
        {"a": ragged(seed, 3, 9), "b": dense(seed, 3, 9)} for seed in range(3)
    ]
    for layer in (distributed, host):
        train(layer, [tlm.pack(ids[0]), ids[1], tlm.pack(ids[2])])
    assert_equal(distributed, host)


def test_staleness_counts_from_the_first_call():
    (layer, _) = make_layers()
    first, second, third = batches("dense", 0)
    with tf.GradientTape() as tape:
        loss = loss_of(layer(first, training=True))
        loss += loss_of(layer(third, training=True))
    layer.embedding.enqueue(second)
    layer.embedding.apply_gradients(layer.embedding.dequeue())
    apply(layer, tape.gradient(loss, layer.trainable_variables))
    stats = layer.embedding.stats()
    assert stats["num_updates"] == 2
    assert stats["staleness"]["max"] == 1


def test_gradients_of_one_call_for_several_losses_are_summed():
    distributed, host = make_layers()
    (one, _, other) = batches("dense", 0)
    for layer in (distributed, host):
        with tf.GradientTape(persistent=True) as tape:
            found = [layer(one, training=True), layer(other, training=True)]
            losses = [loss_of(found[0]), loss_of(found, 2.0)]
        gradients = [
            tape.gradient(loss, layer.trainable_variables) for loss in losses
        ]
        apply(layer, [tf.add_n(list(both)) for both in zip(*gradients)])
    for (_, found), expected in zip(
        distributed.embedding_tables.items(), host.embedding_tables.values()
    ):
        # One process sums the gradients of both losses in another order.
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6)


def test_gradients_that_are_not_applied_are_ignored_in_later_steps():
    distributed, host = make_layers()
    (one, _, other) = batches("dense", 0)
    with tf.GradientTape() as tape:
        loss = loss_of(distributed(one, training=True))
    tape.gradient(loss, distributed.trainable_variables)
    for layer in (distributed, host):
        train(layer, [other])
    assert_equal(distributed, host)


def test_calls_without_gradients_are_ignored():
    distributed, host = make_layers()
    (one, _, other) = batches("dense", 0)
    for layer in (distributed, host):
        with tf.GradientTape() as tape:
            layer(one, training=True)
            loss = loss_of(layer(other, training=True))
        apply(layer, tape.gradient(loss, layer.trainable_variables))
    assert_equal(distributed, host)


def test_too_many_lookups_raise():
    layer, _ = make_layers()
    ids = tf.constant([[1]])
    calls = [
        {"shown": ids, "bag": ids, "text": ids}
        for _ in range(lookups.MAX_LOOKUPS + 1)
    ]
    with pytest.raises(NotImplementedError, match="at most 64 times in a step"):
        train(layer, calls)
    train(layer, calls[1:])
    assert layer.embedding.stats()["num_updates"] == 1


def test_gradients_that_are_applied_too_late_raise():
    layer, _ = make_layers()
    (one, _, _) = batches("dense", 0)

    def gradients():
        with tf.GradientTape() as tape:
            loss = loss_of(layer(one, training=True))
        return tape.gradient(loss, layer.trainable_variables)

    late = gradients()
    for _ in range(lookups.MAX_LOOKUPS):
        gradients()
    with pytest.raises(tf.errors.FailedPreconditionError, match="have expired"):
        apply(layer, late)
    assert layer.embedding.stats()["num_updates"] == 0


CHANGES = {
    "clip_by_global_norm": lambda g: tf.clip_by_global_norm([g], 0.5)[0][0],
    "divide by norm": lambda g: g / tf.norm(g),
    "times 0": lambda g: g * 0.0,
    "zeros": tf.zeros_like,
    "sum": lambda g: g + 0.25 * g,
}


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_gradients_are_applied_like_one_process(name, in_function):
    distributed, host = make_layers()
    for layer in (distributed, host):
        optimizer = optimizer_of(layer)

        def step(inputs, layer=layer, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = loss_of(layer(inputs, training=True))
            (mark,) = tape.gradient(loss, layer.trainable_variables)
            apply(layer, [CHANGES[name](mark)], optimizer)
            return tf.linalg.global_norm([mark])

        if in_function:
            step = tf.function(step)
        norms = [float(step(batches("mixed", one)[0])) for one in range(2)]
        assert layer.embedding.stats()["num_updates"] == 2
        if layer is distributed:
            expected = norms
    assert norms == expected
    assert_equal(distributed, host)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(
    "change", [tf.sign, lambda g: tf.clip_by_value(g, -0.1, 0.1)]
)
def test_operations_that_are_not_linear_raise(change, in_function):
    layer, host = make_layers()
    optimizer = optimizer_of(layer)

    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(layer(batches("mixed", 0)[0], training=True))
        (mark,) = tape.gradient(loss, layer.trainable_variables)
        apply(layer, [change(mark)], optimizer)

    with pytest.raises(
        tf.errors.InvalidArgumentError, match="clip_by_norm.*parameter servers"
    ):
        (tf.function(step) if in_function else step)()
    assert_equal(layer, host)


def test_weights_of_ids_have_a_gradient():
    found = []
    ids = ragged(1, 3, 11)
    for layer in make_layers():
        kernel = tf.Variable(tf.linspace(0.5, 2.0, tf.size(ids.flat_values)))
        inputs = {**batches("mixed", 0)[0], "shown": ids}
        with tf.GradientTape() as tape:
            weights = {
                "shown": ids.with_values(kernel * 2),
                "bag": None,
                "text": None,
            }
            loss = loss_of(layer(inputs, weights, training=True))
        found.append(tape.gradient(loss, kernel))
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0]).max() > 0.1
