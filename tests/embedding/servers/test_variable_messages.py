"""Tests the messages for variables that are on servers."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from tf_layoutmap.embedding.servers import (
    bundles,
    resource_order,
    variable_messages,
)
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

assert strategies.NUM_DEVICES > 2
SERVERS = tuple(
    f"/job:localhost/replica:0/task:0/device:CPU:{number}" for number in (1, 2)
)


def variable(value, dtype, server=0):
    with tf.device(SERVERS[server]):
        return tf.Variable(tf.constant(value, dtype))


@pytest.fixture
def variables():
    return {
        "rate": variable(0.5, "float32"),
        "decay": variable(-0.0, "float32"),
        "count": variable(2**40 + 3, "int64"),
        "weights": variable([[1, np.nan, 3], [4, 5, 6]], "float32"),
        "other": variable(7, "float32", 1),
        "far": variable(8, "float32", 1),
    }


def traced(step, num_steps=1, reduces=True):
    """Returns a traced closure in which CPU:1 and CPU:2 are servers."""

    def servers_of(graph):
        return {
            id(inside): outside.device
            for outside, inside in graph.captures
            if inside.dtype == tf.resource and outside.device.endswith(SERVERS)
        }

    trace = ClosureTrace(bundles_updates=reduces)

    @tf.function(input_signature=[tf.TensorSpec([num_steps, 2], tf.int64)])
    def closure(numbers):
        results = []
        for number in range(num_steps):
            trace.begin(numbers[number])
            with bundles.bundled():
                results.append(step())
        return results

    with (
        mock.patch.object(resource_order, "servers_of", servers_of),
        mock.patch.object(resource_order, "SERVER_JOB", "localhost"),
    ):
        return closure.get_concrete_function()


def run(function, num_steps=1):
    numbers = [[1, number] for number in range(num_steps)]
    results = function(tf.constant(numbers, tf.int64))
    return [one.numpy() for one in tf.nest.flatten(results)]


def sent(function):
    """Returns the tensors of servers that ops without a device use."""
    return {
        tensor.name
        for op in function.graph.get_operations()
        if not op.device and op.type != "ReadVariableOp"
        for tensor in op.inputs
        if tensor.op.type == "ReadVariableOp"
        or tensor.op.device.endswith(SERVERS)
    }


def received(function):
    """Returns the tensors of the worker that ops of servers use."""
    return {
        tensor.name
        for op in function.graph.get_operations()
        if op.device.endswith(SERVERS) or op.type.startswith("Assign")
        for tensor in op.inputs
        if tensor.dtype != tf.resource
        and not tensor.op.device.endswith(SERVERS)
        and tensor.op.type not in ("Const", "ReadVariableOp")
    }


def use(variables):
    """Returns the result of a worker's op for each variable."""
    return [tf.negative(one) for one in variables.values()]


def test_the_worker_gets_one_tensor_from_each_server(variables):
    reduced = traced(lambda: use(variables))
    plain = traced(lambda: use(variables), reduces=False)
    assert len(sent(plain)) == 6
    assert len(sent(reduced)) == 2
    for one, other in zip(run(reduced), run(plain), strict=True):
        assert one.tobytes() == other.tobytes()


def test_each_server_gets_one_tensor_of_updates(variables):
    def step():
        values = {name: one + one for name, one in variables.items()}
        for name, one in variables.items():
            one.assign_sub(values[name])
            one.assign_add(tf.ones_like(one))
        return list(values.values())

    before = {name: one.numpy() for name, one in variables.items()}
    reduced, plain = traced(step), traced(step, reduces=False)
    assert len(received(plain)) == 6
    assert len(received(reduced)) == 2
    run(reduced)
    for name, one in variables.items():
        np.testing.assert_array_equal(one, 1 - before[name])


def test_updates_that_depend_on_other_updates_are_a_second_message(variables):
    names = ("rate", "decay", "weights")

    def step():
        for name in names:
            variables[name].assign_add(variables[name] * 2.0)
        # The optimizers of Keras read a slot variable that they have updated.
        for name in names:
            variables[name].assign_sub(variables[name] / 4.0)
        return [variables["other"] + 1.0]

    before = {name: variables[name].numpy() for name in names}
    reduced = traced(step, 2)
    assert len(received(reduced)) == 4
    run(reduced, 2)
    for name in names:
        once = before[name] * 3 - before[name] * 3 / 4
        np.testing.assert_array_equal(variables[name], once * 3 - once * 3 / 4)


# Calls of a random step: a kind, two variables, and a number.
CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ["assign", "assign_add", "assign_sub", "read", "wait", "branch"]
        ),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25)
@given(CALLS, st.integers(1, 3))
def test_random_steps_equal_the_program(calls, num_steps):
    def new_variables():
        return [
            variable(number + 1.0, "float32", number % 2) for number in range(6)
        ]

    def step_of(variables):
        def step():
            results, number = [], tf.constant(1.0)
            for kind, target, source, factor in calls:
                if kind == "read":
                    number = variables[source] + number / factor
                elif kind == "wait":
                    with tf.control_dependencies([number]):
                        results.append(tf.negative(variables[source]))
                elif kind == "branch":
                    number = tf.cond(
                        number > factor,
                        lambda: variables[target] * 0.5,
                        lambda: variables[source] + 1.0,
                    )
                else:
                    update = getattr(variables[target], kind)
                    update(variables[source] / 2.0 + number * factor)
            return [*results, tf.identity(number)]

        return step

    expected = new_variables()
    results = []
    for _ in range(num_steps):
        results.extend(one.numpy() for one in step_of(expected)())
    received = new_variables()
    assert run(traced(step_of(received), num_steps), num_steps) == results
    assert [one.numpy() for one in received] == [
        one.numpy() for one in expected
    ]


def test_variables_of_all_shapes_are_joined(variables):
    # The key of the scalars of a message was equal to the number 1.
    names = ("rate", "weights", "decay", "count")
    joined = {name: variables[name] for name in names}
    reduced = traced(lambda: use(joined))
    assert len(sent(reduced)) == 1
    for one, name in zip(run(reduced), names, strict=True):
        np.testing.assert_array_equal(one, -variables[name].numpy())


def test_ops_on_servers_get_one_tensor_from_each_process(variables):
    def step():
        gradients = [tf.random.stateless_uniform([3], (1, k)) for k in range(4)]
        # The optimizers of Keras compute on the servers.
        for gradient in gradients:
            with tf.device(SERVERS[0]):
                far = variables["far"] * variables["other"]
                variables["weights"].assign_sub(
                    tf.stack([gradient * far, gradient])
                )
        return gradients

    before = variables["weights"].numpy()
    reduced = traced(step)
    gradients = run(reduced)
    # The worker and the other server send one tensor each.
    messages = {
        tensor.name
        for op in reduced.graph.get_operations()
        if op.device.endswith(SERVERS[0])
        for tensor in op.inputs
        if tensor.dtype != tf.resource
        and not tensor.op.device.endswith(SERVERS[0])
        and tensor.op.type != "ReadVariableOp"
    }
    assert len(messages) == 2
    expected = before
    for gradient in gradients:
        expected = expected - [gradient * np.float32(56), gradient]
    np.testing.assert_array_equal(variables["weights"], expected)


def test_an_update_by_a_constant_waits_for_its_control_inputs(variables):
    rate = variables["rate"]

    def step():
        check = tf.debugging.Assert(variables["other"] < 0.0, ["wrong"])
        with tf.control_dependencies([check]):
            rate.assign_add(1.0)
        return [tf.constant(0)]

    with pytest.raises(tf.errors.InvalidArgumentError, match="wrong"):
        run(traced(step))
    assert rate.numpy() == 0.5


def test_a_use_of_an_earlier_read_waits_for_the_control_inputs(variables):
    rate, seen = variables["rate"], tf.Variable(0.0)

    def step():
        total = tf.negative(rate)
        check = tf.debugging.Assert(variables["other"] < 0.0, ["wrong"])
        with tf.control_dependencies([check]):
            # The second read is replaced by the first one.
            seen.assign_add(rate)
        return [total]

    with pytest.raises(tf.errors.InvalidArgumentError, match="wrong"):
        run(traced(step))
    assert seen.numpy() == 0.0


def test_a_read_after_a_write_is_separate(variables):
    rate, decay = variables["rate"], variables["decay"]

    def step():
        first = rate * 2.0 + decay
        rate.assign(first)
        return first, rate + 1.0

    assert run(traced(step)) == [1.0, 2.0]


def test_a_read_that_follows_another_read_is_separate(variables):
    rate, decay, other = (variables[key] for key in ("rate", "decay", "other"))

    def step():
        first = rate + 1.0
        with tf.control_dependencies([first]):
            second = tf.identity(decay) + 2.0
        other.assign(first)
        return first, second, variables["far"] + other

    assert run(traced(step)) == [1.5, 2.0, 9.5]


def test_a_later_step_reads_only_changed_variables(variables):
    rate, decay, other = (variables[key] for key in ("rate", "decay", "other"))

    def step():
        total = rate + decay + other
        rate.assign_add(1.0)
        return total

    function = traced(step, 3)
    assert run(function, 3) == [7.5, 8.5, 9.5]
    num_uses = sum(
        bool(op.outputs[0].consumers())
        for op in function.graph.get_operations()
        if op.type == "ReadVariableOp"
    )
    assert num_uses == 5
    other.assign(0.0)
    assert run(function, 3) == [3.5, 4.5, 5.5]


def test_a_large_variable_is_a_separate_message(variables):
    size = variable_messages._MAX_BYTES // 4 + 1
    large = {**variables, "large": variable(np.ones(size), "float32")}
    assert len(sent(traced(lambda: use(large)))) == 3


def test_results_do_not_wait_for_writes(variables):
    def step():
        variables["count"].assign_add(1)
        return variables["rate"] + 1.0

    function = traced(step)
    (result,) = function.graph.outputs
    waits = [one.type for one in result.op.control_inputs]
    assert "AssignAddVariableOp" not in waits
    run(function)
    assert variables["count"].numpy() == 2**40 + 4
