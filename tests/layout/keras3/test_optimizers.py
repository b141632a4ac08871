"""Checks that optimizers on a mesh match a single device."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.keras3 import test_layers
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.keras3.variable import MeshVariable

O = keras.optimizers  # noqa: E741 - A table of optimizers follows.
dtensor = tf.experimental.dtensor

FAST = {
    "Adam global_clipnorm": lambda: O.Adam(0.01, global_clipnorm=0.1),
    "SGD ema": lambda: O.SGD(
        0.1,
        momentum=0.9,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
    "Adafactor": lambda: O.Adafactor(0.01),
    "LossScale": lambda: O.LossScaleOptimizer(
        O.Adam(0.01), dynamic_growth_steps=3
    ),
}
SLOW = {
    "SGD": lambda: O.SGD(0.1),
    "SGD nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "SGD decay": lambda: O.SGD(0.1, weight_decay=0.1),
    "SGD loss_scale_factor": lambda: O.SGD(0.1, loss_scale_factor=8.0),
    "Adam": lambda: O.Adam(0.01),
    "Adam amsgrad": lambda: O.Adam(0.01, amsgrad=True),
    "Adam clipnorm": lambda: O.Adam(0.01, clipnorm=0.1),
    "Adam clipvalue": lambda: O.Adam(0.01, clipvalue=0.01),
    "Adam accumulation": lambda: O.Adam(0.01, gradient_accumulation_steps=2),
    "Adam schedule": lambda: O.Adam(O.schedules.ExponentialDecay(0.05, 2, 0.5)),
    "AdamW": lambda: O.AdamW(0.01),
    "Adagrad": lambda: O.Adagrad(0.1),
    "RMSprop": lambda: O.RMSprop(0.01, momentum=0.5, centered=True),
    "Adadelta": lambda: O.Adadelta(1.0),
    "Adamax": lambda: O.Adamax(0.01),
    "Nadam": lambda: O.Nadam(0.01),
    "Ftrl": lambda: O.Ftrl(0.1),
    "Lion": lambda: O.Lion(0.01),
    "Lamb": lambda: O.Lamb(0.01),
    "Muon": lambda: O.Muon(0.01),
    "SGD ema at the end": lambda: O.SGD(0.1, use_ema=True),
}


# test_agreement.py covers all other optimizers.
ONLY_HERE = ("SGD loss_scale_factor", "Adam accumulation", "SGD ema at the end")


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in FAST.items()),
        *(
            pytest.param(
                make,
                id=name,
                marks=[pytest.mark.slow]
                + [pytest.mark.exhaustive] * (name not in ONLY_HERE),
            )
            for name, make in SLOW.items()
        ),
    ],
)
def test_losses_weights_and_slots_match_a_single_device(make):
    model = pairs.assert_trains_alike(
        pairs.dense_model, pairs.FEATURES, pairs.DENSE, optimizer=make
    )
    pairs.assert_slots_have_layouts_of_weights(model)
    assert all(isinstance(v, MeshVariable) for v in model.optimizer.variables)


SPARSE_FAST = {"SGD": SLOW["SGD"], "Adagrad": SLOW["Adagrad"]}
SPARSE_SLOW = {
    name: {**FAST, **SLOW}[name]
    for name in (
        "Adam",
        "Adam clipnorm",
        "Adam global_clipnorm",
        "AdamW",
        "Adafactor",
        "Adam accumulation",
        "RMSprop",
        "Nadam",
        "Ftrl",
        "Lion",
        "Lamb",
        "SGD nesterov",
    )
}


def embedding_model():
    return pairs.sequential((6,), keras.layers.Embedding(16, 8, name="e"))


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("axes", [("model", None), (None, "model")])
@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in SPARSE_FAST.items()),
        *(
            pytest.param(make, id=name, marks=pytest.mark.slow)
            for name, make in SPARSE_SLOW.items()
        ),
    ],
)
def test_sparse_gradients_with_repeated_rows(make, axes):
    # A batch has 48 ids for 16 rows, so rows repeat. Keras squares the gradient
    # of each occurrence separately.
    assert len(np.unique(pairs.TOKENS[:8])) < pairs.TOKENS[:8].size
    model = pairs.assert_trains_alike(
        embedding_model,
        pairs.TOKENS,
        {"e.embeddings": axes, "d2.kernel": ("model", None)},
        optimizer=make,
    )
    assert axes_of(model.layers[0].embeddings) == axes


@pytest.mark.exhaustive
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipped_gradients_of_sharded_attention_match(clip):
    def optimizer():
        return O.SGD(0.5, **{clip: 0.01})

    model = pairs.assert_trains_alike(
        test_layers.attention,
        pairs.TOKENS,
        test_layers.ATTENTION,
        optimizer=optimizer,
    )
    unclipped = pairs.plain(test_layers.attention)
    pairs.fit(unclipped, pairs.TOKENS, optimizer=O.SGD(0.5))
    assert not np.allclose(
        unclipped.weights[0].numpy(), model.weights[0].numpy(), atol=1e-3
    )


def test_every_slot_has_the_layout_of_its_weight():
    model = pairs.on_mesh(pairs.dense_model)
    optimizer = O.Adam(
        0.01, amsgrad=True, use_ema=True, gradient_accumulation_steps=2
    )
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    assert pairs.assert_slots_have_layouts_of_weights(model) == 5 * 4


@pytest.mark.parametrize("where", ["within", "after"])
def test_iterations_are_on_the_mesh_wherever_created(where):
    created = []

    def make():
        if where == "within":
            created.append(O.SGD(0.1))
        return pairs.dense_model()

    model = pairs.on_mesh(make)
    optimizer = created[0] if created else O.SGD(0.1)
    pairs.fit(model, optimizer=optimizer, epochs=1)
    assert int(optimizer.iterations) == 4
    assert isinstance(optimizer.iterations, MeshVariable)
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25


def steps_of(model, optimizer, put, num_steps=3):
    """Runs a custom loop whose code is the same with and without a mesh."""

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    y, model(x, training=True), from_logits=True
                )
            )
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return value

    x, y = put(pairs.FEATURES), put(pairs.LABELS)
    return [step(x, y) for _ in range(num_steps)]


def test_custom_loop_in_a_function_matches_a_single_device():
    mesh = mesh_of(batch=2, model=2)
    first, second = (
        pairs.plain(pairs.dense_model),
        pairs.on_mesh(pairs.dense_model, mesh=mesh),
    )
    expected = steps_of(first, O.Adam(0.01, clipnorm=0.1), tf.constant)
    losses = steps_of(
        second,
        O.Adam(0.01, clipnorm=0.1),
        lambda v: to_mesh(
            v, dtensor.Layout.batch_sharded(mesh, "batch", v.ndim)
        ),
    )
    pairs.assert_alike(
        [float(x) for x in expected], [float(to_host(x)) for x in losses]
    )
    pairs.assert_same_weights(first, second)


def test_custom_loop_with_convolutions_matches_a_single_device():
    mesh = mesh_of(batch=2, model=2)

    def run(model, put):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(tf.square(model(x, training=True)))
            return tape.gradient(value, model.trainable_variables)

        return step(put(pairs.IMAGES))

    def make():
        return pairs.sequential(
            (8, 8, 3),
            keras.layers.Conv2D(4, 3),
            keras.layers.GlobalMaxPooling2D(),
        )

    plain = run(pairs.plain(make), tf.constant)
    with default_mesh(mesh):
        on_mesh = run(
            pairs.on_mesh(make, {"d2.kernel": ("model", None)}, mesh),
            lambda v: to_mesh(
                v, dtensor.Layout.batch_sharded(mesh, "batch", v.ndim)
            ),
        )
    pairs.assert_alike(
        [g.numpy() for g in plain],
        [to_host(g) for g in on_mesh],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.exhaustive
def test_eager_custom_loop_matches_a_single_device():
    mesh = mesh_of(batch=2, model=2)
    first, second = (
        pairs.plain(pairs.dense_model),
        pairs.on_mesh(pairs.dense_model, mesh=mesh),
    )
    for model, y in (
        (first, pairs.LABELS),
        (second, to_mesh(pairs.LABELS, layout_of(mesh, None))),
    ):
        optimizer = O.Adam(0.01, global_clipnorm=0.1)
        for _ in range(2):
            scope = (
                default_mesh(mesh)
                if model is second
                else contextlib.nullcontext()
            )
            with scope:
                with tf.GradientTape() as tape:
                    value = tf.reduce_mean(
                        keras.losses.sparse_categorical_crossentropy(
                            y, model(pairs.FEATURES), from_logits=True
                        )
                    )
                gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    pairs.assert_same_weights(first, second)
