"""Compares tables with open vocabularies in models on a mesh with the host."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers.models import weighted_sum
from tests.layout.meshes import layout_of, mesh_of

# `make test` runs each test with one mesh.
pytestmark = pytest.mark.covering(1, 1)

dtensor = tf.experimental.dtensor
rules = tf.tpu.experimental.embedding

DIM, LENGTH, BATCH = 4, 3, 8
MESHES = {"2x2": dict(batch=2, model=2), "1x4": dict(batch=1, model=4)}


@pytest.fixture(params=MESHES, scope="module")
def mesh(request):
    return mesh_of(**MESHES[request.param])


def data(num_samples, *, most=40, seed=0, dtype=np.int64):
    """Returns keys that repeat, and integer gradients of their rows."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, most, [num_samples, LENGTH])
    keys[:, 1] = keys[:, 0]
    y = rng.integers(-4, 5, [num_samples, LENGTH, DIM]).astype(np.float32)
    if dtype is not np.int64:
        return tf.constant(np.where(keys == 0, "", keys.astype(str))), y
    return keys * 1_000_003, y


def layer_of(name="words", optimizer=None, capacity=100, mask=False, **options):
    settings = {
        key: options.pop(key)
        for key in ("on_evict", "oov_embedding", "seed", "keep_strings")
        if key in options
    }
    return tlm.layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(capacity, **settings),
        DIM,
        optimizer=rules.Adagrad(0.5, 0.25) if optimizer is None else optimizer,
        mask_zero=mask,
        name=name,
        **options,
    )


def model_of(dtype="int64", calls=1, **options):
    """Returns a model whose output contains the rows of its keys."""
    keys = keras.Input([LENGTH], dtype=dtype)
    layer = layer_of(**options)
    rows = [layer(keys) for _ in range(calls)]
    return keras.Model(keys, rows[0] if calls == 1 else keras.layers.add(rows))


def scope(mesh):
    return tlm.layout_map_scope(tlm.LayoutMap(mesh))


def both(mesh, make, **options):
    """Returns a model on the host, and the same model on the mesh."""
    keras.utils.set_random_seed(3)
    host = make(**options)
    keras.utils.set_random_seed(3)
    layout_map = tlm.LayoutMap(mesh)
    if make is lstm_model:
        layout_map["dense.kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        return host, make(**options)


def fit(model, x, y, optimizer=None, loss=weighted_sum, **options):
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss=loss)
    return model.fit(
        x, y, batch_size=BATCH, shuffle=False, verbose=0, **options
    )


WORDS = tf.constant([str(one) for one in range(1, 100)])


def values_of(layer):
    """Returns keys, rows, slot variables and counts of a layer."""
    keys = np.sort(layer.vocabulary.keys().numpy())
    try:
        where = layer.vocabulary.lookup(keys).numpy()
    except tf.errors.InvalidArgumentError:  # The keys are hashes of strings.
        is_known = layer.vocabulary.contains(WORDS)
        where = layer.vocabulary.lookup(tf.boolean_mask(WORDS, is_known))
        assert tf.size(where) >= len(keys) - 1  # The empty string is a key.
        where = where.numpy()
    return {
        "keys": keys,
        "rows": layer.embeddings.numpy()[where],
        **{
            name: slot.numpy()[where]
            for name, slot in layer.optimizer.slots.items()
        },
        "iterations": int(layer.optimizer.iterations),
        **layer.vocabulary.stats(),
    }


def assert_same_tables(host, meshed, name="words"):
    first, second = (values_of(one.get_layer(name)) for one in (host, meshed))
    assert first.keys() == second.keys()
    for one, value in first.items():
        np.testing.assert_array_equal(second[one], value, err_msg=one)


RULES = {
    "sgd": lambda: rules.SGD(0.5),
    "adagrad": lambda: rules.Adagrad(0.5, 0.25),
    "adam": lambda: rules.Adam(0.05),
}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [np.int64, str])
@pytest.mark.parametrize("calls", [1, 2])
def test_fit_is_bitwise_equal_to_a_model_on_the_host(mesh, rule, dtype, calls):
    x, y = data(5 * BATCH + 3, dtype=dtype)
    host, meshed = both(
        mesh,
        lambda: model_of(
            "int64" if dtype is np.int64 else "string",
            calls=calls,
            optimizer=RULES[rule](),
            num_shards=2,
        ),
    )
    found = []
    for model in (host, meshed):
        history = fit(
            model,
            x,
            y,
            epochs=2,
            validation_data=data(12, most=60, seed=1, dtype=dtype),
        ).history
        found.append(
            [
                *history["loss"],
                *history["val_loss"],
                model.evaluate(x, y, batch_size=7, verbose=0),
            ]
        )
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
    assert_same_tables(host, meshed)
    other, _ = data(11, most=60, seed=2, dtype=dtype)
    np.testing.assert_array_equal(
        host.predict(other, batch_size=4, verbose=0),
        meshed.predict(other, batch_size=4, verbose=0),
    )
    np.testing.assert_array_equal(host(other), meshed(other))
    assert_same_tables(host, meshed)


def lstm_model(dtype="int64", **options):
    inputs = {
        "keys": keras.Input([LENGTH], dtype=dtype, name="keys"),
        "size": keras.Input([2], name="size"),
    }
    rows = layer_of(mask=True, **options)(inputs["keys"])
    x = keras.layers.LSTM(4)(rows)
    x = keras.layers.Concatenate()([x, inputs["size"]])
    x = keras.layers.Dense(4, activation="tanh", name="dense")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="top")(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [np.int64, str])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("weighted", [True, False])
def test_masks_and_sample_weights_are_used(mesh, dtype, steps, weighted):
    """Sums over devices have another order, so last bits differ."""
    keys, _ = data(3 * BATCH + 4, most=10, dtype=dtype)
    rng = np.random.default_rng(5)
    x = {
        "keys": tf.constant(keys),
        "size": rng.normal(size=[len(keys), 2]).astype(np.float32),
    }
    y = rng.normal(size=[len(keys), 1]).astype(np.float32)
    weights = rng.random(len(keys)) if weighted else None
    host, meshed = both(
        mesh, lstm_model, dtype="int64" if dtype is np.int64 else "string"
    )
    results = []
    for model in (host, meshed):
        model.compile(
            keras.optimizers.Adam(0.05),
            "mse",
            weighted_metrics=["mae"],
            steps_per_execution=steps,
        )
        history = model.fit(
            x,
            y,
            sample_weight=weights,
            batch_size=BATCH,
            epochs=3,
            shuffle=False,
            verbose=0,
        ).history
        results.append(
            [
                np.asarray(history["loss"]),
                np.asarray(history["mae"]),
                model.predict(x, batch_size=5, verbose=0),
                model.evaluate(x, y, batch_size=6, verbose=0),
            ]
        )
    for first, second in zip(*results):
        np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-5)
    found = values_of(meshed.get_layer("words"))
    for name, value in values_of(host.get_layer("words")).items():
        if isinstance(value, str):
            assert found[name] == value
            continue
        np.testing.assert_allclose(
            found[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )


def two_tables():
    """Two layers look the same keys up, and the mesh also uses the keys."""
    keys = keras.Input([LENGTH], dtype="int64")
    first, second = layer_of("first"), layer_of("second")
    factor = keras.ops.cast(keys % 2, "float32")[..., None]
    return keras.Model(
        keys, (first(keys) + second(keys)) * factor + first(keys)
    )


@pytest.mark.exhaustive
def test_two_tables_use_the_same_keys(mesh):
    x, y = data(4 * BATCH)
    host, meshed = both(mesh, two_tables)
    for model in (host, meshed):
        fit(model, x, y)
    for name in ("first", "second"):
        assert_same_tables(host, meshed, name)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_16_bit_activations_train_in_the_same_way(mesh, policy):
    x, y = data(4 * BATCH)
    host, meshed = both(
        mesh,
        lambda: keras.Model(
            keys := keras.Input([LENGTH], dtype="int64"),
            layer_of(dtype=keras.DTypePolicy(policy))(keys),
        ),
    )
    for model in (host, meshed):
        fit(model, x, y, keras.optimizers.SGD(0.1, loss_scale_factor=4.0))
    assert_same_tables(host, meshed)


def test_a_step_with_an_overflow_is_skipped(mesh):
    x, y = data(4 * BATCH)
    y[2 * BATCH + 1, 0, 0] = np.inf
    host, meshed = both(mesh, model_of)
    for model in (host, meshed):
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0
        )
        fit(model, x, y, optimizer)
    assert_same_tables(host, meshed)
    assert int(meshed.get_layer("words").optimizer.iterations) == 3


def test_an_activity_regularizer_has_gradients(mesh):
    x, y = data(4 * BATCH)
    host, meshed = both(
        mesh,
        lambda: model_of(activity_regularizer=keras.regularizers.L2(0.125)),
    )
    losses = [fit(model, x, y).history["loss"] for model in (host, meshed)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_same_tables(host, meshed)


@pytest.mark.exhaustive
def test_a_layer_that_is_not_trainable_does_not_change(mesh):
    x, y = data(2 * BATCH)
    with scope(mesh):
        keys = keras.Input([LENGTH], dtype="int64")
        layer = layer_of()
        meshed = keras.Model(keys, keras.layers.Dense(DIM)(layer(keys)))
    fit(meshed, x, y)
    before = values_of(layer)
    layer.trainable = False
    fit(meshed, *data(2 * BATCH, most=80, seed=4))
    for name, value in values_of(layer).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    layer.trainable = True
    fit(meshed, x, y)
    assert values_of(layer)["iterations"] == before["iterations"] + 2


class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__()
        self.words = layer_of(**options)

    def call(self, keys):
        return self.words(keys[:, ::-1])


@pytest.mark.exhaustive
def test_a_subclassed_model_requires_eager_steps(mesh):
    x, y = data(2 * BATCH + 3)
    host, meshed = both(mesh, Subclassed)
    meshed.compile("sgd", loss=weighted_sum)
    with pytest.raises(NotImplementedError, match="run_eagerly=True"):
        meshed.fit(x, y, batch_size=BATCH, verbose=0)
    for model in (host, meshed):
        model.compile(
            keras.optimizers.SGD(0.1), loss=weighted_sum, run_eagerly=True
        )
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        model.evaluate(x, y, batch_size=BATCH, verbose=0)
    assert_same_tables(host, meshed)
    np.testing.assert_array_equal(host(x), meshed(x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [np.int64, str])
def test_eager_steps_equal_traced_steps(mesh, dtype):
    x, y = data(2 * BATCH + 3, dtype=dtype)
    host, meshed = both(
        mesh, model_of, dtype="int64" if dtype is np.int64 else "string"
    )
    for model, is_eager in ((host, False), (meshed, True)):
        model.compile(
            keras.optimizers.SGD(0.1), loss=weighted_sum, run_eagerly=is_eager
        )
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_tables(host, meshed)


@pytest.mark.parametrize("dtype", [np.int64, str])
def test_a_custom_loop_trains_the_table(mesh, dtype):
    x, y = data(3 * BATCH, dtype=dtype)
    host, meshed = both(
        mesh, model_of, dtype="int64" if dtype is np.int64 else "string"
    )
    for model in (host, meshed):
        optimizer = keras.optimizers.SGD(0.1)
        for start in range(0, 3 * BATCH, BATCH):
            batch = slice(start, start + BATCH)
            with (
                tlm.layout.default_mesh(mesh)
                if model is meshed
                else contextlib.nullcontext()
            ):
                with tf.GradientTape() as tape:
                    rows = model(x[batch])
                    loss = tf.reduce_mean(weighted_sum(y[batch], rows))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(
                    zip(gradients, model.trainable_variables)
                )
    assert_same_tables(host, meshed)


def test_keys_that_the_mesh_computes_raise(mesh):
    with scope(mesh):
        x = keras.Input([LENGTH], dtype="int64")
        # The weights of this layer are on the mesh.
        keys = keras.layers.Embedding(40, LENGTH)(x)[:, 0]
        model = keras.Model(x, layer_of()(keras.ops.cast(keys, "int64")))
    model.compile("sgd", loss=weighted_sum)
    with pytest.raises(NotImplementedError, match="layer 'words'.*Functional"):
        model.fit(*data(BATCH), verbose=0)


def test_results_of_lookup_layers_are_keys(mesh):
    def make():
        words = keras.Input([LENGTH], dtype="string")
        hashed = keras.layers.Hashing(50, salt=3)(words)
        return keras.Model(words, layer_of()(hashed))

    x, y = data(2 * BATCH, dtype=str)
    host, meshed = both(mesh, make)
    for model in (host, meshed):
        fit(model, x, y)
    assert_same_tables(host, meshed)


def test_a_failed_step_leaves_no_gradients(mesh):
    x, y = data(BATCH)
    host, meshed = both(mesh, model_of)
    for model in (host, meshed):
        fit(model, x, y)
    steps = meshed.get_layer("words")._host_tables
    steps.start_step()
    steps.weight._value.assign(
        tlm.layout.to_mesh(
            np.ones(steps.mark_shape, np.float32), steps.weight.layout
        )
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    y[0, 0, 0] = np.inf
    fit(meshed, x, y, optimizer)
    host_values, values = (
        values_of(one.get_layer("words")) for one in (host, meshed)
    )
    np.testing.assert_array_equal(values["rows"], host_values["rows"])
    assert values["iterations"] == 1


def test_evict_and_resize_and_on_evict(mesh):
    gone = {}

    def make(where):
        return model_of(on_evict=gone.setdefault(where, []).append)

    host = make("host")
    with scope(mesh):
        meshed = make("mesh")
    for model in (host, meshed):
        fit(model, *data(4 * BATCH, most=60))
        vocabulary = model.get_layer("words").vocabulary
        vocabulary.evict(np.sort(vocabulary.keys())[::3])
        fit(model, *data(4 * BATCH, most=60, seed=1))
        vocabulary.resize(400)
        fit(model, *data(8 * BATCH, most=300, seed=2))
    assert_same_tables(host, meshed)
    for one in (gone["host"], gone["mesh"]):
        assert one
    for first, second in zip(gone["host"], gone["mesh"], strict=True):
        np.testing.assert_array_equal(first.keys, second.keys)
        np.testing.assert_array_equal(first.rows, second.rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", ["keras", "weights.h5", "checkpoint"])
@pytest.mark.parametrize(
    "start, end", [("mesh", "host"), ("host", "mesh"), ("mesh", "mesh")]
)
def test_files_are_loaded_with_and_without_a_mesh(file, start, end, tmp_path):
    mesh = mesh_of(batch=2, model=2)

    def place(where):
        return scope(mesh) if where == "mesh" else contextlib.nullcontext()

    with place(start):
        first = model_of(num_shards=3)
    fit(first, *data(4 * BATCH))
    path = str(tmp_path / f"model.{file}")
    with place(end):
        if file == "keras":
            first.save(path)
            second = keras.models.load_model(path)
        else:
            second = model_of(num_shards=2)
    if file == "weights.h5":
        first.save_weights(path)
        second.load_weights(path)
    elif file == "checkpoint":
        tf.train.Checkpoint(model=first).write(path)
        second.compile(keras.optimizers.SGD(0.1), weighted_sum)
        second.optimizer.build(second.trainable_variables)
        tf.train.Checkpoint(model=second).read(
            path
        ).assert_existing_objects_matched()
    assert_same_tables(first, second)
    for model in (first, second):
        fit(model, *data(4 * BATCH, most=60, seed=1))
    assert_same_tables(first, second)


@pytest.mark.exhaustive
def test_exported_models_use_stock_ops(mesh, tmp_path):
    x, y = data(4 * BATCH, dtype=str)
    with scope(mesh):
        words = keras.Input([LENGTH], dtype="string")
        rows = layer_of(oov_embedding="trainable", mask=True)(words)
        model = keras.Model(words, keras.layers.Dense(4, name="dense")(rows))
    fit(model, x, y, loss="mse")
    asked, _ = data(BATCH, most=60, seed=1, dtype=str)
    expected = model.predict(asked, verbose=0)
    tlm.export(model, str(tmp_path / "tlm"))
    model.export(str(tmp_path / "keras"), verbose=False)
    for name in ("tlm", "keras"):
        served = tf.saved_model.load(str(tmp_path / name))
        np.testing.assert_allclose(served.serve(asked), expected, rtol=1e-5)
        graph = (tmp_path / name / "saved_model.pb").read_bytes()
        assert b"LayoutMap>" not in graph


@pytest.mark.exhaustive
def test_early_stopping_restores_the_best_weights(mesh):
    x, y = data(4 * BATCH)
    host, meshed = both(mesh, model_of)
    for model in (host, meshed):
        fit(
            model,
            x,
            y,
            epochs=4,
            callbacks=[
                keras.callbacks.EarlyStopping(
                    "loss", patience=2, mode="max", restore_best_weights=True
                )
            ],
        )
    assert_same_tables(host, meshed)


def test_keys_may_be_slices_of_an_input(mesh):
    def make():
        keys = keras.Input([LENGTH], dtype="int64")
        return keras.Model(keys, layer_of()(keras.ops.abs(keys)[:, 1:]))

    x, y = data(4 * BATCH)
    host, meshed = both(mesh, make)
    for model in (host, meshed):
        fit(model, x, y[:, 1:])
    assert_same_tables(host, meshed)


def test_gradient_accumulation_raises(mesh):
    with scope(mesh):
        model = model_of()
    with pytest.raises(ValueError, match="must not accumulate gradients"):
        fit(
            model,
            *data(BATCH),
            keras.optimizers.SGD(gradient_accumulation_steps=2),
        )


def test_keras_distribution_places_the_layer():
    """Under `keras.distribution`, the layer works as in a scope."""
    mesh = mesh_of(batch=2, model=2)
    x, y = data(4 * BATCH)
    host = model_of()
    fit(host, x, y)
    layout_map = tlm.distribution.LayoutMap(mesh)
    with tlm.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    ).scope():
        meshed = model_of()
    fit(meshed, x, y)
    assert_same_tables(host, meshed)
