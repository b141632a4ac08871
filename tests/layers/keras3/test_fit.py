"""Compares training by `fit` and by custom loops with dense formulas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layers import models

RULES = ("sgd", "adagrad")


def compiled(model, **kwargs):
    model.compile(
        kwargs.pop("optimizer", "adam"), models.weighted_sum, **kwargs
    )
    return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_takes_one_step_per_batch_and_distinct_row(
    rule, num_shards, run_eagerly
):
    model, layer = models.make_model(models.settings(rule), num_shards)
    ids, y = models.batches(3)
    compiled(model, run_eagerly=run_eagerly).fit(
        ids, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0
    )
    ref = models.DenseReference(rule)
    ref.fit(ids, y)
    models.assert_trained(layer, ref)
    assert int(layer.optimizer.iterations) == 3


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_a_repeated_id_are_summed_before_squaring(rule):
    model, layer = models.make_model(models.settings(rule))
    ids = np.full([models.NUM_SAMPLES, models.LENGTH], 7)
    y = np.ones([*ids.shape, models.DIM], np.float32)
    compiled(model).train_on_batch(ids, y)
    ref = models.DenseReference(rule)
    ref.fit(ids, y)
    models.assert_trained(layer, ref)
    changed = np.any(layer.embeddings.numpy() != models.start_rows(), axis=1)
    assert np.flatnonzero(changed).tolist() == [7]


@pytest.mark.parametrize("rule", RULES)
def test_steps_per_execution_applies_each_step(rule):
    model, layer = models.make_model(models.settings(rule))
    ids, y = models.batches(4)
    compiled(model, steps_per_execution=2).fit(
        ids, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0
    )
    ref = models.DenseReference(rule)
    ref.fit(ids, y)
    models.assert_trained(layer, ref)


def test_evaluate_and_predict_change_nothing():
    model, layer = models.make_model("adagrad")
    ids, y = models.batches(1)
    compiled(model)
    model.evaluate(ids, y, verbose=0)
    np.testing.assert_array_equal(
        model.predict(ids, verbose=0), models.start_rows()[ids]
    )
    model(ids, training=True)
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())
    assert int(layer.optimizer.iterations) == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_shared_layer_applies_the_sum_of_its_calls_in_one_step(rule):
    first, second = (
        keras.Input([models.LENGTH], dtype="int64") for _ in range(2)
    )
    layer = models.make_layer(models.settings(rule))
    model = keras.Model(
        [first, second], keras.layers.Add()([layer(first), layer(second)])
    )
    (ids, y), (more_ids, _) = models.batches(1), models.batches(1, seed=2)
    more_ids[0] = ids[0]
    compiled(model).train_on_batch([ids, more_ids], y)
    ref = models.DenseReference(rule)
    ref.step(np.stack([ids, more_ids]), np.stack([y, y]) / len(ids))
    models.assert_trained(layer, ref)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_function", [False, True])
def test_a_custom_loop_trains_with_apply_gradients(rule, is_function):
    model, layer = models.make_model(models.settings(rule))
    optimizer = keras.optimizers.SGD()

    def step(ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(models.weighted_sum(y, model(ids)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    step = tf.function(step) if is_function else step
    ids, y = models.batches(3)
    ref = models.DenseReference(rule)
    for start in range(0, len(ids), models.NUM_SAMPLES):
        batch = slice(start, start + models.NUM_SAMPLES)
        step(tf.constant(ids[batch]), tf.constant(y[batch]))
        ref.step(ids[batch], y[batch] / models.NUM_SAMPLES)
    models.assert_trained(layer, ref)


def test_gradients_that_are_not_applied_change_nothing():
    model, layer = models.make_model("sgd")
    ids, y = models.batches(1)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(models.weighted_sum(y, model(ids)))
    for _ in range(2):
        (gradient,) = tape.gradient(loss, model.trainable_variables)
    expected = np.zeros([models.NUM_ROWS, models.DIM], np.float32)
    np.add.at(expected, ids, y)
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient), expected)
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())


@pytest.mark.parametrize("rule", RULES)
def test_manually_summed_gradients_are_applied_in_one_step(rule):
    model, layer = models.make_model(models.settings(rule))
    (weight,) = model.trainable_variables
    ids, y = models.batches(2)
    total = tf.zeros([models.NUM_ROWS, models.DIM])
    for batch in (slice(0, 4), slice(4, 8)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                models.weighted_sum(y[batch], model(ids[batch]))
            )
        total += tf.convert_to_tensor(tape.gradient(loss, weight))
    keras.optimizers.SGD().apply_gradients([(total, weight)])
    ref = models.DenseReference(rule)
    ref.step(ids, y / models.NUM_SAMPLES)
    models.assert_trained(layer, ref)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda **kwargs: keras.optimizers.SGD(**kwargs),
        lambda **kwargs: keras.optimizers.Adam(**kwargs, loss_scale_factor=8.0),
        lambda **kwargs: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(**kwargs), initial_scale=8.0
        ),
    ],
    ids=["plain", "loss_scale_factor", "LossScaleOptimizer"],
)
def test_accumulated_gradients_are_applied_as_their_mean_in_one_step(
    rule, run_eagerly, wrap
):
    model, layer = models.make_model(models.settings(rule))
    compiled(
        model,
        optimizer=wrap(gradient_accumulation_steps=4),
        run_eagerly=run_eagerly,
    )
    ids, y = models.batches(11)
    model.fit(ids, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0)
    ref = models.DenseReference(rule)
    # The eleven batches contain two complete accumulations of four batches.
    for start in (0, 16):
        batch = slice(start, start + 4 * models.NUM_SAMPLES)
        ref.step(ids[batch], y[batch] / models.NUM_SAMPLES / 4)
    models.assert_trained(layer, ref)
    assert int(layer.optimizer.iterations) == 2
    # The static size of the accumulated ids is unknown, because it depends on
    # the batches.
    assert layer.optimizer._accumulated_ids.shape[0] is None
    assert int(tf.size(layer.optimizer._accumulated_ids)) == (
        3 * models.NUM_SAMPLES * models.LENGTH
    )
    assert all(
        variable.shape.rank == 0 for variable in model.optimizer.variables
    )


def test_a_new_optimizer_discards_accumulated_gradients():
    ids, y = models.batches(5)
    first, second = (
        slice(0, models.NUM_SAMPLES),
        slice(models.NUM_SAMPLES, None),
    )
    tables = []
    for parts in ([first, second], [second]):
        model, layer = models.make_model(models.settings("adagrad"))
        for part in parts:
            compiled(
                model,
                optimizer=keras.optimizers.SGD(gradient_accumulation_steps=4),
            )
            model.fit(
                ids[part],
                y[part],
                batch_size=models.NUM_SAMPLES,
                shuffle=False,
                verbose=0,
            )
        assert int(layer.optimizer.iterations) == 1
        tables.append(layer.embeddings.numpy())
    np.testing.assert_array_equal(*tables)


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(loss_scale_factor=8.0),
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(), initial_scale=8.0
        ),
    ],
    ids=["loss_scale_factor", "LossScaleOptimizer"],
)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_unscaled_by_the_loss_scale(rule, optimizer):
    optimizer = type(optimizer).from_config(optimizer.get_config())
    model, layer = models.make_model(
        models.settings(rule), dtype="mixed_float16"
    )
    ids, y = models.batches(2)
    compiled(model, optimizer=optimizer).fit(
        ids, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0
    )
    ref = models.DenseReference(rule)
    ref.fit(ids, y)
    models.assert_trained(layer, ref)


def test_a_step_with_overflowing_scaled_gradients_is_skipped():
    model, layer = models.make_model("sgd", dtype="mixed_float16")
    ids, y = models.batches(1)
    y[2, 1, 0] = np.inf
    compiled(
        model,
        optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    )
    model.train_on_batch(ids, y)
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())
    assert float(model.optimizer.dynamic_scale) == 2.0**14
    assert int(layer.optimizer.iterations) == 0


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_a_frozen_layer_does_not_change(optimizer):
    ids = keras.Input([models.LENGTH], dtype="int64")
    layer = models.make_layer(optimizer)
    layer.trainable = False
    rows = keras.layers.Dense(models.DIM)(layer(ids))
    model = compiled(keras.Model(ids, rows))
    model.train_on_batch(*models.batches(1))
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())
    assert len(model.trainable_variables) == 2
    layer.trainable = True
    compiled(model).train_on_batch(*models.batches(1))
    assert np.any(layer.embeddings.numpy() != models.start_rows())


@pytest.mark.parametrize("rule", RULES)
def test_a_table_that_is_also_the_output_layer_gets_both_gradients(rule):
    ids, y = models.batches(1)
    layer = models.make_layer(models.settings(rule))
    layer.build()
    with tf.GradientTape() as tape:
        rows = layer(ids)
        scores = tf.matmul(
            tf.reduce_sum(rows * y, 1), layer.embeddings, transpose_b=True
        )
        loss = tf.reduce_sum(scores)
    keras.optimizers.SGD().apply_gradients(
        zip(
            tape.gradient(loss, layer.trainable_variables),
            layer.trainable_variables,
        )
    )
    start = models.start_rows()
    hidden = np.sum(start[ids] * y, axis=1)
    ref = models.DenseReference(rule)
    # Each row is used as output weights and as an embedding. As output weights,
    # its gradient is the sum of `hidden`. As an embedding, its gradient is the
    # sum of all rows.
    ref.step(
        np.concatenate([ids.ravel(), np.arange(models.NUM_ROWS)]),
        np.concatenate(
            [
                (y * start.sum(axis=0)).reshape(-1, models.DIM),
                np.tile(hidden.sum(axis=0), [models.NUM_ROWS, 1]),
            ]
        ),
    )
    np.testing.assert_allclose(layer.embeddings.numpy(), ref.rows, rtol=2e-6)


def test_clipped_gradients_are_applied_clipped():
    model, layer = models.make_model(models.settings("sgd"))
    ids, y = models.batches(1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(models.weighted_sum(y, model(ids)))
    weights = model.trainable_variables
    clipped, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 1.0)
    keras.optimizers.Adam().apply_gradients(zip(clipped, weights))
    ref = models.DenseReference("sgd")
    ref.step(ids, y / norm.numpy())
    np.testing.assert_allclose(layer.embeddings.numpy(), ref.rows, rtol=1e-6)


def test_the_models_optimizer_has_no_variables_of_the_table():
    model, _ = models.make_model("adagrad")
    compiled(
        model,
        optimizer=keras.optimizers.Adam(
            use_ema=True, weight_decay=0.5, clipnorm=1e-3
        ),
    )
    model.train_on_batch(*models.batches(1))
    assert all(
        variable.shape.rank == 0 for variable in model.optimizer.variables
    )


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.SGD,
        keras.optimizers.Adagrad,
        keras.optimizers.Adam,
        lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
    ],
)
def test_the_models_optimizer_trains_a_table_without_an_optimizer(make):
    model, layer = models.make_model(None, num_shards=4)
    # The dense reference multiplies one-hot rows by one matrix, so that no
    # gradient is an `IndexedSlices`.
    one_hot = keras.Input([models.LENGTH, models.NUM_ROWS])
    dense = keras.layers.Dense(models.DIM, use_bias=False)
    ref = keras.Model(one_hot, dense(one_hot))
    dense.kernel.assign(models.start_rows())
    ids, y = models.batches(4)
    for trained, x in (
        (model, ids),
        (ref, np.eye(models.NUM_ROWS, dtype="f")[ids]),
    ):
        compiled(trained, optimizer=make()).fit(
            x, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0
        )
    assert np.any(layer.embeddings.numpy() != models.start_rows())
    np.testing.assert_allclose(
        layer.embeddings.numpy(), dense.kernel.numpy(), rtol=2e-6, atol=1e-6
    )


def test_a_shared_layer_without_an_optimizer_sums_its_calls():
    layer = models.make_layer(None, num_shards=2)
    layer.build()
    ids, y = models.batches(1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids) * y) + tf.reduce_sum(layer(ids) * y)
    gradients = tape.gradient(loss, layer.trainable_variables)
    rows = np.concatenate(
        [g.indices.numpy() + offset for g, offset in zip(gradients, (0, 5))]
    )
    assert sorted(rows) == np.unique(ids).tolist()
