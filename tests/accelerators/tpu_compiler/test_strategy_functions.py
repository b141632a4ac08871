"""The dense part of a step under `TPUStrategy` is separated from its graph."""

import tensorflow as tf

from tests.accelerators.tpu_compiler import strategy_functions


def test_the_nodes_of_a_core_are_separated_from_the_embedding_engine():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2, 3], "x")
        pivot = tf.no_op("pivot")
        with tf.control_dependencies([pivot]):
            y = tf.multiply(x, 2.0, name="y")
        outside = tf.identity(y, "outside")
        gradients = tf.negative(y, "gradients")
        sent = tf.identity_n([gradients], "sent")[0]
    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        if node.name not in ("x", "pivot"):
            node.attr["_tpu_replicate"].s = b"cluster"
        if node.name == outside.op.name:
            node.attr["_xla_outside_compilation"].s = b"0"
        if node.name == sent.op.name:
            node.op = "SendTPUEmbeddingGradients"
    nodes, inputs, results = strategy_functions.split_step(graph_def)
    assert [node.name for node in nodes.node] == ["y/y", "y", "gradients"]
    assert inputs == ["x"]
    assert results == ["gradients"]
    # Nodes that are not compiled cannot order the others.
    assert list(nodes.node[1].input) == ["x", "y/y"]
