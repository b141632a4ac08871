"""Calls with ragged tensors run the trace that TensorFlow selects."""

import contextlib
import unittest.mock

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap._core import function_traces, patches

tracing_compilation = function_traces.tf_private.tracing_compilation


@pytest.fixture(autouse=True, scope="module")
def _patches():
    patches.install("function_calls")
    patches.install("function_traces")
    yield
    patches.uninstall("function_traces")
    patches.uninstall("function_calls")


@contextlib.contextmanager
def stock():
    """Calls functions as TensorFlow does."""
    with unittest.mock.patch.object(
        function_traces, "_read", lambda *arguments: False
    ):
        yield


@contextlib.contextmanager
def selections():
    """Returns a list with an element for each call that TensorFlow selects."""
    found = []
    original = tracing_compilation._maybe_define_function

    def count(*args, **kwargs):
        found.append(args)
        return original(*args, **kwargs)

    # The key of a call contains the replaced function.
    with unittest.mock.patch.object(
        tracing_compilation, "_maybe_define_function", count
    ):
        yield found


def ragged(rows, dtype=tf.int64, splits=tf.int64):
    return tf.ragged.constant(rows, dtype, row_splits_dtype=splits)


A = ragged([[1, 2], [], [3]])
B = ragged([[4], [5, 6, 7], []])


def describe(value):
    """Returns a description of a nested structure of symbolic tensors."""
    return tf.nest.map_structure(
        lambda x: str(tf.type_spec_from_value(x)) if tf.is_tensor(x) else x,
        value,
    )


class Recorded:
    """A function that records its traces, and returns all its tensors."""

    def __init__(self, **options):
        self.traces = []
        self.call = tf.function(self._call, **options)

    def _call(self, *args, **kwargs):
        self.traces.append(describe((args, kwargs)))
        return [
            x
            for x in tf.nest.flatten((args, kwargs), expand_composites=True)
            if tf.is_tensor(x)
        ]

    def results(self, calls):
        """Returns the results of calls, with dtypes."""
        return [
            [(x.dtype, x.numpy().tolist()) for x in self.call(*args, **kwargs)]
            for args, kwargs in calls
        ]


def arguments(*args, **kwargs):
    return args, kwargs


CALLS = {
    "list": [arguments([A, B]), arguments([B, A]), arguments([A, A])],
    "the same tensor twice": [arguments([A, A]), arguments([A, B])],
    "tuple and list": [arguments([A]), arguments((A,)), arguments([A])],
    "dict": [arguments({"b": A, "a": B}), arguments({"a": A, "b": B})],
    "other names": [arguments({"a": A}), arguments({"b": A})],
    "nested": [arguments({"x": [A, (B, None)]}, y=A), arguments({"x": [A]})],
    "dense": [arguments(A, tf.constant(1.0)), arguments(A, tf.constant([1.0]))],
    "dtypes": [
        arguments(ragged([[1], [2]], dtype, splits))
        for dtype in (tf.int64, tf.int32, tf.float32, tf.string)
        for splits in (tf.int64, tf.int32)
        if dtype != tf.string
    ],
    "constants": [
        arguments(A, training)
        for training in (True, 1, 1.5, False, 0, None, "True", True)
    ],
    "numbers of samples": [
        arguments(ragged([[1]] * size)) for size in (1, 2, 3, 0, 2)
    ],
    "numbers of ids": [
        arguments(ragged([[1] * size, []])) for size in (1, 2, 0, 7)
    ],
    "keywords": [arguments(x=A, y=B), arguments(y=A, x=B), arguments(A, y=B)],
    "uniform rows": [
        arguments(A),
        arguments(tf.RaggedTensor.from_uniform_row_length([1, 2, 3], 1)),
        arguments(
            tf.RaggedTensor.from_uniform_row_length([1, 2, 3, 4, 5, 6], 2)
        ),
    ],
    "ranks": [
        arguments(A),
        arguments(tf.ragged.constant([[[1], []], []])),
        arguments(tf.ragged.constant([[[1, 2]], []], ragged_rank=1)),
    ],
    "sparse": [arguments(A, A.to_sparse()), arguments(B, B.to_sparse())],
    "arrays": [arguments(A, np.ones(2)), arguments(A, np.float32(2))],
    "rows of another form": [
        arguments(tf.RaggedTensor.from_value_rowids([1, 2], [0, 2], 3)),
        arguments(tf.RaggedTensor.from_row_lengths([1, 2], [0, 2, 0])),
    ],
}


@pytest.mark.parametrize("reduce_retracing", [False, True])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_results_and_traces_equal_tensorflows(calls, reduce_retracing):
    calls = calls * 3
    expected = Recorded(reduce_retracing=reduce_retracing)
    found = Recorded(reduce_retracing=reduce_retracing)
    with stock():
        results = expected.results(calls)
    assert found.results(calls) == results
    assert found.traces == expected.traces


def test_a_recorded_trace_is_not_selected_again():
    recorded = Recorded(reduce_retracing=True)
    batches = [[A, B], [B, A], [A, ragged([[], [], []])]]
    recorded.results([arguments(batch, training=True) for batch in batches])
    with selections() as found:
        recorded.results([arguments(batches[0], training=True)])
        assert found
        found.clear()
        recorded.results(
            [arguments(batch, training=True) for batch in batches] * 3
        )
        assert not found
        # The first call traces the function, and the second call records the
        # trace.
        for _ in range(2):
            recorded.results([arguments(batches[0], training=False)])
            assert found
            found.clear()
        recorded.results([arguments(batches[0], training=False)])
        assert not found


def test_a_function_with_a_signature_checks_its_arguments():
    recorded = Recorded(
        input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)]
    )
    calls = [arguments(A), arguments(ragged([[1]])), arguments(B)]
    with stock():
        expected = recorded.results(calls)
    assert recorded.results(calls) == expected
    assert recorded.results(calls) == expected
    with pytest.raises(TypeError, match="int32"):
        recorded.call(ragged([[1]], tf.int32))
    assert len(recorded.traces) == 1


def test_a_later_trace_that_fits_better_is_used():
    recorded = Recorded()
    general = tf.RaggedTensorSpec([None, None], tf.int64)
    recorded.call.get_concrete_function(general)
    recorded.results([arguments(A)] * 3)
    assert len(recorded.traces) == 1
    recorded.call.get_concrete_function(
        tf.RaggedTensorSpec([3, None], tf.int64)
    )
    with selections() as found:
        recorded.results([arguments(A)])
        assert found[-1][0][0] is A
        found.clear()
        recorded.results([arguments(A)] * 3)
        assert not found


def test_arguments_that_tensorflow_converts_are_selected_by_tensorflow():
    recorded = Recorded(
        input_signature=[tf.TensorSpec([]), tf.TensorSpec([None])]
    )
    calls = [arguments(1, tf.constant([2.0])), arguments(2.0, np.ones(2))]
    for _ in range(3):
        assert recorded.results(calls) == [
            [(tf.float32, 1.0), (tf.float32, [2.0])],
            [(tf.float32, 2.0), (tf.float32, [1.0, 1.0])],
        ]
    assert len(recorded.traces) == 1


def test_resources_and_variants_are_selected_by_tensorflow():
    variables = [tf.Variable(1.0), tf.Variable([2.0, 3.0])]
    read = tf.function(
        lambda handle: tf.raw_ops.ReadVariableOp(
            resource=handle, dtype=tf.float32
        )
    )
    for _ in range(3):
        for variable in variables:
            result = read(variable.handle)
            assert result.numpy().tolist() == variable.numpy().tolist()


def test_the_number_of_recorded_traces_is_limited():
    recorded = Recorded(reduce_retracing=True)
    sizes = [*range(1, function_traces._MAX_KEYS + 10)]
    calls = [arguments(ragged([[1]] * size)) for size in sizes]
    assert [len(call[1][1]) - 1 for call in recorded.results(calls)] == sizes
    options = recorded.call._variable_creation_config
    assert (
        len(vars(options)[function_traces._TRACES]) == function_traces._MAX_KEYS
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_gradients_equal_tensorflows(persistent):
    weight = tf.Variable(3.0)
    square = tf.function(lambda x: tf.reduce_sum(x.values**2) * weight)
    values = tf.constant([1.0, 2.0, 3.0])

    def gradients():
        with tf.GradientTape(persistent=persistent) as tape:
            tape.watch(values)
            result = square(tf.RaggedTensor.from_row_splits(values, [0, 1, 3]))
        return tape.gradient(result, [values, weight])

    def backward_in_function():
        return tf.function(gradients)()

    with stock():
        expected = [x.numpy().tolist() for x in gradients()]
    for _ in range(3):
        for found in (gradients, backward_in_function):
            assert [x.numpy().tolist() for x in found()] == expected


def test_a_tape_selects_another_trace():
    weight = tf.Variable(2.0)

    @tf.function
    def call(x):
        is_recorded = function_traces.is_recorded(weight, resumes=False)
        return tf.reduce_sum(x.values) * (weight if is_recorded else -1.0)

    x = tf.ragged.constant([[1.0, 2.0], []])
    for _ in range(4):
        assert float(call(x)) == -3
        with tf.GradientTape() as tape:
            result = call(x)
        assert (float(result), float(tape.gradient(result, weight))) == (6, 3)
        with tf.GradientTape():
            weight._trainable = False
            assert float(call(x)) == -3
            weight._trainable = True
    assert call.experimental_get_tracing_count() == 2


@pytest.mark.parametrize("first", [None, "function_calls"])
def test_a_trace_from_before_the_other_patch_is_not_used(first):
    weight = tf.Variable(2.0)

    @tf.function
    def call(x):
        is_recorded = function_traces.is_recorded(weight, resumes=False)
        return tf.reduce_sum(x.values) * (weight if is_recorded else -1.0)

    x = tf.ragged.constant([[1.0, 2.0], []])
    patches.uninstall("function_traces")
    try:
        with stock() if first is None else contextlib.nullcontext():
            for _ in range(3):
                assert float(call(x)) == -3
    finally:
        patches.install("function_traces")
    for _ in range(2):
        with tf.GradientTape() as tape:
            result = call(x)
        assert float(tape.gradient(result, weight)) == 3
        assert float(call(x)) == -3


def test_strategies_select_other_traces():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    replicas = []

    @tf.function
    def call(x):
        replicas.append(tf.distribute.get_replica_context() is None)
        return x.values

    for _ in range(3):
        call(A)
        with strategy.scope():
            call(A)
        strategy.run(call, (A,))
    with stock():
        call(A)
        with strategy.scope():
            call(A)
        strategy.run(call, (A,))
    assert replicas == [False, True, False][: len(replicas)]
    assert call.experimental_get_tracing_count() == len(replicas)


def test_functions_inside_of_functions_and_eager_functions():
    recorded = Recorded()
    outer = tf.function(lambda x: recorded.call(x))
    for _ in range(3):
        assert outer(A)[0].numpy().tolist() == [1, 2, 3]
        assert recorded.call(A)[0].numpy().tolist() == [1, 2, 3]
    tf.config.run_functions_eagerly(True)
    try:
        assert recorded.call(B)[0].numpy().tolist() == [4, 5, 6, 7]
    finally:
        tf.config.run_functions_eagerly(False)


def test_functions_and_methods_that_create_variables():
    class Module(tf.Module):
        weight = None

        @tf.function
        def call(self, x):
            if self.weight is None:
                self.weight = tf.Variable(10.0)
            return tf.reduce_sum(x.values) * self.weight

    modules = [Module(), Module()]
    x = tf.ragged.constant([[1.0, 2.0]])
    for _ in range(3):
        for module in modules:
            assert float(module.call(x)) == 30
    modules[1].weight.assign(1.0)
    assert [float(module.call(x)) for module in modules] == [30, 3]
