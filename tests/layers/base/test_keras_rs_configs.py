"""Tests keras-rs configs in `tlm.layers.TPUEmbedding`.

If keras_rs is not installed, dataclasses with the fields of its version 0.4
replace its configs.
"""

import contextlib
import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

try:
    from keras_rs.layers import FeatureConfig, TableConfig
except ImportError:

    @dataclasses.dataclass(order=True)
    class TableConfig:
        name: str
        vocabulary_size: int
        embedding_dim: int
        initializer: Any = keras.initializers.VarianceScaling(mode="fan_out")
        optimizer: Any = "adam"
        combiner: str = "mean"
        placement: str = "auto"
        max_ids_per_partition: int = 256
        max_unique_ids_per_partition: int = 256

    @dataclasses.dataclass(order=True)
    class FeatureConfig:
        name: str
        table: TableConfig
        input_shape: tuple
        output_shape: tuple


def make_layer(optimizer="adagrad", **options):
    table = TableConfig("words", 10, 2, "ones", optimizer, **options)
    return tlm.layers.TPUEmbedding(
        {
            "title": FeatureConfig("title", table, (4, 3), (4, 2)),
            "topic": FeatureConfig("topic", table, (4,), (4, 2)),
        }
    )


def optimizer_of(layer):
    [table] = layer.embedding_tables
    return table.optimizer


def test_a_table_keeps_the_fields_of_its_config():
    layer = make_layer(combiner="sum")
    [table] = layer.embedding_tables
    assert (table.name, table.vocabulary_size, table.dim, table.combiner) == (
        "words",
        10,
        2,
        "sum",
    )
    np.testing.assert_array_equal(
        layer.embedding_tables[table].numpy(), np.ones([10, 2])
    )


@pytest.mark.parametrize(
    "keras_optimizer, expected",
    [
        ("sgd", tpu.SGD()),
        ("adagrad", tpu.Adagrad()),
        ("adam", tpu.Adam()),
        ("ftrl", tpu.FTRL()),
        (
            lambda: keras.optimizers.SGD(0.5, clipvalue=0.25),
            tpu.SGD(0.5, clipvalue=0.25),
        ),
        (
            lambda: keras.optimizers.Adagrad(0.5, 0.25),
            tpu.Adagrad(0.5, initial_accumulator_value=0.25),
        ),
        (
            lambda: keras.optimizers.Adam(0.5, 0.25, 0.125, 1e-3),
            tpu.Adam(0.5, 0.25, 0.125, 1e-3),
        ),
        (
            lambda: keras.optimizers.Ftrl(
                0.5,
                -0.25,
                0.5,
                l1_regularization_strength=0.5,
                l2_regularization_strength=0.25,
                beta=0.125,
            ),
            tpu.FTRL(0.5, -0.25, 0.5, 0.25, 0.125, 0.5),
        ),
        (
            lambda: keras.optimizers.Adam(0.5, weight_decay=0.25),
            tpu.Adam(0.5, weight_decay_factor=0.25),
        ),
        (lambda: tpu.Adagrad(0.5), tpu.Adagrad(0.5)),
    ],
)
def test_keras_optimizers_map_to_equal_embedding_optimizers(
    keras_optimizer, expected
):
    found = optimizer_of(
        make_layer(
            keras_optimizer() if callable(keras_optimizer) else keras_optimizer
        )
    )
    assert type(found) is type(expected)
    for name, value in vars(expected).items():
        # Keras stores learning rates in float32.
        assert getattr(found, name) == (
            pytest.approx(value, rel=1e-7)
            if isinstance(value, float)
            else value
        ), name


def test_an_optimizer_with_a_schedule_can_also_train_the_model():
    optimizer = keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay(
            [0, 1], [1.0, 2.0, 4.0]
        )
    )
    layer = make_layer(optimizer, combiner="sum")
    x = {"title": tf.constant([[1, 1, 1]]), "topic": tf.constant([0])}

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True)["topic"])
        weights = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    layer(x)
    found = []
    for _ in range(3):
        step()
        [rows] = layer.embedding_tables.values()
        found.append(float(rows.numpy()[0, 0]))
    assert found == [0, -2, -6]


def test_a_callable_learning_rate_is_called_at_each_step():
    optimizer = keras.optimizers.SGD(lambda: 0.5)
    assert optimizer_of(make_layer(optimizer)).learning_rate() == 0.5


def test_training_equals_a_layer_with_tensorflow_configs():
    table = tpu.TableConfig(
        10, 2, tf.ones_initializer(), tpu.Adagrad(0.5), "mean", "words"
    )
    tensorflow_layer = tlm.layers.TPUEmbedding(
        {"title": tpu.FeatureConfig(table), "topic": tpu.FeatureConfig(table)}
    )
    keras_rs_layer = make_layer(keras.optimizers.Adagrad(0.5))
    draw = np.random.default_rng(1)
    x = {
        "title": draw.integers(0, 10, (8, 3)),
        "topic": draw.integers(0, 10, 8),
    }
    y = draw.standard_normal((8, 2)).astype(np.float32)
    rows = []
    for layer in (tensorflow_layer, keras_rs_layer):
        inputs = {
            "title": keras.Input([3], dtype="int64", name="title"),
            "topic": keras.Input([], dtype="int64", name="topic"),
        }
        found = layer(inputs)
        model = keras.Model(inputs, found["title"] * found["topic"])
        model.compile("sgd", lambda y, x: keras.ops.sum(x * y, axis=1))
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        rows.append(*(one.numpy() for one in layer.embedding_tables.values()))
    assert np.any(rows[0] != 1)
    np.testing.assert_array_equal(*rows)


def test_ragged_samples_are_truncated_to_the_input_shape():
    layer = make_layer("sgd", combiner="sum")
    x = {
        "title": tf.ragged.constant([[1, 2, 3, 4, 5], [6], []]),
        "topic": tf.constant([1, 2, 3]),
    }
    for tape in (contextlib.nullcontext(), tf.GradientTape()):
        with tape:
            found = layer(x)
        assert found["title"][:, 0].numpy().tolist() == [3, 1, 0]
    weights = {
        "title": tf.ragged.constant([[1.0, 2, 4, 8, 16], [3], []]),
        "topic": None,
    }
    found = layer(x, weights=weights)
    assert found["title"][:, 0].numpy().tolist() == [7, 3, 0]
    again = type(layer).from_config(layer.get_config())
    assert again(x)["title"][:, 0].numpy().tolist() == [3, 1, 0]


def test_inputs_of_another_shape_raise():
    topic = tf.constant([1, 2])
    with pytest.raises(ValueError, match="must have 3 ids per sample"):
        make_layer()({"title": tf.zeros([2, 4], tf.int64), "topic": topic})
    for weights, words in [
        (tf.ones([2, 2]), "must have the shape of the ids"),
        (tf.ones([2]), "must have the shape of the ids"),
    ]:
        with pytest.raises(ValueError, match=words):
            make_layer()(
                {"title": tf.zeros([2, 3], tf.int64), "topic": topic},
                weights={"title": weights, "topic": None},
            )
    with pytest.raises(ValueError, match="must have 3 ids per sample"):
        make_layer()(
            {"title": tf.zeros([2, 4], tf.int64), "topic": topic},
            weights={"title": tf.ones([2, 4]), "topic": None},
        )
    ids = tf.sparse.from_dense([[1, 2, 3], [1, 2, 3]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many indices"):
        make_layer()(
            {"title": ids, "topic": topic},
            weights={
                "title": tf.sparse.from_dense(
                    [[1.0, 2.0, 3.0], [1.0, 0.0, 3.0]]
                ),
                "topic": None,
            },
        )


def single(combiner="sum", optimizer="sgd", **options):
    table = TableConfig("words", 10, 2, "ones", optimizer, combiner)
    return tlm.layers.TPUEmbedding(
        feature_configs=FeatureConfig("title", table, (4, 3), (4, 2)), **options
    )


IDS = [[1, 2, 3], [4, 4, 5]]
WEIGHTS = [[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]
FORMS = {
    "dense": tf.constant,
    "ragged": tf.ragged.constant,
    "sparse": tf.sparse.from_dense,
    # Each sample has two more ids than `input_shape` allows. The layer drops
    # these ids.
    "ragged, cut": lambda rows: tf.ragged.constant(
        [[*row, 6, 6] for row in rows]
    ),
    "sparse, cut": lambda rows: tf.sparse.from_dense(
        [[0, *row, 6, 6] for row in rows]
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("use_weights", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_single_feature_of_any_input_type_accepts_weights(
    form, use_weights, training
):
    layer = single()
    ids, weights = FORMS[form](IDS), FORMS[form](WEIGHTS)
    gains = WEIGHTS if use_weights else np.ones([2, 3])
    with tf.GradientTape() as tape:
        found = layer(ids, weights if use_weights else None, training=training)
        loss = tf.reduce_sum(found)
    np.testing.assert_array_equal(found[:, 0], np.sum(gains, axis=1))
    variables = layer.trainable_variables
    keras.optimizers.SGD().apply(tape.gradient(loss, variables), variables)
    expected = np.ones([10, 2], np.float32)
    for row, gain in zip(np.ravel(IDS), np.ravel(gains)):
        expected[row] -= np.float32(0.01) * gain
    np.testing.assert_allclose(
        layer.get_embedding_tables()["words"], expected, rtol=1e-6
    )
    looked_up = layer(ids, weights if use_weights else None)
    np.testing.assert_allclose(
        looked_up[0, 0],
        np.sum(
            [gain * expected[row, 0] for row, gain in zip(IDS[0], gains[0])]
        ),
        rtol=1e-6,
    )


def test_dense_ids_accept_one_weight_per_sample():
    table = TableConfig("words", 10, 2, "ones", "sgd", "sum")
    layer = tlm.layers.TPUEmbedding(FeatureConfig("topic", table, (4,), (4, 2)))
    found = layer(tf.constant([1, 2]), tf.constant([2.0, 3.0]))
    assert found[:, 0].numpy().tolist() == [2, 3]


@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
def test_fit_accepts_weights_of_any_input_type(form):
    kind = {} if form == "dense" else {form: True}
    ids = keras.Input([3], dtype="int32", **kind)
    weights = keras.Input([3], dtype="float32", **kind)
    layer = single("mean", keras.optimizers.SGD(0.5))
    model = keras.Model((ids, weights), layer(ids, weights))
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensors(
        ((FORMS[form](IDS), FORMS[form](WEIGHTS)), np.zeros([2, 2]))
    )
    model.fit(data, epochs=2, verbose=0)
    rows = layer.get_embedding_tables()["words"].numpy()
    assert np.all(rows[1:6] < 1) and np.all(rows[6:] == 1)


@pytest.mark.parametrize("has_weights", [False, True])
def test_dense_lookups_compile_with_xla(has_weights):
    layer = make_layer()
    ids = {"title": tf.constant([[1, 2, 3]] * 4), "topic": tf.range(4)}
    weights = (
        {"title": tf.constant([[1.0, 2.0, 3.0]] * 4), "topic": tf.ones([4])}
        if has_weights
        else None
    )
    expected = layer(ids, weights)
    found = tf.function(layer, jit_compile=True)(ids, weights)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_exactly_one_config_argument_is_required():
    feature = FeatureConfig(
        "title", TableConfig("words", 10, 2), (4, 3), (4, 2)
    )
    for names in ({}, {"feature_config": feature, "feature_configs": feature}):
        with pytest.raises(TypeError, match="`feature_config` and its alias"):
            tlm.layers.TPUEmbedding(**names)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return keras.ops.power(0.5, keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


def decay():
    return keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)


def train(layer, num_steps):
    ids = tf.constant([[1, 2, 3]])
    for _ in range(num_steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        weights = layer.trainable_variables
        keras.optimizers.SGD().apply(tape.gradient(loss, weights), weights)
    return float(layer.get_embedding_tables()["words"][1, 0])


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, tpu.SGD])
@pytest.mark.parametrize("schedule", [Halving, decay])
def test_a_schedule_advances_with_each_update(schedule, optimizer):
    layer = single(optimizer=optimizer(schedule()))
    assert train(layer, 1) == 0
    # A call without gradients does not advance the schedule.
    with tf.GradientTape():
        layer(tf.constant([[1, 2, 3]]))
    assert train(layer, 2) == -0.75


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, tpu.SGD])
def test_a_table_config_has_an_optimizer_with_a_schedule(optimizer):
    """Each layer counts its own updates, and the config does not change."""
    given = optimizer(decay())
    table = tpu.TableConfig(
        10, 2, keras.initializers.Ones(), given, "sum", name="words"
    )
    one, two = (
        tlm.layers.TPUEmbedding(tpu.FeatureConfig(table)) for _ in range(2)
    )
    assert table.optimizer is given
    assert train(one, 1) == 0
    assert train(two, 1) == 0
    assert train(one, 2) == -0.75
    again = tlm.layers.TPUEmbedding.from_config(one.get_config())
    assert train(again, 2) == -0.5
    [key] = two.embedding_tables
    assert key is table


def test_an_unsupported_optimizer_of_a_table_config_raises():
    table = tpu.TableConfig(
        10, 2, optimizer=keras.optimizers.SGD(momentum=0.5), name="words"
    )
    with pytest.raises(ValueError, match="momentum=0.5.*'words'"):
        tlm.layers.TPUEmbedding(tpu.FeatureConfig(table))
    assert table.optimizer.momentum == 0.5


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", "checkpoint"])
def test_a_schedule_continues_after_a_restore(suffix, tmp_path):
    def make():
        ids = keras.Input([3], dtype="int64")
        layer = single(optimizer=keras.optimizers.SGD(decay()), name="e")
        return keras.Model(ids, layer(ids))

    model = make()
    train(model.get_layer("e"), 2)
    path = str(tmp_path / f"saved{suffix}")
    if suffix == ".keras":
        model.save(path)
        again = keras.models.load_model(path)
    elif suffix == "checkpoint":
        again = make()
        tf.train.Checkpoint(model=again).read(
            tf.train.Checkpoint(model=model).write(path)
        )
    else:
        model.save_weights(path)
        again = make()
        again.load_weights(path)
    assert train(again.get_layer("e"), 1) == -0.75


def test_one_keras_optimizer_trains_all_tables_of_the_layer():
    table = tpu.TableConfig(10, 2, tf.ones_initializer(), name="words")
    layer = tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(table), optimizer=keras.optimizers.SGD(0.5)
    )
    assert train(layer, 1) == pytest.approx(1 - 0.5 / 3)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(placement="sparsecore"), 'placement.*must be "auto"'),
        (dict(placement="default_device"), "optimizer=None"),
        (dict(optimizer="rmsprop"), "'rmsprop'"),
        (dict(optimizer=lambda: keras.optimizers.AdamW()), "AdamW"),
        (
            dict(optimizer=lambda: keras.optimizers.SGD(momentum=0.5)),
            "momentum=0.5",
        ),
        (
            dict(optimizer=lambda: keras.optimizers.Adam(amsgrad=True)),
            "amsgrad",
        ),
        (
            dict(optimizer=lambda: keras.optimizers.Adagrad(epsilon=1e-3)),
            "epsilon=0.001",
        ),
        (
            dict(optimizer=lambda: keras.optimizers.Adam(clipnorm=0.5)),
            "clipnorm=0.5",
        ),
        (
            dict(
                optimizer=lambda: keras.optimizers.Adam(
                    gradient_accumulation_steps=2
                )
            ),
            "gradient_accumulation_steps=2",
        ),
    ],
)
def test_options_without_a_counterpart_raise_with_their_name(options, words):
    optimizer = options.pop("optimizer", "sgd")
    options["optimizer"] = optimizer() if callable(optimizer) else optimizer
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        make_layer(**options)
    assert "(table 'words')" in str(caught.value)


@pytest.mark.parametrize(
    "shapes",
    [((4, 3), (4, 3)), ((4, 3), (4, 3, 2)), ((4, 3), (8, 2)), ((4,), (4,))],
)
def test_incompatible_shapes_raise(shapes):
    table = TableConfig("words", 10, 2)
    with pytest.raises(ValueError, match="feature 'title'"):
        tlm.layers.TPUEmbedding(FeatureConfig("title", table, *shapes))
