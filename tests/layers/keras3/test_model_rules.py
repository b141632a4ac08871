"""Compares a table that follows the model's optimizer with `Embedding`."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers import model_rule_cases as cases
from tf_layoutmap.layers.base import model_rules

SETTINGS = {
    **cases.SETTINGS,
    "loss scale": {"loss_scale_factor": 8.0},
    "loss scale, global_clipnorm": {
        "loss_scale_factor": 8.0,
        "global_clipnorm": 1.0,
    },
    "loss scale, clipnorm": {"loss_scale_factor": 8.0, "clipnorm": 1.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation, clipnorm": {
        "gradient_accumulation_steps": 2,
        "clipnorm": 0.5,
    },
    "accumulation, clipvalue": {
        "gradient_accumulation_steps": 2,
        "clipvalue": 0.25,
    },
}


def make_layer(kind="model", num_shards=2):
    if kind == "stock":
        layer = keras.layers.Embedding(cases.NUM_ROWS, cases.DIM)
    else:
        layer = tlm.layers.ShardedEmbedding(
            cases.NUM_ROWS, cases.DIM, num_shards=num_shards, optimizer=kind
        )
    layer.build(None)
    layer.embeddings.assign(cases.start_rows())
    return layer


def trained(kind, optimizer, scale=1.0, is_dense=False):
    """Returns the rows and another weight after training."""
    layer = make_layer(kind)
    other = keras.Variable(np.arange(4.0, dtype="f"), name="other")
    cases.train(
        [layer.trainable_variables[0], other],
        optimizer.apply_gradients,
        scale=scale,
        is_dense=is_dense,
    )
    return layer.embeddings.numpy(), other.numpy()


def expect_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_looked_up_rows_equal_stock(name, setting):
    def make():
        return cases.make(keras, name, None, **SETTINGS[setting])

    scale = SETTINGS[setting].get("loss_scale_factor", 1.0)
    # Keras does not support a fixed loss scale for sparse gradients.
    expect_equal(
        trained("model", make(), scale),
        trained("stock", make(), scale, is_dense=scale != 1),
    )


@pytest.mark.parametrize("inner", ["adam", "adagrad"])
def test_a_loss_scale_optimizer_wraps_the_rule(inner):
    def make():
        return keras.optimizers.LossScaleOptimizer(
            cases.make(keras, inner, "global_clipnorm"), initial_scale=8.0
        )

    expect_equal(trained("model", make(), 8.0), trained("stock", make(), 8.0))


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="This Keras has no MultiOptimizer.",
)
def test_each_optimizer_of_a_multi_optimizer_is_followed():
    def make():
        return keras.optimizers.MultiOptimizer(
            lambda variable: sgd if variable.path.endswith("other") else adam
        )

    sgd, adam = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    ours = trained("model", make())
    sgd, adam = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    expect_equal(ours, trained("stock", make()))


def test_rows_that_are_not_looked_up_are_not_updated():
    layer, optimizer = make_layer(), keras.optimizers.AdamW(0.1)
    (weight,) = layer.trainable_variables
    for _ in range(2):
        optimizer.apply(
            [tf.IndexedSlices(tf.ones([1, cases.DIM]), tf.constant([2]))],
            [weight],
        )
    is_moved = np.any(layer.embeddings.numpy() != cases.start_rows(), axis=1)
    assert np.flatnonzero(is_moved).tolist() == [2]


def small_model(kind="model", seed=0):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input([3], dtype="int64")
    layer = make_layer(kind)
    model = keras.Model(
        inputs,
        keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))),
    )
    return model, layer


IDS = np.arange(21).reshape(7, 3) % cases.NUM_ROWS
LABELS = np.linspace(-1, 1, 7, dtype="f")[:, None]


def fit(model, **options):
    model.fit(IDS, LABELS, batch_size=7, shuffle=False, verbose=0, **options)


def test_changes_of_the_learning_rate_reach_the_table():
    rows = []
    for kind in ("model", "stock"):
        model, layer = small_model(kind)
        model.compile(keras.optimizers.Adam(0.001), "mse", run_eagerly=True)
        fit(
            model,
            epochs=3,
            callbacks=[
                keras.callbacks.LearningRateScheduler(
                    lambda epoch: 0.1 / (1 + epoch)
                )
            ],
        )
        model.optimizer.learning_rate = 0.5
        fit(model)
        rows.append(layer.embeddings.numpy())
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-5, atol=1e-6)
    assert np.abs(rows[0] - cases.start_rows()).max() > 0.1


def test_the_layer_shows_rule_and_rate_of_the_model():
    model, layer = small_model()
    assert layer.optimizer.describe() == "the optimizer of `compile`"
    model.compile(keras.optimizers.Adam(0.25, clipnorm=2.0), "mse")
    fit(model)
    assert layer.optimizer.describe() == (
        "Adam, learning rate 0.25, clipnorm=2 (the model's optimizer)"
    )
    assert float(layer.optimizer.learning_rate) == 0.25
    assert sorted(layer.optimizer.slots) == ["momenta", "velocities"]
    with pytest.raises(TypeError, match="model.optimizer.learning_rate"):
        layer.optimizer.learning_rate = 0.5


def test_a_new_optimizer_starts_with_new_slot_variables():
    model, layer = small_model()
    for make in (
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    ):
        model.compile(make(), "mse")
        fit(model)
    assert sorted(layer.optimizer.slots) == ["momenta"]
    first = model.optimizer
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    model.optimizer.build(model.trainable_variables)
    assert not np.any(layer.optimizer.slots["momenta"].numpy())
    del first


def test_two_optimizers_have_separate_slot_variables():
    """Two optimizers, as in a GAN, train the same table by turns."""
    results = []
    for kind in ("model", "stock"):
        layer = make_layer(kind)
        (weight,) = layer.trainable_variables
        optimizers = [
            keras.optimizers.Adam(0.1),
            keras.optimizers.SGD(0.1, momentum=0.9),
        ]
        for number, (ids, values, _) in enumerate(cases.gradients(6)):
            optimizers[number % 2].apply(
                [
                    tf.IndexedSlices(
                        tf.constant(values),
                        tf.constant(ids),
                        tf.constant([cases.NUM_ROWS, cases.DIM]),
                    )
                ],
                [weight],
            )
        results.append(layer.embeddings.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda: keras.optimizers.Nadam(), "Nadam"),
        (lambda: keras.optimizers.Adam(amsgrad=True), "Adam with amsgrad=True"),
        (
            lambda: keras.optimizers.RMSprop(momentum=0.5),
            "RMSprop with momentum=0.5",
        ),
        (type("Own", (keras.optimizers.Adam,), {}), "Own"),
    ],
)
def test_another_optimizer_raises_with_the_choices(make, received):
    model, layer = small_model()
    model.compile(make(), "mse")
    with pytest.raises(ValueError, match=f"(?s)SGD.*Lamb.*{received}.*Adagrad"):
        fit(model)
    np.testing.assert_array_equal(layer.embeddings, cases.start_rows())


def test_global_clipnorm_with_accumulation_raises():
    model, _ = small_model()
    model.compile(
        keras.optimizers.Adam(
            global_clipnorm=1.0, gradient_accumulation_steps=2
        ),
        "mse",
    )
    with pytest.raises(ValueError, match="global_clipnorm"):
        fit(model)


def test_excluded_tables_do_not_decay():
    layer = make_layer()
    optimizer = keras.optimizers.SGD(0.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=layer.trainable_variables)
    cases.train(
        [layer.trainable_variables[0], keras.Variable(np.zeros(4, "f"))],
        optimizer.apply_gradients,
    )
    np.testing.assert_array_equal(layer.embeddings, cases.start_rows())


def test_lamb_scales_each_row_by_its_norm():
    layer = make_layer()
    (weight,) = layer.trainable_variables
    keras.optimizers.Lamb(0.1).apply(
        [tf.IndexedSlices(tf.ones([1, cases.DIM]), tf.constant([2]))], [weight]
    )
    row = cases.start_rows()[2]
    np.testing.assert_allclose(
        layer.embeddings.numpy()[2],
        row - 0.1 * np.linalg.norm(row) / np.sqrt(cases.DIM),
        rtol=1e-5,
    )


def test_a_custom_loop_uses_the_optimizer_that_applies_the_gradients():
    results = []
    for kind in ("model", "stock"):
        model, layer = small_model(kind)
        optimizer = keras.optimizers.Adam(0.1)

        @tf.function
        def step(model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(IDS) - LABELS) ** 2)
            optimizer.apply_gradients(
                zip(
                    tape.gradient(loss, model.trainable_variables),
                    model.trainable_variables,
                )
            )

        for _ in range(3):
            step()
        results.append(layer.embeddings.numpy())
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def resumed(model, path, save, load):
    """Trains, saves, loads into a new model, and trains both further."""
    model.compile(keras.optimizers.Adam(0.1), "mse")
    fit(model, epochs=2)
    save(model, path)
    other = load(path)
    fit(model, epochs=2)
    fit(other, epochs=2)
    return other


def test_a_saved_model_continues_with_its_slot_variables(tmp_path):
    model, layer = small_model()
    other = resumed(
        model,
        tmp_path / "model.keras",
        lambda model, path: model.save(path),
        keras.models.load_model,
    )
    loaded = other.layers[1]
    assert loaded.get_config()["optimizer"] == "model"
    np.testing.assert_array_equal(loaded.embeddings, layer.embeddings)
    assert layer.optimizer.slots["momenta"].numpy().any()


@pytest.mark.exhaustive
def test_a_model_that_is_loaded_without_compile_can_be_compiled(tmp_path):
    model, layer = small_model()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras", compile=False)
    momenta = layer.optimizer.slots["momenta"].numpy()
    other.compile(keras.optimizers.Adam(0.1), "mse")
    other.optimizer.build(other.trainable_variables)
    np.testing.assert_array_equal(
        other.layers[1].optimizer.slots["momenta"], momenta
    )
    other.compile(keras.optimizers.Adagrad(0.1), "mse")
    fit(other)
    assert list(other.layers[1].optimizer.slots) == ["accumulators"]


def test_the_state_of_another_optimizer_is_not_loaded(tmp_path):
    model, layer = small_model()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    other, loaded = small_model()
    other.compile(keras.optimizers.Adagrad(0.1), "mse")
    other.optimizer.build(other.trainable_variables)
    with pytest.warns(UserWarning, match="optimizer state of table"):
        other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(loaded.embeddings, layer.embeddings)
    fit(other)


def test_a_checkpoint_contains_the_slot_variables(tmp_path):
    model, layer = small_model()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    fit(model)
    path = tf.train.Checkpoint(model).save(tmp_path / "checkpoint")
    other, loaded = small_model(seed=1)
    other.compile(keras.optimizers.Adam(0.1), "mse")
    tf.train.Checkpoint(other).restore(path)
    other.optimizer.build(other.trainable_variables)
    for name, slot in layer.optimizer.slots.items():
        np.testing.assert_array_equal(loaded.optimizer.slots[name], slot)


def test_slot_variables_of_a_deleted_optimizer_are_freed():
    model, layer = small_model()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    gc.collect()
    assert len(layer.optimizer._bindings) == 1


@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_the_spec_of_a_rule_has_all_hyperparameters(name):
    """Messages to parameter servers have the size that the spec states."""
    optimizer = cases.make(keras, name, "plain")
    rule = model_rules.read_rule(keras, optimizer, "table 't'")
    vector = rule.hyperparameters(optimizer, tf.constant(0.1), tf.constant(1.0))
    assert vector.shape == [1 + len(rule.spec(optimizer).constants)]


def test_a_file_without_optimizer_state_resets_the_slot_variables(tmp_path):
    saved, _ = small_model()
    saved.save_weights(tmp_path / "model.weights.h5")
    model, layer = small_model()
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    fit(model)
    model.load_weights(tmp_path / "model.weights.h5")
    assert not np.any(layer.optimizer.slots["momenta"].numpy())
    np.testing.assert_array_equal(layer.embeddings, cases.start_rows())
