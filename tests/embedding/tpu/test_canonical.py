"""The canonical form of a graph depends on everything except names."""

import tensorflow as tf

from tests.embedding.tpu import canonical


def graph_of(function):
    return (
        tf.function(function)
        .get_concrete_function(tf.TensorSpec([2]), tf.TensorSpec([2]))
        .graph
    )


def same(one, other, scope=None):
    return canonical.operations(graph_of(one), scope) == (
        canonical.operations(graph_of(other), scope)
    )


def test_names_do_not_matter():
    assert same(lambda a, b: tf.add(a, b, name="x"), lambda a, b: a + b)


def test_wiring_matters():
    assert not same(lambda a, b: a - b, lambda a, b: b - a)
    assert not same(lambda a, b: a, lambda a, b: b)


def test_attributes_and_constants_matter():
    assert not same(
        lambda a, b: tf.cast(a, tf.int32), lambda a, b: tf.cast(a, tf.int64)
    )
    assert not same(lambda a, b: a + 1.0, lambda a, b: a + 2.0)


def test_the_number_of_operations_matters():
    def twice(a, b):
        tf.print(a)
        tf.print(a)
        return b

    def once(a, b):
        tf.print(a)
        return b

    assert not same(twice, once)


def test_devices_and_order_matter():
    def on(device):
        def add(a, b):
            with tf.device(device):
                return a + b

        return add

    assert not same(on("/cpu:0"), on("/cpu:1"))

    def in_order(a, b):
        tf.print(a)
        tf.print(b)

    def in_reverse_order(a, b):
        tf.print(b)
        tf.print(a)

    assert not same(in_order, in_reverse_order)


def test_bodies_of_loops_and_branches_matter():
    def branch(number):
        return lambda a, b: tf.cond(a[0] > 0.0, lambda: a + number, lambda: b)

    assert same(branch(1.0), branch(1.0))
    assert not same(branch(1.0), branch(2.0))

    def loop(number):
        return lambda a, b: tf.while_loop(
            lambda i: i < 3.0, lambda i: [i + number * b[0]], [a[0]]
        )

    assert same(loop(1.0), loop(1.0))
    assert not same(loop(1.0), loop(2.0))


def test_operations_of_an_ignored_scope_are_left_out():
    def checked(a, b):
        with tf.name_scope("check"):
            check = tf.raw_ops.Assert(condition=True, data=[a])
        with tf.control_dependencies([check]):
            tf.raw_ops.PrintV2(input=tf.as_string(b[0]))

    def unchecked(a, b):
        tf.raw_ops.PrintV2(input=tf.as_string(b[0]))

    assert not same(checked, unchecked)
    assert same(checked, unchecked, "check")
