"""Writes the dense part of a step with `TPUEmbedding` under `TPUStrategy`.

    python -m tests.accelerators.tpu_compiler.strategy_functions FOLDER

The strategy has cores that do not exist (`traced_tpu`), so the step is traced
but does not run. The function of one core contains the ops between
`RecvTPUEmbeddingActivations`, whose outputs become arguments, and
`SendTPUEmbeddingGradients`, whose inputs become results. The embedding engine
performs these two ops. The program writes the same files as `mesh_functions`.
"""

import pathlib
import sys
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2

import tf_layoutmap as tlm
from tests.accelerators.tpu_compiler import (
    definitions,
    mesh_functions,
    models,
)
from tests.embedding.tpu import traced_tpu

NUM_CORES = 4
_RECEIVE, _SEND = "RecvTPUEmbeddingActivations", "SendTPUEmbeddingGradients"
_OUTSIDE = "_xla_outside_compilation"
config = tf.tpu.experimental.embedding


def feature_config() -> dict[str, Any]:
    return {
        name: config.FeatureConfig(
            config.TableConfig(models.ROWS, models.ROW_WIDTH, name=name)
        )
        for name in models.FEATURES
    }


def dense_model(batch: int) -> keras.Model:
    """Returns the model from numbers and rows to scores."""
    numbers = keras.Input([models.NUM_NUMBERS], batch)
    rows = [keras.Input([models.ROW_WIDTH], batch) for _ in models.FEATURES]
    return keras.Model([numbers, *rows], models.dense_part(numbers, rows))


def traced_step(model: keras.Model, batch: int) -> Any:
    """Returns the graph of a step of all cores."""
    strategy = traced_tpu.strategy_of(NUM_CORES)
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(numbers, ids, labels):
        embedding.enqueue(ids)
        rows = embedding.dequeue()
        with tf.GradientTape() as tape:
            tape.watch(rows)
            scores = model(
                [numbers, *(rows[name] for name in models.FEATURES)],
                training=True,
            )
            loss = keras.ops.mean(
                keras.losses.binary_crossentropy(
                    labels, scores, from_logits=True
                )
            )
        of_rows, of_weights = tape.gradient(
            loss, (rows, model.trainable_weights)
        )
        embedding.apply_gradients(of_rows)
        replica = tf.distribute.get_replica_context()
        of_weights = replica.all_reduce("mean", of_weights)
        optimizer.apply(of_weights, model.trainable_variables)
        return replica.all_reduce("mean", loss)

    with traced_tpu.replaced(), strategy.scope():
        embedding = tlm.TPUEmbedding(feature_config(), config.Adagrad(0.1))
        embedding.build(batch)

        @tf.function(autograph=False)
        def program(numbers, ids, labels):
            return strategy.run(step, (numbers, ids, labels))

        return program.get_concrete_function(
            tf.TensorSpec([batch, models.NUM_NUMBERS]),
            {
                name: tf.TensorSpec([batch], tf.int32)
                for name in models.FEATURES
            },
            tf.TensorSpec([batch, 1]),
        ).graph


def node_name(tensor: str) -> str:
    """Returns the name of the node of a tensor or a control input.

    >>> node_name("a/b:1"), node_name("^c")
    ('a/b', 'c')
    """
    return tensor.lstrip("^").partition(":")[0]


def split_step(
    graph_def: graph_pb2.GraphDef,
) -> tuple[graph_pb2.GraphDef, list[str], list[str]]:
    """Returns the nodes that one core runs, its inputs and its results.

    Args:
      graph_def: Graph of a step of all cores.

    Returns:
      The nodes, the names of the tensors that other nodes compute, and the
      names of the tensors that other nodes use.
    """
    by_name = {node.name: node for node in graph_def.node}

    def is_inside(node):
        return (
            "_tpu_replicate" in node.attr
            and _OUTSIDE not in node.attr
            and node.op not in ("TPUReplicateMetadata", _RECEIVE, _SEND)
        )

    found = graph_pb2.GraphDef()
    found.versions.CopyFrom(graph_def.versions)
    inputs, results = [], []
    for node in graph_def.node:
        if is_inside(node):
            kept = [
                one
                for one in node.input
                if not one.startswith("^") or is_inside(by_name[one[1:]])
            ]
            copy = found.node.add()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(kept)
            inputs += [
                one
                for one in kept
                if not is_inside(by_name[node_name(one)]) and one not in inputs
            ]
        elif node.op in (_SEND, "TPUReplicatedOutput"):
            results += [one for one in node.input if one not in results]
    return (
        found,
        inputs,
        [one for one in results if is_inside(by_name[node_name(one)])],
    )


def function_of_core(graph: Any) -> function_pb2.FunctionDef:
    """Returns the function that one core runs, from the graph of a step."""
    nodes, inputs, results = split_step(graph.as_graph_def())
    captured = {inner.name: outer for outer, inner in graph.captures}
    tensors = [
        graph.get_tensor_by_name(one if ":" in one else f"{one}:0")
        for one in inputs
    ]
    variables = [x for x in tensors if x.dtype == tf.resource]
    others = [x for x in tensors if x.dtype != tf.resource]
    assert {x.name for x in variables} <= captured.keys()

    @tf.function(autograph=False)
    def run(*arguments):
        inside: Any = tf.compat.v1.get_default_graph()
        return tf.graph_util.import_graph_def(
            nodes,
            input_map={
                **{x.name: one for x, one in zip(others, arguments)},
                **{x.name: inside.capture(captured[x.name]) for x in variables},
            },
            return_elements=[
                one if ":" in one else f"{one}:0" for one in results
            ],
            name="",
        )

    concrete: Any = run.get_concrete_function(
        *(tf.TensorSpec(x.shape, x.dtype) for x in others)
    )
    return definitions.definition_of(concrete)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    batch = models.BATCH // NUM_CORES
    plan = tlm.plan(
        dense_model(models.BATCH),
        mesh={"batch": NUM_CORES},
        batch_size=models.BATCH,
        optimizer="adam",
        costs=tlm.planning.MachineCosts.typical(),
    )
    function = function_of_core(traced_step(dense_model(batch), batch))
    mesh_functions.write_case(
        folder,
        plan,
        {"train": function_pb2.FunctionDefLibrary(function=[function])},
    )


if __name__ == "__main__":
    main()
