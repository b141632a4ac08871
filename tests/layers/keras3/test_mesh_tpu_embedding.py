"""Compares `TPUEmbedding` layers in models on a mesh with the host."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of

# `make test` runs each test with one mesh.
pytestmark = pytest.mark.covering(1, 1)

tpu = tf.tpu.experimental.embedding

BATCH, LENGTH = 8, 3
MESHES = {"2x2": dict(batch=2, model=2), "1x4": dict(batch=1, model=4)}
DIMS = {"words": 4, "users": 2}


@pytest.fixture(params=MESHES, scope="module")
def mesh(request):
    return mesh_of(**MESHES[request.param])


@keras.saving.register_keras_serializable("mesh_tpu_embedding_tests")
def weighted_sum(y, x):
    return keras.ops.sum(x * y, axis=1)


@keras.saving.register_keras_serializable("mesh_tpu_embedding_tests")
def initial_rows(shape, dtype=tf.float32):
    return tf.reshape(tf.range(np.prod(shape), dtype=dtype), shape) / 64


def layer_of(**options):
    """Returns a layer with three features in two tables."""
    of_keys = tf.random_uniform_initializer(-1.0, 1.0)
    words, users = (
        tpu.TableConfig(
            40,
            dim,
            of_keys if "vocabularies" in options else initial_rows,
            combiner="sum",
            name=name,
        )
        for name, dim in DIMS.items()
    )
    return tlm.layers.TPUEmbedding(
        {
            "title": tpu.FeatureConfig(words, name="title"),
            "text": tpu.FeatureConfig(
                words, max_sequence_length=LENGTH, name="text"
            ),
            "user": tpu.FeatureConfig(users, name="user"),
        },
        **{"optimizer": tpu.Adagrad(0.5, 0.25), "name": "tables", **options},
    )


def inputs_of(dtype="int64"):
    return {
        name: keras.Input([size], dtype=dtype, name=name)
        for name, size in (("title", LENGTH), ("text", LENGTH), ("user", 1))
    }


def joined(rows):
    """Returns the activations of all features as one vector per sample."""
    return keras.layers.Concatenate()(
        [rows["title"], keras.layers.Flatten()(rows["text"]), rows["user"]]
    )


SIZE = 4 + LENGTH * 4 + 2


def model_of(calls=1, dtype="int64", **options):
    inputs = inputs_of(dtype)
    layer = layer_of(**options)
    rows = [joined(layer(inputs)) for _ in range(calls)]
    return keras.Model(
        inputs, rows[0] if calls == 1 else keras.layers.add(rows)
    )


def data(num_samples, *, seed=0, dtype=np.int64):
    """Returns ids that repeat, and integer gradients of the activations."""
    rng = np.random.default_rng(seed)
    ids = {
        name: rng.integers(0, 40, [num_samples, size])
        for name, size in (("title", LENGTH), ("text", LENGTH), ("user", 1))
    }
    ids["title"][:, 1] = ids["title"][:, 0]
    y = rng.integers(-4, 5, [num_samples, SIZE]).astype(np.float32)
    if dtype is str:
        ids = {name: tf.constant(own.astype(str)) for name, own in ids.items()}
    return ids, y


def scope(mesh):
    return tlm.layout_map_scope(tlm.LayoutMap(mesh))


def both(mesh, make, **options):
    """Returns a model on the host, and the same model on the mesh."""
    keras.utils.set_random_seed(3)
    host = make(**options)
    keras.utils.set_random_seed(3)
    with scope(mesh):
        return host, make(**options)


def fit(model, x, y, optimizer=None, **options):
    model.compile(
        optimizer or keras.optimizers.SGD(0.5),
        weighted_sum,
        run_eagerly=options.pop("run_eagerly", False),
    )
    return model.fit(
        x, y, batch_size=BATCH, shuffle=False, verbose=0, **options
    )


def values_of(model):
    """Returns tables and slot variables."""
    store = {}
    model.get_layer("tables").save_own_variables(store)
    return {name: np.array(value) for name, value in store.items()}


def assert_same_tables(host, meshed):
    first, second = values_of(host), values_of(meshed)
    assert first.keys() == second.keys() and first
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


OPTIMIZERS = {
    "adagrad": lambda: tpu.Adagrad(0.5, 0.25),
    "adam": lambda: tpu.Adam(0.05),
    "keras": lambda: keras.optimizers.Adagrad(
        keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.25])
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("calls", [1, 2])
def test_fit_is_bitwise_equal_to_a_model_on_the_host(mesh, optimizer, calls):
    x, y = data(5 * BATCH + 3)
    host, meshed = both(
        mesh,
        lambda: model_of(calls, optimizer=OPTIMIZERS[optimizer]()),
    )
    losses = [
        fit(model, x, y, epochs=2).history["loss"] for model in (host, meshed)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-5)
    assert_same_tables(host, meshed)


def test_lookups_without_a_step_equal_the_host(mesh):
    host, meshed = both(mesh, model_of)
    before = values_of(host)
    other, _ = data(11, seed=2)
    np.testing.assert_array_equal(
        host.predict(other, batch_size=4, verbose=0),
        meshed.predict(other, batch_size=4, verbose=0),
    )
    np.testing.assert_array_equal(host(other), meshed(other))
    for name, value in values_of(meshed).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.parametrize("dtype", [np.int64, str])
def test_keys_are_added_to_vocabularies(mesh, dtype):
    name = "string" if dtype is str else "int64"
    host, meshed = both(
        mesh,
        lambda: model_of(
            dtype=name,
            vocabularies={
                table: tlm.vocabulary.OpenVocabulary(40) for table in DIMS
            },
        ),
    )
    for model in (host, meshed):
        fit(model, *data(4 * BATCH, dtype=dtype))
        model.evaluate(*data(BATCH, seed=1, dtype=dtype), verbose=0)
    assert_same_tables(host, meshed)


def test_weights_are_passed_to_the_host(mesh):
    def make():
        inputs = inputs_of()
        weights = keras.Input([LENGTH], name="weights")
        rows = layer_of()(
            inputs, {"title": weights, "text": None, "user": None}
        )
        return keras.Model([inputs, weights], joined(rows))

    ids, y = data(4 * BATCH)
    weights = np.random.default_rng(1).integers(1, 4, ids["title"].shape)
    host, meshed = both(mesh, make)
    for model in (host, meshed):
        fit(model, [ids, weights.astype(np.float32)], y)
    assert_same_tables(host, meshed)


def test_a_feature_without_gradients_changes_no_row(mesh):
    def make():
        inputs = inputs_of()
        return keras.Model(inputs, layer_of()(inputs)["title"])

    x, y = data(2 * BATCH)
    host, meshed = both(mesh, make)
    for model in (host, meshed):
        fit(model, x, y[:, :4])
    assert_same_tables(host, meshed)


def test_inputs_may_be_results_of_host_layers(mesh):
    def make():
        words = keras.Input([LENGTH], dtype="string")
        ids = keras.layers.Hashing(40, salt=3)(words)
        return keras.Model(
            words,
            joined(layer_of()({"title": ids, "text": ids, "user": ids[:, :1]})),
        )

    x, y = data(2 * BATCH, dtype=str)
    host, meshed = both(mesh, make)
    for model in (host, meshed):
        fit(model, x["title"], y)
    assert_same_tables(host, meshed)


def test_other_weights_of_the_model_are_on_the_mesh(mesh):
    """Sums over devices have another order, so last bits differ."""

    def make():
        inputs = inputs_of()
        x = joined(layer_of()(inputs))
        return keras.Model(inputs, keras.layers.Dense(1, name="top")(x))

    x, y = data(4 * BATCH)
    host, meshed = both(mesh, make)
    for model in (host, meshed):
        model.compile(keras.optimizers.Adam(0.05, global_clipnorm=0.5), "mse")
        model.fit(
            x, y[:, :1], batch_size=BATCH, epochs=2, shuffle=False, verbose=0
        )
    rows = values_of(meshed)
    for name, value in values_of(host).items():
        np.testing.assert_allclose(rows[name], value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        meshed.predict(x, verbose=0),
        host.predict(x, verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_step_with_an_overflow_is_skipped(mesh):
    x, y = data(4 * BATCH)
    y[2 * BATCH + 1, 0] = np.inf
    host, meshed = both(mesh, model_of)
    for model in (host, meshed):
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0
        )
        fit(model, x, y, optimizer)
        for value in values_of(model).values():
            assert np.isfinite(value).all()
    assert_same_tables(host, meshed)


@pytest.mark.exhaustive
def test_16_bit_activations_train_in_the_same_way(mesh):
    x, y = data(4 * BATCH)
    host, meshed = both(
        mesh,
        model_of,
        dtype="int64",
        table_dtypes="bfloat16",
        rounding_seed=3,
    )
    for model in (host, meshed):
        fit(model, x, y, keras.optimizers.SGD(0.1, loss_scale_factor=4.0))
    assert_same_tables(host, meshed)


def test_a_layer_that_is_not_trainable_does_not_change(mesh):
    with scope(mesh):
        inputs = inputs_of()
        layer = layer_of()
        meshed = keras.Model(
            inputs, keras.layers.Dense(SIZE)(joined(layer(inputs)))
        )
    before = values_of(meshed)
    layer.trainable = False
    fit(meshed, *data(2 * BATCH))
    for name, value in values_of(meshed).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_a_custom_loop_trains_the_tables(mesh):
    x, y = data(3 * BATCH)
    host, meshed = both(mesh, model_of)
    for model in (host, meshed):
        optimizer = keras.optimizers.SGD(0.5)
        for start in range(0, 3 * BATCH, BATCH):
            batch = slice(start, start + BATCH)
            with (
                tlm.layout.default_mesh(mesh)
                if model is meshed
                else contextlib.nullcontext()
            ):
                with tf.GradientTape() as tape:
                    rows = model({name: own[batch] for name, own in x.items()})
                    loss = tf.reduce_mean(weighted_sum(y[batch], rows))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(
                    zip(gradients, model.trainable_variables)
                )
    assert_same_tables(host, meshed)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.tables = layer_of()
        self.flatten = keras.layers.Flatten()

    def call(self, ids):
        rows = self.tables(ids)
        return keras.ops.concatenate(
            [rows["title"], self.flatten(rows["text"]), rows["user"]], axis=-1
        )


def test_a_subclassed_model_requires_eager_steps(mesh):
    x, y = data(2 * BATCH)
    host, meshed = both(mesh, Subclassed)
    with pytest.raises(NotImplementedError, match="run_eagerly=True"):
        fit(meshed, x, y)
    for model in (host, meshed):
        fit(model, x, y, run_eagerly=True)
    assert_same_tables(host, meshed)


@pytest.mark.parametrize("as_sparse", [False, True])
def test_ragged_and_sparse_ids_raise(mesh, as_sparse):
    with scope(mesh):
        layer = layer_of()
    ids, _ = data(BATCH)
    ragged = tf.RaggedTensor.from_tensor(ids["title"])
    ids["title"] = ragged.to_sparse() if as_sparse else ragged
    with pytest.raises(
        (TypeError, NotImplementedError, ValueError), match="dense"
    ):
        layer(ids)


def test_gradient_accumulation_raises(mesh):
    with scope(mesh):
        model = model_of()
    with pytest.raises(ValueError, match="must not accumulate gradients"):
        fit(
            model,
            *data(BATCH),
            keras.optimizers.SGD(gradient_accumulation_steps=2),
        )


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
        first = model_of()
    fit(first, *data(4 * BATCH))
    path = str(tmp_path / f"model.{file}")
    with place(end):
        if file == "keras":
            first.save(path)
            second = keras.models.load_model(path)
        else:
            second = model_of()
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
        fit(model, *data(4 * BATCH, seed=1))
    assert_same_tables(first, second)


def test_exported_models_use_stock_ops(tmp_path):
    with scope(mesh_of(batch=2, model=2)):
        model = model_of()
    fit(model, *data(2 * BATCH))
    ids, _ = data(BATCH, seed=1)
    expected = model.predict(ids, verbose=0)
    tlm.export(model, str(tmp_path / "tlm"))
    model.export(str(tmp_path / "keras"), verbose=False)
    for name in ("tlm", "keras"):
        served = tf.saved_model.load(str(tmp_path / name))
        np.testing.assert_array_equal(
            served.serve({key: tf.constant(own) for key, own in ids.items()}),
            expected,
        )
        graph = (tmp_path / name / "saved_model.pb").read_bytes()
        assert b"LayoutMap>" not in graph


@pytest.mark.exhaustive
def test_keras_distribution_places_the_layer():
    """Under `keras.distribution`, the layer works as in a scope."""
    x, y = data(4 * BATCH)
    host = model_of()
    fit(host, x, y)
    with tlm.distribution.ModelParallel(
        layout_map=tlm.distribution.LayoutMap(mesh_of(batch=2, model=2)),
        batch_dim_name="batch",
    ).scope():
        meshed = model_of()
    fit(meshed, x, y)
    assert_same_tables(host, meshed)
