"""Measured cost of replication: what DTensor's compiled programs compute.

DTensor compiles a step to a program that every device runs. The nodes of this
program have the shapes of one device, and the graph of the step has the shapes
of the unsharded tensors. Their difference shows the share of the floating-point
operations that every device repeats. The program also contains the all-gathers
that DTensor inserted. An all-gather of a weight means that the full weight is
on each device during the step.

Programs are read only when a report is requested, or if the layout map is
strict. The operations of functions that a step calls are included once, for
example both branches of `tf.cond` and one iteration of `tf.while_loop`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import errors, shard_map

Shape = Sequence[int] | None

# Operations between the read of a weight and the all-gather of its value.
_VIEWS = frozenset(
    ("Cast", "ExpandDims", "Identity", "IdentityN", "Reshape", "Squeeze")
    + ("Transpose",)
)
# Part of the names of nodes with which DTensor moves data.
_OF_DTENSOR = "/DTensor"
_CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")
_CONVOLUTIONS = ("Conv2D", "Conv3D")
# Name of the axes of a weight whose layout the program does not contain.
_UNKNOWN = "unknown"
_UNSHARDED = tf.experimental.dtensor.UNSHARDED
_DEPTHWISE = "DepthwiseConv2dNative"


@dataclasses.dataclass(frozen=True)
class MeasuredLayer:
    """What the program of a step computes and gathers for one layer.

    Attributes:
      step: Kind of the step: `"train"`, `"test"` or `"predict"`.
      layer: Quoted name of the innermost layer; None for operations outside of
        all layers.
      flops: Floating-point operations of matrix products, einsums and
        convolutions of the unsharded step, gradients included.
      replicated: Share of `flops` that every device computes, between 0 (each
        device computes its part only) and 1 (every device computes all).
      gathered_bytes: Bytes of sharded weights and slot variables that the step
        gathers on each device.
      gathered_along_batch: The part of `gathered_bytes` that is gathered along
        the batch axis only. Weights that are sharded along this axis are always
        gathered when they are read. A strict layout map accepts this.
    """

    step: str
    layer: str | None
    flops: int
    replicated: float
    gathered_bytes: int
    gathered_along_batch: int = 0

    def __str__(self) -> str:
        where = "outside of all layers" if self.layer is None else self.layer
        return (
            f"{self.step} step, {where}: {self.replicated:.0%} of "
            f"{self.flops:,} FLOPs replicated, "
            f"{self.gathered_bytes / 1024:.1f} KiB of weights gathered"
        )


@dataclasses.dataclass(frozen=True)
class _Program:
    """A function that ran on a mesh.

    Attributes:
      name: Name of the concrete function.
      graph: Weak reference to its graph.
      num_devices: Number of devices of the mesh.
      batch_dim: Mesh axis that shards batches, or None.
      gathered_before: Bytes of the weights that were gathered before the call,
        because the full function is replicated.
    """

    name: str
    graph: weakref.ref[Any]
    num_devices: int
    batch_dim: str | None
    gathered_before: int


# Maps each model to the last program of each kind of step.
_of_models: weakref.WeakKeyDictionary[Any, dict[str, _Program]] = (
    weakref.WeakKeyDictionary()
)


def record(
    model: Any, kind: str, function: Any, context: Any, gathered_before: int
) -> None:
    """Records that `function`, a concrete function, ran as a step of `model`.

    Args:
      model: Model of Keras 3 or tf_keras.
      kind: Kind of the step, for example `"train"`.
      function: The concrete function.
      context: `MeshContext` of the model.
      gathered_before: Bytes of weights that are gathered before each call.
    """
    _of_models.setdefault(model, {})[kind] = _Program(
        tf.compat.as_str(function.name),
        weakref.ref(function.graph),
        context.mesh.size,
        context.batch_dim,
        gathered_before,
    )


def measure(model: Any) -> tuple[MeasuredLayer, ...]:
    """Returns the measured layers of the steps that `model` has run.

    Layers without matrix products and without gathered weights are not
    included. The layer with the most gathered bytes is first. Layers with
    equal gathered bytes are sorted by replicated operations.
    """
    layers = [
        layer
        for kind, program in sorted(_of_models.get(model, {}).items())
        for layer in _measure(program, model, kind)
    ]
    return tuple(
        sorted(
            layers,
            key=lambda layer: (
                -layer.gathered_bytes,
                -layer.flops * layer.replicated,
                -layer.flops,
            ),
        )
    )


def gathered_weights(model: Any, kind: str) -> tuple[MeasuredLayer, ...]:
    """Returns the layers whose weights the last step of `kind` gathered.

    Weights that are gathered along the batch axis only are not included.
    """
    program = _of_models.get(model, {}).get(kind)
    if program is None:
        return ()
    return tuple(
        layer
        for layer in _measure(program, model, kind)
        if layer.gathered_bytes > layer.gathered_along_batch
    )


def _measure(
    program: _Program, model: Any, kind: str
) -> Iterator[MeasuredLayer]:
    graph = program.graph()
    compiled = compiled_functions(program.name)
    if graph is None or not compiled:
        return
    full, local = collections.Counter(), collections.Counter()
    gathered, along_batch = collections.Counter(), collections.Counter()
    gathered[None] += program.gathered_before
    for op in _used_operations(graph):
        flops = _flops_of_op(op) * _num_parts(op.name)
        if flops:
            full[errors.layer_of(op.name, model)] += flops
    for nodes in _with_called_functions(map(_Nodes, compiled)):
        for node in nodes:
            layer = errors.layer_of(node.name, model)
            local[layer] += nodes.flops(node)
            size, axes = nodes.gathered_weight(node)
            gathered[layer] += size
            if axes <= {program.batch_dim}:
                along_batch[layer] += size
    count = program.num_devices
    for layer in dict.fromkeys([*full, *gathered]):
        if not full[layer] and not gathered[layer]:
            continue
        share = (
            (local[layer] * count / full[layer] - 1) / (count - 1)
            if full[layer] and count > 1
            else 0.0
        )
        yield MeasuredLayer(
            kind,
            layer,
            full[layer],
            min(max(share, 0.0), 1.0),
            gathered[layer],
            along_batch[layer],
        )


def _used_operations(graph: Any) -> list[Any]:
    """Returns the operations that the compiler does not remove.

    The operations of functions that the graph calls are included.
    """
    operations = _used_operations_of(graph)
    for op in operations:
        for called in tf_private.graphs_called_by(op):
            operations += _used_operations_of(called)
    return operations


def _used_operations_of(graph: Any) -> list[Any]:
    waiting = [
        *(x.op for x in graph.outputs),
        *graph.control_outputs,
        *(op for op in graph.get_operations() if op.op_def.is_stateful),
    ]
    used = set()
    while waiting:
        op = waiting.pop()
        if op not in used:
            used.add(op)
            waiting += [*(x.op for x in op.inputs), *op.control_inputs]
    return [op for op in graph.get_operations() if op in used]


def _num_parts(name: str) -> int:
    """Returns the number of devices over which an operation is divided.

    In a `shard_map`, the graph contains the shapes of one device. The result is
    1 for all other operations.
    """
    match = re.search(shard_map.SCOPE + r"_over_(\d+)", name)
    return 1 if match is None else int(match.group(1))


def compiled_functions(name: str) -> list[Any]:
    """Returns the functions that DTensor compiled for a concrete function.

    Args:
      name: Name of the concrete function.

    Returns:
      A `FunctionDef` per mesh of the newest compilation. Empty if the function
      has not run on a mesh.
    """
    # DTensor registers a function that calls one function per mesh. The last
    # number of the name increases with each compilation.
    pattern = re.compile(re.escape(name) + r"__func_.*_(\d+)")
    newest = max(
        (
            (int(match.group(1)), function)
            for function in tf_private.function_names()
            if (match := pattern.fullmatch(function))
        ),
        default=None,
    )
    if newest is None:
        return []
    return [
        tf_private.function_def(node.attr["f"].func.name)
        for node in tf_private.function_def(newest[1]).node_def
        if node.op == "StatefulPartitionedCall"
    ]


def _with_called_functions(functions: Iterable[_Nodes]) -> Iterator[_Nodes]:
    for function in functions:
        yield function
        yield from _with_called_functions(function.called_functions())


def _data_inputs(node: Any) -> list[str]:
    """Returns the inputs of a node, without control dependencies."""
    return [name for name in node.input if not name.startswith("^")]


class _Nodes:
    """The nodes of a compiled function.

    Args:
      function: The `FunctionDef`.
      caller: The nodes of the calling function, if the function is called by
        another compiled function.
      inputs: Names of the arguments in the calling function.
    """

    def __init__(
        self,
        function: Any,
        caller: _Nodes | None = None,
        inputs: Sequence[str] = (),
    ):
        self._by_name = {node.name: node for node in function.node_def}
        self._caller = caller
        self._passed = dict(
            zip((arg.name for arg in function.signature.input_arg), inputs)
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._by_name.values())

    def called_functions(self) -> Iterator[_Nodes]:
        """Yields the functions that nodes of this function call."""
        for node in self:
            inputs = _data_inputs(node)
            # The first input of a conditional is the condition.
            inputs = inputs[node.op in _CONDITIONALS :]
            for name in tf_private.names_of_functions(node):
                yield _Nodes(tf_private.function_def(name), self, inputs)

    def _source(self, name: str) -> tuple[Any, int]:
        """Returns the node that computes an input, and the output index.

        If the input is an argument of the function, the node is in a calling
        function.
        """
        parts = name.split(":")
        node = self._by_name.get(parts[0])
        if node is None and self._caller is not None and name in self._passed:
            return self._caller._source(self._passed[name])
        return node, int(parts[-1]) if len(parts) > 1 else 0

    def shape(self, name: str) -> Shape:
        """Returns the shape of an input on one device; None if unknown."""
        node, index = self._source(name)
        if node is None:
            return None
        if node.op == "Const":
            return [d.size for d in node.attr["value"].tensor.tensor_shape.dim]
        return _shape_of_output(node, index)

    def flops(self, node: Any) -> int:
        """Returns the floating-point operations of a node on one device."""
        if not _is_counted(node.op) or _OF_DTENSOR in node.name:
            return 0
        return _flops(
            node.op,
            [self.shape(name) for name in _data_inputs(node)],
            _shape_of_output(node, 0),
            lambda key: _attribute(node.attr[key]),
        )

    def gathered_weight(self, node: Any) -> tuple[int, set[str]]:
        """Returns what a node gathers, if it gathers a weight.

        Args:
          node: A node of the function.

        Returns:
          Bytes of the gathered weight, and the mesh axes along which it is
          gathered. 0 bytes if the node does not gather a weight.
        """
        if not node.op.startswith("Collective") or not node.input:
            return 0, set()
        source, _ = self._source(node.input[0])
        if source is not None and source.op == "TensorStridedSliceUpdate":
            # On CPUs, an all-gather writes the values of the device into zeros
            # and adds the results of all devices.
            source, _ = self._source(source.input[4])
        elif not node.op.startswith("CollectiveGather"):
            return 0, set()
        while source is not None and source.op in _VIEWS:
            source, _ = self._source(source.input[0])
        shape = _shape_of_output(node, 0)
        if source is None or source.op != "ReadVariableOp" or shape is None:
            return 0, set()
        return (
            math.prod(shape) * tf.as_dtype(node.attr["T"].type).size,
            _gathered_axes(source, shape),
        )


def _gathered_axes(read: Any, shape: Sequence[int]) -> set[str]:
    """Returns the mesh axes along which a weight is gathered.

    Args:
      read: The node that reads the weight.
      shape: Shape of the gathered value. If the value was transposed or
        reshaped, all axes of the weight are returned.
    """
    text = b" ".join(read.attr["_layout"].list.s).decode()
    specs = re.search(r"sharding_specs:([^ ]*),? mesh", text)
    if specs is None:
        return {_UNKNOWN}
    axes = specs.group(1).rstrip(",").split(",")
    local = _shape_of_output(read, 0)
    if local is None or len(local) != len(shape) or len(axes) != len(shape):
        return {*axes} - {_UNSHARDED}
    return {
        axis
        for axis, before, after in zip(axes, local, shape)
        if before != after
    } - {_UNSHARDED}


def _shape_of_output(node: Any, index: int) -> Shape:
    shapes = node.attr["_output_shapes"].list.shape
    if index >= len(shapes) or shapes[index].unknown_rank:
        return None
    return [dim.size for dim in shapes[index].dim]


def _attribute(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return tf.compat.as_str(value.s) if kind == "s" else getattr(value, kind)


def _is_counted(op_type: str) -> bool:
    return (
        op_type in ("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum")
        or op_type.startswith(_CONVOLUTIONS)
        or op_type.startswith(_DEPTHWISE)
    )


def _flops_of_op(op: Any) -> int:
    """Returns the floating-point operations of a `tf.Operation`."""
    if not _is_counted(op.type):
        return 0
    return _flops(
        op.type,
        [_static(x) for x in op.inputs],
        _static(op.outputs[0]),
        lambda key: _decoded(op.get_attr(key)),
    )


def _static(x: Any) -> Shape:
    return x.shape.as_list() if x.shape.is_fully_defined() else None


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _flops(
    op_type: str, inputs: list[Shape], output: Shape, attribute: Any
) -> int:
    """Returns the floating-point operations of an op; 0 if a shape is unknown.

    A multiplication and an addition count as two operations.
    """
    if op_type.startswith((*_CONVOLUTIONS, _DEPTHWISE)):
        return _flops_of_convolution(op_type, inputs, output)
    if op_type == "Einsum":
        sizes: dict[str, int] = {}
        terms = attribute("equation").split("->")[0].split(",")
        for term, shape in zip(terms, inputs):
            if shape is None or len(term) != len(shape):
                return 0
            sizes |= zip(term, shape)
        return 2 * math.prod(sizes.values())
    if output is None:
        return 0
    first, second = (
        ("transpose_a", "transpose_b")
        if op_type == "MatMul"
        else ("adj_x", "adj_y")
    )
    if inputs[0] is not None:
        summed = inputs[0][-2 if attribute(first) else -1]
    elif inputs[1] is not None:
        summed = inputs[1][-1 if attribute(second) else -2]
    else:
        return 0
    return 2 * math.prod(output) * summed


def _flops_of_convolution(
    op_type: str, inputs: list[Shape], output: Shape
) -> int:
    if "BackpropFilter" in op_type:
        kernel, activations = output, inputs[2]
    elif "BackpropInput" in op_type:
        kernel, activations = inputs[1], inputs[2]
    else:
        kernel, activations = inputs[1], output
    if kernel is None or activations is None:
        return 0
    # The kernel of a depthwise convolution has the dimensions of space, of the
    # input channels, and of the outputs per input channel.
    summed = kernel[: -2 if op_type.startswith(_DEPTHWISE) else -1]
    return 2 * math.prod(activations) * math.prod(summed)
