"""Tests that `TPUEmbedding` for tf_keras equals the Keras 3 layer.

Models in both Keras versions compute the same elementwise formula on the same
batches. Their tables must be bitwise equal.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.layers.keras3 import test_tpu_embedding_replicas as keras3

# The tests of Keras 3 run more cases of the same code.
pytestmark = pytest.mark.covering(1, 1)

tf_keras = pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras"
)

tpu = tf.tpu.experimental.embedding
BATCH = keras3.BATCH


def make_layer(optimizer=None, **options):
    config = keras3.make_layer(optimizer)._steps
    return tlm.layers.tf_keras.TPUEmbedding(
        config.feature_config, config.optimizer, name="embedding", **options
    )


def make_model(**options):
    inputs = {
        "title": tf_keras.Input([3], dtype="int64", name="title"),
        "body": tf_keras.Input([2], dtype="int64", name="body"),
        "user": tf_keras.Input([], dtype="int64", name="user"),
    }
    found = make_layer(**options)(inputs)
    return tf_keras.Model(
        inputs,
        (
            found["title"] * found["user"]
            + found["title"]
            + found["body"][:, 0] * found["body"][:, 1]
        ),
    )


class WeightedSum(tf_keras.losses.Loss):
    def call(self, y, x):
        return tf.reduce_sum(x * y, axis=1)


def compiled(
    strategy=None, optimizer=lambda: "sgd", make=make_model, **options
):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
        model.compile(optimizer(), WeightedSum(), **options)
    return model


def train(model, x, y, epochs=1):
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=epochs)


def embedding_of(model):
    return model.get_layer("embedding").embedding


@functools.cache
def of_keras_3():
    return keras3.with_one_replica()


STEPS = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "three steps at once": {"steps_per_execution": 3},
    "clipped": {"optimizer": lambda: tf_keras.optimizers.Adam(clipnorm=1e-3)},
    "legacy": {"optimizer": lambda: tf_keras.optimizers.legacy.SGD(0.1)},
    "scaled": {
        "optimizer": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(0.1), initial_scale=8.0
        )
    },
    "legacy scaled": {
        "optimizer": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.legacy.SGD(0.1), initial_scale=8.0
        )
    },
}


@pytest.mark.exhaustive
def test_tables_are_bitwise_equal_to_those_of_keras_3():
    model = compiled()
    train(model, *keras3.batches(), epochs=2)
    keras3.assert_same(embedding_of(model), of_keras_3())
    assert embedding_of(model).stats()["num_updates"] == 6


@pytest.mark.exhaustive
@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_tables_are_bitwise_equal_for_all_compile_options(steps, num_replicas):
    model = compiled(strategies.mirrored(num_replicas), **STEPS[steps])
    train(model, *keras3.batches(), epochs=2)
    keras3.assert_same(embedding_of(model), of_keras_3())
    assert embedding_of(model).stats()["num_updates"] == 6


@pytest.mark.parametrize(
    "make_strategy",
    [
        lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
        lambda: strategies.mirrored(4),
    ],
    ids=["one device", "4 replicas"],
)
def test_tables_are_bitwise_equal_under_other_strategies(make_strategy):
    model = compiled(
        make_strategy(),
        make=functools.partial(
            make_model, partitioner=tlm.partitioners.FixedShardsPartitioner(3)
        ),
    )
    train(model, *keras3.batches(), epochs=2)
    keras3.assert_same(embedding_of(model), of_keras_3())


def with_dense():
    below = make_model()
    return tf_keras.Model(
        below.input,
        tf_keras.layers.Dense(
            4, kernel_initializer=tf_keras.initializers.RandomNormal(seed=1)
        )(below.output),
    )


@pytest.mark.exhaustive
def test_dense_weights_of_replicas_train_with_the_tables():
    models = [compiled(strategies.mirrored(n), make=with_dense) for n in (1, 2)]
    x, y = keras3.batches()
    for model in models:
        train(model, x, y, epochs=2)
    one, two = models
    # The gradients of dense weights are first summed on each replica, so they
    # are rounded differently.
    keras3.assert_same(
        embedding_of(two), embedding_of(one), rtol=1e-5, atol=1e-6
    )
    for found, wanted in zip(two.layers[-1].weights, one.layers[-1].weights):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        two.evaluate(x, y, batch_size=BATCH, verbose=0),
        one.evaluate(x, y, batch_size=BATCH, verbose=0),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        two.predict(x, batch_size=BATCH, verbose=0),
        one.predict(x, batch_size=BATCH, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".h5", "_tf"])
def test_one_replica_resumes_from_files_of_several_replicas(suffix, tmp_path):
    two = compiled(strategies.mirrored(2))
    train(two, *keras3.batches())
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        two.save(path)
        one = tf_keras.models.load_model(
            path, custom_objects={"WeightedSum": WeightedSum}
        )
    else:
        two.save_weights(path)
        one = compiled()
        one.load_weights(path)
    for model in (two, one):
        train(model, *keras3.batches())
        keras3.assert_same(embedding_of(model), of_keras_3())


@pytest.mark.exhaustive
def test_an_overflow_in_one_replica_skips_the_step_of_all():
    x, y = keras3.batches(1)
    overflow = y.copy()
    overflow[-1, 0] = np.inf
    models = [
        compiled(strategies.mirrored(n), **STEPS["scaled"]) for n in (1, 2)
    ]
    train(models[1], x, overflow)
    np.testing.assert_array_equal(
        keras3.values_of(embedding_of(models[1]))["words"], keras3.START
    )
    for model in models:
        train(model, x, y)
    keras3.assert_same(*map(embedding_of, models))


def own_loop(strategy, model, optimizer, aggregate=None, **options):
    """Trains for two epochs; each batch is one function call."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) * y) / BATCH
        gradients = tape.gradient(loss, model.trainable_weights)
        if aggregate:
            gradients = tf.distribute.get_replica_context().all_reduce(
                aggregate, gradients
            )
        optimizer.apply_gradients(
            zip(gradients, model.trainable_weights), **options
        )

    step = tf.function(step)
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(keras3.batches()).batch(BATCH)
        ):
            strategy.run(step, args=batch)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("optimizers", ["optimizers", "optimizers.legacy"])
def test_a_custom_loop_trains_in_strategy_run(num_replicas, optimizers):
    strategy = strategies.mirrored(num_replicas)
    with strategy.scope():
        model = make_model()
        optimizer = {
            "optimizers": tf_keras.optimizers,
            "optimizers.legacy": tf_keras.optimizers.legacy,
        }[optimizers].SGD(0.1)
    own_loop(strategy, model, optimizer)
    keras3.assert_same(embedding_of(model), of_keras_3())


@pytest.mark.parametrize(
    "aggregate", [tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN]
)
@pytest.mark.parametrize(
    "option",
    [
        {"skip_gradients_aggregation": True},
        {"experimental_aggregate_gradients": False},
    ],
    ids=["new", "old"],
)
def test_gradients_aggregated_by_the_caller_raise(aggregate, option):
    strategy = strategies.mirrored(2)
    with strategy.scope():
        model = make_model()
        optimizer = tf_keras.optimizers.SGD(0.1)
    with pytest.raises(NotImplementedError, match="must sum the gradients"):
        own_loop(strategy, model, optimizer, aggregate, **option)
    np.testing.assert_array_equal(
        keras3.values_of(embedding_of(model))["words"], keras3.START
    )


@pytest.mark.exhaustive
def test_a_step_that_failed_in_one_replica_is_discarded():
    x, y = keras3.batches(1)
    model = compiled(strategies.mirrored(2))
    train(model, *keras3.batches(), epochs=2)
    bad = {**x, "user": np.where(np.arange(BATCH) == BATCH - 1, 9, x["user"])}
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="'user', sample 7: id 9 is outside",
    ):
        train(model, bad, y)
    keras3.assert_same(embedding_of(model), of_keras_3())
    train(model, x, y)
    assert embedding_of(model).stats()["num_updates"] == 7


def test_a_layer_of_another_strategy_raises():
    layer = make_layer()
    layer.build()

    def make():
        inputs = {
            "title": tf_keras.Input([3], dtype="int64"),
            "body": tf_keras.Input([2], dtype="int64"),
            "user": tf_keras.Input([], dtype="int64"),
        }
        return tf_keras.Model(inputs, layer(inputs)["title"])

    with pytest.raises((RuntimeError, ValueError), match=r"strategy.scope"):
        compiled(strategies.mirrored(2), make=make)


def test_dense_weights_train_with_the_tables():
    def make():
        below = make_model()
        return tf_keras.Model(
            below.input, tf_keras.layers.Dense(4)(below.output)
        )

    model = compiled(make=make)
    before = [one.numpy() for one in model.layers[-1].weights]
    train(model, *keras3.batches())
    assert all(
        np.any(one != new.numpy())
        for one, new in zip(before, model.layers[-1].weights)
    )
    assert np.any(
        keras3.values_of(embedding_of(model))["words"] != keras3.START
    )


@pytest.mark.exhaustive
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
        "embedding/marks:0"
    ]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".h5", "_tf"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_saved_model_resumes_training(suffix, num_shards, tmp_path):
    make = functools.partial(
        make_model,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )
    model = compiled(make=make)
    train(model, *keras3.batches())
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(path)
        again = tf_keras.models.load_model(
            path, custom_objects={"WeightedSum": WeightedSum}
        )
    else:
        model.save_weights(path)
        again = compiled(make=make)
        again.load_weights(path)
    keras3.assert_same(embedding_of(again), embedding_of(model))
    for one in (model, again):
        train(one, *keras3.batches())
    keras3.assert_same(embedding_of(again), of_keras_3())


@pytest.mark.exhaustive
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_16_bit_rows_equal_those_of_keras_3_and_are_saved(suffix, tmp_path):
    expected = keras3.compiled(
        tf.distribute.get_strategy(),
        lambda: keras3.Product(
            keras3.make_layer(table_dtypes="bfloat16", rounding_seed=3)
        ),
    )
    keras3.train(expected, *keras3.batches(), epochs=2)
    make = functools.partial(
        make_model, table_dtypes="bfloat16", rounding_seed=3
    )
    model = compiled(make=make)
    train(model, *keras3.batches())
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(path)
        again = tf_keras.models.load_model(
            path, custom_objects={"WeightedSum": WeightedSum}
        )
    else:
        model.save_weights(path)
        again = compiled(make=make)
        again.load_weights(path)
    for one in (model, again):
        train(one, *keras3.batches())
        keras3.assert_same(embedding_of(one), embedding_of(expected))
    [rows, _] = embedding_of(again).embedding_tables.values()
    assert rows.dtype == tf.bfloat16


@pytest.mark.exhaustive
def test_an_exported_model_uses_only_stock_ops(tmp_path):
    model = compiled()
    x, y = keras3.batches(1)
    train(model, x, y)
    model.export(str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    np.testing.assert_array_equal(
        loaded.serve(
            [tf.constant(x[name]) for name in ("body", "title", "user")]
        ),
        model.predict(x, verbose=0),
    )
    assert b"LayoutMap>" not in (tmp_path / "m/saved_model.pb").read_bytes()


def test_a_model_of_the_other_keras_version_raises():
    inputs = {
        "title": keras.Input([3], dtype="int64"),
        "body": keras.Input([2], dtype="int64"),
        "user": keras.Input([], dtype="int64"),
    }
    with pytest.raises(RuntimeError, match=r"use tlm.layers.TPUEmbedding"):
        make_layer()(inputs)
    inputs = {
        "title": tf_keras.Input([3], dtype="int64"),
        "body": tf_keras.Input([2], dtype="int64"),
        "user": tf_keras.Input([], dtype="int64"),
    }
    with pytest.raises(
        RuntimeError, match=r"use tlm.layers.tf_keras.TPUEmbedding"
    ):
        keras3.make_layer()(inputs)


class Siamese(tf_keras.Model):
    """Model that calls its layer twice and has no `training` argument."""

    def __init__(self, layer):
        super().__init__()
        self.embedding = layer

    def call(self, x):
        return self.embedding(x) * self.embedding((x * 5 + 1) % 12)


def single():
    config = keras3.make_layer()._steps.feature_config["title"]
    return tlm.layers.tf_keras.TPUEmbedding(config, tpu.SGD(0.5), name="e")


def siamese_loop(layer, **call):
    """Trains in a custom loop with a gradient tape, as with any other layer."""
    optimizer = tf_keras.optimizers.SGD(0.5)
    x, y = keras3.batches()
    for ids, labels in tf.data.Dataset.from_tensor_slices((x["user"], y)).batch(
        BATCH
    ):
        with tf.GradientTape() as tape:
            found = layer(ids, **call) * layer((ids * 5 + 1) % 12, **call)
            loss = tf.reduce_mean(found * labels)
        weights = layer.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))


def assert_rows_of_stock(layer, expected):
    # Stock layers sum the gradients of a row in a different order.
    np.testing.assert_allclose(
        layer.get_embedding_tables()["words"],
        expected.embeddings,
        rtol=1e-5,
        atol=1e-6,
    )


def stock():
    return tf_keras.layers.Embedding(
        12, 4, tf_keras.initializers.Constant(keras3.START)
    )


@pytest.mark.parametrize("call", [{}, {"training": True}, {"training": False}])
def test_a_custom_loop_trains_for_any_training_argument(call):
    layer, expected = single(), stock()
    siamese_loop(layer, **call)
    siamese_loop(expected)
    assert_rows_of_stock(layer, expected)
    assert layer.embedding.stats()["num_updates"] == 3


def test_fit_without_a_training_argument_trains_as_a_stock_layer():
    x, y = keras3.batches()
    models = [Siamese(make()) for make in (single, stock)]
    for model in models:
        model.compile(tf_keras.optimizers.SGD(0.5), "mse")
        model.fit(x["user"], y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_rows_of_stock(*(model.embedding for model in models))
    found = models[0].embedding.embedding.stats()
    models[0].evaluate(x["user"], y, verbose=0)
    models[0].predict(x["user"], verbose=0)
    assert models[0].embedding.embedding.stats() == found


def sharded():
    return tlm.layers.tf_keras.ShardedEmbedding(
        12, 4, optimizer="sgd", name="e"
    )


@pytest.mark.parametrize("make", [single, sharded])
@pytest.mark.parametrize(
    "optimizer", [tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD]
)
def test_a_table_without_a_gradient_raises(optimizer, make):
    x, y = keras3.batches()
    ids = tf_keras.Input([], dtype="int64")
    layer, dense = make(), tf_keras.layers.Dense(4)
    model = tf_keras.Model(ids, dense(tf.stop_gradient(layer(ids))))
    model.compile(optimizer(0.5), "mse")
    with pytest.raises(ValueError, match="'e.*got no gradient.*not called"):
        model.fit(x["user"], y, verbose=0)
    layer.trainable = False
    model.compile(optimizer(0.5), "mse")
    model.fit(x["user"], y, verbose=0)


@pytest.mark.exhaustive
def test_packed_batches_train_equal_tables():
    def make():
        ids = tf_keras.Input([10], dtype="int64")
        found = make_layer()(ids)
        return tf_keras.Model(
            ids,
            (
                found["title"] * found["user"]
                + found["title"]
                + found["body"][:, 0] * found["body"][:, 1]
            ),
        )

    packed = (
        tf.data.Dataset.from_tensor_slices(keras3.batches())
        .batch(BATCH)
        .map(lambda x, y: (tlm.pack(x), y))
    )
    for num_replicas in (1, 2):
        model = compiled(strategies.mirrored(num_replicas), make=make)
        model.fit(packed, epochs=2, verbose=0)
        keras3.assert_same(embedding_of(model), keras3.with_one_replica())
