"""Tests `fit` of `tlm.layers.TPUEmbedding` under `tf.distribute` strategies.

For the same global batches, tables are bitwise equal for any number of
replicas, because gradients are summed in the order of the global batch. With
the test data, any other order changes the sums.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies

tpu = tf.tpu.experimental.embedding

BATCH = 16
START = np.random.default_rng(1).standard_normal((12, 4)).astype(np.float32)

SCOPES = {
    "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "2 replicas": lambda: strategies.mirrored(2),
    "4 replicas": lambda: strategies.mirrored(4),
}


def start(shape, shard_info=None):
    del shape
    first = shard_info.offset[0]
    return tf.constant(START[first : first + shard_info.shape[0]])


def make_layer(optimizer=None, **options):
    words = tpu.TableConfig(12, 4, start, combiner="mean", name="words")
    users = tpu.TableConfig(
        5,
        4,
        tf.zeros_initializer(),
        combiner="sum",
        name="users",
        optimizer=tpu.Adam(0.1),
    )
    return tlm.layers.TPUEmbedding(
        {
            "title": tpu.FeatureConfig(words),
            "body": tpu.FeatureConfig(words, max_sequence_length=2),
            "user": tpu.FeatureConfig(users),
        },
        optimizer or tpu.Adagrad(0.5),
        name="embedding",
        **options,
    )


class Product(keras.Model):
    """Model of elementwise ops, without sums over samples."""

    def __init__(self, layer=None):
        super().__init__()
        self.embedding = layer or make_layer()

    def call(self, inputs, training=None):
        found = self.embedding(inputs, training=training)
        return (
            found["title"] * found["user"]
            + found["title"]
            + found["body"][:, 0] * found["body"][:, 1]
        )


def functional():
    inputs = {
        "title": keras.Input([3], dtype="int64", name="title"),
        "body": keras.Input([2], dtype="int64", name="body"),
        "user": keras.Input([], dtype="int64", name="user"),
    }
    found = make_layer()(inputs)
    hidden = keras.layers.Concatenate()(
        [found["title"], keras.layers.Flatten()(found["body"]), found["user"]]
    )
    dense = keras.layers.Dense(
        4, kernel_initializer=keras.initializers.RandomNormal(seed=1)
    )
    return keras.Model(inputs, dense(hidden))


def batches(num_batches=3):
    rng = np.random.default_rng(2)
    size = num_batches * BATCH
    return (
        {
            "title": rng.integers(0, 12, (size, 3)),
            "body": rng.integers(0, 12, (size, 2)),
            "user": rng.integers(0, 5, size),
        },
        rng.standard_normal((size, 4)).astype(np.float32),
    )


def weighted_sum(y, x):
    return keras.ops.sum(x * y, axis=1)


def compiled(strategy, make=Product, *, optimizer="sgd", **options):
    with strategy.scope():
        model = make()
        model.compile(
            optimizer() if callable(optimizer) else optimizer,
            weighted_sum,
            **options,
        )
    return model


def train(model, x, y, epochs=1):
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=epochs)


def fit(strategy, make=Product, **options):
    """Trains a model for two epochs under a strategy, and returns it."""
    model = compiled(strategy, make, **options)
    train(model, *batches(), epochs=2)
    return model


def embedding_of(model):
    return model.get_layer("embedding").embedding


def values_of(embedding):
    """Returns the rows and the slot variables of each table."""
    found = {
        config.name: rows.numpy()
        for config, rows in embedding.embedding_tables.items()
    }
    for config, slots in embedding.slot_variables.items():
        for name, slot in slots.items():
            found[f"{config.name}/{name}"] = slot.numpy()
    return found


def assert_same(found, expected, **tolerance):
    found, expected = values_of(found), values_of(expected)
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        np.testing.assert_allclose(
            found[name], rows, err_msg=name, **{"rtol": 0, **tolerance}
        )


@functools.cache
def with_one_replica():
    model = fit(tf.distribute.get_strategy())
    assert np.any(values_of(embedding_of(model))["words"] != START)
    return embedding_of(model)


@pytest.mark.parametrize("scope", SCOPES)
def test_tables_are_bitwise_equal_to_those_of_one_replica(scope):
    found = embedding_of(fit(SCOPES[scope]()))
    assert_same(found, with_one_replica())
    assert found.stats()["num_updates"] == 6


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True},
        {"steps_per_execution": 3},
        {"optimizer": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0)},
        {
            "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=8.0
            )
        },
    ],
    ids=["eager", "three steps at once", "scaled", "scaled by need"],
)
def test_tables_are_bitwise_equal_for_all_compile_options(options):
    model = fit(strategies.mirrored(2), **options)
    assert_same(embedding_of(model), with_one_replica())


@pytest.mark.exhaustive
def test_sharded_tables_are_bitwise_equal_with_replicas():
    model = fit(
        strategies.mirrored(2),
        lambda: Product(
            make_layer(partitioner=tlm.partitioners.FixedShardsPartitioner(3))
        ),
    )
    assert_same(embedding_of(model), with_one_replica())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_tables_before_a_dense_layer_are_equal_within_float32_rounding(
    num_replicas,
):
    one = fit(tf.distribute.get_strategy(), functional, optimizer="adam")
    found = fit(strategies.mirrored(num_replicas), functional, optimizer="adam")
    # The gradients of dense weights are first summed on each replica, so they
    # are rounded differently. Adam divides by the square root of second
    # moments, which amplifies rounding errors of small values.
    assert_same(embedding_of(found), embedding_of(one), rtol=1e-5, atol=1e-6)
    x, y = batches()
    np.testing.assert_allclose(
        found.evaluate(x, y, batch_size=BATCH, verbose=0),
        one.evaluate(x, y, batch_size=BATCH, verbose=0),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        found.predict(x, batch_size=BATCH, verbose=0),
        one.predict(x, batch_size=BATCH, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.exhaustive
def test_ids_padded_with_minus_one_equal_ragged_ids():
    # Keras does not distribute ragged batches over several replicas, so this
    # test pads the ids. The next test trains on ragged batches in a custom
    # loop.
    rng = np.random.default_rng(3)
    lengths = np.array([1, 5, 0, 2, 4, 0, 3, 1] * 6)
    ragged = {
        name: tf.RaggedTensor.from_row_lengths(
            rng.integers(0, 12, lengths.sum()), lengths
        )
        for name in ("title", "body")
    }
    users = tf.constant(rng.integers(0, 5, len(lengths)))
    y = rng.standard_normal((len(lengths), 4)).astype(np.float32)

    def trained(strategy, ids):
        model = compiled(
            strategy, lambda: Product(make_layer(out_of_range="drop"))
        )
        model.fit(
            tf.data.Dataset.from_tensor_slices(
                ({**ids, "user": users}, y)
            ).batch(BATCH),
            verbose=0,
        )
        return embedding_of(model)

    padded = {name: ids.to_tensor(-1) for name, ids in ragged.items()}
    assert_same(
        trained(strategies.mirrored(2), padded),
        trained(tf.distribute.get_strategy(), ragged),
    )


@pytest.mark.parametrize("form", ["ragged", "sparse"])
def test_ragged_and_sparse_batches_are_distributed_in_a_custom_loop(form):
    ids = tf.RaggedTensor.from_row_lengths(
        np.random.default_rng(3).integers(0, 12, 30),
        [1, 5, 0, 2, 4, 0, 3, 0] * 2,
    )
    y = np.random.default_rng(4).standard_normal((16, 4)).astype(np.float32)
    if form == "sparse":
        ids = ids.to_sparse()

    def trained(strategy):
        with strategy.scope():
            layer = tlm.layers.TPUEmbedding(
                tpu.FeatureConfig(
                    tpu.TableConfig(12, 4, start, combiner="mean")
                ),
                tpu.Adagrad(0.5),
            )
            layer.build()
            optimizer = keras.optimizers.SGD()
            optimizer.build(layer.trainable_variables)

        def step(ids, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids, training=True) * y)
            weights = layer.trainable_variables
            optimizer.apply_gradients(
                zip(tape.gradient(loss, weights), weights)
            )

        for batch in strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((ids, y)).batch(8)
        ):
            strategy.run(tf.function(step), args=batch)
        return layer.embedding

    assert_same(
        trained(strategies.mirrored(2)), trained(tf.distribute.get_strategy())
    )


def test_an_overflow_in_one_replica_skips_the_step_of_all():
    x, y = batches(1)
    overflow = y.copy()
    overflow[-1, 0] = np.inf
    model = compiled(
        strategies.mirrored(2),
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0
        ),
    )
    train(model, x, overflow)
    np.testing.assert_array_equal(
        values_of(embedding_of(model))["words"], START
    )
    train(model, x, y)
    one = compiled(tf.distribute.get_strategy())
    train(one, x, y)
    assert_same(embedding_of(model), embedding_of(one))


def test_a_step_that_failed_in_one_replica_is_discarded():
    x, y = batches(1)
    model = fit(strategies.mirrored(2))
    bad = {**x, "user": np.where(np.arange(BATCH) == BATCH - 1, 9, x["user"])}
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="'user', sample 7: id 9 is outside",
    ):
        train(model, bad, y)
    assert_same(embedding_of(model), with_one_replica())
    train(model, x, y)
    assert embedding_of(model).stats()["num_updates"] == 7


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_one_replica_resumes_from_files_of_several_replicas(suffix, tmp_path):
    path = str(tmp_path / f"model{suffix}")
    two = fit(strategies.mirrored(2), functional, optimizer="adam")
    if suffix == ".keras":
        two.save(path)
        one = keras.models.load_model(
            path, custom_objects={"weighted_sum": weighted_sum}
        )
    else:
        two.save_weights(path)
        one = compiled(
            tf.distribute.get_strategy(), functional, optimizer="adam"
        )
        one.load_weights(path)
    assert_same(embedding_of(one), embedding_of(two))
    x, y = batches(1)
    for model in (one, two):
        train(model, x, y)
    assert_same(embedding_of(one), embedding_of(two), rtol=1e-5, atol=1e-6)
    if suffix == ".weights.h5":
        again = compiled(strategies.mirrored(2), functional, optimizer="adam")
        again.load_weights(path)
        train(again, x, y)
        assert_same(embedding_of(again), embedding_of(two))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_checkpoints_and_exports_do_not_depend_on_the_strategy(tmp_path):
    two = fit(strategies.mirrored(2), functional)
    path = tf.train.Checkpoint(model=two).write(str(tmp_path / "ckpt"))
    one = functional()
    tf.train.Checkpoint(model=one).read(path).expect_partial()
    assert_same(embedding_of(one), embedding_of(two))
    two.export(str(tmp_path / "exported"), verbose=False)
    x, _ = batches(1)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    served = loaded.serve(tf.nest.map_structure(tf.constant, x))
    np.testing.assert_allclose(
        served, one.predict(x, verbose=0), rtol=1e-6, atol=1e-6
    )


def test_a_custom_loop_trains_in_strategy_run():
    strategy = strategies.mirrored(2)
    x, y = batches()
    with strategy.scope():
        layer = make_layer()
        layer.build()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(layer.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            found = layer(x, training=True)
            output = (
                found["title"] * found["user"]
                + found["title"]
                + found["body"][:, 0] * found["body"][:, 1]
            )
            loss = tf.reduce_sum(output * y) / BATCH
        weights = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    @tf.function
    def epoch(dataset):
        for batch in dataset:
            strategy.run(step, args=batch)

    for _ in range(2):
        epoch(
            strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
            )
        )
    assert_same(layer.embedding, with_one_replica())


def test_a_layer_of_another_strategy_raises():
    layer = make_layer()
    model = compiled(strategies.mirrored(2), lambda: Product(layer))
    with pytest.raises(RuntimeError, match=r"create it in `strategy.scope"):
        train(model, *batches(1))


def test_a_step_outside_of_strategy_run_raises():
    with strategies.mirrored(2).scope():
        layer = make_layer()
    x, _ = batches(1)
    with (
        tf.GradientTape(),
        pytest.raises(RuntimeError, match=r"inside `strategy.run`"),
    ):
        layer(x)


class Siamese(keras.Model):
    """Model that calls its layer twice and has no `training` argument."""

    def __init__(self):
        super().__init__()
        self.embedding = make_layer()

    def call(self, inputs):
        one = self.embedding(inputs)
        other = self.embedding({**inputs, "title": inputs["body"]})
        return one["title"] * one["user"] + (
            other["title"] * other["body"][:, 1]
        )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_two_calls_without_training_equal_those_of_one_replica(num_replicas):
    expected = embedding_of(fit(tf.distribute.get_strategy(), Siamese))
    found = embedding_of(fit(strategies.mirrored(num_replicas), Siamese))
    assert_same(found, expected)
    assert found.stats()["num_updates"] == 6


@pytest.mark.parametrize("reduce", ["SUM", "MEAN"])
def test_gradients_reduced_over_replicas_equal_a_stock_layer(reduce):
    """A program reduces gradients, and clips them by their common norm."""
    found = []
    for stock in (False, True):
        strategy = strategies.mirrored(2)
        with strategy.scope():
            if stock:
                layer = keras.layers.Embedding(
                    12, 4, keras.initializers.Constant(START)
                )
            else:
                table = tpu.TableConfig(12, 4, start, None, "sum", "words")
                layer = tlm.layers.TPUEmbedding(
                    tpu.FeatureConfig(table), tpu.SGD(0.5)
                )
            layer(tf.constant([0]))
            optimizer = keras.optimizers.SGD(0.5)
            optimizer.build(layer.trainable_variables)

        @tf.function
        def step(number, layer=layer, optimizer=optimizer):
            def of_replica():
                context = tf.distribute.get_replica_context()
                # The ids of the replicas do not overlap, so that the norm of
                # the sum is the norm of both gradients.
                ids = 5 * context.replica_id_in_sync_group + tf.constant(
                    [1, 4, 2]
                )
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.sin(layer(ids) * (1.0 + number)))
                gradient = tf.convert_to_tensor(
                    tape.gradient(loss, layer.trainable_variables[0].value)
                )
                total = context.all_reduce(
                    tf.distribute.ReduceOp[reduce], gradient
                )
                norm = tf.norm(total)
                optimizer.apply([total / norm], layer.trainable_variables)
                return norm

            norms = strategy.experimental_local_results(
                strategy.run(of_replica)
            )
            return tf.stack(norms)

        norms = [step(tf.constant(float(one))).numpy() for one in range(2)]
        rows = (
            np.asarray(layer.embeddings)
            if stock
            else layer.get_embedding_tables()["words"]
        )
        found.append((np.stack(norms), np.asarray(rows)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
