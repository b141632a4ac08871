"""Runs `fit` with `tlm.layers.TPUEmbedding` on two emulated cores.

Runs in a separate process (tests/emulation).
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.covering import but
from tests.emulation import training

SETTING = dict(num_cores=2, deadline=3.0)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding
BATCH = 8
START = np.random.default_rng(1).standard_normal((12, 4)).astype(np.float32)


def start(shape, shard_info=None):
    first = shard_info.offset[0] if shard_info else 0
    size = shard_info.shape[0] if shard_info else shape[0]
    return tf.constant(START[first : first + size])


def make_layer(**options):
    words = tpu.TableConfig(12, 4, start, combiner="mean", name="words")
    users = tpu.TableConfig(
        5,
        4,
        tf.ones_initializer(),
        combiner="sum",
        name="users",
        optimizer=tpu.Adam(0.1),
    )
    return tlm.layers.TPUEmbedding(
        {"title": tpu.FeatureConfig(words), "user": tpu.FeatureConfig(users)},
        tpu.Adagrad(0.5),
        name="embedding",
        **options,
    )


class Product(keras.Model):
    """Model of elementwise ops, without sums over samples."""

    def __init__(self):
        super().__init__()
        self.embedding = make_layer()

    def call(self, inputs, training=None):
        found = self.embedding(inputs, training=training)
        return found["title"] * found["user"] + found["title"]


def functional():
    inputs = {
        "title": keras.Input([1], dtype="int64", name="title"),
        "user": keras.Input([], dtype="int64", name="user"),
    }
    found = make_layer()(inputs)
    hidden = keras.layers.Concatenate()([found["title"], found["user"]])
    return keras.Model(
        inputs,
        keras.layers.Dense(
            4, kernel_initializer=keras.initializers.RandomNormal(seed=1)
        )(hidden),
    )


def batches(size=6 * BATCH):
    rng = np.random.default_rng(2)
    return tf.data.Dataset.from_tensor_slices(
        (
            {
                "title": rng.integers(0, 12, (size, 1)),
                "user": rng.integers(0, 5, size),
            },
            rng.standard_normal((size, 4)).astype(np.float32),
        )
    ).batch(BATCH, drop_remainder=True)


def weighted_sum(y, x):
    return keras.ops.sum(x * y, axis=1)


def compiled(strategy, make=Product, **options):
    if strategy is STRATEGY:
        tlm.emulation.initialize_tpu_system()
    with strategy.scope():
        model = make()
        model.compile(
            options.pop("optimizer", "sgd"),
            weighted_sum,
            metrics=["mae"],
            **options,
        )
    return model


def fit(strategy, make=Product, **options):
    model = compiled(strategy, make, **options)
    model.fit(batches(), epochs=2, verbose=0)
    return model


def tables_of(model):
    return training.values_of(model.get_layer("embedding").embedding)


@pytest.fixture(scope="module", name="of_one_replica")
def fixture_of_one_replica():
    wanted = tables_of(fit(tf.distribute.get_strategy()))
    assert not np.any(wanted["words"] == START)
    return wanted


def test_tables_are_bitwise_equal_to_one_replica(of_one_replica):
    training.assert_same(tables_of(fit(STRATEGY)), of_one_replica)


@pytest.mark.exhaustive
def test_packed_batches_train_equally(of_one_replica):
    packed = batches().map(lambda x, y: (tlm.pack(x), y))
    model = compiled(STRATEGY)
    model.fit(packed, epochs=2, verbose=0)
    training.assert_same(tables_of(model), of_one_replica)
    wanted = fit(STRATEGY)
    np.testing.assert_array_equal(
        model.predict(packed.map(lambda x, y: x), verbose=0),
        wanted.predict(batches().map(lambda x, y: x), verbose=0),
    )


class WithoutTraining(Product):
    """Model whose `call` has no argument `training`."""

    def call(self, inputs):
        return super().call(inputs)


@pytest.mark.exhaustive
def test_a_model_without_training_argument_trains(of_one_replica):
    one = fit(tf.distribute.get_strategy(), WithoutTraining)
    model = fit(STRATEGY, WithoutTraining)
    for found in (one, model):
        training.assert_same(tables_of(found), of_one_replica)
    model.evaluate(batches(), verbose=0)
    model.predict(batches().map(lambda x, y: x), verbose=0)
    training.assert_same(tables_of(model), of_one_replica)


class Twice(Product):
    def call(self, inputs):
        return super().call(inputs) * super().call(inputs)


def test_two_calls_in_a_step_raise():
    with pytest.raises(RuntimeError, match="comes twice|called once"):
        fit(STRATEGY, Twice)


@pytest.mark.exhaustive
def test_several_steps_per_execution_require_build(of_one_replica):
    # The static batch size is unknown inside Keras' loop over several steps.
    model = compiled(STRATEGY, steps_per_execution=3)
    with pytest.raises(ValueError, match="known batch size .* call `build`"):
        model.fit(batches(), verbose=0)
    model = compiled(STRATEGY, steps_per_execution=3)
    model.embedding.embedding.build(BATCH // 2)
    model.fit(batches(), epochs=2, verbose=0)
    training.assert_same(tables_of(model), of_one_replica)


def test_a_functional_model_with_dense_weights_trains_and_evaluates():
    model = fit(STRATEGY, functional)
    one = fit(tf.distribute.get_strategy(), functional)
    # The gradient of the dense weights is summed in a different order.
    for name, rows in tables_of(one).items():
        np.testing.assert_allclose(tables_of(model)[name], rows, atol=1e-6)
    before = tables_of(model)
    np.testing.assert_allclose(
        model.evaluate(batches(), verbose=0),
        one.evaluate(batches(), verbose=0),
        rtol=1e-5,
    )
    inputs = batches().map(lambda x, y: x)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0),
        one.predict(inputs, verbose=0),
        atol=1e-5,
    )
    training.assert_same(tables_of(model), before)


@pytest.mark.exhaustive
def test_training_continues_from_weights_and_checkpoints(tmp_path):
    model = fit(STRATEGY)
    model.save_weights(tmp_path / "it.weights.h5")
    tf.train.Checkpoint(model=model).write(str(tmp_path / "it"))
    saved = tables_of(model)
    model.fit(batches(), verbose=0)
    wanted = tables_of(model)
    assert np.any(wanted["words"] != saved["words"])
    for restore in (
        lambda: model.load_weights(tmp_path / "it.weights.h5"),
        lambda: (
            tf.train.Checkpoint(model=model)
            .read(str(tmp_path / "it"))
            .expect_partial()
        ),
    ):
        restore()
        training.assert_same(tables_of(model), saved)
        model.fit(batches(), verbose=0)
        training.assert_same(tables_of(model), wanted)


@pytest.mark.exhaustive
def test_weights_of_the_tpu_serve_on_the_host(tmp_path):
    model = fit(STRATEGY)
    path = tmp_path / "it.weights.h5"
    model.save_weights(path)
    wanted = tables_of(model)
    found = compiled(tf.distribute.get_strategy())
    found.evaluate(batches(), verbose=0)
    found.load_weights(path)
    training.assert_same(tables_of(found), wanted)


def test_calls_not_supported_on_tpu_raise(tmp_path):
    model = compiled(STRATEGY)
    ids = {"title": np.zeros([2, 1], int), "user": np.zeros([2], int)}
    with pytest.raises(RuntimeError, match="inside `strategy.run`"):
        model(ids)
    with pytest.raises(RuntimeError, match="requires a built TPUEmbedding"):
        model.embedding.save_own_variables({})
    with pytest.raises(RuntimeError, match="requires a built TPUEmbedding"):
        _ = model.embedding.embedding_tables
    ragged_end = batches().unbatch().batch(BATCH)
    with pytest.raises(ValueError, match="drop_remainder=True"):
        model.fit(ragged_end, verbose=0)


def test_a_loss_scale_raises():
    model = compiled(
        STRATEGY,
        optimizer=keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1)
        ),
    )
    with pytest.raises(ValueError, match="A loss scale, which may"):
        model.fit(batches(), verbose=0)


class TfKerasProduct(tf_keras.Model):
    """The model `Product` for tf_keras."""

    def __init__(self):
        super().__init__()
        steps = make_layer()._steps
        self.embedding = tlm.layers.tf_keras.TPUEmbedding(
            steps.feature_config, steps.optimizer, name="embedding"
        )

    def call(self, inputs):
        found = self.embedding(inputs)
        return found["title"] * found["user"] + found["title"]


def tf_keras_functional():
    inputs = {
        "title": tf_keras.Input([1], dtype="int64", name="title"),
        "user": tf_keras.Input([], dtype="int64", name="user"),
    }
    outputs = TfKerasProduct().call(inputs)
    return tf_keras.Model(inputs, outputs)


class TfKerasSum(tf_keras.losses.Loss):
    def call(self, y, x):
        return tf.reduce_sum(x * y, axis=1)


def compiled_in_tf_keras(make, **options):
    tlm.emulation.initialize_tpu_system()
    with STRATEGY.scope():
        model = make()
        model.compile("sgd", TfKerasSum(), metrics=["mae"], **options)
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make", but([TfKerasProduct, tf_keras_functional], TfKerasProduct)
)
def test_the_layer_of_tf_keras_trains_equally(make, of_one_replica, tmp_path):
    model = compiled_in_tf_keras(make)
    model.fit(batches(), epochs=2, verbose=0)
    training.assert_same(tables_of(model), of_one_replica)
    of_keras_3 = fit(tf.distribute.get_strategy())
    np.testing.assert_allclose(
        model.evaluate(batches(), verbose=0),
        of_keras_3.evaluate(batches(), verbose=0),
        rtol=1e-5,
    )
    inputs = batches().map(lambda x, y: x)
    np.testing.assert_array_equal(
        model.predict(inputs, verbose=0), of_keras_3.predict(inputs, verbose=0)
    )
    training.assert_same(tables_of(model), of_one_replica)
    # Saved weights and copies of weights restore the tables.
    path = str(tmp_path / "it.weights.h5")
    model.save_weights(path)
    copies = model.get_weights()
    model.fit(batches(), verbose=0)
    wanted = tables_of(model)
    assert np.any(wanted["words"] != of_one_replica["words"])
    for restore in (
        lambda: model.load_weights(path),
        lambda: model.set_weights(copies),
    ):
        restore()
        training.assert_same(tables_of(model), of_one_replica)
        model.fit(batches(), verbose=0)
        training.assert_same(tables_of(model), wanted)


def test_unsupported_calls_of_the_layer_of_tf_keras_raise(tmp_path):
    class Twice(TfKerasProduct):
        def call(self, inputs):
            return super().call(inputs) * super().call(inputs)

    with pytest.raises(RuntimeError, match="comes twice|called once"):
        compiled_in_tf_keras(Twice).fit(batches(), verbose=0)
    model = compiled_in_tf_keras(tf_keras_functional)
    model.fit(batches(), verbose=0)
    with pytest.raises(NotImplementedError, match="A table on a TPU is not"):
        model.save_weights(str(tmp_path / "it.h5"))
    with pytest.raises(RuntimeError, match="without a copy"):
        model.set_weights([np.array(one) for one in model.get_weights()])
