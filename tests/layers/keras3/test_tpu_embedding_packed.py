"""Tests `tlm.layers.TPUEmbedding` with packed batches of `tlm.pack`."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.layers.keras3 import test_tpu_embedding_replicas as replicas

tpu = tf.tpu.experimental.embedding
WIDTH = 1 + 3 + 3 + 2 + 1


def dataset(packed=False):
    given = tf.data.Dataset.from_tensor_slices(replicas.batches()).batch(
        replicas.BATCH
    )
    return given.map(lambda x, y: (tlm.pack(x), y)) if packed else given


def packed_input():
    """Returns a functional model whose input is a packed batch."""
    ids = keras.Input([WIDTH], dtype="int64", name="ids")
    found = replicas.make_layer()(ids)
    return keras.Model(
        ids,
        found["title"] * found["user"]
        + found["title"]
        + found["body"][:, 0] * found["body"][:, 1],
    )


def trained(strategy, make=replicas.Product, packed=True):
    model = replicas.compiled(strategy, make)
    model.fit(dataset(packed), verbose=0, epochs=2)
    return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("make", [replicas.Product, packed_input])
def test_fit_with_packed_batches_trains_equal_tables(make, num_replicas):
    model = trained(strategies.mirrored(num_replicas), make)
    replicas.assert_same(
        replicas.embedding_of(model), replicas.with_one_replica()
    )


@pytest.mark.exhaustive
def test_evaluation_prediction_and_export_look_up_the_same_rows(tmp_path):
    packed, plain = (
        trained(strategies.mirrored(1)),
        trained(strategies.mirrored(1), packed=False),
    )
    np.testing.assert_array_equal(
        packed.predict(dataset(True), verbose=0),
        plain.predict(dataset(), verbose=0),
    )
    assert packed.evaluate(dataset(True), verbose=0) == plain.evaluate(
        dataset(), verbose=0
    )
    model = trained(strategies.mirrored(1), packed_input)
    model.export(str(tmp_path / "served"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    x, _ = next(iter(dataset(True)))
    np.testing.assert_array_equal(served.serve(x), model(x))
    # The served graph contains no op of this package.
    assert not [
        op
        for op in served.serve.concrete_functions[0].graph.get_operations()
        if op.type.startswith("LayoutMap")
    ]


def test_weights_are_packed_with_their_ids():
    def embedded(change):
        layer = replicas.make_layer()
        x, _ = replicas.batches(1)
        ids = {
            name: tf.RaggedTensor.from_tensor(one.reshape(len(one), -1))
            for name, one in x.items()
        }
        rng = np.random.default_rng(5)
        weights = {
            "title": ids["title"].with_values(
                tf.constant(
                    rng.uniform(1, 2, ids["title"].values.shape), tf.float32
                )
            ),
            "body": None,
            "user": None,
        }
        optimizer = keras.optimizers.SGD()
        with tf.GradientTape() as tape:
            ids, weights = change(ids, weights)
            found = layer(ids, weights=weights)
            loss = tf.add_n(
                [tf.reduce_sum(one * one) for one in found.values()]
            )
        optimizer.apply(
            tape.gradient(loss, layer.trainable_weights),
            layer.trainable_weights,
        )
        return layer, layer(ids, weights=weights)

    packed, found = embedded(tlm.pack)
    plain, wanted = embedded(lambda *given: given)
    replicas.assert_same(packed.embedding, plain.embedding)
    for name, rows in wanted.items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-6)


def test_batches_of_other_features_raise():
    layer = replicas.make_layer()
    x, _ = replicas.batches(1)
    other = tlm.pack({name * 2: one for name, one in x.items()})
    for tape in (contextlib.nullcontext(), tf.GradientTape()):
        with (
            tape,
            pytest.raises(
                tf.errors.InvalidArgumentError, match="packed from a structure"
            ),
        ):
            layer(other)
    with pytest.raises(ValueError, match="tlm.pack"):
        layer(tf.zeros([4, 3], tf.int64))
