"""Compares random models with a `ShardedEmbedding` on a mesh with the host."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of

rules = tf.tpu.experimental.embedding

NUM_ROWS, DIM = 24, 4
RULES = {
    "sgd": lambda: rules.SGD(0.25),
    "adagrad": lambda: rules.Adagrad(0.25, 0.25),
    "adam": lambda: rules.Adam(0.05),
}
CONSTRAINTS = {
    None: None,
    "max norm": keras.constraints.MaxNorm(0.5, axis=1),
    "non-negative": keras.constraints.NonNeg(),
}
REGULARIZERS = {None: None, "L2": keras.regularizers.L2(0.125)}


@st.composite
def cases(draw):
    """Draws the settings of a model and of its training."""
    is_open = draw(st.booleans())
    return {
        "is_open": is_open,
        "rule": draw(st.sampled_from(sorted(RULES))),
        "constraint": (
            None if is_open else draw(st.sampled_from([*CONSTRAINTS]))
        ),
        "regularizer": (
            None if is_open else draw(st.sampled_from([*REGULARIZERS]))
        ),
        "accumulation": (
            None if is_open else draw(st.sampled_from([None, 2, 3]))
        ),
        "calls": draw(st.integers(1, 2)),
        "mask": draw(st.booleans()),
        "pooling": draw(st.sampled_from(["mean", "gru", "flat"])),
        "length": draw(st.integers(1, 4)),
        "batch": draw(st.integers(1, 9)),
        "samples": draw(st.integers(10, 24)),
        "steps": draw(st.integers(1, 3)),
        "weighted": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def model_of(case):
    keras.utils.set_random_seed(case["seed"])
    ids = keras.Input([case["length"]], dtype="int64")
    layer = tlm.layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(64) if case["is_open"] else NUM_ROWS,
        DIM,
        optimizer=RULES[case["rule"]](),
        embeddings_constraint=CONSTRAINTS[case["constraint"]],
        embeddings_regularizer=REGULARIZERS[case["regularizer"]],
        mask_zero=case["mask"],
        name="words",
    )
    x = layer(ids)
    if case["calls"] == 2:
        # The mesh cannot compute keys of an open vocabulary.
        others = ids if case["is_open"] else ids[:, ::-1]
        x = keras.layers.Add(dtype="float64")([x, layer(others)])
    if case["pooling"] == "mean":
        x = keras.layers.GlobalAveragePooling1D(dtype="float64")(x)
    elif case["pooling"] == "gru":
        x = keras.layers.GRU(3, dtype="float64", use_cudnn=False)(x)
    else:
        x = keras.layers.Flatten(dtype="float64")(x)
    x = keras.layers.Dense(6, "tanh", dtype="float64", name="hidden")(x)
    model = keras.Model(ids, keras.layers.Dense(1, dtype="float64")(x))
    model.compile(
        keras.optimizers.SGD(
            0.1, gradient_accumulation_steps=case["accumulation"]
        ),
        "mse",
        weighted_metrics=["mae"],
        steps_per_execution=case["steps"],
    )
    return model


def results_of(model, case):
    """Returns numbers of `fit`, `evaluate` and `predict`, and all weights."""
    rng = np.random.default_rng(case["seed"])
    x = rng.integers(0, NUM_ROWS, [case["samples"], case["length"]])
    y = rng.normal(size=[case["samples"], 1])
    weights = rng.random(case["samples"]) if case["weighted"] else None
    options = {"batch_size": case["batch"], "verbose": 0}
    history = model.fit(
        x, y, sample_weight=weights, epochs=2, shuffle=False, **options
    ).history
    layer = model.get_layer("words")
    tables = [layer.embeddings, *layer.optimizer.slots.values()]
    where = np.arange(NUM_ROWS)
    found = [np.asarray(history["loss"]), np.asarray(history["mae"])]
    if case["is_open"]:
        keys = np.sort(layer.vocabulary.keys().numpy())
        where = layer.vocabulary.lookup(keys).numpy()
        found.append(keys)
    return [
        *found,
        np.asarray(model.evaluate(x, y, sample_weight=weights, **options)),
        model.predict(x[::-1].copy(), **options),
        *(np.asarray(one.numpy())[where] for one in tables),
        *(
            weight.numpy()
            for weight in model.get_layer("hidden").trainable_weights
        ),
        int(layer.optimizer.iterations),
    ]


# Slow, because each case compiles a model for `fit`, `evaluate` and `predict`.
@pytest.mark.exhaustive
@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 50, deadline=None)
@given(cases())
def test_a_random_model_trains_as_on_the_host(case):
    """The table is float32, and DTensor sums in another order."""
    layout_map = tlm.LayoutMap(mesh := mesh_of(batch=2, model=2))
    if not case["is_open"]:
        layout_map["words.embeddings"] = layout_of(mesh, "model", None)
    layout_map["hidden.kernel"] = layout_of(mesh, None, "model")
    host = results_of(model_of(case), case)
    with tlm.layout_map_scope(layout_map):
        meshed = model_of(case)
    for first, second in zip(host, results_of(meshed, case), strict=True):
        np.testing.assert_allclose(second, first, rtol=1e-4, atol=2e-6)
