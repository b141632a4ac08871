"""Checks that unchanged Keras code on a mesh matches a single device."""

import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import LayoutMapWarning
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError

dtensor = tf.experimental.dtensor
X, Y = pairs.FEATURES, pairs.LABELS


def both(run, make=pairs.dense_model, **options):
    """Compares a model with and without a mesh; returns the mesh model."""
    first, second = pairs.plain(make), pairs.on_mesh(make, **options)
    pairs.assert_alike(run(first), run(second))
    pairs.assert_same_weights(first, second)
    return second


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 2, "model": 2},
        {"model": 2, "data": 2},
        {"batch": 1, "model": 1},
        {"batch": 2, "model": 1},
        {"batch": 1, "model": 4},
        {"model": 2},
    ],
)
def test_batch_norm_validation_and_predict_match(sizes):
    def make():
        # The layer before BatchNormalization has no bias, because the gradient
        # of a bias would consist of rounding errors, which Adam amplifies.
        return pairs.sequential(
            (8,),
            keras.layers.Dense(16, use_bias=False, name="d1"),
            keras.layers.BatchNormalization(name="bn"),
            keras.layers.ReLU(),
        )

    def run(model):
        history = pairs.fit(
            model,
            validation_data=(X, Y),
            metrics=[
                "accuracy",
                keras.metrics.SparseTopKCategoricalAccuracy(2),
            ],
            class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0},
        )
        return (
            history,
            model.evaluate(X, Y, verbose=0),
            model.predict(X, verbose=0),
        )

    both(
        run,
        make,
        mesh=mesh_of(**sizes),
        axes={
            "d1.kernel": (None, "model"),
            "bn.gamma": ("model",),
            "bn.moving_mean": ("model",),
        },
    )


def test_uneven_batches_match_a_single_device():
    def run(model):
        history = pairs.fit(model, X[:29], Y[:29], batch_size=7)
        return (
            history,
            model.evaluate(X[:29], Y[:29], verbose=0),
            model.predict(X[:29], batch_size=5, verbose=0),
        )

    both(run)


@pytest.mark.exhaustive
def test_no_step_runs_at_the_end_of_data_of_unknown_length():
    # Without a mesh, Keras calls its step function once more when the data has
    # ended. This call raises an error, but it may draw seeds and count a step
    # before that.
    length = len(X) // 8
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    unknown = dataset.filter(lambda *_: True)
    known = unknown.apply(tf.data.experimental.assert_cardinality(length))
    assert int(unknown.cardinality()) == tf.data.UNKNOWN_CARDINALITY

    def make():
        return pairs.sequential(
            (8,), keras.layers.Dense(16, name="d1"), keras.layers.Dropout(0.5)
        )

    def run(model, data):
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
        history = pairs.fit(
            model,
            data,
            None,
            epochs=3,
            batch_size=None,
            optimizer=keras.optimizers.Adam(rate),
        )
        return history, int(model.optimizer.iterations.numpy())

    first, second = pairs.plain(make), pairs.on_mesh(make)
    expected, found = run(first, known), run(second, unknown)
    assert found[1] == expected[1] == 3 * length
    pairs.assert_alike(expected, found)
    pairs.assert_same_weights(first, second)


def warnings_of(caught, words):
    return [
        str(one.message)
        for one in caught
        if one.category is LayoutMapWarning and words in str(one.message)
    ]


def test_batch_size_not_divisible_by_the_mesh_warns_once():
    model = pairs.on_mesh(pairs.dense_model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pairs.fit(model, batch_size=7)
        model.evaluate(X, Y, batch_size=7, verbose=0)
    (sentence,) = warnings_of(caught, "multiple of 2")
    assert "batches of 7 samples" in sentence
    assert "batch size of 8" in sentence


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        # The last batch of this data is smaller.
        {"x": X[:29], "y": Y[:29], "batch_size": 8},
        {"batch_size": 8},
    ],
)
def test_batch_size_divisible_by_the_mesh_does_not_warn(options):
    model = pairs.on_mesh(pairs.dense_model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pairs.fit(model, epochs=1, **options)
    assert not warnings_of(caught, "")


@pytest.mark.parametrize("jit_compile", [True, False, "auto"])
def test_jit_compile_warns_once_that_it_has_no_effect(jit_compile):
    model = pairs.on_mesh(pairs.dense_model)
    model.compile("sgd", pairs.loss(), jit_compile=jit_compile)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=8, verbose=0)
        model.evaluate(X, Y, batch_size=8, verbose=0)
    assert len(warnings_of(caught, "jit_compile")) == (jit_compile is True)


def test_string_lookup_inside_a_layer_raises_and_suggests_a_fix():
    class WithLookup(keras.layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
            self.table = keras.layers.Embedding(4, 8)

        def build(self, shape):
            self.table.build(shape)

        def call(self, words):
            return self.table(self.lookup(words))

        def compute_output_spec(self, words):
            return keras.KerasTensor((*words.shape, 8))

    model = pairs.on_mesh(
        lambda: keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                WithLookup(name="words"),
                keras.layers.Flatten(),
                keras.layers.Dense(4, name="d2"),
            ]
        ),
        {},
    )
    model.compile("sgd", pairs.loss())
    data = tf.data.Dataset.from_tensors((tf.constant([["a"], ["b"]]), [0, 1]))
    with pytest.raises(UnsupportedByDTensorError, match="dataset.map"):
        model.fit(data, verbose=0)


def test_tensorboard_writes_images_of_sharded_weights(tmp_path):
    def make():
        return pairs.sequential(
            (8, 8, 3), keras.layers.Conv2D(16, 3, name="d1")
        )

    model = pairs.on_mesh(
        make,
        {
            "d1.kernel": (None, None, None, "model"),
            "d2.kernel": ("model", None),
        },
    )
    images = {}

    class Recording(keras.callbacks.TensorBoard):
        # Replaces the package `tensorboard`, which is optional.
        summary = types.SimpleNamespace(
            image=lambda name, data, step: images.update({name: data})
        )

    callback = Recording(tmp_path, write_images=True)
    for weight in model.weights:
        callback._log_weight_as_image(weight, weight.path, 0)
    kernel = model.get_layer("d2").kernel.numpy()
    image = images[model.get_layer("d2").kernel.path]
    assert np.array_equal(np.sort(image, axis=None), np.sort(kernel, axis=None))


@pytest.mark.exhaustive
def test_callbacks_read_and_set_host_values():
    def run(model):
        seen = []
        history = pairs.fit(
            model,
            epochs=3,
            validation_split=0.25,
            callbacks=[
                keras.callbacks.LearningRateScheduler(lambda e, lr: lr * 0.5),
                keras.callbacks.ReduceLROnPlateau(
                    monitor="loss", patience=0, min_delta=10.0
                ),
                keras.callbacks.EarlyStopping(
                    monitor="loss",
                    mode="max",
                    patience=1,
                    restore_best_weights=True,
                ),
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda _, logs: seen.append(
                        float(logs["loss"])
                    )
                ),
            ],
        )
        return history, seen

    both(run)


@pytest.mark.exhaustive
def test_steps_per_execution_with_a_short_last_execution():
    def run(model):
        model.compile("adam", pairs.loss(), steps_per_execution=3)
        history = model.fit(
            X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0
        ).history
        return history, model.predict(X, batch_size=8, verbose=0)

    both(run)


def test_train_and_test_on_batch_match_a_single_device():
    def run(model):
        model.compile("adam", pairs.loss(), metrics=["accuracy"])
        return (
            model.train_on_batch(X, Y),
            model.train_on_batch(
                X[:5], Y[:5], class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}
            ),
            model.train_on_batch(X, Y, np.arange(32) / 32),
            model.test_on_batch(X, Y, return_dict=True),
            model.predict_on_batch(X),
        )

    both(run)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["tf.data", pytest.param("generator", marks=pytest.mark.slow)]
)
def test_other_data_sources_match_a_single_device(kind):
    def run(model):
        model.compile("adam", pairs.loss(), metrics=["accuracy"])
        if kind == "tf.data":
            data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
            validation = data.unbatch().batch(10)
            return model.fit(
                data.repeat(),
                steps_per_epoch=3,
                epochs=2,
                verbose=0,
                validation_data=validation,
            ).history

        def batches():
            for start in range(0, 32, 8):
                yield X[start : start + 8], Y[start : start + 8]

        # `steps_per_epoch` is passed, because Keras without a mesh may count a
        # step without a batch at the end of the data.
        return model.fit(batches(), steps_per_epoch=4, verbose=0).history

    both(run)


@pytest.mark.covering(1)
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
@pytest.mark.parametrize(
    "convert", [tf.sparse.from_dense, tf.RaggedTensor.from_tensor]
)
def test_sparse_and_sharded_tensors_in_a_batch_raise(verb, kind, convert):
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return batch

    mesh = mesh_of(batch=2, model=2)
    model = pairs.on_mesh(pairs.dense_model, mesh=mesh)
    model.compile("sgd", pairs.loss())
    batch = (
        convert(X[:8]),
        tlm.layout.to_mesh(Y[:8], layout_of(mesh, "batch")),
    )
    data = Data() if kind == "PyDataset" else (batch for _ in range(2))
    with pytest.raises(TypeError, match="must consist of dense tensors"):
        getattr(model, verb)(data, verbose=0)


@pytest.mark.exhaustive
def test_dtensor_dataset_matches_arrays():
    mesh = mesh_of(batch=2, model=2)
    plain, mesh_model = (
        pairs.plain(pairs.dense_model),
        pairs.on_mesh(pairs.dense_model, mesh=mesh),
    )
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    on_mesh = dtensor.DTensorDataset(
        data,
        mesh=mesh,
        global_batch_size=8,
        batch_dim="batch",
        dataset_already_batched=False,
        layouts=(layout_of(mesh, "batch", None), layout_of(mesh, "batch")),
    )
    for model, source in ((plain, data.batch(8)), (mesh_model, on_mesh)):
        model.compile("sgd", pairs.loss())
        model.fit(source, epochs=2, verbose=0)
    pairs.assert_same_weights(plain, mesh_model)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.d1 = keras.layers.Dense(16, activation="tanh")
        self.d2 = keras.layers.Dense(4)

    def call(self, x):
        return self.d2(self.d1(x))


@pytest.mark.exhaustive
def test_model_that_fit_builds_matches_a_single_device():
    model = both(lambda model: pairs.fit(model), Subclassed)
    assert all(isinstance(v, MeshVariable) for v in model.variables)


def test_predict_may_build_the_model_before_fit():
    both(
        lambda model: (model.predict(X, verbose=0), pairs.fit(model)),
        Subclassed,
    )


class CustomStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = pairs.loss()(y, self(x, training=True))
        self.optimizer.apply_gradients(
            zip(
                tape.gradient(value, self.trainable_variables),
                self.trainable_variables,
            )
        )
        return {"mine": value}


def test_custom_train_step_matches_a_single_device():
    def run(model):
        model.compile("adam")
        return model.fit(X, Y, shuffle=False, verbose=0).history

    both(run, CustomStep)


def test_run_eagerly_matches_a_single_device():
    def run(model):
        model.compile(
            "adam", pairs.loss(), metrics=["accuracy"], run_eagerly=True
        )
        return model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history

    both(run)


@pytest.mark.exhaustive
def test_several_inputs_and_outputs_match_a_single_device():
    def make():
        a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
        x = keras.layers.Dense(16, name="d1")(
            keras.layers.Concatenate()([a, b])
        )
        return keras.Model(
            {"a": a, "b": b},
            {
                "p": keras.layers.Dense(4, name="d2")(x),
                "q": keras.layers.Dense(1, name="q")(x),
            },
        )

    def run(model):
        model.compile(
            "adam",
            {"p": pairs.loss(), "q": "mse"},
            metrics={"p": "accuracy", "q": "mae"},
            loss_weights={"p": 1.0, "q": 0.5},
        )
        x = {"a": X, "b": X[::-1].copy()}
        y = {"p": Y, "q": Y[:, None].astype(np.float32)}
        return (
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history,
            model.predict(x, verbose=0),
        )

    both(run, make)


def test_frozen_layer_does_not_change():
    def run(model):
        model.layers[0].trainable = False
        before = model.layers[0].kernel.numpy()
        history = pairs.fit(model)
        np.testing.assert_array_equal(model.layers[0].kernel.numpy(), before)
        return history

    both(run)


@pytest.mark.exhaustive
def test_layer_frozen_in_the_scope_trains_after_unfreezing():
    def make():
        model = pairs.dense_model()
        model.layers[0].trainable = False
        return model

    def run(model):
        before = model.layers[0].kernel.numpy()
        frozen = pairs.fit(model, epochs=1)
        np.testing.assert_array_equal(model.layers[0].kernel.numpy(), before)
        model.layers[0].trainable = True
        thawed = pairs.fit(model)
        assert np.abs(model.layers[0].kernel.numpy() - before).min() > 0
        return frozen, thawed

    both(run, make)


class TwoOptimizers(keras.Model):
    """GAN whose step builds both parts and receives no labels."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential(
            [
                keras.layers.Dense(16, activation="relu", name="d1"),
                keras.layers.Dense(8),
            ]
        )
        self.judge = keras.Sequential(
            [
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        self.seeds = keras.random.SeedGenerator(5)

    def compile(self, maker, judge):
        super().compile()
        self.of_maker, self.of_judge = maker, judge

    def train_step(self, real):
        score = keras.losses.BinaryCrossentropy(from_logits=True)
        noise = keras.random.normal(keras.ops.shape(real), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            generated = self.judge(self.maker(noise), training=True)
            seen = self.judge(real, training=True)
            cheat = score(keras.ops.ones_like(generated), generated)
            catch = score(keras.ops.zeros_like(generated), generated) + score(
                keras.ops.ones_like(seen), seen
            )
        for optimizer, value, part in (
            (self.of_maker, cheat, self.maker),
            (self.of_judge, catch, self.judge),
        ):
            optimizer.apply(
                tape.gradient(value, part.trainable_variables),
                part.trainable_variables,
            )
        return {"cheat": cheat, "catch": catch}


@pytest.mark.exhaustive
def test_step_with_two_optimizers_and_without_call():
    def run(model):
        model.compile(
            keras.optimizers.Adam(1e-3), keras.optimizers.SGD(0.1, momentum=0.9)
        )
        # The last batch is smaller and traced separately. Its trace must use
        # the same slot variables.
        return model.fit(X[:20], epochs=3, batch_size=8, verbose=0).history

    model = both(run, TwoOptimizers, axes={"maker.d1.kernel": (None, "model")})
    assert model.maker.layers[0].kernel.layout.sharding_specs == [
        "unsharded",
        "model",
    ]
    assert isinstance(model.of_judge.variables[-1], MeshVariable)


@pytest.mark.exhaustive
def test_compiled_metrics_keep_their_state_between_traces():
    # The last batch is smaller and traced separately. Metrics that are created
    # during tracing would be reset by this trace.
    def run(model):
        model.compile(
            "sgd",
            pairs.loss(),
            metrics=[
                "accuracy",
                keras.metrics.SparseTopKCategoricalAccuracy(2, name="two"),
            ],
        )
        return model.evaluate(X[:30], Y[:30], batch_size=8, verbose=0)

    both(run)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "metric",
    [
        pytest.param(
            make,
            id=make().name,
        )
        for make in (
            lambda: keras.metrics.MeanSquaredError(),
            lambda: keras.metrics.Precision([0.1, 0.3]),
            lambda: keras.metrics.F1Score(threshold=0.3),
            lambda: keras.metrics.R2Score(),
            lambda: keras.metrics.Recall(0.3),
            lambda: keras.metrics.CosineSimilarity(),
            lambda: keras.metrics.BinaryAccuracy(),
            lambda: keras.metrics.KLDivergence(),
            lambda: keras.metrics.TopKCategoricalAccuracy(2),
        )
    ],
)
def test_metric_matches_a_single_device(metric):
    def run(model):
        model.compile(
            "sgd", "mse", metrics=[metric()], weighted_metrics=["mae"]
        )
        y = np.eye(4, dtype=np.float32)[Y]
        history = model.fit(
            X,
            y,
            batch_size=8,
            shuffle=False,
            verbose=0,
            sample_weight=np.arange(32) / 32,
        ).history
        # Values are compared in the order of the metrics instead of by name,
        # because Keras adds numbers to the names.
        return list(history.values()), model.evaluate(X, y, verbose=0)

    both(run)


def test_dropout_draws_new_numbers_each_step_at_its_rate():
    model = pairs.on_mesh(
        lambda: keras.Sequential(
            [keras.Input((64,)), keras.layers.Dropout(0.25, seed=1)]
        )
    )
    assert isinstance(model.variables[0], MeshVariable)
    x = np.ones((100, 64), np.float32)
    draws = [model(x, training=True).numpy() for _ in range(2)]
    assert not np.array_equal(*draws)
    for draw in draws:
        assert abs(np.mean(draw == 0) - 0.25) < 0.03
        np.testing.assert_allclose(draw[draw != 0], 1 / 0.75, rtol=1e-6)


def test_mixed_precision_matches_a_single_device():
    def make():
        return keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(
                    16, activation="tanh", name="d1", dtype="mixed_bfloat16"
                ),
                keras.layers.Dense(4, name="d2", dtype="mixed_bfloat16"),
            ]
        )

    twice = [
        pairs.fit(model, epochs=3)["loss"]
        for model in (pairs.plain(make), pairs.on_mesh(make))
    ]
    # bfloat16 has 8 bits of precision, and sums in a different order can differ
    # in the last bit.
    np.testing.assert_allclose(*twice, atol=2e-2)


def test_unsupported_op_in_a_metric_is_replicated():
    results = []
    for model in (
        pairs.plain(pairs.dense_model),
        pairs.on_mesh(pairs.dense_model),
    ):
        model.compile(
            "sgd",
            "mse",
            metrics=[lambda y, p: tf.reduce_sum(tf.roll(p, 1, 0), axis=-1)],
        )
        results.append(model.evaluate(X, np.eye(4)[Y], verbose=0))
    pairs.assert_alike(*results)


@pytest.mark.exhaustive
def test_discretization_in_a_model_is_replicated():
    def make():
        return keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Discretization(
                    bin_boundaries=[0.0], output_mode="one_hot"
                ),
                keras.layers.Dense(4, name="d2"),
            ]
        )

    pairs.assert_alike(
        *(
            pairs.fit(model, X[:, :1])
            for model in (pairs.plain(make), pairs.on_mesh(make, axes={}))
        )
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layer, values",
    [
        (
            lambda: keras.layers.IntegerLookup(
                vocabulary=[1, 2], output_mode="multi_hot"
            ),
            np.arange(32)[:, np.newaxis],
        )
    ],
)
def test_preprocessing_matches_in_a_model_and_in_the_input(layer, values):
    def make(layers=()):
        return keras.Sequential(
            [
                keras.Input(values.shape[1:], dtype=values.dtype),
                *layers,
                keras.layers.Dense(4, name="d2"),
            ]
        )

    on_host = pairs.on_mesh(lambda: make([layer()]), axes={})
    inside, outside = layer(), layer()
    first = pairs.plain(lambda: make([inside]))
    keras.utils.set_random_seed(3)
    data = (
        tf.data.Dataset.from_tensor_slices((values, Y))
        .batch(8)
        .map(lambda x, y: (outside(x), y))
    )
    width = data.element_spec[0].shape[1:]
    second = pairs.on_mesh(
        lambda: keras.Sequential(
            [keras.Input(width), keras.layers.Dense(4, name="d2")]
        ),
        axes={},
    )
    expected = pairs.fit(first, values)
    pairs.assert_alike(expected, pairs.fit(on_host, values))
    pairs.assert_alike(expected, pairs.fit(second, data, None, batch_size=None))


def test_unsupported_op_in_a_loss_is_replicated():
    def loss(y, p):
        return -tf.reduce_sum(y * tf.one_hot(tf.math.argmax(p, -1), 4) * p)

    axes = {"d2.kernel": (None, "model"), "d2.bias": ("model",)}
    models = (
        pairs.plain(pairs.dense_model),
        pairs.on_mesh(pairs.dense_model, axes),
    )
    for model in models:
        model.compile("sgd", loss)
    y = np.eye(4, dtype=np.float32)[Y]
    with pytest.warns(LayoutMapWarning, match="the test step of model"):
        losses = [model.evaluate(X, y, verbose=0) for model in models]
    pairs.assert_alike(*losses)


def test_training_continues_after_an_invalid_label():
    model = pairs.on_mesh(
        pairs.dense_model, axes={"d1.kernel": ("model", None)}
    )
    pairs.fit(model, epochs=1)
    before = [w.numpy() for w in model.trainable_weights]
    bad = Y.copy()
    bad[5] = 9
    with pytest.raises(tf.errors.OpError):
        model.fit(X, bad, verbose=0)
    for weight, value in zip(model.trainable_weights, before):
        np.testing.assert_array_equal(weight.numpy(), value)
    assert np.isfinite(model.fit(X, Y, verbose=0).history["loss"]).all()


def test_sparse_batches_raise():
    model = pairs.on_mesh(pairs.dense_model)
    ragged = tf.ragged.constant([[1.0] * 8] * 4)
    with pytest.raises(TypeError, match="must consist of dense tensors"):
        model.predict(
            tf.data.Dataset.from_tensor_slices(ragged).batch(2), verbose=0
        )


def test_weight_built_outside_the_scope_raises():
    outside = keras.layers.Dense(4, name="outside")
    outside.build((None, 16))
    model = pairs.on_mesh(
        lambda: keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, name="d1"), outside]
        )
    )
    with pytest.raises(
        ValueError, match="'outside/kernel'.*outside layout_map_scope"
    ):
        pairs.fit(model)


def test_seeds_built_outside_the_scope_move_to_the_mesh():
    dropout = keras.layers.Dropout(0.5, seed=1)
    model = pairs.on_mesh(
        lambda: keras.Sequential(
            [keras.Input((8,)), dropout, keras.layers.Dense(4, name="d1")]
        )
    )
    pairs.fit(model, epochs=1)
    assert isinstance(dropout.seed_generator.state, MeshVariable)


@pytest.mark.exhaustive
def test_batch_axis_may_have_any_name():
    layout_map = tlm.LayoutMap(mesh_of(rows=2, columns=2))
    with tlm.layout_map_scope(layout_map, batch_dim="columns"):
        model = pairs.plain(pairs.dense_model)
    history = pairs.fit(model)
    pairs.assert_alike(pairs.fit(pairs.plain(pairs.dense_model)), history)


@pytest.mark.exhaustive
def test_autotune_is_off_only_for_arrays_on_a_mesh(monkeypatch):
    seen = []
    iterate = tf.data.Dataset.__iter__
    monkeypatch.setattr(
        tf.data.Dataset,
        "__iter__",
        lambda data: (
            seen.append(data.options().autotune.enabled) or iterate(data)
        ),
    )

    def runs(model, *data):
        seen.clear()
        pairs.fit(
            model,
            *data,
            epochs=1,
            batch_size=None if data else 8,
            validation_data=data or (X, Y),
        )
        model.predict(data[0].map(lambda x, y: x) if data else X, verbose=0)
        return set(seen)

    mesh_model = pairs.on_mesh(pairs.dense_model)
    assert runs(mesh_model) == {False}
    own = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    assert runs(mesh_model, own, None) == {None}
    # Training on a mesh must not change how models without a mesh run.
    assert runs(pairs.plain(pairs.dense_model)) == {None}
