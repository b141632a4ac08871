"""Checks that settings of `compile` and `fit` work on a mesh."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of

pytestmark = pytest.mark.slow

X, Y = pairs.FEATURES, pairs.LABELS
WEIGHTS = (np.arange(32) % 5 / 4).astype(np.float32)


def both(run, make=pairs.dense_model, **tolerance):
    """Compares a model with and without a mesh; returns the mesh model."""
    first, second = pairs.plain(make), pairs.on_mesh(make)
    pairs.assert_alike(run(first), run(second), **tolerance)
    pairs.assert_same_weights(first, second, **tolerance)
    return second


@pytest.mark.exhaustive
def test_sample_weights_of_arrays_and_of_an_uneven_dataset():
    def run(model):
        history = pairs.fit(
            model,
            X[:30],
            Y[:30],
            epochs=1,
            sample_weight=WEIGHTS[:30],
            validation_data=(X, Y, WEIGHTS),
        )
        data = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(7)
        return (
            history,
            model.fit(data, verbose=0).history,
            model.evaluate(data, verbose=0),
            model.predict(data.map(lambda x, y, w: x), verbose=0),
        )

    both(run)


@pytest.mark.exhaustive
def test_validation_split_with_class_weights_matches():
    def run(model):
        return pairs.fit(
            model,
            validation_split=0.3,
            validation_batch_size=5,
            class_weight={0: 0.0, 1: 3.0, 2: 1.0, 3: 0.5},
        )

    both(run)


def test_gradients_are_accumulated_over_batches():
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)

    def run(model):
        # An epoch has four batches, so the accumulation of three batches
        # continues in the next epoch.
        return pairs.fit(
            model,
            optimizer=keras.optimizers.Adam.from_config(optimizer.get_config()),
            epochs=3,
        )

    both(run)


@pytest.mark.exhaustive
def test_jit_compile_does_not_change_results():
    def run(model):
        model.compile(
            keras.optimizers.Adam(0.01), pairs.loss(), jit_compile=True
        )
        return (
            model.fit(
                X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0
            ).history,
            model.predict(X, verbose=0),
        )

    both(run)


def test_moving_averages_replace_the_weights_after_fit():
    def run(model):
        before = [w.numpy() for w in model.weights]
        history = pairs.fit(
            model,
            optimizer=keras.optimizers.SGD(
                0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
            ),
        )
        assert any(
            np.any(a != w.numpy()) for a, w in zip(before, model.weights)
        )
        return history

    both(run)


@pytest.mark.exhaustive
def test_swap_ema_weights_callback_swaps_weights():
    def run(model):
        return pairs.fit(
            model,
            optimizer=keras.optimizers.SGD(0.5, use_ema=True),
            validation_data=(X, Y),
            callbacks=[keras.callbacks.SwapEMAWeights()],
        )

    both(run)


@pytest.mark.exhaustive
def test_losses_of_layers_and_regularizers_are_added():
    class Activity(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    def make():
        return pairs.sequential(
            (8,),
            keras.layers.Dense(
                16,
                activation="tanh",
                name="d1",
                kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1),
                bias_regularizer="l2",
            ),
            keras.layers.ActivityRegularization(l2=0.1),
            Activity(),
        )

    def run(model):
        history = pairs.fit(model)
        model(X)
        return history, [float(loss) for loss in model.losses]

    model = both(run, make)
    assert len(model.losses) >= 3


def test_constraints_hold_after_every_step():
    def make():
        return pairs.sequential(
            (8,),
            keras.layers.Dense(
                16, name="d1", kernel_constraint=keras.constraints.MaxNorm(0.7)
            ),
        )

    model = both(
        lambda model: pairs.fit(model, optimizer=keras.optimizers.SGD(0.5)),
        make,
    )
    norms = np.linalg.norm(model.layers[0].kernel.numpy(), axis=0)
    assert norms.max() <= 0.7 + 1e-5 and norms.max() > 0.69


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["list", "dict"])
def test_losses_and_loss_weights_of_several_outputs_match(kind):
    def make():
        inputs = keras.Input((8,))
        x = keras.layers.Dense(16, name="d1")(inputs)
        outputs = {
            "p": keras.layers.Dense(4, name="d2")(x),
            "q": keras.layers.Dense(1, name="q")(x),
        }
        return keras.Model(
            inputs, outputs if kind == "dict" else list(outputs.values())
        )

    labels = {"p": Y, "q": Y[:, None].astype(np.float32)}
    losses = {"p": pairs.loss(), "q": keras.losses.Huber()}
    weights = {"p": 0.25, "q": 2.0}
    samples = {"p": WEIGHTS, "q": WEIGHTS[::-1].copy()}
    if kind == "list":
        labels, losses, weights, samples = (
            list(x.values()) for x in (labels, losses, weights, samples)
        )

    def run(model):
        model.compile("adam", losses, loss_weights=weights)
        history = model.fit(
            X,
            labels,
            sample_weight=samples,
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
        ).history
        return history, model.evaluate(X, labels, verbose=0)

    both(run, make)


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [1, 3])
def test_scaled_loss_matches_a_single_device(steps):
    def run(model):
        model.compile(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01),
                initial_scale=2.0**8,
                dynamic_growth_steps=3,
            ),
            pairs.loss(),
            steps_per_execution=steps,
        )
        history = model.fit(
            X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0
        ).history
        return history, float(model.optimizer.dynamic_scale.numpy())

    model = both(run)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**10


def float16_model():
    policy = keras.mixed_precision.DTypePolicy("mixed_float16")
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="d1", dtype=policy),
            keras.layers.Dense(4, name="d2", dtype=policy),
        ]
    )


@pytest.mark.exhaustive
def test_mixed_float16_scales_its_loss():
    def run(model):
        model.compile(
            keras.optimizers.SGD(0.1), pairs.loss(), auto_scale_loss=True
        )
        history = model.fit(
            X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0
        ).history
        return history, float(model.optimizer.dynamic_scale.numpy())

    models = []
    for model in (pairs.plain(float16_model), pairs.on_mesh(float16_model)):
        # Keras reads the dtype policy of the model when it compiles the model.
        model.dtype_policy = keras.mixed_precision.DTypePolicy("mixed_float16")
        models.append((model, run(model)))
    # float16 has 11 bits of precision, and sums over devices are computed in a
    # different order.
    pairs.assert_alike(models[0][1], models[1][1], rtol=4e-3, atol=4e-3)
    for model, _ in models:
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert model.layers[0].kernel.dtype == "float32"


def test_step_with_overflowing_scaled_gradients_is_skipped():
    def run(model):
        model.compile(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=2.0**126
            ),
            lambda y, p: 1e4 * pairs.loss()(y, p),
        )
        before = model.layers[0].kernel.numpy()
        model.train_on_batch(X, Y)
        np.testing.assert_array_equal(model.layers[0].kernel.numpy(), before)
        return float(model.optimizer.dynamic_scale.numpy())

    model = both(run)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**125


@pytest.mark.exhaustive
def test_callbacks_write_the_same_files_as_a_single_device(tmp_path):
    kept = {}

    def run(model):
        kind = "mesh" if kept else "plain"
        log = tmp_path / f"{kind}.csv"
        history = pairs.fit(
            model,
            epochs=3,
            validation_split=0.25,
            callbacks=[
                keras.callbacks.CSVLogger(log),
                keras.callbacks.ModelCheckpoint(
                    tmp_path / (kind + "{epoch}.keras")
                ),
                keras.callbacks.ModelCheckpoint(
                    tmp_path / f"{kind}.weights.h5",
                    monitor="val_loss",
                    save_best_only=True,
                    save_weights_only=True,
                ),
            ],
        )
        rows = np.genfromtxt(log, delimiter=",", names=True)
        kept[kind] = keras.models.load_model(tmp_path / f"{kind}2.keras")
        best = pairs.plain(pairs.dense_model)
        best.load_weights(tmp_path / f"{kind}.weights.h5")
        return (
            history,
            [rows[name] for name in rows.dtype.names],
            best.get_weights(),
        )

    both(run)
    pairs.assert_same_weights(kept["plain"], kept["mesh"])


@pytest.mark.exhaustive
def test_interrupted_training_resumes_at_the_same_epoch(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def run(model):
        kind = type(model.layers[0].kernel).__name__
        backup = keras.callbacks.BackupAndRestore(tmp_path / kind)
        with pytest.raises(KeyboardInterrupt):
            pairs.fit(model, epochs=4, callbacks=[backup, Interrupt()])
        uninterrupted = pairs.plain(pairs.dense_model)
        expected = pairs.fit(uninterrupted, epochs=4)["loss"]
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        resumed = pairs.fit(model, epochs=4, callbacks=[backup])["loss"]
        np.testing.assert_allclose(resumed, expected[2:], **pairs.TOLERANCE)
        return resumed

    both(run)


@pytest.mark.exhaustive
def test_early_stopping_restores_the_best_weights():
    def run(model):
        return pairs.fit(
            model,
            optimizer=keras.optimizers.SGD(1.5),
            epochs=8,
            validation_split=0.5,
            callbacks=[
                keras.callbacks.EarlyStopping(
                    patience=1, restore_best_weights=True
                ),
                keras.callbacks.ReduceLROnPlateau(
                    factor=0.1, patience=1, min_delta=1.0
                ),
            ],
        )

    model = both(run)
    assert len(model.history.history["loss"]) < 8


class CustomSteps(keras.Model):
    """Model with custom train, test and predict steps and a custom metric."""

    def __init__(self):
        super().__init__()
        self.d1 = keras.layers.Dense(16, activation="tanh")
        self.d2 = keras.layers.Dense(4)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        return self.d2(self.d1(x))

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            value = self.compute_loss(
                y=y, y_pred=self(x, training=True), sample_weight=weights
            )
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(value, variables), variables)
        self.seen.update_state(value)
        return {"seen": self.seen.result()}

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.seen.update_state(
            tf.reduce_max(self(x)) + tf.cast(tf.reduce_sum(y), tf.float32)
        )
        return {"seen": self.seen.result()}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"p": tf.nn.softmax(self(x)), "top": tf.argmax(self(x), -1)}


def test_custom_steps_match_a_single_device():
    def run(model):
        model.compile(keras.optimizers.Adam(0.01), pairs.loss())
        history = model.fit(
            X,
            Y,
            sample_weight=WEIGHTS,
            batch_size=8,
            shuffle=False,
            verbose=0,
            epochs=2,
        ).history
        return (
            history,
            model.evaluate(X, Y, batch_size=8, verbose=0),
            model.predict(X[:13], batch_size=8, verbose=0),
        )

    both(run, CustomSteps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["eager", "function"])
def test_custom_loop_matches_a_single_device(how):
    mesh = mesh_of(batch=2, model=2)

    def run(model):
        optimizer = keras.optimizers.Adam(0.01)
        compute = pairs.loss()
        optimizer.build(model.trainable_variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                value = compute(y, model(x, training=True))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(value, variables), variables)
            return value

        on_mesh = hasattr(model.layers[0].kernel, "layout")
        step = tf.function(step) if how == "function" else step
        losses = []
        for start in range(0, 32, 8):
            batch = X[start : start + 8], Y[start : start + 8]
            if on_mesh:
                batch = (
                    tlm.layout.to_mesh(
                        batch[0], layout_of(mesh, "batch", None)
                    ),
                    tlm.layout.to_mesh(batch[1], layout_of(mesh, "batch")),
                )
                with tlm.layout.default_mesh(mesh):
                    losses.append(tlm.layout.to_host(step(*batch)))
            else:
                losses.append(step(*map(tf.constant, batch)).numpy())
        return losses

    both(run)
