"""Tests `tlm.layers.TPUEmbedding` in Keras models."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.reference import optimizers as reference

tpu = tf.tpu.experimental.embedding

NUM_SAMPLES = 4
WORDS = np.arange(20, dtype=np.float32).reshape(10, 2) / 8
USERS = np.arange(18, dtype=np.float32).reshape(6, 3) / 16


def constant(rows):
    def initializer(shape, shard_info=None, dtype=None):
        del shape, dtype
        first = shard_info.offset[0]
        return tf.constant(rows[first : first + shard_info.shape[0]])

    return initializer


def make_layer(optimizer="sgd", **options):
    optimizer = tpu.SGD(0.5) if optimizer == "sgd" else optimizer
    words = tpu.TableConfig(
        10, 2, constant(WORDS), combiner="sum", name="words"
    )
    users = tpu.TableConfig(
        6,
        3,
        constant(USERS),
        combiner="sum",
        name="users",
        optimizer=tpu.Adagrad(0.25, initial_accumulator_value=0.5),
    )
    return tlm.layers.TPUEmbedding(
        {
            "text": {
                "title": tpu.FeatureConfig(words),
                "body": tpu.FeatureConfig(words, max_sequence_length=2),
            },
            "user": tpu.FeatureConfig(users),
        },
        optimizer,
        name="embedding",
        **options,
    )


def make_model(layer=None):
    inputs = {
        "text": {
            "title": keras.Input([2], dtype="int64"),
            "body": keras.Input([3], dtype="int64"),
        },
        "user": keras.Input([], dtype="int64", name="user"),
    }
    found = (layer or make_layer())(inputs)
    flat = [
        found["text"]["title"],
        keras.layers.Flatten()(found["text"]["body"]),
        found["user"],
    ]
    return keras.Model(inputs, keras.layers.Concatenate()(flat))


def weighted_sum(y, x):
    return keras.ops.sum(x * y, axis=1)


def batches(num_batches):
    rng = np.random.default_rng(2)
    size = num_batches * NUM_SAMPLES
    return (
        {
            "text": {
                "title": rng.integers(0, 10, (size, 2)),
                "body": rng.integers(0, 10, (size, 3)),
            },
            "user": rng.integers(0, 6, size),
        },
        rng.integers(-4, 5, (size, 9)).astype(np.float32),
    )


def refs(x, y):
    """Returns references of both tables, trained in float64."""
    words = reference.Table(WORDS, "SGD", 0.5)
    users = reference.Table(
        USERS, "Adagrad", 0.25, initial_accumulator_value=0.5
    )
    for start in range(0, len(y), NUM_SAMPLES):
        terms, user_terms = [], []
        for i in range(start, start + NUM_SAMPLES):
            gradient = y[i] / NUM_SAMPLES
            terms += [(row, gradient[:2]) for row in x["text"]["title"][i]]
            terms += [
                (x["text"]["body"][i, p], gradient[2 + 2 * p : 4 + 2 * p])
                for p in range(2)
            ]
            user_terms.append((x["user"][i], gradient[6:]))
        words.train(terms)
        users.train(user_terms)
    return {"words": words.rows, "users": users.rows}


def rows_of(layer):
    return {
        config.name: rows.numpy()
        for config, rows in layer.embedding_tables.items()
    }


def compiled(model, **options):
    model.compile(options.pop("optimizer", "adam"), weighted_sum, **options)
    return model


def fit(model, x, y, **options):
    return model.fit(
        x, y, batch_size=NUM_SAMPLES, shuffle=False, verbose=0, **options
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True}, {"steps_per_execution": 3}]
)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_fit_takes_one_step_per_batch(num_shards, options):
    model = compiled(
        make_model(
            make_layer(
                partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards)
            )
        ),
        **options,
    )
    x, y = batches(3)
    fit(model, x, y)
    found = rows_of(model.get_layer("embedding"))
    for name, rows in refs(x, y).items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-6, atol=1e-6)
    embedding = model.get_layer("embedding").embedding
    assert embedding.stats()["num_updates"] == 3


def test_evaluation_and_prediction_change_nothing():
    model = compiled(make_model())
    x, y = batches(2)
    before = rows_of(model.get_layer("embedding"))
    found = model.predict(x, verbose=0)
    loss = model.evaluate(x, y, batch_size=NUM_SAMPLES, verbose=0)
    np.testing.assert_allclose(
        loss, np.sum(found * y, axis=1).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(
        found[:, :2], WORDS[x["text"]["title"]].sum(axis=1), rtol=1e-6
    )
    np.testing.assert_array_equal(
        found[:, 2:6], WORDS[x["text"]["body"][:, :2]].reshape(-1, 4)
    )
    np.testing.assert_array_equal(found[:, 6:], USERS[x["user"]])
    for name, rows in rows_of(model.get_layer("embedding")).items():
        np.testing.assert_array_equal(rows, before[name])


def test_a_custom_loop_trains_the_tables():
    layer, optimizer = make_layer(), keras.optimizers.SGD(0.1)
    x, y = batches(1)
    with tf.GradientTape() as tape:
        found = layer(x, training=True)
        loss = tf.reduce_mean(
            tf.reduce_sum(
                y
                * tf.concat(
                    [
                        found["text"]["title"],
                        tf.reshape(found["text"]["body"], [-1, 4]),
                        found["user"],
                    ],
                    1,
                ),
                1,
            )
        )
    gradients = tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_array_equal(rows_of(layer)["words"], WORDS)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
    for name, rows in refs(x, y).items():
        np.testing.assert_allclose(
            rows_of(layer)[name], rows, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("form", ["ragged", "sparse"])
def test_ragged_and_sparse_features_with_weights_train(form):
    table = tpu.TableConfig(
        10, 2, constant(WORDS), combiner="sum", name="words"
    )
    layer = tlm.layers.TPUEmbedding(
        {"x": tpu.FeatureConfig(table)}, tpu.SGD(1.0)
    )
    ids = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
    weights = tf.ragged.constant([[2.0, 3.0], [4.0]])
    if form == "sparse":
        ids, weights = ids.to_sparse(), weights.to_sparse()
    with tf.GradientTape() as tape:
        found = layer({"x": ids}, weights={"x": weights}, training=True)
        loss = tf.reduce_sum(found["x"])
    gradients = tape.gradient(loss, layer.trainable_variables)
    keras.optimizers.SGD().apply_gradients(
        zip(gradients, layer.trainable_variables)
    )
    expected = WORDS.copy()
    expected[[1, 2, 3]] -= [[2], [3], [4]]
    np.testing.assert_array_equal(rows_of(layer)["words"], expected)


def test_a_layer_that_is_not_trainable_does_not_change():
    layer = make_layer()
    model = make_model(layer)
    layer.trainable = False
    outputs = keras.layers.Dense(1)(model.output)
    model = keras.Model(model.input, outputs)
    x, _ = batches(1)
    model.compile("sgd", "mse")
    model.fit(x, np.ones([NUM_SAMPLES, 1]), verbose=0)
    np.testing.assert_array_equal(rows_of(layer)["words"], WORDS)
    assert layer.embedding.stats()["num_updates"] == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_saved_model_resumes_training(num_shards, suffix, tmp_path):
    trained = compiled(
        make_model(
            make_layer(
                partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards)
            )
        )
    )
    x, y = batches(2)
    fit(trained, x, y)
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        trained.save(path)
        found = keras.models.load_model(
            path, custom_objects={"weighted_sum": weighted_sum}
        )
    else:
        trained.save_weights(path)
        found = compiled(make_model())
        found.load_weights(path)
    fit(trained, x, y)
    fit(found, x, y)
    wanted = trained.get_layer("embedding")
    for name, rows in rows_of(found.get_layer("embedding")).items():
        np.testing.assert_array_equal(rows, rows_of(wanted)[name])


def test_a_checkpoint_contains_tables_and_slots(tmp_path):
    trained = compiled(make_model())
    x, y = batches(2)
    fit(trained, x, y)
    path = tf.train.Checkpoint(model=trained).write(str(tmp_path / "ckpt"))
    found = compiled(make_model())
    tf.train.Checkpoint(model=found).read(path).expect_partial()
    for name, rows in rows_of(found.get_layer("embedding")).items():
        np.testing.assert_array_equal(
            rows, rows_of(trained.get_layer("embedding"))[name]
        )


def test_an_exported_model_uses_only_stock_ops(tmp_path):
    model = compiled(make_model())
    x, y = batches(1)
    fit(model, x, y)
    model.export(str(tmp_path / "m"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    np.testing.assert_array_equal(
        loaded.serve(tf.nest.map_structure(tf.constant, x)),
        model.predict(x, verbose=0),
    )
    saved = (tmp_path / "m" / "saved_model.pb").read_bytes()
    assert b"LayoutMap>" not in saved


def test_output_shapes_are_known_before_the_layer_is_built():
    model = make_model()
    assert model.output.shape == (None, 9)
    assert make_layer().compute_output_spec(
        {
            "text": {
                "title": keras.KerasTensor([None, 2], "int64"),
                "body": keras.KerasTensor([5, 3], "int64"),
            },
            "user": keras.KerasTensor([None], "int64"),
        }
    )["text"]["body"].shape == (5, 2, 2)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0
        ),
        lambda: keras.optimizers.SGD(0.1, clipnorm=1e-3),
    ],
)
def test_loss_scaling_and_clipping_do_not_affect_the_tables(make, run_eagerly):
    model = compiled(make_model(), optimizer=make(), run_eagerly=run_eagerly)
    x, y = batches(2)
    fit(model, x, y)
    found = rows_of(model.get_layer("embedding"))
    for name, rows in refs(x, y).items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_overflowing_scaled_loss_skips_the_step(run_eagerly):
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0
    )
    model = compiled(make_model(), optimizer=optimizer, run_eagerly=run_eagerly)
    x, y = batches(1)
    overflow = y.copy()
    overflow[0, 0] = np.inf
    fit(model, x, overflow)
    np.testing.assert_array_equal(
        rows_of(model.get_layer("embedding"))["words"], WORDS
    )
    fit(model, x, y)
    for name, rows in refs(x, y).items():
        np.testing.assert_allclose(
            rows_of(model.get_layer("embedding"))[name],
            rows,
            rtol=1e-6,
            atol=1e-6,
        )


def test_a_step_that_is_not_applied_is_discarded():
    layer = make_layer()
    x, y = batches(1)
    with tf.GradientTape():
        layer(x)
    model = compiled(make_model(layer))
    fit(model, x, y)
    for name, rows in refs(x, y).items():
        np.testing.assert_allclose(
            rows_of(layer)[name], rows, rtol=1e-6, atol=1e-6
        )


def test_a_callable_learning_rate_in_get_config_raises():
    layer = make_layer(tpu.SGD(lambda: 0.5))
    with pytest.raises(ValueError, match="save_weights"):
        layer.get_config()


def test_a_config_is_restored_completely():
    table = tpu.TableConfig(
        10,
        2,
        keras.initializers.Constant(2.0),
        tpu.FTRL(
            0.5, beta=0.25, clipvalue=(None, 1.0), weight_decay_factor=0.5
        ),
        "mean",
        "words",
        quantization_config=tpu.QuantizationConfig(4, -1.0, 1.0),
    )
    layer = tlm.layers.TPUEmbedding(
        [
            tpu.FeatureConfig(table, output_shape=[2, 3], name="a"),
            (tpu.FeatureConfig(table, max_sequence_length=4),),
        ],
        out_of_range="drop",
        table_dtypes={table: "bfloat16"},
        rounding_seed=7,
    )
    found = tlm.layers.TPUEmbedding.from_config(layer.get_config())
    found_steps, steps = found._steps, layer._steps
    tf.nest.assert_same_structure(
        found_steps.feature_config, steps.feature_config
    )
    assert found_steps.spec.features == steps.spec.features
    assert found_steps.rounding_seed == 7
    [table], [expected] = found_steps.spec.tables, steps.spec.tables
    assert table.dtype == "bfloat16"
    assert table.optimizer == expected.optimizer
    assert table.quantization == expected.quantization
    assert table.initializer.value == 2.0
    assert found.get_config()["out_of_range"] == "drop"


def test_training_without_an_optimizer_raises_with_the_argument_to_pass():
    layer = make_layer(optimizer=None)
    x, _ = batches(1)
    with (
        tf.GradientTape(),
        pytest.raises(
            RuntimeError,
            match=(
                "Layer 'embedding' in a training step requires an optimizer .*"
                "'words' has none. Pass `optimizer=` to the TPUEmbedding"
                ".* `trainable=False`"
            ),
        ) as caught,
    ):
        layer(tf.nest.map_structure(tf.constant, x))
    assert "enqueue" not in str(caught.value)


def test_python_values_raise_with_the_supported_form():
    x, _ = batches(1)
    with pytest.raises(
        TypeError,
        match=(
            r"such as tf.constant\(\[1, 2\]\).*Received: 1.5 \(layer 'embed"
        ),
    ):
        make_layer()(tf.nest.map_structure(lambda _: 1.5, x))
