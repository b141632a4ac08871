"""Tests that gradients of `tf.custom_gradient` are unchanged and are freed.

Gradients of graphs that use no variable of this package stay registered, as in
TensorFlow.
"""

import gc

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import (
    convert_variables_to_constants_v2,
)

import tf_layoutmap as tlm
from tests.freed.alive import remaining_after
from tf_layoutmap._core import patches, tf_private


def table(values):
    """Returns a sharded variable; gradients in its graphs are freed."""
    return tlm.ShardedVariable([tf.Variable([value]) for value in values])


def read_table(rows):
    """Reads a table, so that the traced graph uses a sharded variable."""
    return tf.stop_gradient(tf.reduce_sum(tf.convert_to_tensor(rows))) * 0.0


@tf.custom_gradient
def tripled_gradient(x):
    mean = tf.reduce_mean(x)

    def gradient(dy):
        return 3 * dy * mean

    return tf.identity(x), gradient


def branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tripled_gradient(x), lambda: x)


def loop(x):
    for _ in tf.range(2):
        x = tripled_gradient(x)
    return x


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: tripled_gradient, 6),
        (lambda: branch, 6),
        (lambda: loop, 36),
        (lambda: tf.function(tripled_gradient), 6),
        (lambda: tf.recompute_grad(tripled_gradient), 6),
    ],
)
def test_gradients_equal_those_of_tensorflow_and_are_freed(make, expected):
    gradients = []

    def program():
        rows, function = table([1.0, 3.0]), make()

        @tf.function
        def gradient():
            x = tf.convert_to_tensor(rows)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(function(x)[0])
            return tape.gradient(y, x)

        gradients.append(gradient().numpy())

    assert not remaining_after(program)
    np.testing.assert_array_equal(gradients, [[expected, 0]] * 3)


def test_second_order_gradients_are_computed():
    @tf.custom_gradient
    def cube(x):
        return x**3, lambda dy: dy * 3 * x**2

    @tf.function
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = cube(x)
            first = inner.gradient(y, x)
        return first, outer.gradient(first, x)

    first, then = second(tf.constant(2.0))
    assert (float(first), float(then)) == (12, 12)


def test_a_gradient_is_found_by_name_while_its_graph_exists(tmp_path):
    """TensorFlow looks up custom gradients by name when it saves a model."""

    def save():
        module = tf.Module()
        module.call = tf.function(
            tripled_gradient, input_signature=[tf.TensorSpec([2])]
        )
        tf.saved_model.save(
            module,
            str(tmp_path),
            options=tf.saved_model.SaveOptions(
                experimental_custom_gradients=True
            ),
        )

    save()
    gc.collect()
    loaded = tf.saved_model.load(str(tmp_path))
    x = tf.constant([1.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded.call(x)
    np.testing.assert_array_equal(tape.gradient(y, x), [6, 6])


def test_no_gradient_remains_registered():
    def program():
        rows = table([1.0])
        tf.function(lambda x: tripled_gradient(x) + read_table(rows))(
            tf.constant([1.0])
        )

    program()
    gc.collect()
    before = set(tf_private._gradients.list())
    program()
    gc.collect()
    assert set(tf_private._gradients.list()) == before


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda dy: -dy


def traced():
    return tf.function(reversed_gradient).get_concrete_function(
        tf.TensorSpec([2], name="x")
    )


def pruned():
    wrapped = tf.compat.v1.wrap_function(
        reversed_gradient, [tf.TensorSpec([2])]
    )
    return wrapped.prune(wrapped.inputs, wrapped.outputs)


def frozen():
    factor = tf.Variable(2.0)
    function = tf.function(lambda x: reversed_gradient(x) * factor)
    return convert_variables_to_constants_v2(
        function.get_concrete_function(tf.TensorSpec([2]))
    )


def imported(read):
    graph = traced().graph
    graph_def, output = graph.as_graph_def(), graph.outputs[0].name
    del graph
    gc.collect()

    def call(x):
        return read(graph_def, x, output)

    return tf.compat.v1.wrap_function(call, [tf.TensorSpec([2])])


def from_graph_def(graph_def, x, output):
    return tf.graph_util.import_graph_def(
        graph_def, input_map={"x:0": x}, return_elements=[output]
    )[0]


def from_meta_graph(graph_def, x, output):
    meta_graph = tf.compat.v1.MetaGraphDef(graph_def=graph_def)
    meta_graph.meta_info_def.tensorflow_version = "2"
    tf.compat.v1.train.import_meta_graph(meta_graph, input_map={"x:0": x})
    return tf.compat.v1.get_default_graph().get_tensor_by_name(output)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (pruned, -1),
        (frozen, -2),
        (lambda: imported(from_graph_def), -1),
        (lambda: imported(from_meta_graph), -1),
    ],
)
def test_copies_of_a_freed_graph_keep_its_gradients(make, expected):
    table([1.0])
    function = make()
    gc.collect()
    x = tf.constant([1.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    np.testing.assert_array_equal(tape.gradient(y, x), [expected, expected])


def test_a_graph_without_tables_keeps_its_gradients():
    table([1.0])
    before = set(tf_private._gradients.list())
    traced()
    gc.collect()
    (remaining,) = set(tf_private._gradients.list()) - before
    assert remaining.startswith("CustomGradient-")


@pytest.mark.parametrize("kind", ["ragged", "number"])
def test_ragged_and_python_results_are_supported(kind):
    @tf.custom_gradient
    def custom(x):
        if kind == "ragged":
            result = tf.RaggedTensor.from_row_lengths(tf.identity(x), [1, 1])
            return result, lambda dy: dy.flat_values * 5
        return [7, tf.identity(x)], lambda _, dy: dy * 5

    def program():
        rows = table([1.0, 2.0])

        @tf.function
        def gradient():
            x = tf.convert_to_tensor(rows)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.nest.flatten(custom(x), expand_composites=True)
                y = next(one for one in y if one.dtype == tf.float32)
            return tape.gradient(y, x)

        np.testing.assert_array_equal(gradient(), [5, 5])

    assert not remaining_after(program)


def test_tensorflow_without_the_patch_does_not_free_them():
    """If this test fails, TensorFlow frees gradients without the patch."""
    patches.ensure("memory")
    installed = patches._counts["memory"]
    for _ in range(installed):
        patches.uninstall("memory")
    try:
        remaining = remaining_after(
            lambda: tf.function(tripled_gradient)(tf.constant([1.0]))
        )
    finally:
        for _ in range(installed):
            patches.install("memory")
    assert remaining["FuncGraph"] == 2
