"""Gradients that are applied several times equal a closed table.

The rows of a lookup of keys stay assigned to these keys until the next lookup.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
both = pytest.mark.parametrize(
    ("version", "layers"),
    [(keras, tlm.layers), (tf_keras, tlm.layers.tf_keras)],
)
FAILED = tf.errors.FailedPreconditionError
DIM = 2
KEYS = np.array([7, 3, 7, 9, -4])


class Rows:
    """A `ShardedEmbedding`."""

    def __init__(self, layers, rows):
        self.layer = layers.ShardedEmbedding(
            rows,
            DIM,
            num_shards=2,
            optimizer=tpu.Adam(0.5),
            embeddings_initializer="uniform",
            name="words",
        )
        self.layer.build(None)

    @property
    def table(self):
        return self.layer.embeddings

    @property
    def vocabulary(self):
        return self.layer.vocabulary


class Tokens(Rows):
    """A `TPUEmbedding` with one table."""

    def __init__(self, layers, rows):
        is_open = isinstance(rows, tlm.vocabulary.OpenVocabulary)
        table = tpu.TableConfig(
            rows.capacity if is_open else rows,
            DIM,
            tf.random_uniform_initializer(-0.5, 0.5),
            optimizer=tpu.Adam(0.5),
            name="words",
        )
        self.layer = layers.TPUEmbedding(
            tpu.FeatureConfig(table),
            tpu.Adam(0.5),
            vocabularies={"words": rows} if is_open else None,
        )
        self.layer(tf.constant(KEYS[:1] if is_open else [0]))

    @property
    def table(self):
        return self.layer.get_embedding_tables()["words"]

    @property
    def vocabulary(self):
        return self.layer.embedding.vocabularies["words"]


kinds = pytest.mark.parametrize("kind", [Rows, Tokens])
OPERATIONS = {
    "unchanged": lambda gradient: gradient,
    "dense": tf.convert_to_tensor,
}


def eager(subject, ids, apply, change):
    weights = subject.layer.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(subject.layer(ids) ** 2)
    gradients = [change(one) for one in tape.gradient(loss, weights)]
    for _ in range(3):
        apply(gradients, weights)


def around_a_function(subject, ids, apply, change):
    weights = subject.layer.trainable_variables
    if not hasattr(subject, "call"):
        subject.call = tf.function(lambda ids: subject.layer(ids))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(subject.call(tf.constant(ids)) ** 2)
    gradients = [change(one) for one in tape.gradient(loss, weights)]
    for _ in range(2):
        apply(gradients, weights)


def in_a_function(subject, ids, apply, change):
    step = tf.function(lambda ids: eager(subject, ids, apply, change))
    step(tf.constant(ids))


def persistent(subject, ids, apply, change):
    """Applies the gradients of two losses, each of them twice."""
    weights = subject.layer.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        rows = subject.layer(ids)
        losses = [tf.reduce_sum(rows**2), tf.reduce_sum(rows[1:] ** 3)]
    for loss in [*losses, losses[0]]:
        gradients = [change(one) for one in tape.gradient(loss, weights)]
        for _ in range(2):
            apply(gradients, weights)


def optimizer_of(version, weights):
    optimizer = version.optimizers.SGD(0.5)
    optimizer.build(weights)

    def apply(gradients, weights):
        optimizer.apply_gradients(zip(gradients, weights))

    return apply


@both
@kinds
@pytest.mark.parametrize(
    "step", [eager, around_a_function, in_a_function, persistent]
)
def test_repeated_updates_equal_a_closed_table(version, layers, kind, step):
    opened = kind(layers, tlm.vocabulary.OpenVocabulary(20))
    with tf.GradientTape():
        opened.layer(KEYS)
    start = tf.convert_to_tensor(opened.table).numpy()
    closed = Rows(layers, len(start))
    closed.table.assign(start)
    for number, change in enumerate(OPERATIONS.values()):
        keys = KEYS[number:]
        for one, ids in (
            (opened, keys),
            (closed, opened.vocabulary.lookup(keys).numpy()),
        ):
            apply = optimizer_of(version, one.layer.trainable_variables)
            step(one, ids, apply, change)
    np.testing.assert_allclose(
        tf.convert_to_tensor(opened.table),
        tf.convert_to_tensor(closed.table),
        rtol=1e-5,
        atol=1e-6,
    )
    assert np.abs(tf.convert_to_tensor(opened.table) - start).max() > 0.1


@kinds
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_another_lookup_ends_repeated_updates(kind, operation):
    """The row of the first key is assigned to another key in the meantime."""
    subject = kind(tlm.layers, tlm.vocabulary.OpenVocabulary(8))
    weights = subject.layer.trainable_variables
    apply = optimizer_of(keras, weights)

    def gradients_of(key):
        with tf.GradientTape() as tape:
            rows = subject.layer(tf.constant([key]))
            loss = tf.reduce_sum(rows * (key + 1.0))
        change = OPERATIONS[operation]
        return [change(one) for one in tape.gradient(loss, weights)]

    old = gradients_of(0)
    apply(old, weights)
    apply(old, weights)
    for key in range(1, 20):
        apply(gradients_of(key), weights)
        if key in (1, 19):
            before = tf.convert_to_tensor(subject.table).numpy()
            match = "(already applied|again before the next lookup).*words"
            with pytest.raises(FAILED, match=match):
                apply(old, weights)
            np.testing.assert_array_equal(
                tf.convert_to_tensor(subject.table), before
            )
    assert not subject.vocabulary.contains([0]).numpy().any()


@kinds
@pytest.mark.parametrize("how", ["checkpoint", "weights"])
def test_replaced_values_end_repeated_updates(kind, how, tmp_path):
    """A restored row may belong to another key."""
    subject = kind(tlm.layers, tlm.vocabulary.OpenVocabulary(8))
    model = keras.Sequential([keras.Input([], dtype="int64"), subject.layer])
    weights = subject.layer.trainable_variables
    apply = optimizer_of(keras, weights)

    def gradients_of(key):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.constant([key])))
        return tape.gradient(loss, weights)

    apply(gradients_of(1), weights)
    checkpoint = tf.train.Checkpoint(layer=subject.layer)
    path = str(tmp_path / "saved.weights.h5")
    if how == "weights":
        model.save_weights(path)
    else:
        path = checkpoint.save(str(tmp_path / "saved"))
    for is_applied in (True, False):
        old = gradients_of(2)
        if is_applied:
            apply(old, weights)
        if how == "weights":
            model.load_weights(path)
        else:
            checkpoint.restore(path)
        before = tf.convert_to_tensor(subject.table).numpy()
        with pytest.raises(FAILED, match="reset|restored|expired"):
            apply(old, weights)
        np.testing.assert_array_equal(
            tf.convert_to_tensor(subject.table), before
        )
