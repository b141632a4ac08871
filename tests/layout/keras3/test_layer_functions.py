"""Checks layers and models that call a `tf.function`, on a mesh.

The functions must read and write the variables of the model in each call, as if
they were Python functions. The references are the same models without functions
on one device, because stock Keras itself keeps the first values of states and
of layers that are built in the first step.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import mesh_of

L = keras.layers
PLACES = {
    "replicated": {},
    "sharded": {"d1.*(kernel|embeddings)": (None, "model")},
    "sharded by rows": {"d1.*(kernel|embeddings)": ("model", None)},
}


def as_is(function):
    return function


def projection(function):
    class Projection(L.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(8, 16), name="kernel")

        @function
        def call(self, x):
            return x @ self.kernel

    return Projection


def states(function):
    """Returns a layer with a counter, a metric and a seed."""

    class States(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seed = keras.random.SeedGenerator(1)
            self.calls = keras.metrics.Sum(name="calls")

        def build(self, shape):
            self.kernel = self.add_weight(shape=(8, 16), name="kernel")
            self.count = self.add_weight(
                shape=(), name="count", initializer="zeros", trainable=False
            )

        @function
        def call(self, x):
            self.count.assign_add(1.0)
            self.calls.update_state(tf.ones([3]))
            noise = keras.random.uniform((8, 16), seed=self.seed)
            return x @ self.kernel + noise

    return States


def helper(function):
    """Returns a layer whose sublayers are built in a function."""

    class Helper(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = L.Dense(16, name="dense")
            self.norm = L.BatchNormalization(name="norm")
            self.drop = L.Dropout(0.5, seed=3)

        @function
        def sublayers(self, x, training):
            x = self.norm(self.dense(x), training=training)
            return self.drop(x, training=training)

        def call(self, x, training=None):
            return self.sublayers(x, training)

    return Helper


def lookup(function):
    class Lookup(L.Layer):
        def build(self, shape):
            self.table = L.Embedding(8, 16, name="table")
            self.table.build(shape)

        @function
        def call(self, x):
            ids = tf.math.floormod(tf.cast(tf.round(x[:, 0]), tf.int32), 8)
            return self.table(ids)

    return Lookup


def sequential(layer, function):
    return lambda: pairs.sequential((8,), layer(function)(name="d1"))


def subclassed(layer, function):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1 = layer(function)(name="d1")
            self.d2 = L.Dense(4, name="d2")

        def call(self, x):
            return self.d2(self.d1(x))

    return Model


def function_model(layer, function):
    """Returns a model whose `call` is a function."""

    def make():
        model = sequential(layer, function)()
        model.call = function(model.call)
        return model

    return make


FEATURES = pairs.FEATURES[:8]


def results(make, first, run_eagerly):
    """Returns predictions and variables of a model that `fit` has trained."""
    model = make()

    def predictions():
        if first == "predict":
            return model.predict(FEATURES, verbose=0)
        return np.asarray(model(FEATURES))

    found = [predictions()] if first != "fit" else []
    pairs.fit(
        model,
        FEATURES,
        pairs.LABELS[:8],
        optimizer=keras.optimizers.SGD(0.1),
        run_eagerly=run_eagerly,
    )
    return [*found, predictions(), *(v.numpy() for v in model.variables)]


@pytest.mark.slow
@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("first", ["fit", "call", "predict"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", [sequential, subclassed, function_model])
@pytest.mark.parametrize("layer", [projection, states, helper, lookup])
def test_functions_of_layers_are_trained(
    layer, model, place, first, run_eagerly
):
    reference, ours = model(layer, as_is), model(layer, tf.function)
    pairs.assert_alike(
        results(lambda: pairs.plain(reference), first, True),
        results(lambda: pairs.on_mesh(ours, PLACES[place]), first, run_eagerly),
        rtol=1e-4,
        atol=1e-5,
    )


def assert_uses_assigned_weights(model):
    plain = pairs.plain(sequential(projection, as_is))
    for one in (plain, model):
        one.set_weights([np.ones(w.shape) for w in one.weights])
    expected = np.asarray(plain(FEATURES))
    np.testing.assert_allclose(model(FEATURES), expected, rtol=1e-5, atol=1e-5)
    predicted = model.predict(FEATURES, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-5)


def test_assigned_weights_are_used():
    make = sequential(projection, tf.function)
    assert_uses_assigned_weights(pairs.on_mesh(make, PLACES["sharded"]))


def test_function_that_a_program_calls_reads_the_weights():
    make = sequential(projection, tf.function)
    projected = pairs.on_mesh(make, PLACES["sharded"]).get_layer("d1")
    before = projected.call(tf.constant(FEATURES)).numpy()
    projected.kernel.assign(2 * projected.kernel.numpy())
    np.testing.assert_allclose(
        projected.call(tf.constant(FEATURES)), 2 * before, rtol=1e-6
    )


def test_a_stock_model_traces_a_function_once():
    """Checks that functions of models without a mesh are not changed."""
    mesh_of(model=2)
    layer = projection(tf.function)(name="d1")
    x = keras.Input((8,))
    keras.Model(x, layer(x))
    assert layer.call.experimental_get_tracing_count() == 1


def test_planning_keeps_no_trace_of_a_function():
    mesh = mesh_of(batch=2, model=2)
    with tlm.layout_map_scope("auto", mesh=mesh):
        model = sequential(projection, tf.function)()
    assert_uses_assigned_weights(model)


class Concrete(L.Layer):
    """Layer that creates a concrete function in its first call."""

    concrete = None

    def build(self, shape):
        self.kernel = self.add_weight(shape=(8, 16), name="kernel")

    def call(self, x):
        if self.concrete is None:
            self.concrete = tf.function(
                lambda x: x @ self.kernel
            ).get_concrete_function(tf.TensorSpec([None, 8]))
        return self.concrete(x)


def test_concrete_function_of_a_pending_weight_raises():
    def make():
        return keras.Sequential([keras.Input((8,)), Concrete(name="d1")])

    with pytest.raises(
        RuntimeError,
        match="`get_concrete_function` must not be called.*'.*d1/kernel'",
    ):
        pairs.on_mesh(make, {})
    # A layer that is built when it is first called has weights.
    layer = pairs.on_mesh(lambda: Concrete(name="d1"), {})
    layer.build((None, 8))
    assert layer(FEATURES).shape == (8, 16)


TOKENS = tf.constant(pairs.TOKENS[:8], tf.int32)


def table_model(layer):
    return lambda: keras.Sequential(
        [keras.Input((6,), dtype="int32"), layer(), L.Flatten(), L.Dense(4)]
    )


def stock():
    return L.Embedding(16, 8, name="e")


def trained_by_itself():
    return tlm.layers.ShardedEmbedding(16, 8, name="e", optimizer="sgd")


def trained_by_the_model():
    return tlm.layers.ShardedEmbedding(16, 8, name="e")


def dense(gradient):
    """Returns a gradient as a dense array."""
    if not isinstance(gradient, tf.IndexedSlices):
        return host_value(gradient)
    found = np.zeros((16, 8), np.float32)
    np.add.at(found, host_value(gradient.indices), host_value(gradient.values))
    return found


def host_value(x):
    is_on_mesh = tf.experimental.dtensor.is_dtensor(x)
    return tlm.layout.to_host(x) if is_on_mesh else np.asarray(x)


def gradients_of_forward(model, is_function, called_first):
    forward = tf.function(model) if is_function else model
    if called_first:
        forward(TOKENS)
    found = []
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(TOKENS) ** 2)
        weights = [v.value for v in model.trainable_variables]
        found += map(dense, tape.gradient(loss, weights))
    return found


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("called_first", [False, True])
@pytest.mark.parametrize(
    ("layer", "axes"),
    [
        (stock, ("model", None)),
        (stock, ("batch", None)),
        (stock, (None, "model")),
        (stock, (None, "batch")),
        (trained_by_itself, ("model", None)),
        (trained_by_the_model, (None, "model")),
    ],
)
def test_tape_outside_of_a_function_trains_a_table(layer, axes, called_first):
    """A call without a tape can come first."""
    model = pairs.on_mesh(table_model(layer), {"e.embeddings": axes})
    plain = pairs.plain(table_model(stock))
    pairs.assert_alike(
        gradients_of_forward(plain, False, False),
        gradients_of_forward(model, True, called_first),
    )


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("layer", [stock, trained_by_itself])
def test_table_in_a_function_of_a_model_is_trained(layer, run_eagerly):
    def with_function():
        model = table_model(layer)()
        model.call = tf.function(model.call)
        return model

    plain = pairs.plain(table_model(stock))
    model = pairs.on_mesh(with_function, {"e.embeddings": ("model", None)})
    for one in (plain, model):
        before = one.layers[0].get_weights()[0]
        pairs.fit(
            one,
            TOKENS.numpy(),
            pairs.LABELS[:8],
            optimizer=keras.optimizers.SGD(0.01),
            run_eagerly=run_eagerly,
        )
        assert np.abs(one.layers[0].get_weights()[0] - before).max() > 1e-5
    pairs.assert_alike(plain.get_weights(), model.get_weights())
