"""Counts of the programs that DTensor compiled: ops, kernels and collectives.

Unlike times on logical CPUs, these counts do not depend on the machine. On an
accelerator, each kernel has a fixed cost, and the time of a collective depends
on the bytes that each device sends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.replication import measured

# Ops that compute nothing: their results are constants, or share the memory of
# an input.
_NO_KERNEL = frozenset(
    """
    Const ExpandDims Identity IdentityN NoOp PlaceholderWithDefault
    PreventGradient ReadVariableOp Reshape Shape ShapeN Size Rank Squeeze
    StopGradient VarHandleOp
    """.split()
)
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


@dataclasses.dataclass(frozen=True)
class ProgramCounts:
    """What one device runs in one call of a program.

    Attributes:
      ops: Operations, without constants and calls of functions.
      kernels: Operations that compute or copy data.
      collectives: Collective operations.
      sent_bytes: Bytes that the device sends, if each collective uses the
        algorithm with the fewest bytes (a ring).
    """

    ops: int
    kernels: int
    collectives: int
    sent_bytes: int


def count(name: str) -> ProgramCounts:
    """Returns the counts of the program that DTensor compiled.

    Operations of called functions are counted once per call. Operations whose
    results are not used are not counted.

    Args:
      name: Name of a concrete function that has run on a mesh.

    Raises:
      ValueError: If the function has not run on a mesh.
    """
    functions = measured.compiled_functions(name)
    if not functions:
        raise ValueError(
            "Argument `name` must be the name of a function that has run on a "
            f"mesh. Received: {name!r}."
        )
    ops = kernels = collectives = sent = 0
    for function in functions:
        for node, nodes in _used_nodes(function):
            if node.op == "Const" or node.op in _CALLS:
                continue
            ops += 1
            kernels += node.op not in _NO_KERNEL
            if node.op.startswith("Collective"):
                collectives += 1
                sent += _sent_bytes(node, nodes)
    return ProgramCounts(ops, kernels, collectives, round(sent))


def _used_nodes(function: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the nodes that run, each with all nodes of its function."""
    nodes = {node.name: node for node in function.node_def}
    waiting = [
        *function.ret.values(),
        *function.control_ret.values(),
        *(name for name, node in nodes.items() if _is_stateful(node)),
    ]
    used = set()
    while waiting:
        name = waiting.pop().removeprefix("^").split(":")[0]
        if name in nodes and name not in used:
            used.add(name)
            waiting += nodes[name].input
    for name in used:
        yield nodes[name], nodes
        for called in tf_private.names_of_functions(nodes[name]):
            yield from _used_nodes(tf_private.function_def(called))


def _is_stateful(node: Any) -> bool:
    op = tf_private.op_def_of(node.op)
    # A read of a variable is stateful, but only its result is used.
    return op is not None and op.is_stateful and node.op != "ReadVariableOp"


def _sent_bytes(node: Any, nodes: dict[str, Any]) -> float:
    """Returns the bytes that a device sends in a collective operation."""
    size = node.input[1].split(":")[0]
    devices = int(tf.make_ndarray(nodes[size].attr["value"].tensor))
    shape = node.attr["_output_shapes"].list.shape[0]
    result = math.prod(dim.size for dim in shape.dim) * (
        tf.as_dtype(node.attr["T"].type).size
    )
    factor = 2 if node.op.startswith("CollectiveReduceV") else 1
    if node.op.startswith("CollectiveReduceScatter"):
        factor = devices
    return factor * result * (devices - 1) / devices
