"""Replaced layers train, save and load like the stock layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tf_layoutmap._core import patches

# `make test` does not run each case with each version of Keras.
pytestmark = pytest.mark.covering(1)

VERSIONS = {"keras": keras, "tf_keras": tf_keras}
NUM_ROWS, DIM, LENGTH = 50, 4, 3
RULES = ("SGD", "Adagrad")

RNG = np.random.default_rng(0)
# Every batch of 8 samples contains ids several times.
IDS = RNG.integers(0, 12, (32, LENGTH))
LABELS = RNG.normal(size=(32, 1)).astype(np.float32)


def optimizer_of(version, rule):
    return getattr(version.optimizers, rule)(0.5)


def embedding(version, **kwargs):
    return version.layers.Embedding(
        NUM_ROWS, DIM, **{"name": "words", **kwargs}
    )


def head(version, rows):
    flat = version.layers.Flatten()(rows)
    return version.layers.Dense(1, name="head")(flat)


def functional(version, **kwargs):
    """The layer is called twice."""
    ids = version.Input([LENGTH], dtype="int64")
    layer = embedding(version, **kwargs)
    return version.Model(ids, head(version, layer(ids) + layer(ids + 1)))


def sequential(version, **kwargs):
    return version.Sequential(
        [
            version.Input([LENGTH], dtype="int64"),
            embedding(version, **kwargs),
            version.layers.Flatten(),
            version.layers.Dense(1, name="head"),
        ]
    )


def nested(version, **kwargs):
    ids = version.Input([LENGTH], dtype="int64")
    inner = version.Model(ids, embedding(version, **kwargs)(ids), name="inner")
    outer = version.Input([LENGTH], dtype="int64")
    return version.Model(outer, head(version, inner(outer)))


def subclassed(version, **kwargs):
    """The layer is in a list, and built in the first call."""

    class Model(version.Model):
        def __init__(self):
            super().__init__()
            self.parts = [embedding(version, **kwargs)]
            self.by_name = {"head": version.layers.Dense(1, name="head")}

        def call(self, ids):
            rows = tf.reshape(self.parts[0](ids), [-1, LENGTH * DIM])
            return self.by_name["head"](rows)

    return Model()


def masked(version, **kwargs):
    ids = version.Input([LENGTH], dtype="int64")
    rows = embedding(version, mask_zero=True, **kwargs)(ids)
    state = version.layers.LSTM(3, name="state")(rows)
    return version.Model(ids, version.layers.Dense(1, name="head")(state))


MODELS = {
    make.__name__: make
    for make in (functional, sequential, nested, subclassed, masked)
}


def made(make, version, **kwargs):
    version.utils.set_random_seed(3)
    return make(version, **kwargs)


def fit(model, version, rule, **kwargs):
    """Trains 8 steps after `compile`, and returns the weights."""
    model.compile(optimizer_of(version, rule), "mse", **kwargs)
    return fit_compiled(model, version)


def fit_compiled(model, version, y=LABELS):
    # tf_keras draws the weights of a subclassed model when it is built.
    version.utils.set_random_seed(3)
    model.fit(IDS, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return values(model)


def values(model):
    return [np.array(one, np.float32) for one in model.get_weights()]


def replaced(model, version, rule="SGD", **kwargs):
    report = tlm.layers.shard_embeddings(
        model, min_rows=10, optimizer=optimizer_of(version, rule), **kwargs
    )
    assert len(report.replaced) == 1, str(report)
    return model


def assert_equal(first, second, atol=1e-6):
    assert len(first) == len(second)
    for one, other in zip(first, second):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.fixture(params=VERSIONS)
def version(request):
    return VERSIONS[request.param]


@pytest.mark.slow
@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_training_equals_the_stock_model(version, make, rule, num_shards):
    stock = fit(made(make, version), version, rule)
    model = made(make, version)
    initial = values(model)
    replaced(model, version, rule, num_shards=num_shards)
    assert_equal(initial, values(model), atol=0)
    assert_equal(stock, fit(model, version, rule))


@pytest.mark.parametrize("rule", RULES)
def test_layers_created_in_a_scope_train_like_the_stock_model(version, rule):
    stock = fit(made(functional, version), version, rule)
    with tlm.layers.sharded_embeddings(
        min_rows=10, optimizer=optimizer_of(version, rule)
    ) as report:
        model = made(functional, version)
    assert [entry.path for entry in report.replaced] == ["words"]
    assert_equal(stock, fit(model, version, rule))


def test_a_scope_restores_the_constructor(version):
    original = version.layers.Embedding.__init__
    with tlm.layers.sharded_embeddings(min_rows=10):
        assert version.layers.Embedding.__init__ is not original
        inside = embedding(version)
    assert version.layers.Embedding.__init__ is original
    assert type(embedding(version)) is version.layers.Embedding
    # Classes of replaced layers keep the name, which weight files contain.
    assert type(inside).__name__ == "Embedding"
    assert isinstance(inside, version.layers.Embedding)
    assert not patches.is_installed("keras3_embedding_creation")
    assert not patches.is_installed("tf_keras_embedding_creation")


def test_a_scope_is_left_after_an_error(version):
    with (
        pytest.raises(KeyError),
        tlm.layers.sharded_embeddings(min_rows=10),
    ):
        raise KeyError
    assert type(embedding(version)) is version.layers.Embedding


def test_the_layer_remains_the_same_object_with_the_same_attributes(version):
    model = made(functional, version, mask_zero=True, trainable=False)
    layer = model.get_layer("words")
    weight_path = getattr(layer.weights[0], "path", None)
    replaced(model, version, "Adagrad")
    assert model.get_layer("words") is layer
    assert isinstance(
        layer,
        {
            keras: tlm.layers.ShardedEmbedding,
            tf_keras: tlm.layers.tf_keras.ShardedEmbedding,
        }[version],
    )
    assert layer.name == "words" and layer.mask_zero
    assert not layer.trainable and not layer.trainable_weights
    assert getattr(layer.weights[0], "path", None) == weight_path


def test_a_frozen_table_is_not_trained(version):
    model = replaced(made(functional, version, trainable=False), version)
    table, head = model.get_layer("words"), model.get_layer("head")
    rows, kernel = table.embeddings.numpy(), head.get_weights()[0]
    fit(model, version, "SGD")
    np.testing.assert_array_equal(table.embeddings.numpy(), rows)
    assert np.any(head.get_weights()[0] != kernel)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("rule", RULES)
def test_mixed_precision_trains_like_the_stock_model(version, rule):
    kwargs = {"dtype": "mixed_bfloat16"}
    stock = fit(made(functional, version, **kwargs), version, rule)
    model = replaced(made(functional, version, **kwargs), version, rule)
    assert model.get_layer("words")(tf.constant([1])).dtype == tf.bfloat16
    assert_equal(stock, fit(model, version, rule))


@pytest.mark.exhaustive
@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize("make", [functional, nested, subclassed])
@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_weight_files_are_interchangeable(version, make, suffix, tmp_path):
    if make is subclassed and suffix == ".keras":
        pytest.skip("the class of the model is not registered")
    path = str(tmp_path / f"model{suffix}")

    def save(model):
        if suffix == ".keras":
            model.save(path)
        else:
            model.save_weights(path)

    stock = made(make, version)
    fit(stock, version, "Adagrad")
    save(stock)
    new = replaced(made(make, version), version)
    new(IDS[:2])
    new.load_weights(path)
    assert_equal(values(stock), values(new), atol=0)
    new.compile("sgd", "mse")
    fit_compiled(new, version)
    save(new)
    back = made(make, version)
    back(IDS[:2])
    back.load_weights(path)
    assert_equal(values(new), values(back), atol=0)


def test_checkpoints_are_interchangeable(version, tmp_path):
    stock = made(functional, version)
    fit(stock, version, "SGD")
    path = tf.train.Checkpoint(model=stock).write(str(tmp_path / "stock"))
    new = replaced(made(functional, version), version)
    tf.train.Checkpoint(model=new).read(path)
    assert_equal(values(stock), values(new), atol=0)
    path = tf.train.Checkpoint(model=new).write(str(tmp_path / "new"))
    back = made(functional, version)
    tf.train.Checkpoint(model=back).read(path)
    assert_equal(values(new), values(back), atol=0)


@pytest.mark.exhaustive
@pytest.mark.covering(1, 1)
def test_a_saved_model_continues_training(version, tmp_path):
    model = replaced(made(functional, version), version, "Adagrad")
    fit(model, version, "Adagrad")
    model.save(str(tmp_path / "model.keras"))
    again = version.models.load_model(str(tmp_path / "model.keras"))
    assert_equal(
        fit_compiled(model, version), fit_compiled(again, version), atol=0
    )


def test_predictions_before_are_not_reused(version):
    model = made(functional, version)
    model.compile("sgd", "mse")
    model.predict(IDS, verbose=0)
    replaced(model, version, "SGD")
    model.get_layer("words").set_weights([np.zeros((NUM_ROWS, DIM))])
    result = model.predict(IDS, verbose=0)
    np.testing.assert_array_equal(result, np.zeros_like(result))


def test_a_function_with_the_old_weight_raises_an_error(version):
    model = made(functional, version)
    look_up = tf.function(lambda ids: model(ids))
    look_up(tf.constant(IDS))
    replaced(model, version)
    with pytest.raises(tf.errors.InvalidArgumentError):
        look_up(tf.constant(IDS))


def test_an_optimizer_with_slots_of_the_table_raises_an_error(version):
    model = made(functional, version)
    fit(model, version, "Adagrad")
    with pytest.raises(ValueError, match="compile.*with a new optimizer"):
        replaced(model, version)
    assert type(model.get_layer("words")) is version.layers.Embedding
    model.compile(optimizer_of(version, "Adagrad"), "mse")
    replaced(model, version)


def reason_of(model, **kwargs):
    report = tlm.layers.shard_embeddings(model, min_rows=10, **kwargs)
    (entry,) = report.not_replaced
    return entry.reason


@pytest.mark.parametrize(
    "kwargs,word",
    [
        ({"embeddings_regularizer": "l2"}, "embeddings_regularizer"),
        ({"embeddings_constraint": "max_norm"}, "embeddings_constraint"),
        ({"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_layer_that_would_train_differently_is_kept(version, kwargs, word):
    model = made(functional, version, **kwargs)
    assert word in reason_of(model)
    assert type(model.get_layer("words")) is version.layers.Embedding


def test_a_small_table_is_kept(version):
    report = tlm.layers.shard_embeddings(made(functional, version))
    assert "min_rows=1,000" in report.not_replaced[0].reason


def test_a_shared_weight_is_kept(version):
    model = made(functional, version)

    class Other(version.layers.Layer):
        def __init__(self, weight):
            super().__init__()
            self.kernel = weight

        def call(self, inputs):
            return inputs

    weight = model.get_layer("words").weights[0]
    both = version.Sequential([model, Other(weight)])
    assert "also a weight of layer" in reason_of(both)


def test_a_class_with_another_call_is_kept(version):
    class Doubled(version.layers.Embedding):
        def call(self, inputs):
            return 2 * super().call(inputs)

    layer = Doubled(NUM_ROWS, DIM)
    assert "Doubled overrides ['call']" in reason_of(layer)


def test_replace_regularized_replaces_layers_with_rules(version):
    model = made(
        functional,
        version,
        embeddings_regularizer="l2",
        embeddings_constraint=version.constraints.NonNeg(),
    )
    report = tlm.layers.shard_embeddings(
        model, min_rows=10, replace_regularized=True
    )
    assert "embeddings_regularizer is applied to the rows" in str(report)
    fit(model, version, "SGD")
    rows = model.get_layer("words").embeddings.numpy()
    assert rows[np.unique([IDS, IDS + 1])].min() >= 0


def test_rules_of_columns_are_kept_in_any_case(version):
    model = made(
        functional,
        version,
        embeddings_constraint=version.constraints.MaxNorm(1.0, axis=0),
    )
    assert "norms of columns" in reason_of(model, replace_regularized=True)


def test_a_dry_run_changes_nothing(version):
    model = made(functional, version)
    report = tlm.layers.shard_embeddings(model, min_rows=10, dry_run=True)
    assert len(report.replaced) == 1
    assert type(model.get_layer("words")) is version.layers.Embedding


def test_the_report_states_other_optimizers(version):
    model = made(functional, version)
    model.compile(version.optimizers.Adam(clipnorm=1.0), "mse")
    lines = str(
        tlm.layers.shard_embeddings(
            model,
            min_rows=10,
            optimizer=tf.tpu.experimental.embedding.Adam(0.1),
        )
    )
    assert "rows that a step does not look up are not updated" in lines
    assert "clipnorm=1.0 of the model's optimizer does not apply" in lines


def test_the_report_states_the_rule_and_the_rate_of_the_model(version):
    model = made(functional, version)
    model.compile(version.optimizers.Adam(0.25, clipnorm=1.0), "mse")
    report = tlm.layers.shard_embeddings(model, min_rows=10)
    rule = "Adam, learning rate 0.25, clipnorm=1 (the model's optimizer)"
    assert report.replaced[0].rule == rule
    assert f"trained with {rule}" in str(report)
    assert rule in report.plan.explain("words")
    assert report.to_dict()["layers"][0]["rule"] == rule
    assert "rows that a step does not look up are not updated" in str(report)
    fit(model, version, "SGD")
    assert report.replaced[0].rule == (
        "SGD, learning rate 0.5 (the model's optimizer)"
    )


def test_the_report_of_an_uncompiled_model_follows_compile(version):
    with tlm.layers.sharded_embeddings(min_rows=10) as report:
        model = made(functional, version)
    assert "trained with the optimizer of `compile`" in str(report)
    fit(model, version, "Adagrad")
    assert "trained with Adagrad, learning rate 0.5" in str(report)


def test_the_report_states_the_rule_of_a_separate_optimizer(version):
    report = tlm.layers.shard_embeddings(
        made(functional, version),
        min_rows=10,
        optimizer=tf.tpu.experimental.embedding.Adam(0.1),
    )
    assert report.replaced[0].rule == "adam, learning rate 0.1"


def test_an_optimizer_that_tables_cannot_follow_raises_an_error(version):
    model = made(functional, version)
    model.compile(version.optimizers.Nadam(0.1), "mse")
    with pytest.raises(ValueError, match="(?s)SGD.*Lamb.*Received: Nadam"):
        tlm.layers.shard_embeddings(model, min_rows=10)
    assert type(model.get_layer("words")) is version.layers.Embedding


def test_the_report_states_another_learning_rate(version):
    model = made(functional, version)
    model.compile(optimizer_of(version, "Adagrad"), "mse")
    report = tlm.layers.shard_embeddings(
        model, min_rows=10, optimizer="adagrad"
    )
    assert "is 0.001, and of the model's optimizer 0.5" in str(report)


@pytest.mark.parametrize(
    "make,error,words",
    [
        (lambda v: v.optimizers.Adam(), TypeError, "must be SGD or Adagrad"),
        (lambda v: v.optimizers.SGD(momentum=0.9), ValueError, "momentum=0.9"),
        (lambda v: v.optimizers.SGD(clipnorm=1.0), ValueError, "clipnorm=1.0"),
        (lambda v: "adam", ValueError, "optimizer"),
        (lambda v: None, ValueError, "optimizer"),
    ],
)
def test_an_unsupported_optimizer_raises_an_error(version, make, error, words):
    model = made(functional, version)
    with pytest.raises(error, match=words):
        tlm.layers.shard_embeddings(model, optimizer=make(version))


def test_another_object_raises_an_error():
    with pytest.raises(TypeError, match="a model or layer"):
        tlm.layers.shard_embeddings([1])


def test_a_learning_rate_schedule_is_copied(version):
    def rate():
        return version.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)

    model = made(functional, version)
    model.compile(version.optimizers.SGD(rate()), "mse")
    stock = fit_compiled(model, version)
    model = made(functional, version)
    model.compile(version.optimizers.SGD(rate()), "mse")
    tlm.layers.shard_embeddings(
        model, min_rows=10, optimizer=version.optimizers.SGD(rate())
    )
    assert_equal(stock, fit_compiled(model, version))


def test_replacing_a_built_layer_draws_no_random_numbers():
    seed = keras.random.SeedGenerator(3)
    layer = keras.layers.Embedding(
        50, 4, embeddings_initializer=keras.initializers.RandomNormal(seed=seed)
    )
    model = keras.Sequential([keras.Input([2], dtype="int64"), layer])
    rows, state = layer.embeddings.numpy(), seed.state.numpy()
    tlm.layers.shard_embeddings(model, min_rows=10)
    np.testing.assert_array_equal(layer.embeddings.numpy(), rows)
    np.testing.assert_array_equal(seed.state.numpy(), state)
