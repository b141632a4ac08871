"""Checks tf_keras models that are created under `tlm.layout_map_scope`."""

import types
import weakref

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.covering import but
from tests.layout import unsupported
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.replication import traces

# The scope supports tf_keras only if the program has imported it.
import tf_keras  # isort: skip

# The tests of Keras 3 run more cases of the same code.
pytestmark = pytest.mark.covering(1, 1)

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(36, 8)).astype(np.float32)
IMAGES = RNG.normal(size=(36, 8, 8, 3)).astype(np.float32)
SERIES = RNG.normal(size=(36, 5, 8)).astype(np.float32)
TOKENS = RNG.integers(0, 16, (36, 5))
LABELS = RNG.integers(0, 4, 36)
TOLERANCE = dict(rtol=1e-5, atol=1e-5)
AXES = {
    "d1.kernel": (None, "model"),
    "d1.bias": ("model",),
    "d2.kernel": ("model", None),
}

layers = tf_keras.layers


class Subclassed(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.d1 = layers.Dense(16, activation="tanh", kernel_regularizer="l2")
        self.d2 = layers.Dense(4)

    def call(self, inputs):
        return self.d2(self.d1(inputs))


class Nested(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = Subclassed()
        self.blocks = [layers.Dense(8), layers.Dense(4)]

    def call(self, inputs):
        x = tf.nn.relu(self.inner(inputs))
        for block in self.blocks:
            x = block(x)
        return x


def sequential(*middle, shape=(8,)):
    return tf_keras.Sequential(
        [
            tf_keras.Input(shape),
            *middle,
            layers.Flatten(),
            layers.Dense(4, name="d2"),
        ]
    )


def dense():
    return sequential(layers.Dense(16, activation="tanh", name="d1"))


def functional():
    inputs = tf_keras.Input((8,))
    hidden = layers.Dense(16, activation="tanh", name="d1")(inputs)
    return tf_keras.Model(inputs, layers.Dense(4, name="d2")(hidden))


# Models without a mesh. A few of their steps run eagerly, which is faster than
# tracing.
_PLAIN = weakref.WeakSet()
_MAX_EAGER_STEPS = 12


def plain(make):
    """Returns the model without a mesh, with the same random numbers."""
    tf_keras.utils.set_random_seed(3)
    model = make()
    _PLAIN.add(model)
    return model


def on_mesh(make, axes=AXES, mesh=None, strict=False, **options):
    mesh = mesh or mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=strict)
    for key, value in axes.items():
        layout_map[key] = layout_of(mesh, *value)
    tf_keras.utils.set_random_seed(3)
    with tlm.layout_map_scope(layout_map, **options):
        return make()


def _is_random(model):
    """Returns whether layers draw numbers, which eager steps do not repeat."""
    return any(
        getattr(layer, name, 0)
        for layer in model._flatten_layers()
        for name in ("rate", "stddev", "dropout", "recurrent_dropout")
    )


def fit(model, x=FEATURES, *, y=LABELS, optimizer="adam", epochs=2, **options):
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    is_short = (
        isinstance(x, np.ndarray)
        and len(x) * epochs <= _MAX_EAGER_STEPS * options["batch_size"]
    )
    model.compile(
        optimizer,
        tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=is_short and model in _PLAIN and not _is_random(model),
    )
    return model.fit(x, y, epochs=epochs, **options).history


def axes_of(variable):
    return tuple(
        None if spec == "unsharded" else spec
        for spec in variable.layout.sharding_specs
    )


def assert_alike(first, second, **tolerance):
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(
            a, b, **(tolerance or TOLERANCE)
        ),
        first,
        second,
    )


def assert_trains_alike(
    make,
    x=FEATURES,
    axes=AXES,
    mesh=None,
    optimizer=lambda: "adam",
    tolerance=None,
    **options,
):
    refs = plain(make), on_mesh(make, axes, mesh)
    histories = []
    for ref in refs:
        # Subclassed models initialize their weights in the first step.
        tf_keras.utils.set_random_seed(4)
        histories.append(fit(ref, x, optimizer=optimizer(), **options))
    assert_alike(*histories, **(tolerance or {}))
    for a, b in zip(*(ref.get_weights() for ref in refs), strict=True):
        np.testing.assert_allclose(a, b, **(tolerance or TOLERANCE))
    return refs


@pytest.mark.parametrize("make", [Subclassed, dense, functional])
def test_weights_have_the_layout_of_their_name(make):
    model = on_mesh(make)
    model(FEATURES)

    kernels = {
        w.name.split("/")[-2]: w for w in model.weights if "kernel" in w.name
    }
    assert len(kernels) == 2
    found = {tuple(axes_of(k)) for k in kernels.values()}
    assert found == {(None, "model"), ("model", None)}
    assert all(
        isinstance(w, tf.experimental.dtensor.DVariable) for w in model.weights
    )


@pytest.mark.parametrize("make", [Subclassed, dense, functional, Nested])
def test_fit_evaluate_and_predict_match_a_single_device(make):
    axes = (
        {"inner.d1.kernel": (None, "model"), "blocks.0.kernel": ("model", None)}
        if make is Nested
        else AXES
    )
    first, second = assert_trains_alike(make, axes=axes)

    assert_alike(
        first.evaluate(FEATURES, LABELS, verbose=0),
        second.evaluate(FEATURES, LABELS, verbose=0),
    )
    assert_alike(
        first.predict(FEATURES, verbose=0), second.predict(FEATURES, verbose=0)
    )
    assert_alike(first(FEATURES).numpy(), second(FEATURES).numpy())


@pytest.mark.exhaustive
def test_names_contain_models_and_list_indices():
    model = on_mesh(
        Nested,
        {
            "inner.d1.kernel": (None, "model"),
            "blocks.0.kernel": ("model", None),
        },
    )
    fit(model, epochs=1)

    assert axes_of(model.inner.d1.kernel) == (None, "model")
    assert axes_of(model.blocks[0].kernel) == ("model", None)
    assert axes_of(model.blocks[1].kernel) == (None, None)
    assert len(model.trainable_weights) == 8


def test_regularizer_receives_the_trained_weight():
    model = on_mesh(Subclassed)
    model(FEATURES)

    kernel = model.d1.kernel.numpy()
    np.testing.assert_allclose(
        tlm.layout.to_host(model.losses[0]), 0.01 * np.sum(kernel**2), rtol=1e-5
    )


MASKED = SERIES.copy()
MASKED[:, 3:] = MASKED[::2, 1] = 0

LAYERS = {
    "constraint": (
        lambda: sequential(
            layers.Dense(16, name="d1", kernel_constraint="non_neg")
        ),
        FEATURES,
    ),
    "batch norm": (
        lambda: sequential(
            layers.Dense(16, name="d1"), layers.BatchNormalization()
        ),
        FEATURES,
    ),
    "layer norm": (
        lambda: sequential(
            layers.Dense(16, name="d1"), layers.LayerNormalization()
        ),
        FEATURES,
    ),
    "embedding": (
        lambda: sequential(
            layers.Embedding(16, 8, name="e"),
            layers.Dense(16, name="d1"),
            shape=(5,),
        ),
        TOKENS,
    ),
    "convolution": (
        lambda: sequential(
            layers.Conv2D(4, 3, name="c"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(16, name="d1"),
            shape=(8, 8, 3),
        ),
        IMAGES,
    ),
    "gru": (
        lambda: sequential(
            layers.Bidirectional(layers.GRU(8, return_sequences=True)),
            layers.Flatten(),
            layers.Dense(16, name="d1"),
            shape=(5, 8),
        ),
        SERIES,
    ),
    "lstm": (
        lambda: sequential(
            layers.Masking(),
            layers.LSTM(8),
            layers.Dense(16, name="d1"),
            shape=(5, 8),
        ),
        MASKED,
    ),
    "simple rnn": (
        lambda: sequential(
            layers.SimpleRNN(8, go_backwards=True),
            layers.Dense(16, name="d1"),
            shape=(5, 8),
        ),
        SERIES,
    ),
    "attention": (lambda: functional_attention(), SERIES),
}


def functional_attention():
    inputs = tf_keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 4, name="a")(inputs, inputs)
    x = layers.Dense(16, name="d1")(layers.Flatten()(x))
    return tf_keras.Model(inputs, layers.Dense(4, name="d2")(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_a_single_device(name):
    make, x = LAYERS[name]
    axes = {"d1.kernel": (None, "model"), "d1.bias": ("model",)}
    # The optimizer is not Adam, which would amplify gradients that consist of
    # rounding errors.
    assert_trains_alike(
        make, x, axes, optimizer=lambda: tf_keras.optimizers.SGD(0.1)
    )


def test_dropout_draws_new_numbers_in_each_training_step_only():
    model = on_mesh(lambda: sequential(layers.Dropout(0.5)), {})
    ones = np.ones((4, 8), np.float32)
    dropout = model.layers[0]
    step = tf.function(lambda x: dropout(x, training=True))
    copied = tlm.layout.to_mesh(
        ones, layout_of(mesh_of(batch=2, model=2), None, None)
    )
    with tlm.layout.default_mesh(mesh_of(batch=2, model=2)):
        first, second = (tlm.layout.to_host(step(copied)) for _ in range(2))

    assert set(np.unique(first)) <= {0.0, 2.0}
    assert (first != second).any()
    fit(model, epochs=1)
    assert_alike(
        model.predict(ones, verbose=0), model.predict(ones, verbose=0), rtol=0
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_embedding_matches_a_single_device(rule):
    make = LAYERS["embedding"][0]
    assert_trains_alike(
        make, TOKENS, {"e.embeddings": (None, "model")}, optimizer=lambda: rule
    )


# Layouts of weights that are gathered for their layer.
GATHERED = {
    "embedding": {"e.embeddings": ("model", None)},
    "convolution": {
        "c.kernel": (None, None, None, "model"),
        "c.bias": ("batch",),
    },
    "gru": {".*gru_cell.*/(recurrent_)?kernel": (None, "model")},
    "lstm": {".*lstm.*/(recurrent_)?kernel": ("model", None)},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.filterwarnings("ignore:To ")
def test_weights_are_gathered_for_layers_that_require_it(name):
    make, x = LAYERS[name]
    # With Adam, the test detects whether gradients of repeated rows are summed
    # before they are squared.
    optimizer = "adam" if name == "embedding" else "sgd"
    assert_trains_alike(make, x, GATHERED[name], optimizer=lambda: optimizer)


def convolutions():
    return sequential(
        layers.Conv2D(8, 3, activation="relu", name="c1"),
        layers.DepthwiseConv2D(3, name="c2"),
        layers.SeparableConv2D(4, 2, name="c3"),
        layers.Conv2DTranspose(4, 2, strides=2, name="c4"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(16, name="d1"),
        shape=(8, 8, 3),
    )


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error::tf_layoutmap.layout.LayoutMapWarning")
def test_convolutions_with_sharded_kernels_match_a_single_device():
    outputs, inputs = (None, None, None, "model"), (None, None, "model", None)
    assert_trains_alike(
        convolutions,
        IMAGES,
        {
            "c1.kernel": outputs,
            "c1.bias": ("model",),
            "c2.depthwise_kernel": inputs,
            "c3.depthwise_kernel": inputs,
            "c3.pointwise_kernel": outputs,
            "c4.kernel": inputs,
        },
        optimizer=lambda: "sgd",
    )


def normalized_images():
    return sequential(
        layers.Conv2D(4, 3, name="c1"),
        layers.BatchNormalization(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(16, name="d1"),
        shape=(8, 8, 3),
    )


@pytest.mark.exhaustive
def test_batch_normalization_of_images_matches_a_single_device():
    # The fused op of the layer ended the process.
    assert_trains_alike(
        normalized_images,
        IMAGES,
        {
            "c1.kernel": (None, None, None, "model"),
            "d1.kernel": (None, "model"),
        },
        optimizer=lambda: "sgd",
    )


def test_strict_map_raises_instead_of_gathering_rows():
    with pytest.raises(ValueError, match=r"use \(None, 'model'\)"):
        on_mesh(
            LAYERS["embedding"][0],
            {"e.embeddings": ("model", None)},
            strict=True,
        )


@pytest.mark.exhaustive
def test_step_that_cannot_be_sharded_is_fully_replicated(monkeypatch):
    monkeypatch.setattr(traces.Replication, "extend", lambda *_: False)

    def make():
        return sequential(
            layers.Dense(16, name="d1"),
            layers.Lambda(lambda x: unsupported.split(x, 2, axis=-1)[1]),
            layers.BatchNormalization(name="n"),
        )

    with pytest.warns(tlm.layout.LayoutMapWarning, match="everything, with"):
        assert_trains_alike(
            make,
            FEATURES,
            {
                "d1.kernel": (None, "model"),
                "n.*": ("model",),
                "d2.kernel": ("batch", None),
            },
            optimizer=lambda: "sgd",
        )


OPTIMIZERS = {
    "SGD": lambda o: o.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda o: o.Adam(0.01, amsgrad=True, clipnorm=0.5),
    "AdamW": lambda o: o.AdamW(0.01, weight_decay=0.1),
    "Adagrad": lambda o: o.Adagrad(0.1, global_clipnorm=0.5),
    "Adadelta": lambda o: o.Adadelta(1.0, clipvalue=0.1),
    "Adamax": lambda o: o.Adamax(0.01),
    "RMSprop": lambda o: o.RMSprop(0.01, momentum=0.5, centered=True),
    "Ftrl": lambda o: o.Ftrl(0.1),
    "Lion": lambda o: o.Lion(0.001),
    "schedule": lambda o: o.Adam(o.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "EMA": lambda o: o.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", but(OPTIMIZERS, "Adadelta", "Adamax", "RMSprop", "Lion")
)
def test_optimizer_matches_a_single_device(name):
    _, model = assert_trains_alike(
        dense, optimizer=lambda: OPTIMIZERS[name](tf_keras.optimizers)
    )

    layout = model.get_layer("d1").kernel.layout
    slots = [v for v in model.optimizer.variables if v.shape == (8, 16)]
    assert all(slot.layout == layout for slot in slots)
    assert slots or name == "SGD"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        dict(batch=2, model=2),
        dict(batch=1, model=1),
        dict(model=4),
    ],
)
def test_200_steps_match_a_single_device(mesh):
    assert_trains_alike(
        dense, mesh=mesh_of(**mesh), epochs=40, optimizer=lambda: "adagrad"
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_mixed_bfloat16_is_close_to_a_single_device():
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        assert_trains_alike(dense, tolerance=dict(rtol=0.05, atol=0.05))
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".weights.h5", "", ".keras"])
@pytest.mark.parametrize("target", ["mesh", "none"])
def test_files_saved_on_a_mesh_load_on_any_mesh(tmp_path, suffix, target):
    model = on_mesh(functional)
    fit(model, epochs=1)
    path = str(tmp_path / f"model{suffix}")
    other = (
        on_mesh(functional, {"d1.kernel": ("model", None)}, mesh_of(model=4))
        if target == "mesh"
        else functional()
    )
    if suffix == ".keras":
        model.save(path)
        other = tf_keras.models.load_model(path)
    else:
        model.save_weights(path)
        other.load_weights(path)

    assert_alike(model.get_weights(), other.get_weights(), rtol=0)
    assert_alike(
        model.predict(FEATURES, verbose=0), other.predict(FEATURES, verbose=0)
    )


@pytest.mark.exhaustive
def test_training_continues_from_a_checkpoint(tmp_path):
    first, second = on_mesh(functional), on_mesh(functional)
    fit(first, epochs=1)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).write(
        str(tmp_path / "c")
    )
    first.fit(FEATURES, LABELS, batch_size=8, shuffle=False, verbose=0)

    fit(second, epochs=1)
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).read(
        path
    ).assert_consumed()
    second.fit(FEATURES, LABELS, batch_size=8, shuffle=False, verbose=0)

    assert_alike(first.get_weights(), second.get_weights())


def test_sharded_init_depends_on_the_seed():
    def make(seed):
        mesh = mesh_of(model=4)
        layout_map = tlm.LayoutMap(mesh)
        layout_map["d1.kernel"] = layout_of(mesh, None, "model")
        with tlm.layout_map_scope(layout_map):
            return (
                sequential(
                    layers.Dense(
                        400,
                        name="d1",
                        kernel_initializer=(
                            tf_keras.initializers.RandomNormal(0, 2, seed=seed)
                        ),
                    )
                )
                .get_layer("d1")
                .kernel.numpy()
            )

    np.testing.assert_array_equal(make(1), make(1))
    assert (make(1) != make(2)).any()
    assert abs(make(1).std() - 2) < 0.1


def test_invalid_layout_raises_before_allocation():
    with pytest.raises(ValueError, match=r"d1\.kernel.*\(8, 18\)"):
        on_mesh(
            lambda: sequential(layers.Dense(18, name="d1")),
            {"d1.kernel": (None, "model")},
            mesh_of(model=4),
        )


def test_unmatched_key_warns():
    with pytest.warns(UserWarning, match="'d9.kernel' matches no variable"):
        on_mesh(dense, {"d9.kernel": (None, "model")})


def test_unsupported_optimizers_raise():
    model = on_mesh(dense)

    with pytest.raises(ValueError, match="legacy"):
        model.compile(tf_keras.optimizers.legacy.Adam(), "mse")
    with pytest.raises(ValueError, match="Nadam is not supported"):
        model.compile("nadam", "mse")


def test_explain_reports_the_matching_key():
    model = on_mesh(dense)
    layout_map = tlm.LayoutMap(mesh_of(batch=2, model=2))
    layout_map["d1.*"] = layout_of(layout_map.get_default_mesh(), None, "model")

    report = layout_map.explain(model)

    assert {v.name: v.pattern for v in report.variables} == {
        "d1.kernel": "d1.*",
        "d1.bias": "d1.*",
        "d2.kernel": None,
        "d2.bias": None,
    }
    # A key matches the bias, but has a layout for two dimensions.
    assert not report.ok


def test_models_outside_of_the_scope_are_unchanged():
    on_mesh(dense)

    model = dense()

    fit(model, epochs=1)
    assert not any(
        isinstance(w, tf.experimental.dtensor.DVariable) for w in model.weights
    )


class HostTensors(layers.Layer):
    """Layer that holds host tensors and a variable that is not tracked."""

    def __init__(self):
        super().__init__()
        self.table = tf.constant(
            np.linspace(0, 1, 64).reshape(8, 8), tf.float32
        )
        self.mask = tf.range(300) % 2 == 0
        self.hidden = types.SimpleNamespace(count=tf.Variable(0))

    def call(self, x, training=False):
        if training == "count":
            self.hidden.count.assign_add(1)
        return x @ self.table + tf.cast(self.mask[2], x.dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("eager", [False, True])
def test_host_tensors_of_layers_are_copied_to_the_mesh(eager):
    def make():
        return sequential(
            layers.Normalization(
                mean=np.arange(8.0) / 8, variance=np.arange(1.0, 9.0)
            ),
            HostTensors(),
            layers.Dense(16, activation="tanh", name="d1"),
        )

    def losses(model):
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, run_eagerly=eager)
        return (
            [model.train_on_batch(FEATURES, LABELS) for _ in range(4)],
            model.evaluate(FEATURES, LABELS, verbose=0),
            model.predict(FEATURES, verbose=0),
            model(FEATURES).numpy(),
        )

    assert_alike(
        losses(plain(make)), losses(on_mesh(make)), rtol=1e-6, atol=1e-6
    )


def test_assigning_a_host_variable_in_a_step_raises():
    layer = HostTensors()
    model = on_mesh(
        lambda: sequential(
            layer,
            layers.Lambda(lambda x: layer(x, training="count")),
            layers.Dense(16, name="d1"),
        )
    )
    with pytest.raises(RuntimeError, match="`assign_add` of tf.Variable"):
        fit(model, epochs=1)
    model(FEATURES)
    assert layer.hidden.count.numpy() == 1


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
    data = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(4)
    for model, x, y, enabled in (
        (on_mesh(dense), FEATURES, LABELS, False),
        (on_mesh(dense), data, None, None),
        (plain(dense), FEATURES, LABELS, None),
    ):
        seen.clear()
        fit(model, x, y=y, epochs=1)
        model.evaluate(x, y, verbose=0)
        assert set(seen) == {enabled}


class WithoutCall(tf_keras.Model):
    """Model without `call`; each of its two parts has a separate optimizer."""

    def __init__(self):
        super().__init__()
        self.d1 = layers.Dense(16, activation="tanh")
        self.d2 = layers.Dense(4)
        self.head = layers.Dense(1, name="head")
        self.error = tf_keras.metrics.Mean(name="error")
        self.head_optimizer = tf_keras.optimizers.Adagrad(0.1)

    def losses_of(self, data):
        x, y = data
        hidden = self.d2(self.d1(x))
        return (
            tf.reduce_mean(tf.square(hidden - tf.one_hot(y, 4))),
            tf.reduce_mean(tf.square(self.head(hidden))),
        )

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            losses = self.losses_of(data)
        for loss, optimizer, parts in zip(
            losses,
            [self.optimizer, self.head_optimizer],
            [[self.d1, self.d2], [self.head]],
        ):
            weights = [w for part in parts for w in part.trainable_weights]
            optimizer.apply_gradients(
                zip(tape.gradient(loss, weights), weights)
            )
        self.error.update_state(losses[0])
        return {"error": self.error.result(), "head": losses[1]}

    def test_step(self, data):
        return {"error": self.losses_of(data)[0]}


@pytest.mark.exhaustive
def test_model_without_call_trains_with_its_train_step():
    refs = plain(WithoutCall), on_mesh(WithoutCall)
    histories = []
    for ref in refs:
        tf_keras.utils.set_random_seed(4)
        histories.append(
            (
                fit(ref, optimizer=tf_keras.optimizers.Adam(0.01)),
                ref.evaluate(FEATURES, LABELS, batch_size=12, verbose=0),
            )
        )
    assert_alike(*histories)
    for a, b in zip(*(ref.get_weights() for ref in refs), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)
    model = refs[1]
    assert axes_of(model.d1.kernel) == (None, "model")
    assert axes_of(model.d2.kernel) == ("model", None)
    # Each optimizer creates slot variables only for the weights that it trains.
    assert [axes_of(slot) for slot in model.optimizer._momentums] == [
        (None, "model"),
        ("model",),
        ("model", None),
        (None,),
    ]
    assert len(model.head_optimizer._accumulators) == 2


@pytest.mark.exhaustive
def test_model_without_call_may_be_evaluated_first():
    refs = plain(WithoutCall), on_mesh(WithoutCall)
    found = []
    for ref in refs:
        tf_keras.utils.set_random_seed(4)
        ref.compile("sgd")
        found.append(
            (
                ref.evaluate(FEATURES, LABELS, verbose=0),
                ref.fit(
                    FEATURES, LABELS, batch_size=12, verbose=0, shuffle=False
                ).history,
            )
        )
    assert_alike(*found)


class WeightsInLists(layers.Layer):
    """Layer in the style of deepctr, with TensorFlow's initializers."""

    def build(self, shape):
        initializer = tf.compat.v1.keras.initializers.glorot_normal(seed=7)
        self.kernels = [
            self.add_weight(
                name=f"kernel{i}", shape=(8, 8), initializer=initializer
            )
            for i in range(2)
        ]
        self.biases = {
            "first": self.add_weight(
                name="bias",
                shape=(8,),
                initializer=tf.initializers.RandomNormal(seed=1),
            )
        }

    def call(self, inputs):
        for kernel in self.kernels:
            inputs = tf.matmul(inputs, kernel)
        return inputs + self.biases["first"]


@pytest.mark.exhaustive
def test_weights_in_lists_train_and_are_saved(tmp_path):
    def make():
        return sequential(WeightsInLists(name="list"))

    _, model = assert_trains_alike(
        make,
        axes={
            "list.kernels.0": (None, "model"),
            "list/kernel1": ("model", None),
        },
    )
    layer = model.get_layer("list")
    assert [axes_of(kernel) for kernel in layer.kernels] == [
        (None, "model"),
        ("model", None),
    ]
    assert len(model.weights) == len({id(w) for w in model.weights}) == 5
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    other = on_mesh(make, {})
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_are_initialized_in_creation_order():
    # Initializers with the same seed draw from one sequence, so the result
    # depends on the order of the weights.
    class Reversed(layers.Layer):
        def build(self, shape):
            initializer = tf.compat.v1.glorot_normal_initializer(seed=7)
            self.fixed, self.kernel = (
                self.add_weight(
                    name=name,
                    shape=(8, 8),
                    trainable=trainable,
                    initializer=initializer,
                )
                for name, trainable in (("fixed", False), ("kernel", True))
            )

        def call(self, inputs):
            return tf.matmul(tf.matmul(inputs, self.fixed), self.kernel)

    def make():
        return sequential(Reversed(name="reversed"))

    first, second = plain(make), on_mesh(make, {})
    for a, b in zip(first.weights, second.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


class Branching(layers.Layer):
    """Layer that can only be traced if AutoGraph converts its `call`."""

    def call(self, inputs):
        total = tf.reduce_sum(inputs)
        if total > 0:
            total = -total
        return total


def test_sparse_and_sharded_tensors_in_a_batch_raise():
    mesh = mesh_of(batch=2, model=2)
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        model = tf_keras.Sequential([layers.Dense(4)])
    model.compile("sgd", "mse")
    batch = (
        tf.sparse.from_dense(FEATURES[:8]),
        tlm.layout.to_mesh(
            np.zeros([8, 4], np.float32), layout_of(mesh, "batch", None)
        ),
    )
    with pytest.raises(TypeError, match="must consist of dense tensors"):
        model.fit((batch for _ in range(2)), verbose=0)


def test_autograph_converts_layers_without_a_mesh():
    # Creating a model on a mesh replaces methods of tf_keras for the rest of
    # the process.
    on_mesh(dense)

    @tf.function
    def run(inputs):
        return Branching()(inputs)

    assert float(run(tf.constant([1.0, 2.0]))) == -3
    assert float(run(tf.constant([-1.0, -2.0]))) == -3


@pytest.mark.exhaustive
def test_autograph_converts_a_step_on_a_mesh():
    class Adding(Subclassed):
        def call(self, inputs):
            # `len` of a tensor works only after conversion by AutoGraph.
            return super().call(inputs) * tf.cast(
                len(tf.shape(inputs)), tf.float32
            )

    assert_trains_alike(Adding)
