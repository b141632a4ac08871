"""Traces depend on tapes and on other decisions of the traced code."""

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap._core import function_traces, patches


@pytest.fixture(autouse=True, scope="module")
def _patches():
    patches.install("function_traces")
    yield
    patches.uninstall("function_traces")


class Layer:
    """Its value is the weight if a tape records it, and -1 otherwise."""

    def __init__(self, resumes=False):
        self.weight = tf.Variable(2.0)
        self.resumes = resumes
        self.traces = 0

    def __call__(self, x):
        self.traces += 1
        if function_traces.is_recorded(self.weight, resumes=self.resumes):
            return x * self.weight
        return -x


def train(call, layer, **options):
    """Returns the result of `call` under a tape and its gradient."""
    with tf.GradientTape(**options) as tape:
        found = call(ONE)
    return float(found), tape.gradient(found, layer.weight)


ONE = np.float32(1)


def nested(layer):
    return tf.function(tf.function(layer))


def branch(layer):
    return tf.function(
        lambda x: tf.cond(x > 0, lambda: layer(x), lambda: layer(2 * x))
    )


def loop(layer):
    return tf.function(
        lambda x: tf.while_loop(
            lambda step, _: step < 1,
            lambda step, value: (step + 1, layer(value)),
            (0, x),
        )[1]
    )


@pytest.mark.parametrize("first_with_tape", [False, True])
@pytest.mark.parametrize("wrap", [tf.function, nested, branch, loop])
def test_a_function_has_a_trace_with_and_a_trace_without_a_tape(
    wrap, first_with_tape
):
    layer = Layer()
    call = wrap(layer)
    for number in range(4):
        if number % 2 == first_with_tape:
            assert float(call(ONE)) == -1
        else:
            assert train(call, layer) == (2, 1)
    traces = layer.traces
    assert float(call(ONE)) == -1
    assert train(call, layer) == (2, 1)
    assert layer.traces == traces
    assert call.experimental_get_tracing_count() == 2


def test_a_function_that_calls_a_traced_function_is_traced_again():
    layer = Layer()
    inner = tf.function(layer)
    inner(ONE)
    train(inner, layer)
    outer = tf.function(lambda x: inner(x))
    assert float(outer(ONE)) == -1
    assert train(outer, layer) == (2, 1)
    assert layer.traces == 2


def test_a_tape_inside_of_a_function_does_not_add_traces():
    layer = Layer()
    forward = tf.function(layer)
    assert float(forward(ONE)) == -1
    step = tf.function(lambda: train_in_graph(forward, layer))
    assert float(step()) == 1 and float(step()) == 1
    assert float(forward(ONE)) == -1
    assert step.experimental_get_tracing_count() == 1
    assert layer.traces == 2


def train_in_graph(call, layer):
    with tf.GradientTape() as tape:
        found = call(ONE)
    return tape.gradient(found, layer.weight)


def test_a_tape_that_does_not_watch_the_weight_does_not_record_it():
    layer = Layer()
    call = tf.function(layer)
    unwatched = dict(watch_accessed_variables=False)
    assert train(call, layer, **unwatched)[0] == -1
    assert train(call, layer) == (2, 1)
    with tf.GradientTape() as tape, tape.stop_recording():
        assert float(call(ONE)) == -1
    assert layer.traces == 2


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_recompute_grad_trains_the_weight(resumes, is_traced):
    layer = Layer(resumes)
    inner = tf.function(layer) if is_traced else layer
    assert float(inner(ONE)) == -1
    found = train(tf.recompute_grad(inner), layer)
    assert found == (2 if resumes else -1, 1)
    assert float(tf.recompute_grad(inner)(ONE)) == -1


def test_traces_depend_on_each_weight():
    layers = [Layer(), Layer()]
    call = tf.function(lambda x: layers[0](x) + 10 * layers[1](x))
    assert float(call(ONE)) == -11
    for layer, expected in zip(layers, [2 - 10, -1 + 20]):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(layer.weight)
            assert float(call(ONE)) == expected
    with tf.GradientTape():
        assert float(call(ONE)) == 22
    assert call.experimental_get_tracing_count() == 4


def test_other_functions_have_one_trace():
    weight = tf.Variable(2.0)
    call = tf.function(lambda x: x * weight)
    call(ONE)
    with tf.GradientTape():
        call(ONE)
    assert call.experimental_get_tracing_count() == 1


def test_a_function_that_failed_while_it_was_traced_can_be_called_again():
    layer, fails = Layer(), [True]

    @tf.function
    def call(x):
        if fails[0]:
            raise ValueError("fails")
        return layer(x)

    with tf.GradientTape(), pytest.raises(ValueError, match="fails"):
        call(ONE)
    fails[0] = False
    assert float(call(ONE)) == -1
    assert train(call, layer) == (2, 1)


def test_a_function_with_a_signature_and_a_method_are_traced_again():
    layer = Layer()

    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([])])
        def call(self, x):
            return layer(x)

    module = Module()
    assert float(module.call(ONE)) == -1
    assert train(module.call, layer) == (2, 1)


def test_a_function_that_creates_variables_is_traced_again():
    layer, created = Layer(), []

    @tf.function
    def call(x):
        if not created:
            created.append(tf.Variable(3.0))
        return layer(x) * created[0]

    assert train(call, layer) == (6, 3)
    assert float(call(ONE)) == -3
    assert train(call, layer) == (6, 3)


@pytest.mark.parametrize("first_with_tape", [False, True])
def test_a_trace_from_before_the_patch_is_not_used(first_with_tape):
    """The first call of a function can build the layer that needs the patch."""
    layer = Layer()
    call = tf.function(layer)
    patches.uninstall("function_traces")
    try:
        assert (
            (train(call, layer) == (2, 1))
            if first_with_tape
            else (float(call(ONE)) == -1)
        )
    finally:
        patches.install("function_traces")
    for _ in range(2):
        assert float(call(ONE)) == -1
        assert train(call, layer) == (2, 1)
    assert call.experimental_get_tracing_count() == 2


def test_a_function_is_traced_again_if_a_decision_changes():
    is_on = [False]

    def decide():
        return is_on[0]

    inner = tf.function(
        lambda x: x if function_traces.depends_on(decide) else -x
    )
    outer = tf.function(lambda x: inner(x))
    for _ in range(2):
        for value in (False, True):
            is_on[0] = value
            assert (
                float(outer(ONE)) == float(inner(ONE)) == (1 if value else -1)
            )
    assert inner.experimental_get_tracing_count() == 2
    assert outer.experimental_get_tracing_count() == 2


def test_concrete_functions_are_traced_once():
    """TensorFlow copies the options of a function in each of these calls."""
    layer = Layer()
    function = tf.function(layer)
    for _ in range(3):
        function.get_concrete_function(ONE)
        assert float(function(ONE)) == -1
    assert layer.traces == 1
    for _ in range(2):
        with tf.GradientTape() as tape:
            function.get_concrete_function(ONE)
            value = function(ONE)
        assert float(tape.gradient(value, layer.weight)) == 1
    assert layer.traces == 2
