"""Tests the messages for variables that are on servers."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tf_layoutmap.embedding.servers import (
    bundles,
    resource_order,
    variable_messages,
)
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

assert strategies.NUM_DEVICES > 2
SERVERS = ("CPU:1", "CPU:2")


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
