"""`tlm.layers.tf_keras.TPUEmbedding` is the Keras 3 layer for tf_keras.

Models of both Keras, of the same elementwise formula, are given the same
batches: their tables must be equal to the bit.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.layers import test_tpu_embedding_replicas as keras3

tf_keras = pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras==2.21.*")

tpu = tf.tpu.experimental.embedding
BATCH = keras3.BATCH


def make_layer(optimizer=None, **options):
    config = keras3.make_layer(optimizer)._steps
    return tlm.layers.tf_keras.TPUEmbedding(
        config.feature_config, config.optimizer, name="embedding", **options)


def make_model(**options):
    inputs = {"title": tf_keras.Input([3], dtype="int64", name="title"),
              "body": tf_keras.Input([2], dtype="int64", name="body"),
              "user": tf_keras.Input([], dtype="int64", name="user")}
    found = make_layer(**options)(inputs)
    return tf_keras.Model(inputs, (
        found["title"] * found["user"] + found["title"]
        + found["body"][:, 0] * found["body"][:, 1]))


class WeightedSum(tf_keras.losses.Loss):
    def call(self, y, x):
        return tf.reduce_sum(x * y, axis=1)


def compiled(strategy=None, optimizer=lambda: "sgd", make=make_model,
             **options):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
        model.compile(optimizer(), WeightedSum(), **options)
    return model


def train(model, x, y, epochs=1):
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0,
              epochs=epochs)


def embedding_of(model):
    return model.get_layer("embedding").embedding


@functools.cache
def of_keras_3():
    return keras3.with_one_replica()


def test_several_replicas_are_refused():
    with pytest.raises(NotImplementedError, match="one replica in tf_keras"):
        compiled(strategies.mirrored(2))


def test_tables_equal_those_of_keras_3_to_the_bit():
    model = compiled()
    train(model, *keras3.batches(), epochs=2)
    keras3.assert_same(embedding_of(model), of_keras_3())
    assert embedding_of(model).stats()["num_updates"] == 6


@pytest.mark.parametrize("options", [
    {"run_eagerly": True}, {"steps_per_execution": 3},
    {"optimizer": lambda: tf_keras.optimizers.Adam(clipnorm=1e-3)},
    {"optimizer": lambda: tf_keras.optimizers.legacy.SGD(0.1)},
    {"optimizer": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.SGD(0.1), initial_scale=8.0)},
], ids=["eager", "three steps at once", "clipped", "legacy", "scaled"])
def test_so_they_do_however_the_steps_are_taken(options):
    model = compiled(**options)
    train(model, *keras3.batches(), epochs=2)
    keras3.assert_same(embedding_of(model), of_keras_3())


def test_dense_weights_train_beside_the_tables():
    def make():
        below = make_model()
        return tf_keras.Model(below.input, tf_keras.layers.Dense(4)(
            below.output))

    model = compiled(make=make)
    before = [one.numpy() for one in model.layers[-1].weights]
    train(model, *keras3.batches())
    assert all(np.any(one != new.numpy()) for one, new in zip(
        before, model.layers[-1].weights))
    assert np.any(keras3.values_of(embedding_of(model))["words"]
                  != keras3.START)


def test_evaluation_and_gradients_alone_change_nothing():
    model = compiled()
    x, y = keras3.batches(1)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x, training=True))
    tape.gradient(loss, model.trainable_weights)
    keras3.assert_same(embedding_of(model), embedding_of(compiled()))
    assert [one.name for one in model.trainable_weights] == [
        "embedding/step:0"]


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".h5", "_tf"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_saved_model_goes_on_where_it_was(suffix, num_shards, tmp_path):
    make = functools.partial(
        make_model, partitioner=tlm.partitioners.FixedShardsPartitioner(
            num_shards))
    model = compiled(make=make)
    train(model, *keras3.batches())
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(path)
        again = tf_keras.models.load_model(
            path, custom_objects={"WeightedSum": WeightedSum})
    else:
        model.save_weights(path)
        again = compiled(make=make)
        again.load_weights(path)
    keras3.assert_same(embedding_of(again), embedding_of(model))
    for one in (model, again):
        train(one, *keras3.batches())
    keras3.assert_same(embedding_of(again), of_keras_3())


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_rows_of_16_bits_are_those_of_keras_3_and_are_saved(suffix, tmp_path):
    expected = keras3.compiled(
        tf.distribute.get_strategy(), lambda: keras3.Product(
            keras3.make_layer(table_dtypes="bfloat16", rounding_seed=3)))
    keras3.train(expected, *keras3.batches(), epochs=2)
    make = functools.partial(
        make_model, table_dtypes="bfloat16", rounding_seed=3)
    model = compiled(make=make)
    train(model, *keras3.batches())
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(path)
        again = tf_keras.models.load_model(
            path, custom_objects={"WeightedSum": WeightedSum})
    else:
        model.save_weights(path)
        again = compiled(make=make)
        again.load_weights(path)
    for one in (model, again):
        train(one, *keras3.batches())
        keras3.assert_same(embedding_of(one), embedding_of(expected))
    [rows, _] = embedding_of(again).embedding_tables.values()
    assert rows.dtype == tf.bfloat16


def test_an_exported_model_uses_stock_ops_only(tmp_path):
    model = compiled()
    x, y = keras3.batches(1)
    train(model, x, y)
    model.export(str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    np.testing.assert_array_equal(
        loaded.serve([tf.constant(x[name]) for name in
                      ("body", "title", "user")]),
        model.predict(x, verbose=0))
    assert b"LayoutMap>" not in (tmp_path / "m/saved_model.pb").read_bytes()


def test_a_model_of_the_other_keras_is_refused():
    inputs = {"title": keras.Input([3], dtype="int64"),
              "body": keras.Input([2], dtype="int64"),
              "user": keras.Input([], dtype="int64")}
    with pytest.raises(RuntimeError, match=r"takes tlm.layers.TPUEmbedding"):
        make_layer()(inputs)
    inputs = {"title": tf_keras.Input([3], dtype="int64"),
              "body": tf_keras.Input([2], dtype="int64"),
              "user": tf_keras.Input([], dtype="int64")}
    with pytest.raises(RuntimeError,
                       match=r"takes tlm.layers.tf_keras.TPUEmbedding"):
        keras3.make_layer()(inputs)
