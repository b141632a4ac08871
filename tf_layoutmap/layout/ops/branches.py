"""Branches on a mesh, and their gradients.

DTensor supports `tf.cond`, but not the operations of `tf.switch_case`, which
becomes a chain of `tf.cond`. The gradient of a branch reads intermediate values
of the branch that was taken. TensorFlow stores these values in optionals, which
DTensor does not support. On a mesh, both branches therefore return all values,
and a branch returns zeros for the values of the other one. TensorFlow does the
same for XLA.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.ops.corrections import static_value


def _is_traced_for_mesh() -> bool:
    return (
        not tf.executing_eagerly() and tracing.mesh_of_operation() is not None
    )


def uses_optionals(original: Callable[[], bool]) -> bool:
    """Returns whether gradients of branches may use optionals."""
    return original() and not _is_traced_for_mesh()


def missing_values(
    original: Callable[..., Any], graph: Any, values: Sequence[Any]
) -> list[Any]:
    """Returns results for the intermediate values of another branch.

    Args:
      original: `cond_v2._create_fakeparams`.
      graph: Graph of the branch that does not compute the values.
      values: Values of the other branch.
    """
    if not _is_traced_for_mesh() or not all(
        x.shape.is_fully_defined() for x in values
    ):
        return original(graph, values)
    with graph.as_default():
        return [tf.zeros(x.shape, x.dtype) for x in values]


def switch_case(
    original: Callable[..., Any],
    branches: Any,
    default: Callable[[], Any] | None,
    index: Any,
    name: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs `tf.switch_case`, on a mesh as a chain of `tf.cond`.

    Args:
      original: `control_flow_switch_case._indexed_case_helper`.
      branches: Functions, or a dict or pairs of indices and functions.
      default: Function for an index without a branch; the last branch if None.
      index: Index of the branch.
      name: Name of the operation.
      *args: Further arguments of `original`.
      **kwargs: Further arguments of `original`.
    """
    if not _is_traced_for_mesh():
        return original(branches, default, index, name, *args, **kwargs)
    functions = tf_private.checked_branches(branches, default, index)
    last = len(functions) - 1
    static = static_value(index)

    def run(number: int) -> Any:
        if number == last:
            return functions[last]()
        return tf.cond(
            tf.equal(index, tf.constant(number, index.dtype)),
            functions[number],
            lambda: run(number + 1),
        )

    with tf.name_scope(name or "switch_case"):
        if static is None:
            return run(0)
        return functions[int(static) if 0 <= static < last else last]()
