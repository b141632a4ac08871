"""Tests `tlm.layers.tf_keras.ShardedEmbedding`, and a table as an attribute."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers import models
from tf_layoutmap._core import patches

tf_keras = pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras"
)
from tests.layers.tf_keras import models as tfk  # noqa: E402

RULES = ("sgd", "adagrad")
CONFIG = tf.tpu.experimental.embedding
legacy = tf_keras.optimizers.legacy


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_takes_one_step_per_batch_and_distinct_row(
    rule, num_shards, run_eagerly
):
    model, layer = tfk.make_model(models.settings(rule), num_shards)
    model.compile("adam", tfk.weighted_sum, run_eagerly=run_eagerly)
    ids, y = models.batches(3)
    tfk.fit(model, ids, y)
    ref = models.DenseReference(rule)
    ref.fit(ids, y)
    models.assert_trained(layer, ref)
    assert int(layer.optimizer.iterations) == 3
    assert int(model.optimizer.iterations) == 3


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_a_repeated_id_are_summed_before_squaring(rule):
    model, layer = tfk.make_model(models.settings(rule))
    ids = np.full([models.NUM_SAMPLES, models.LENGTH], 7)
    y = np.ones([*ids.shape, models.DIM], np.float32)
    model.compile("sgd", tfk.weighted_sum)
    model.train_on_batch(ids, y)
    ref = models.DenseReference(rule)
    ref.fit(ids, y)
    models.assert_trained(layer, ref)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_keras.optimizers.Adam(
            clipnorm=1e-3,
            weight_decay=0.5,
            use_ema=True,
            ema_overwrite_frequency=2,
        ),
        lambda: tf_keras.optimizers.SGD(global_clipnorm=1e-3, momentum=0.9),
        tf_keras.optimizers.Adafactor,
        legacy.Adam,
        legacy.SGD,
    ],
    ids=["adam", "sgd", "adafactor", "legacy adam", "legacy sgd"],
)
def test_the_models_optimizer_does_not_affect_the_table(make):
    ids = tf_keras.Input([models.LENGTH], dtype="int64")
    layer = tfk.make_layer(models.settings("adagrad"))
    # The gradients of the other weights are zero, so clipping does not change
    # the gradient of the table.
    bias = tf_keras.layers.Dense(models.DIM)
    model = tf_keras.Model(ids, layer(ids) + 0 * bias(tf.ones([1, 1])))
    batch, y = models.batches(3)
    model.compile(make(), tfk.weighted_sum)
    tfk.fit(model, batch, y)
    ref = models.DenseReference("adagrad")
    ref.fit(batch, y)
    models.assert_trained(layer, ref)
    variables = model.optimizer.variables
    for variable in variables() if callable(variables) else variables:
        assert tuple(variable.shape) != tuple(layer.embeddings.shape)


@pytest.mark.parametrize(
    "kind", [tf_keras.optimizers.SGD, legacy.SGD], ids=["new", "legacy"]
)
@pytest.mark.parametrize("is_function", [False, True])
def test_a_custom_loop_trains_with_apply_gradients(kind, is_function):
    model, layer = tfk.make_model(models.settings("adagrad"))
    optimizer = kind()

    def step(ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tfk.weighted_sum(y, model(ids)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    step = tf.function(step) if is_function else step
    ids, y = models.batches(3)
    ref = models.DenseReference("adagrad")
    for start in range(0, len(ids), models.NUM_SAMPLES):
        batch = slice(start, start + models.NUM_SAMPLES)
        step(tf.constant(ids[batch]), tf.constant(y[batch]))
        ref.step(ids[batch], y[batch] / models.NUM_SAMPLES)
    models.assert_trained(layer, ref)


def test_evaluation_prediction_and_gradients_alone_change_nothing():
    model, layer = tfk.make_model("sgd")
    model.compile("sgd", tfk.weighted_sum)
    ids, y = models.batches(1)
    model.evaluate(ids, y, verbose=0)
    np.testing.assert_array_equal(
        model.predict(ids, verbose=0), models.start_rows()[ids]
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tfk.weighted_sum(y, model(ids)))
    (gradient,) = tape.gradient(loss, model.trainable_variables)
    assert isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())
    assert int(layer.optimizer.iterations) == 0


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD()
        ),
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(legacy.SGD()),
    ],
    ids=["new", "legacy"],
)
def test_gradients_are_unscaled_and_an_overflow_skips_the_step(wrap):
    model, layer = tfk.make_model(models.settings("sgd"), dtype="mixed_float16")
    model.compile(wrap(), tfk.weighted_sum)
    ids, y = models.batches(1)
    model.train_on_batch(ids, y / 1024)
    ref = models.DenseReference("sgd")
    ref.fit(ids, y / 1024)
    models.assert_trained(layer, ref)
    y[2, 1, 0] = np.inf
    model.train_on_batch(ids, y)
    models.assert_trained(layer, ref)
    assert int(layer.optimizer.iterations) == 1


def test_a_frozen_layer_does_not_change():
    ids = tf_keras.Input([models.LENGTH], dtype="int64")
    layer = tfk.make_layer("sgd", trainable=False)
    model = tf_keras.Model(ids, tf_keras.layers.Dense(2)(layer(ids)))
    model.compile("adam", tfk.weighted_sum)
    model.train_on_batch(*models.batches(1))
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())
    assert len(model.trainable_variables) == 2
    assert len(model.non_trainable_variables) == 1


def test_a_schedule_is_called_with_the_step_number():
    schedule = tf_keras.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [1.0, 0.5, 0.25]
    )
    model, layer = tfk.make_model(CONFIG.SGD(schedule))
    model.compile("sgd", lambda y, rows: tf.reduce_sum(rows, axis=[1, 2]))
    for total in (1.0, 1.5, 1.75, 2.0):
        model.train_on_batch(np.array([[7, 3, 1]]), np.zeros([1]))
        np.testing.assert_array_equal(
            layer.embeddings[7], models.start_rows()[7] - total
        )


def test_the_learning_rate_is_set_and_read_and_setting_a_schedule_raises():
    layer = tfk.make_layer("adagrad")
    layer.optimizer.learning_rate = 0.5
    assert float(layer.optimizer.learning_rate) == 0.5
    rate = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    layer = tfk.make_layer(CONFIG.SGD(rate))
    with pytest.raises(TypeError, match="must be a number to be set"):
        layer.optimizer.learning_rate = 0.5


def test_ragged_and_masked_ids_are_looked_up():
    ragged = tf.ragged.constant([[7, 0], [], [9]], dtype=tf.int64)
    start = models.start_rows()
    layer = tfk.make_layer("sgd", mask_zero=True)
    assert layer(ragged).to_list() == [
        [start[i].tolist() for i in row] for row in ragged.to_list()
    ]
    assert layer.compute_mask(tf.constant([3, 0])).numpy().tolist() == [
        True,
        False,
    ]
    ids = tf_keras.Input([None], dtype="int32")
    pooled = tf_keras.layers.GlobalAveragePooling1D()(layer(ids))
    np.testing.assert_array_equal(
        tf_keras.Model(ids, pooled)(np.array([[0, 5, 7]])),
        [(start[5] + start[7]) / 2],
    )


@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_an_out_of_range_id_raises_and_nothing_is_written(optimizer):
    model, layer = tfk.make_model(optimizer)
    model.compile("sgd", tfk.weighted_sum)
    ids, y = models.batches(1)
    ids[1, 1] = 10
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="10 .*is outside .*table .*10 rows",
    ):
        model.train_on_batch(ids, y)
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())


@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_tf_keras_counts_lists_gets_and_sets_the_table(optimizer):
    model, layer = tfk.make_model(optimizer)
    assert layer.count_params() == models.NUM_ROWS * models.DIM
    assert model.output_shape == (None, models.LENGTH, models.DIM)
    lines = []
    model.summary(print_fn=lines.append)
    assert any("words (ShardedEmbedding)" in line for line in lines)
    assert len(layer.weights) == (3 if optimizer is None else 1)
    assert layer.weights[0].name.startswith("words/embeddings")
    weights = model.get_weights()
    np.testing.assert_array_equal(np.concatenate(weights), models.start_rows())
    model.set_weights([-weight for weight in weights])
    np.testing.assert_array_equal(
        layer.embeddings.numpy(), -models.start_rows()
    )


def test_a_tf_keras_initializer_creates_different_rows_per_shard():
    def rows(num_shards):
        layer = tfk.make_layer(
            None,
            num_shards,
            embeddings_initializer=(
                tf_keras.initializers.RandomUniform(seed=3)
            ),
        )
        layer.build()
        return layer.embeddings.numpy()

    np.testing.assert_array_equal(rows(2), rows(2))
    assert len(np.unique(rows(2), axis=0)) == models.NUM_ROWS


def test_xla_raises():
    model, layer = tfk.make_model("sgd")
    model.compile("sgd", tfk.weighted_sum, jit_compile=True)
    with pytest.raises(RuntimeError, match="jit_compile=False"):
        model.train_on_batch(*models.batches(1))


def test_a_training_step_reads_no_full_shard():
    model, layer = tfk.make_model("adagrad")
    model.compile("adam", tfk.weighted_sum)
    ids, y = map(tf.constant, models.batches(1))
    step = tf.function(model.train_step).get_concrete_function((ids, y))
    shards = {
        id(shard.handle)
        for shard in (
            *layer.embeddings.variables,
            *layer.optimizer.accumulators.variables,
        )
    }
    tables = {
        internal.name
        for external, internal in step.graph.captures
        if id(external) in shards
    }
    used_by = {
        op.type
        for op in step.graph.get_operations()
        for value in op.inputs
        if value.name in tables
    }
    assert used_by == {"LayoutMap>ApplyRowGradients", "LayoutMap>GatherRows"}


# In the following tests, the model's optimizer trains the table.

OPTIMIZERS = {
    "sgd": tf_keras.optimizers.SGD,
    "momentum": lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: tf_keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True
    ),
    "adam": tf_keras.optimizers.Adam,
    "amsgrad": lambda: tf_keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: tf_keras.optimizers.AdamW(0.1, weight_decay=0.5),
    "adamax": tf_keras.optimizers.Adamax,
    "nadam": tf_keras.optimizers.Nadam,
    "adagrad": lambda: tf_keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: tf_keras.optimizers.Adadelta(1.0),
    "rmsprop": lambda: tf_keras.optimizers.RMSprop(centered=True),
    "ftrl": lambda: tf_keras.optimizers.Ftrl(
        0.1, l1_regularization_strength=0.1
    ),
    "lion": tf_keras.optimizers.Lion,
    "ema": lambda: tf_keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "clipvalue": lambda: tf_keras.optimizers.Adam(0.1, clipvalue=0.25),
    "global_clipnorm": lambda: tf_keras.optimizers.Adam(
        0.1, global_clipnorm=1.0
    ),
    "legacy adam": lambda: legacy.Adam(0.1),
    "legacy adagrad": lambda: legacy.Adagrad(0.1),
    "legacy ftrl": lambda: legacy.Ftrl(0.1),
}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_models_optimizer_trains_shards_as_one_unsharded_table(name):
    model, layer = tfk.make_model(None, num_shards=4)
    ids, y = models.batches(3)
    # The model runs eagerly, because the Nadam optimizer of tf_keras returns
    # NaN for a single weight in a `tf.function`.
    run_eagerly = name == "nadam"
    model.compile(OPTIMIZERS[name](), tfk.weighted_sum, run_eagerly=run_eagerly)
    tfk.fit(model, ids, y)
    np.testing.assert_allclose(
        layer.embeddings.numpy(),
        tfk.unsharded(layer, OPTIMIZERS[name], ids, y, run_eagerly),
        rtol=1e-6,
        atol=1e-6,
    )


def test_the_first_layer_of_a_process_installs_the_checks(monkeypatch):
    """Otherwise `clipnorm` would silently clip each shard separately."""
    groups = []
    monkeypatch.setattr(patches, "ensure", groups.append)
    _, layer = tfk.make_model(None, num_shards=2)
    layer.build()
    assert "tf_keras_self_training" in groups


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tf_keras.optimizers.SGD(clipnorm=1.0), "clipnorm=1.0"),
        (lambda: legacy.SGD(clipnorm=1.0), "clipnorm=1.0"),
        (tf_keras.optimizers.Adafactor, "Adafactor"),
    ],
)
def test_options_that_need_the_full_weight_raise_for_several_shards(
    make, words
):
    model, layer = tfk.make_model(None, num_shards=2)
    model.compile(make(), tfk.weighted_sum)
    with pytest.raises(ValueError, match=f"num_shards=1.*{words}.*words"):
        model.train_on_batch(*models.batches(1))
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())
    model, layer = tfk.make_model(None, num_shards=1)
    model.compile(make(), tfk.weighted_sum)
    ids, y = models.batches(3)
    tfk.fit(model, ids, y)
    np.testing.assert_allclose(
        layer.embeddings.numpy(),
        tfk.unsharded(layer, make, ids, y),
        rtol=1e-6,
        atol=1e-6,
    )


class Lookup(tf_keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.table = tlm.ShardedVariable.create(
            models.start_rows(), num_shards=3, name="words"
        )

    def call(self, ids):
        return tf.gather(self.table, ids)


@pytest.mark.parametrize("rule", RULES)
def test_fit_trains_a_layer_with_a_table_attribute(rule):
    layer = Lookup()
    model = tf_keras.Sequential([layer])
    model.compile(
        {
            "sgd": tf_keras.optimizers.SGD(models.LEARNING_RATE),
            "adagrad": tf_keras.optimizers.Adagrad(
                models.LEARNING_RATE, 0.25, epsilon=0.0
            ),
        }[rule],
        tfk.weighted_sum,
    )
    ids, y = models.batches(3)
    tfk.fit(model, ids, y)
    ref = models.DenseReference(rule)
    ref.fit(ids, y)
    assert len(model.trainable_weights) == 3
    np.testing.assert_allclose(
        layer.table.numpy(), ref.rows, rtol=2e-6, atol=1e-6
    )


def test_legacy_h5_files_raise_for_open_vocabulary_tables(tmp_path):
    """Legacy files contain only weights; keys are not weights."""
    layer = tlm.layers.tf_keras.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(8), 2, optimizer="sgd", name="words"
    )
    model = tf_keras.Sequential([tf_keras.Input([2], dtype="int64"), layer])
    with pytest.raises(NotImplementedError, match="legacy .h5 files.*'words'"):
        model.save_weights(str(tmp_path / "model.h5"))
    model.save_weights(str(tmp_path / "model"), save_format="tf")


def test_floats_that_keras_rounds_to_16_bits_raise():
    def layer_of(num_rows):
        return tlm.layers.tf_keras.ShardedEmbedding(
            num_rows, 2, dtype="mixed_bfloat16", name="words"
        )

    ids = tf_keras.Input([1])
    assert layer_of(256)(ids).shape == [None, 1, 2]
    with pytest.raises(
        TypeError, match="dtype float32 in a.*compute dtype bfloat16.*'words'"
    ):
        layer_of(257)(ids)
    assert layer_of(257)(tf_keras.Input([1], dtype="int64")).shape[1:] == [1, 2]
