"""Tests a `ShardedEmbedding` of Keras 3 that several replicas train.

For the same global batches, a table with an optimizer is bitwise equal for any
number of replicas, because gradients are summed in the order of the global
batch. With the test data, any other order changes the sums.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.layers import models

tpu = tf.tpu.experimental.embedding
BATCH = 8
# `make test` tries one case of each kind: a case compiles models for one and
# for two replicas, which takes about 2 s.
EXHAUSTIVE = pytest.mark.exhaustive
LENGTH = models.LENGTH


def adagrad():
    return tpu.Adagrad(0.5, initial_accumulator_value=0.25)


def data(num_samples=3 * BATCH, seed=0):
    """Returns ids, and gradients of the rows that are not exact in binary."""
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, models.NUM_ROWS, (num_samples, LENGTH)),
        rng.standard_normal((num_samples, LENGTH, models.DIM)).astype("f"),
    )


def compiled(
    num_replicas,
    optimizer="adagrad",
    *,
    calls=1,
    model_optimizer=lambda: keras.optimizers.SGD(0.5),
    options=None,
    **arguments,
):
    """Returns a compiled model with one table, named "words"."""
    if optimizer == "adagrad":
        optimizer = adagrad()
    with strategies.mirrored(num_replicas).scope():
        ids = keras.Input([LENGTH], dtype="int64", name="ids")
        layer = models.make_layer(optimizer, **arguments)
        rows = [layer(ids) for _ in range(calls)]
        model = keras.Model(
            ids,
            rows[0] if calls == 1 else keras.layers.add(rows),
            name="model",
        )
        model.compile(model_optimizer(), models.weighted_sum, **(options or {}))
    return model


def train(model, ids, y, **options):
    model.fit(ids, y, batch_size=BATCH, shuffle=False, verbose=0, **options)


def trained(num_replicas, *arguments, **options):
    """Returns a model after two epochs."""
    model = compiled(num_replicas, *arguments, **options)
    train(model, *data(), epochs=2)
    return model


def table_of(model):
    return model.get_layer("words")


@functools.cache
def with_one_replica():
    return trained(1)


def rows_of(model):
    return np.asarray(table_of(model).embeddings.numpy())


@pytest.mark.parametrize("num_replicas", [2, pytest.param(4, marks=EXHAUSTIVE)])
def test_tables_are_bitwise_equal_to_those_of_one_replica(num_replicas):
    models.assert_same_tables(
        table_of(trained(num_replicas)), table_of(with_one_replica())
    )


@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True},
        pytest.param({"jit_compile": False}, marks=EXHAUSTIVE),
        {"steps_per_execution": 2},
    ],
    ids=["eager", "without XLA", "two steps at once"],
)
def test_tables_are_bitwise_equal_for_all_compile_options(options):
    models.assert_same_tables(
        table_of(trained(2, options=options)), table_of(with_one_replica())
    )


def test_a_first_call_without_training_and_a_smaller_last_batch():
    ids, y = data(3 * BATCH + 2)

    def model_of(num_replicas):
        model = compiled(num_replicas)
        before = model.predict(ids, batch_size=BATCH, verbose=0)
        np.testing.assert_array_equal(before, models.start_rows()[ids])
        train(model, ids, y)
        return model

    one, two = model_of(1), model_of(2)
    models.assert_same_tables(table_of(two), table_of(one))
    np.testing.assert_array_equal(
        two.predict(ids, batch_size=BATCH, verbose=0),
        one.predict(ids, batch_size=BATCH, verbose=0),
    )


def test_a_replica_without_samples_changes_no_row():
    ids, y = data(BATCH + 1)
    y[:BATCH] = 0
    model = compiled(2, tpu.SGD(0.5))
    train(model, ids, y)
    changed = np.any(rows_of(model) != models.start_rows(), axis=1)
    assert set(np.flatnonzero(changed)) == set(ids[-1])
    assert np.isfinite(rows_of(model)).all()
    assert table_of(model).optimizer.iterations.numpy() == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.1),
        pytest.param(
            lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.05),
            marks=EXHAUSTIVE,
        ),
        lambda: keras.optimizers.SGD(0.1, momentum=0.5, clipnorm=0.25),
        pytest.param(
            lambda: keras.optimizers.AdamW(0.1, weight_decay=0.125),
            marks=EXHAUSTIVE,
        ),
        pytest.param(lambda: keras.optimizers.Lamb(0.1), marks=EXHAUSTIVE),
        lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.1), initial_scale=8.0
        ),
    ],
    ids=[
        "Adam",
        "Adagrad",
        "SGD",
        "AdamW",
        "Lamb",
        "accumulation",
        "loss scale",
    ],
)
def test_the_optimizer_of_the_model_has_the_numbers_of_one_replica(make):
    models.assert_same_tables(
        *(
            table_of(
                trained(count, "model", model_optimizer=make, num_shards=1)
            )
            for count in (2, 1)
        )
    )


def test_a_norm_of_all_gradients_raises_with_several_replicas():
    with pytest.raises(ValueError, match="global_clipnorm.*each replica"):
        trained(
            2,
            "model",
            model_optimizer=lambda: keras.optimizers.SGD(global_clipnorm=1.0),
        )


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "model_optimizer": lambda: keras.optimizers.SGD(
                0.5, gradient_accumulation_steps=3
            )
        },
        {"embeddings_constraint": keras.constraints.MaxNorm(1.0, axis=1)},
        {"embeddings_regularizer": keras.regularizers.L2(0.125)},
        {
            "embeddings_regularizer": lambda rows: tf.reduce_mean(rows**2),
            "calls": 2,
        },
    ],
    ids=["accumulation", "constraint", "regularizer", "mean over rows"],
)
def test_settings_of_a_table_have_the_numbers_of_one_replica(arguments):
    one, two = (trained(count, **arguments) for count in (1, 2))
    if "calls" not in arguments:
        models.assert_same_tables(table_of(two), table_of(one))
        return
    # The gradients of two calls are summed replica by replica.
    np.testing.assert_allclose(rows_of(two), rows_of(one), rtol=1e-6)


def test_each_row_counts_once_in_the_loss_of_a_regularizer():
    ids = np.tile([3, 3, 7], (BATCH, 1))
    y = np.zeros((BATCH, LENGTH, models.DIM), np.float32)
    model = compiled(2, embeddings_regularizer=keras.regularizers.L2(0.125))
    expected = 0.125 * np.sum(models.start_rows()[[3, 7]] ** 2)
    assert model.evaluate(ids, y, batch_size=BATCH, verbose=0) == expected


def test_an_overflow_in_one_replica_skips_the_step_of_all():
    ids, y = data(BATCH)
    overflow = y.copy()
    overflow[-1, 0] = np.inf

    def model_of(count):
        return compiled(
            count,
            model_optimizer=lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=8.0
            ),
        )

    model = model_of(2)
    train(model, ids, overflow)
    np.testing.assert_array_equal(rows_of(model), models.start_rows())
    train(model, ids, y)
    one = model_of(1)
    train(one, ids, y)
    models.assert_same_tables(table_of(model), table_of(one))


def test_an_id_outside_of_the_table_fails_and_changes_no_row():
    ids, y = data(BATCH)
    bad = np.where(np.arange(BATCH)[:, np.newaxis] == BATCH - 1, 99, ids)
    model = compiled(2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="99"):
        train(model, bad, y)
    np.testing.assert_array_equal(rows_of(model), models.start_rows())


def test_a_summary_and_the_weights_are_those_of_one_replica():
    one, two = with_one_replica(), trained(2)
    lines = []
    for model in (one, two):
        model.summary(print_fn=lines.append)
    assert lines[0] == lines[1]
    assert one.count_params() == two.count_params()
    for weight, other in zip(two.weights, one.weights, strict=True):
        assert weight.path == other.path
        assert weight.shape == other.shape
    (rows,) = two.get_weights()
    np.testing.assert_array_equal(rows, rows_of(two))
    two.set_weights([rows + 1])
    np.testing.assert_array_equal(rows_of(two), rows + 1)


@pytest.mark.parametrize("optimizer", ["adagrad", "model", None])
@pytest.mark.parametrize(
    "counts", [pytest.param((1, 2), marks=EXHAUSTIVE), (2, 1)]
)
def test_files_do_not_depend_on_the_number_of_replicas(
    optimizer, counts, tmp_path
):
    """The last steps continue with the slot variables of the files."""

    def make(count):
        return compiled(
            count,
            optimizer,
            model_optimizer=lambda: keras.optimizers.Adam(0.25),
        )

    first, second = counts
    saved = make(first)
    train(saved, *data())
    saved.save_weights(tmp_path / "model.weights.h5")
    path = tf.train.Checkpoint(model=saved).write(str(tmp_path / "checkpoint"))
    from_file, from_checkpoint = make(second), make(second)
    for model in (from_file, from_checkpoint):
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    from_file.load_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=from_checkpoint).read(
        path
    ).assert_existing_objects_matched()
    train(saved, *data(seed=1))
    for model in (from_file, from_checkpoint):
        train(model, *data(seed=1))
        if optimizer is None:
            # The sums over replicas are the sums of Keras.
            np.testing.assert_allclose(
                rows_of(model), rows_of(saved), rtol=1e-5
            )
        else:
            models.assert_same_tables(table_of(model), table_of(saved))


def custom_step(layer, optimizer):
    def step(ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) * y)
        weights = layer.trainable_variables
        gradients = tape.gradient(loss, weights)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(gradients, weights))

    return step


@pytest.mark.parametrize("place", ["eager", "outside"])
def test_a_custom_loop_has_the_numbers_of_one_replica(place):
    ids, y = data()

    def layer_of(count):
        strategy = strategies.mirrored(count)
        with strategy.scope():
            layer = models.make_layer(adagrad())
            layer.build()
            optimizer = keras.optimizers.SGD()
            optimizer.build(layer.trainable_variables)
        step = custom_step(layer, optimizer)
        run = lambda *batch: strategy.run(step, args=batch)  # noqa: E731
        if place == "outside":
            run = tf.function(run)
        for batch in strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((ids, y)).batch(BATCH)
        ):
            run(*batch)
        return layer

    models.assert_same_tables(layer_of(2), layer_of(1))


def test_a_function_in_a_replica_raises():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        layer = models.make_layer(adagrad())
        layer.build()
        optimizer = keras.optimizers.SGD()
        optimizer.build(layer.trainable_variables)
    step = custom_step(layer, optimizer)
    batch = tuple(map(tf.constant, data(1)))

    @tf.function
    def run():
        inner = tf.function(step)
        strategy.run(lambda: inner(*batch))

    with pytest.raises(RuntimeError, match="only `tf.function`.*'words"):
        run()


def test_gradients_that_are_applied_outside_of_replicas_are_applied_once():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        layer = models.make_layer(tpu.SGD(1.0))
        layer.build()
        optimizer = keras.optimizers.SGD()
        optimizer.build(layer.trainable_variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([4])))
        weights = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    expected = models.start_rows()
    expected[4] -= 1
    np.testing.assert_array_equal(layer.embeddings.numpy(), expected)


def test_rows_of_ids_above_the_integers_of_a_float():
    """Keras traces the model with the mean of the ids of the replicas."""
    with strategies.mirrored(2).scope():
        layer = tlm.layers.ShardedEmbedding(
            2**24 + 2, 1, optimizer="sgd", embeddings_initializer="zeros"
        )

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.words = layer

            def call(self, ids):
                return self.words(ids)

        model = Model()
        model.compile("sgd", lambda y, x: keras.ops.sum(x, axis=1))
    model.fit(np.full([4, 1], 2**24 + 1), np.zeros([4, 1]), verbose=0)
    np.testing.assert_allclose(layer.embeddings.numpy()[-1], -0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_without_an_optimizer_is_a_weight_of_the_strategy(dtype):
    model = trained(2, None, dtype=dtype)
    one = trained(1, None, dtype=dtype)
    layer = table_of(model)
    assert isinstance(layer.embeddings, keras.Variable)
    assert model.count_params() == one.count_params()
    np.testing.assert_allclose(
        rows_of(model).astype("f"),
        rows_of(one).astype("f"),
        rtol=1e-5 if dtype == "float32" else 0.05,
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="99"):
        model.predict(np.full([2, LENGTH], 99), verbose=0)
