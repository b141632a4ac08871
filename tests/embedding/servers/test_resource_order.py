"""Tests which variables of servers a traced function uses."""

import gc
import weakref

import tensorflow as tf

from tf_layoutmap.embedding.servers import resource_order


def traced(*variables):
    """Returns the graph of a function that reads variables."""

    @tf.function
    def function():
        return [variable.read_value() for variable in variables]

    return function.get_concrete_function().graph


def test_a_function_uses_variables_of_its_servers():
    server, other, own, rest = (tf.Variable([0.0]) for _ in range(4))
    resource_order.register(server.handle, [own.handle])
    resource_order.register(other.handle, [own.handle])
    assert resource_order.uses_variables(traced(server, own))
    # Servers with a common variable are ordered, too.
    assert resource_order.uses_variables(traced(server, other))
    assert not resource_order.uses_variables(traced(server, rest))
    assert not resource_order.uses_variables(traced(own, rest))


def test_a_graph_that_uses_variables_of_a_server_is_freed():
    server, own = tf.Variable([0.0]), tf.Variable([0.0])
    resource_order.register(server.handle, [own.handle])
    graph = traced(server, own)
    assert resource_order.uses_variables(graph)
    graph = weakref.ref(graph)
    gc.collect()
    assert graph() is None
