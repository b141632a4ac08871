"""Creates embeddings to export, and reads the exported models."""

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding


def make_rows(num_rows, dim, seed=0):
    """Returns `[num_rows, dim]` float32 values with different magnitudes."""
    random = np.random.default_rng(seed)
    return (
        random.normal(size=[num_rows, dim])
        * 10 ** random.uniform(-3, 1, size=[num_rows, 1])
    ).astype(np.float32)


def table_of(rows, name, **kwargs):
    """Returns a `TableConfig` whose initial values are `rows`."""

    def initializer(
        shape, dtype=None, partition_shape=None, partition_offset=(0, 0)
    ):
        del dtype
        start, size = partition_offset[0], (partition_shape or shape)[0]
        return tf.constant(rows[start : start + size])

    return tpu.TableConfig(
        *rows.shape, initializer=initializer, name=name, **kwargs
    )


def export(subject, path, row_format="float32", **kwargs):
    """Exports `subject` and returns the report and the loaded model."""
    report = tlm.export(subject, str(path / "model"), row_format, **kwargs)
    return report, tf.saved_model.load(report.path)


def run_signature_with_graph_ops(path, **inputs):
    """Restores a model by the ops in its graph, and runs its signature."""
    v1 = tf.compat.v1
    with v1.Session(graph=tf.Graph()) as session:
        graph = v1.saved_model.load(session, ["serve"], path)
        signature = graph.signature_def["serving_default"]
        return session.run(
            {key: one.name for key, one in signature.outputs.items()},
            {signature.inputs[key].name: one for key, one in inputs.items()},
        )


def operations_of(served):
    """Counts the ops in the graph of a function."""
    found = {}
    graph = served.concrete_functions[0].graph.as_graph_def()
    functions = [one.node_def for one in graph.library.function]
    for nodes in (graph.node, *functions):
        for node in nodes:
            found[node.op] = found.get(node.op, 0) + 1
    return found
