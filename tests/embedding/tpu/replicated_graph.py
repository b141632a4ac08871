"""Runs functions that TensorFlow's TPUStrategy has traced, without a TPU.

The graph of such a function contains the TPU program once, and the ops on the
host around it. `runner` runs this graph as the runtime of a TPU does: the
program runs once per replica, compiled by XLA (for the CPU, where one function
contains the programs of all replicas). All other ops run on the host, in the
order of the program. Inputs and outputs of the program connect both parts.
"""

import pytest
import tensorflow as tf

from tf_layoutmap._core import requirements

_PROGRAM = "_tpu_replicate"


def is_in_program(op):
    """Returns whether an op is part of the TPU program."""
    return _PROGRAM in op.node_def.attr


def program_ops(graph):
    """Returns the ops of the TPU program in a graph.

    The result contains stateful ops and the ops on which results depend. As in
    TensorFlow, other ops are removed before the program is compiled.
    """
    found = [
        one
        for one in graph.get_operations()
        if is_in_program(one) and one.op_def.is_stateful
    ]
    found += [
        one.inputs[0].op
        for one in graph.get_operations()
        if one.type == "TPUReplicatedOutput"
    ]
    used = set()
    while found:
        op = found.pop()
        if op in used or not is_in_program(op):
            continue
        used.add(op)
        found += [one.op for one in op.inputs] + list(op.control_inputs)
    return [one for one in graph.get_operations() if one in used]


def host_ops(graph):
    """Returns the ops around the TPU program in a graph."""
    return [one for one in graph.get_operations() if not is_in_program(one)]


def _copy(op, inputs):
    """Creates a copy of an op in the current graph, and returns its outputs."""
    attrs = {
        name: value
        for name, value in op.node_def.attr.items()
        if not name.startswith("_")
    }
    graph = tf.compat.v1.get_default_graph()
    with tf.device(None if is_in_program(op) else op.device):
        copy = graph.create_op(
            op.type,
            [graph.capture(one) for one in inputs],
            [one.dtype for one in op.outputs],
            attrs=attrs,
            name=op.name.rpartition("/")[2],
        )
    return copy.outputs


def _source(tensor):
    """Returns the op and the number of an output."""
    return tensor.op, tensor.value_index


class _Program:
    """The TPU program of a graph.

    Attributes:
      inputs: Tensors on the host that have a separate value for each replica.
      shared: Other tensors on the host that the program reads.
      outputs: Tensors of the program that the host reads.
    """

    def __init__(self, graph):
        self._ops = [
            one
            for one in program_ops(graph)
            if one.type != "TPUReplicateMetadata"
        ]
        read = {
            _source(one): one
            for op in self._ops
            for one in op.inputs
            if not is_in_program(one.op)
        }
        self.inputs, self.shared = (
            [
                one
                for (op, _), one in read.items()
                if (op.type == "TPUReplicatedInput") == is_replicated
            ]
            for is_replicated in (True, False)
        )
        self.outputs = [
            one.inputs[0]
            for one in host_ops(graph)
            if one.type == "TPUReplicatedOutput"
        ]

    def compiled(self):
        """Returns a function of the inputs of replicas and of `shared`."""

        @tf.function(jit_compile=True, autograph=False)
        def program(values_of_replicas, shared):
            known = dict(zip(map(_source, self.shared), shared))
            found = [
                {**known, **dict(zip(map(_source, self.inputs), values))}
                for values in values_of_replicas
            ]
            for op in self._ops:
                inputs = [[one[_source(i)] for i in op.inputs] for one in found]
                if op.type == "CrossReplicaSum":
                    # The replicas are on one device, so their sum is no
                    # collective. All replicas form one group.
                    total = tf.add_n([values for values, _ in inputs])
                    results = [[total]] * len(found)
                else:
                    results = [_copy(op, values) for values in inputs]
                for one, outputs in zip(found, results):
                    one.update(zip(map(_source, op.outputs), outputs))
            return [[one[_source(i)] for i in self.outputs] for one in found]

        return program


def runner(concrete, num_replicas):
    """Returns a function that runs a traced function.

    Args:
      concrete: Concrete function whose graph contains one TPU program.
      num_replicas: Number of replicas of the program.

    Returns:
      A function of the flat arguments of `concrete`, which returns the flat
      results.
    """
    if requirements.installed_version("tensorflow-tpu") is not None:
        pytest.skip("tensorflow-tpu has no XLA compiler for CPUs.")
    graph = concrete.graph
    program = _Program(graph)
    compiled = program.compiled()

    @tf.function(autograph=False)
    def run(*args):
        values = [*args, *concrete.captured_inputs]
        found = dict(zip(map(_source, graph.inputs), values))
        results = []  # One list of outputs per replica.

        for op in host_ops(graph):
            if any(_source(one) in found for one in op.outputs):
                continue  # A placeholder of an argument.
            values = [found.get(_source(one)) for one in op.inputs]
            if op.type == "TPUReplicatedInput":
                found[op, 0] = values
            elif op.type == "TPUCompilationResult":
                found[op, 0] = tf.constant("")
            elif op.type == "TPUReplicatedOutput":
                if not results:
                    results.extend(
                        compiled(
                            [
                                [
                                    found[_source(one)][i]
                                    for one in program.inputs
                                ]
                                for i in range(num_replicas)
                            ],
                            [found[_source(one)] for one in program.shared],
                        )
                    )
                number = next(
                    index
                    for index, one in enumerate(program.outputs)
                    if one is op.inputs[0]
                )
                for replica in range(num_replicas):
                    found[op, replica] = results[replica][number]
            else:
                copies = _copy(op, values)
                found.update(zip(map(_source, op.outputs), copies))
        return [found[_source(one)] for one in graph.outputs]

    return run
