"""Checks that string lookups at the inputs of a model run on the host."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import axes_of

L = keras.layers
WORDS = ["red", "green", "blue"]
RNG = np.random.default_rng(4)


def columns(count=20):
    """Returns columns of input data; some words are out of vocabulary."""
    return {
        "color": np.array(WORDS + ["other"])[RNG.integers(0, 4, (count, 1))],
        "code": RNG.integers(0, 5, (count, 1)),
        "size": RNG.normal(size=(count, 1)).astype(np.float32),
    }


DATA, LABELS = columns(), RNG.integers(0, 4, 20)
AXES = {"words.embeddings": ("model", None), "d1.kernel": (None, "model")}


def columns_model():
    """Returns a model with string, integer and float inputs."""
    inputs = {
        "color": keras.Input((1,), dtype="string", name="color"),
        "code": keras.Input((1,), dtype="int64", name="code"),
        "size": keras.Input((1,), name="size"),
    }
    color = L.StringLookup(vocabulary=WORDS, name="lookup")(inputs["color"])
    code = L.IntegerLookup(
        vocabulary=[1, 2, 3], output_mode="one_hot", name="codes"
    )(inputs["code"])
    crossed = L.HashedCrossing(8, output_mode="one_hot", name="crossed")(
        (inputs["color"], inputs["code"])
    )
    x = L.Concatenate(name="all")(
        [
            L.Flatten()(L.Embedding(4, 8, name="words")(color)),
            # The input `code` is also used directly on the mesh.
            keras.ops.cast(inputs["code"], "float32"),
            code,
            crossed,
            inputs["size"],
        ]
    )
    x = L.Dense(16, activation="tanh", name="d1")(x)
    return keras.Model(inputs, L.Dense(4, name="d2")(x))


def sentences_model():
    return keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            L.TextVectorization(
                vocabulary=WORDS, output_sequence_length=4, name="vectorize"
            ),
            L.Embedding(8, 8, name="words"),
            L.Flatten(),
            L.Dense(16, activation="tanh", name="d1"),
            L.Dense(4, name="d2"),
        ]
    )


SENTENCES = np.array(
    [[" ".join(RNG.choice(WORDS + ["far"], 3))] for _ in range(20)]
)


# Slow, because each case compiles two models for fit, evaluate and predict.
@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "make, x", [(columns_model, DATA), (sentences_model, SENTENCES)]
)
def test_model_trains_as_on_a_single_device(make, x, tmp_path):
    x = tf.nest.map_structure(tf.constant, x)
    first, second = pairs.plain(make), pairs.on_mesh(make, AXES)
    results = []
    for model in (first, second):
        history = pairs.fit(model, x, LABELS)
        results.append(
            [
                history,
                model.evaluate(x, LABELS, batch_size=8, verbose=0),
                model.predict(x, batch_size=8, verbose=0),
                np.asarray(model(x)),
                model.train_on_batch(x, LABELS),
            ]
        )
    pairs.assert_alike(*results)
    pairs.assert_same_weights(first, second)
    second.save(tmp_path / "model.keras")
    pairs.assert_alike(
        keras.models.load_model(tmp_path / "model.keras")(x), first(x)
    )
    assert axes_of(second.get_layer("words").embeddings) == ("model", None)


@pytest.mark.exhaustive
def test_feature_space_runs_on_the_host():
    space = keras.utils.FeatureSpace(
        {
            "color": keras.utils.FeatureSpace.string_categorical(),
            "size": keras.utils.FeatureSpace.float_normalized(),
        },
        output_mode="concat",
    )
    table = {name: tf.constant(DATA[name][:, 0]) for name in ("color", "size")}
    space.adapt(tf.data.Dataset.from_tensor_slices(table).batch(5))

    def make():
        inputs = space.get_inputs()
        encoded = space.get_encoded_features()
        return keras.Model(
            inputs,
            L.Dense(4, name="d2")(
                L.Dense(16, activation="tanh", name="d1")(encoded)
            ),
        )

    x = {name: value[:, None] for name, value in table.items()}
    models = (
        pairs.plain(make),
        pairs.on_mesh(make, {"d1.kernel": (None, "model")}),
    )
    pairs.assert_alike(*(pairs.fit(one, x, LABELS, epochs=1) for one in models))


def test_step_that_calls_the_model_with_other_inputs_raises():
    """Checks that a step that changes the inputs raises an error.

    In such a step, the inputs of the lookups are not known in advance.
    """

    class Reversed(keras.Sequential):
        def train_step(self, data):
            x, y = data
            return super().train_step((tf.reverse(x, [0]), y))

    model = pairs.on_mesh(lambda: Reversed(sentences_model().layers), {})
    with pytest.raises(NotImplementedError, match="dataset.map"):
        pairs.fit(model, tf.constant(SENTENCES), LABELS, epochs=1)


@pytest.mark.exhaustive
def test_lookup_after_a_weight_raises():
    """Checks a lookup whose input was computed on the mesh."""

    def make():
        x = inputs = keras.Input((4,))
        x = L.Dense(4, name="d1")(x)
        x = L.IntegerLookup(vocabulary=[1, 2])(keras.ops.cast(x, "int64"))
        x = L.Embedding(8, 4)(x)
        return keras.Model(inputs, L.Dense(4, name="d2")(L.Flatten()(x)))

    model = pairs.on_mesh(make)
    with pytest.raises(NotImplementedError, match="dataset.map"):
        pairs.fit(model, RNG.normal(size=(20, 4)), LABELS, epochs=1)


def crossed_model():
    """Returns a model that crosses two slices of its input."""
    inputs = keras.Input((2,), dtype="int64")
    first = inputs[:, 0:1]
    crossed = L.HashedCrossing(8, output_mode="one_hot", name="crossed")(
        (first, keras.ops.abs(inputs)[:, 1:2])
    )
    # The first slice and the input are also used directly on the mesh.
    x = L.Concatenate()(
        [crossed, *(keras.ops.cast(x, "float32") for x in (first, inputs))]
    )
    return keras.Model(inputs, L.Dense(4, name="d2")(x))


def test_operations_before_a_lookup_run_on_the_host():
    x = RNG.integers(-5, 5, (20, 2))
    models = (
        pairs.plain(crossed_model),
        pairs.on_mesh(crossed_model, {"d2.kernel": (None, "model")}),
    )
    pairs.assert_alike(*(pairs.fit(one, x, LABELS, epochs=1) for one in models))
    pairs.assert_alike(
        *(one.predict(x, batch_size=8, verbose=0) for one in models)
    )


def test_a_result_of_the_host_may_be_an_output():
    def make():
        inputs = keras.Input((1,), dtype="int64")
        ids = L.Hashing(8, name="ids")(inputs)
        x = L.Dense(4, name="d2")(keras.ops.cast(inputs, "float32"))
        return keras.Model(inputs, [x, ids])

    x = RNG.integers(0, 50, (20, 1))
    models = (
        pairs.plain(make),
        pairs.on_mesh(make, {"d2.kernel": (None, "model")}),
    )
    pairs.assert_alike(
        *(one.predict(x, batch_size=8, verbose=0) for one in models)
    )


def test_a_cross_of_features_in_a_subclassed_model_raises():
    """Without an error, the devices would wait for each other."""

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.crossed = L.HashedCrossing(8, name="crossed")
            self.words = L.Embedding(8, 4)
            self.top = L.Dense(4, name="d2")

        def call(self, x):
            ids = self.crossed((x[:, 0:1], x[:, 1:2]))
            return self.top(L.Flatten()(self.words(ids)))

    model = pairs.on_mesh(Subclassed, {})
    with pytest.raises(
        NotImplementedError, match=r"crossed.*/SparseCross.*dataset.map"
    ):
        pairs.fit(model, RNG.integers(0, 5, (20, 2)), LABELS, epochs=1)
