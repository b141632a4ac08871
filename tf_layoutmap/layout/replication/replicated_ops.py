"""Replication of single operations that DTensor cannot shard.

DTensor can reject the layouts of an operation even if it supports the
operation. DTensor selects layouts only when it compiles a function. If the
compilation fails, the step is traced again with a mark on the operation
(`traces.Replication`). The inputs and results of a marked operation are
replicated, or their samples are unsharded. Eager operations run again on
replicated inputs (`replicated_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, tf_private, user_warnings
from tf_layoutmap.layout.mesh import errors, tracing
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops.corrections import as_constant
from tf_layoutmap.layout.replication import traces

# Operations that are never marked, because they have no inputs.
_NEVER = frozenset(("Placeholder", "NoOp", "Const"))


def create(
    original: Callable[..., Any],
    graph: Any,
    op_type: str,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Creates an operation in a graph; pins inputs and results if it is marked.

    Args:
      original: `FuncGraph._create_op_internal`.
      graph: Graph of the operation.
      op_type: Type in TensorFlow's op registry.
      inputs: Inputs of the operation.
      *args: `dtypes, input_types, name, attrs, op_def, compute_device`.
      **kwargs: The same arguments by name.
    """
    trace = traces.current()
    if tracing.mesh_of_operation() is not None:
        inputs = [_constant_of_other_graph(x, graph) for x in inputs]
    if trace is None or not trace.replication.is_named or op_type in _NEVER:
        op = original(graph, op_type, inputs, *args, **kwargs)
        _check_ranks(op)
        return op
    arguments = (
        dict(
            zip(
                (
                    "dtypes",
                    "input_types",
                    "name",
                    "attrs",
                    "op_def",
                    "compute_device",
                ),
                args,
            )
        )
        | kwargs
    )
    name = arguments.get("name") or op_type
    name = (
        name[:-1]
        if name.endswith("/")
        else graph.unique_name(name, mark_as_used=False)
    )
    extent = trace.extent_of(name)
    inputs = [as_constant(trace.input(x, op_type)) for x in inputs]
    if extent is not None:
        inputs = [trace.pinned(x, extent, op_type) for x in inputs]
    arguments["attrs"] = {
        **(arguments.get("attrs") or {}),
        errors.NAME_ATTRIBUTE: tf.compat.v1.AttrValue(s=name.encode()),
    }
    op = original(graph, op_type, inputs, **arguments)
    _check_ranks(op)
    if extent is not None:
        trace.add_results(op.outputs, extent)
    return op


def _constant_of_other_graph(x: Any, graph: Any) -> Any:
    """Returns a constant of another graph as a constant of `graph`.

    TensorFlow would pass the constant as an argument, for example to the
    function that computes the gradient of another function. DTensor needs the
    values of sizes, axes and permutations when it compiles the function.
    """
    if (
        not tf.is_symbolic_tensor(x)
        or x.graph is graph
        or x.op.type != "Const"
        or x.dtype not in (tf.int32, tf.int64)
        or x.shape.rank not in (0, 1)
    ):
        return x
    with graph.as_default(), tf.control_dependencies(None):
        return tf.constant(tf.get_static_value(x), x.dtype)


_CROSSES = ("SparseCross", "SparseCrossHashed", "SparseCrossV2")


def _check_ranks(op: Any) -> None:
    """Raises an error for a replicated op with a result of unknown rank.

    DTensor ends the process when it compiles such an op. A step with a cross of
    features, whose number of results is unknown, can wait forever.
    """
    if op.type in _CROSSES and tracing.mesh_of_operation() is not None:
        raise errors.UnsupportedByDTensorError(
            f"A mesh does not support the operation {op.name!r} of type "
            f"{op.type}. {errors.in_the_data('A HashedCrossing layer')}"
        )
    if (
        dtensor_ops.is_replicated_op(op.type)
        and any(x.shape.rank is None for x in op.outputs)
        and tracing.mesh_of_operation() is not None
    ):
        raise errors.UnsupportedByDTensorError(
            "On a mesh, the ranks of the results of an operation without a "
            f"rule must be known during tracing. Received: a {op.type} "
            f"operation {op.name!r}. Pass arguments that determine the rank, "
            "such as axes and sizes, as Python numbers, or compute the "
            "operation on the host."
        )


dtensor = tf.experimental.dtensor

_is_strict = ThreadValue(False)
# Types of eager operations for which this process has issued a warning.
_warned: set[str] = set()

# These operations set a layout, so they would also fail on replicated inputs.
_LAYOUT_OPS = frozenset(
    ("Relayout", "RelayoutLike", "CopyToMesh", "CopyToMeshGrad")
)
# Dtypes of variables and iterators, whose shards cannot be gathered.
_NEVER_GATHERED = frozenset((tf.resource, tf.variant))


def strict_eager_ops(is_strict: bool) -> AbstractContextManager[None]:
    """Disables the replication of eager operations if `is_strict` is true."""
    return _is_strict.set_to(is_strict)


def can_run_replicated(
    message: str, operation: str | bytes, inputs: Sequence[Any]
) -> bool:
    """Returns whether a failed op can run on replicated inputs.

    Args:
      message: Message of its error.
      operation: Type of the operation.
      inputs: Inputs of the operation. Values that are not tensors are ignored.

    Returns:
      True if sharding caused the error, an input is sharded, and all inputs can
      be gathered.
    """
    operation = tf.compat.as_str(operation)
    if (
        _is_strict.get()
        or operation in _LAYOUT_OPS
        or tf_private.has_output_layout()
        or errors.finding_of(message) is None
        or tf_private.op_def_of(operation) is None
    ):
        return False
    sharded = [
        x
        for x in inputs
        if tracing.on_mesh(x)
        and not dtensor.fetch_layout(x).is_fully_replicated()
    ]
    return bool(sharded) and not any(
        x.dtype in _NEVER_GATHERED for x in sharded
    )


def replicated_inputs(
    message: str, operation: str, inputs: Sequence[Any]
) -> list[Any] | None:
    """Returns replicated inputs for a failed operation.

    Args:
      message: Message of its error.
      operation: Type of the operation.
      inputs: Eager tensors.

    Returns:
      The inputs, or None if `can_run_replicated` returns False.
    """
    if not can_run_replicated(message, operation, inputs):
        return None
    replicated = [tracing.pin_replicated(x, None) for x in inputs]
    if operation not in _warned:
        _warned.add(operation)
        user_warnings.warn(
            f"DTensor cannot shard an eager {operation} operation "
            f"({errors.finding_of(message)}). Every device runs such "
            "operations in full, on replicated inputs.",
            errors.LayoutMapWarning,
        )
    return replicated
