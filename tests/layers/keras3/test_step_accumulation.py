"""`gradient_accumulation_steps` with tables that the host engine trains.

A table with an open vocabulary is compared with a closed table of the same
rows, whose accumulated gradients `test_fit.py` compares with a reference.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies

tpu = tf.tpu.experimental.embedding
exhaustive = pytest.mark.exhaustive

NUM_ROWS, DIM, BATCH = 50, 2, 4
RULES = {"adagrad": lambda: tpu.Adagrad(0.5), "adam": lambda: tpu.Adam(0.1)}


def sharded(rows, rule):
    return tlm.layers.ShardedEmbedding(
        rows,
        DIM,
        num_shards=2,
        optimizer=rule,
        embeddings_initializer="ones",
        name="words",
    )


def tpu_layer(rule, vocabularies):
    table = tpu.TableConfig(
        NUM_ROWS, DIM, keras.initializers.Ones(), combiner="sum", name="words"
    )
    return tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(table), rule, vocabularies=vocabularies, name="words"
    )


LAYERS = {
    "closed": lambda rule: sharded(NUM_ROWS, rule),
    "open": lambda rule: sharded(tlm.vocabulary.OpenVocabulary(NUM_ROWS), rule),
    "tpu": lambda rule: tpu_layer(rule, None),
    "open tpu": lambda rule: tpu_layer(
        rule, {"words": tlm.vocabulary.OpenVocabulary(NUM_ROWS)}
    ),
}


def model_of(kind, rule="adagrad", length=1, calls=1):
    keras.utils.set_random_seed(1)
    ids = keras.Input([length], dtype="int64")
    layer = LAYERS[kind](RULES[rule]())
    rows = [keras.layers.Flatten()(layer(ids)) for _ in range(calls)]
    rows = rows[0] if calls == 1 else keras.layers.Add()(rows)
    return keras.Model(ids, keras.layers.Dense(1, name="top")(rows))


def data(num_batches, length=1):
    rng = np.random.default_rng(0)
    size = num_batches * BATCH
    ids = rng.integers(0, 12, (size, length))
    return ids, rng.integers(-2, 3, (size, 1)).astype(np.float32)


def fit(model, ids, y):
    return model.fit(ids, y, batch_size=BATCH, shuffle=False, verbose=0)


def compiled(model, steps=2, *, run_eagerly=False, scale=None):
    model.compile(
        keras.optimizers.SGD(
            0.5, gradient_accumulation_steps=steps, loss_scale_factor=scale
        ),
        "mse",
        run_eagerly=run_eagerly,
    )
    return model


def own_loop(model, ids, y, steps, *, traced):
    """Trains in a custom loop."""
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=steps)
    weights = model.trainable_variables

    def step(ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids) - y) ** 2)
        optimizer.apply(tape.gradient(loss, weights), weights)

    step = tf.function(step) if traced else step
    for start in range(0, len(ids), BATCH):
        here = slice(start, start + BATCH)
        step(tf.constant(ids[here]), tf.constant(y[here]))


@pytest.mark.parametrize(
    ("way", "rule", "steps"),
    [
        ("fit", "adam", 2),
        pytest.param("eager fit", "adagrad", 3, marks=exhaustive),
        ("loop", "adagrad", 3),
        pytest.param("traced loop", "adagrad", 3, marks=exhaustive),
    ],
)
def test_an_open_table_trains_like_a_closed_table(way, rule, steps):
    ids, y = data(8, length=3)
    found = {}
    for kind in ("closed", "open"):
        model = model_of(kind, rule, length=3)
        if "loop" in way:
            own_loop(model, ids, y, steps, traced=way == "traced loop")
        else:
            fit(compiled(model, steps, run_eagerly="eager" in way), ids, y)
        found[kind] = model.predict(ids, verbose=0)
        assert int(model.get_layer("words").optimizer.iterations) == 8 // steps
    np.testing.assert_array_equal(found["open"], found["closed"])


@pytest.mark.parametrize(
    ("kind", "steps", "calls", "scale"),
    [("tpu", 2, 1, 8.0), ("open tpu", 3, 2, None)],
)
def test_tables_of_tpu_embedding_train_like_a_closed_table(
    kind, steps, calls, scale
):
    ids, y = data(7)
    closed, found = model_of("closed", calls=calls), model_of(kind, calls=calls)
    for model in (closed, found):
        fit(compiled(model, steps, scale=scale), ids, y)
    # Gradients are added in another order.
    np.testing.assert_allclose(
        found.predict(ids, verbose=0),
        closed.predict(ids, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )
    embedding = found.get_layer("words").embedding
    assert embedding.stats()["num_updates"] == 7 // steps


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("open", "checkpoint"),
        pytest.param("open", "weights", marks=exhaustive),
        pytest.param("open tpu", "weights", marks=exhaustive),
        ("open tpu", "set_weights"),
    ],
)
def test_a_restore_discards_accumulated_gradients(kind, way, capfd, tmp_path):
    """The gradients count as zeros, and a warning is printed."""
    ids, y = data(4)
    model = compiled(model_of(kind), 2)
    fit(model, ids[:BATCH], y[:BATCH])
    path = str(tmp_path / "model.weights.h5")
    if way == "weights":
        model.save_weights(path)
        model.load_weights(path)
    elif way == "checkpoint":
        path = tf.train.Checkpoint(model=model).write(path)
        tf.train.Checkpoint(model=model).read(path)
    else:
        model.set_weights(model.get_weights())
    before = model.get_layer("top").kernel.numpy()
    assert "has not accumulated" not in capfd.readouterr().err
    fit(model, ids[BATCH : 2 * BATCH], y[BATCH : 2 * BATCH])
    assert "layer 'words' has not accumulated" in capfd.readouterr().err
    # The weights of Keras itself have all gradients.
    assert np.any(model.get_layer("top").kernel.numpy() != before)
    # The first batch has no influence on the rows.
    expected = model_of(kind)
    weights = expected.trainable_variables
    with tf.GradientTape() as tape:
        rows = expected(ids[BATCH : 2 * BATCH])
        loss = tf.reduce_mean((rows - y[BATCH : 2 * BATCH]) ** 2) / 2
    keras.optimizers.SGD(0.5).apply(tape.gradient(loss, weights), weights)
    second = ids[BATCH : 2 * BATCH]
    np.testing.assert_allclose(
        table_of(model, second), table_of(expected, second), rtol=1e-6
    )
    first = np.setdiff1d(ids[:BATCH], second)
    assert len(first)
    assert np.all(table_of(model, first) == 1)
    # The next steps accumulate all gradients.
    fit(model, ids[: 2 * BATCH], y[: 2 * BATCH])
    assert "has not accumulated" not in capfd.readouterr().err


def table_of(model, ids):
    """Returns the row of each id."""
    rows = model.get_layer("words")(tf.constant(ids.ravel()))
    return rows.numpy()


@pytest.mark.parametrize("kind", ["open", "tpu"])
def test_a_reset_between_two_steps_does_not_prevent_later_steps(kind, capfd):
    ids, y = data(4)
    model = compiled(model_of(kind), 2, run_eagerly=True)
    fit(model, ids[:BATCH], y[:BATCH])
    layer = model.get_layer("words")
    (layer._key_table if kind == "open" else layer).embedding.reset()
    with pytest.raises(tf.errors.FailedPreconditionError):
        fit(model, ids[BATCH : 2 * BATCH], y[BATCH : 2 * BATCH])
    fit(model, ids[2 * BATCH :], y[2 * BATCH :])
    assert "layer 'words' has not accumulated" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["open", "tpu"])
def test_more_steps_than_the_engine_keeps_raise(kind):
    model = compiled(model_of(kind), 65)
    with pytest.raises(ValueError, match="must be at most 64.*steps=65"):
        fit(model, *data(1))


@exhaustive
@pytest.mark.parametrize("kind", ["open", "tpu"])
def test_the_largest_number_of_steps(kind):
    ids, y = data(64)
    closed, found = model_of("closed"), model_of(kind)
    for model in (closed, found):
        fit(compiled(model, 64), ids, y)
    np.testing.assert_allclose(
        found.predict(ids, verbose=0),
        closed.predict(ids, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("kind", "rate", "run_eagerly"),
    [
        ("tpu", "schedule", False),
        ("open tpu", "function", False),
        pytest.param("tpu", "number", True, marks=exhaustive),
    ],
)
def test_replicas_train_the_tables_of_one_replica(kind, rate, run_eagerly):
    """Keras itself does not accumulate gradients of other weights there."""
    ids, y = data(7)
    tables = []
    for num_replicas in (1, 2):
        rates = {
            "number": 0.5,
            "function": lambda: tf.constant(0.5),
            "schedule": keras.optimizers.schedules.ExponentialDecay(
                0.5, 1, 0.5
            ),
        }
        with strategies.mirrored(num_replicas).scope():
            inputs = keras.Input([1], dtype="int64")
            layer = tpu_layer(
                tpu.Adagrad(rates[rate])
                if rate != "schedule"
                else keras.optimizers.Adagrad(rates[rate]),
                None
                if kind == "tpu"
                else {"words": tlm.vocabulary.OpenVocabulary(NUM_ROWS)},
            )
            model = keras.Model(inputs, layer(inputs))
            model.compile(
                keras.optimizers.SGD(0.5, gradient_accumulation_steps=3),
                lambda y, x: keras.ops.sum(x * y, axis=1),
                run_eagerly=run_eagerly,
            )
        fit(model, ids, y)
        assert layer.embedding.stats()["num_updates"] == 2
        tables.append(model.predict(ids, batch_size=BATCH, verbose=0))
    np.testing.assert_array_equal(*tables)
    assert np.any(tables[0] != 1)


def test_several_replicas_of_an_open_table_raise():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        model = compiled(model_of("open"))
    with pytest.raises(ValueError, match="must not accumulate gradients"):
        fit(model, *data(2))
