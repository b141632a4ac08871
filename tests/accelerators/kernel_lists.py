"""Which ops of functions have no kernel on an accelerator.

`tpu_kernels_2.20.pb.gz` is the list of kernels of the package `tensorflow-tpu`
2.20.0, `cuda_kernels_2.21.pb.gz` that of `tensorflow` 2.21.0. A device of type
`XLA_TPU_JIT` compiles the ops of a function for a TPU.
"""

import collections
import functools
import gzip
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2
from tensorflow.python.eager import context

FOLDER = pathlib.Path(__file__).parent
# Device types of the kernels of each list.
LISTS = {
    "cuda_kernels_2.21.pb.gz": ("GPU", "DEFAULT"),
    "tpu_kernels_2.20.pb.gz": ("XLA_TPU_JIT",),
}
# The names of the functions that DTensor compiles for one device.
_DEVICE_FUNCTION = re.compile(r"_func_\d+_\d+")


@functools.cache
def _kernels(name: str):
    """Returns the kernels of a list by op."""
    content = gzip.decompress((FOLDER / name).read_bytes())
    by_op = collections.defaultdict(list)
    for one in kernel_def_pb2.KernelList.FromString(content).kernel:
        if one.device_type in LISTS[name]:
            by_op[one.op].append(one)
    assert by_op, name
    return by_op


def _supports(kernel, node) -> bool:
    for constraint in kernel.constraint:
        value = node.attr[constraint.name]
        dtypes = [value.type] if value.type else list(value.list.type)
        if not set(dtypes) <= set(constraint.allowed_values.list.type):
            return False
    return True


def dtypes_of(op: str, name: str) -> set[tf.DType]:
    """Returns the dtypes `T` for which a list has a kernel of an op."""
    return {
        tf.as_dtype(dtype)
        for kernel in _kernels(name)[op]
        for constraint in kernel.constraint
        if constraint.name == "T"
        for dtype in constraint.allowed_values.list.type
    }


def function_names() -> set[str]:
    """Returns the names of all functions of this process."""
    return {
        tf.compat.as_str(one) for one in context.context().list_function_names()
    }


def missing_in_nodes(
    nodes: Iterable[Any], name: str = "tpu_kernels_2.20.pb.gz"
) -> dict[str, str]:
    """Returns the ops of nodes that have no kernel in a list.

    Returns:
      The name of one node by the op and its dtype, such as `"MatMul int32"`.
    """
    found: dict[str, str] = {}
    for node in nodes:
        if not any(_supports(one, node) for one in _kernels(name)[node.op]):
            dtype = node.attr["T"].type or node.attr["dtype"].type
            found.setdefault(
                node.op + (f" {tf.as_dtype(dtype).name}" if dtype else ""),
                node.name,
            )
    return found


def missing_kernels(functions: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the ops without a kernel in the functions of single devices.

    Returns:
      For each list, the name of one node by the op and its dtype, such as
      `"MatMul int32"`. The key "nodes" has the number of nodes.
    """
    nodes = [
        node
        for function in functions
        if _DEVICE_FUNCTION.fullmatch(function)
        for node in context.context().get_function_def(function).node_def
    ]
    found: dict[str, Any] = {
        name: missing_in_nodes(nodes, name) for name in LISTS
    }
    return {**found, "nodes": len(nodes)}
