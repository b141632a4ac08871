"""What a TPU's compiler does to steps that have a name.

`enqueue`, `dequeue` and `apply_gradients` of one name inside `strategy.run`
are one step. If it has no `apply_gradients`, the compiler makes it look up
only, and else train, whatever `training` says: it takes the one or the other
constant in place of the choice between them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable

import tensorflow as tf

from tf_layoutmap import _tf_private

_NAME_ATTR = "_tpu_embedding_layer"
_CALLS = {
    "EnqueueTPUEmbeddingArbitraryTensorBatch": "enqueue",
    "RecvTPUEmbeddingActivations": "dequeue",
    "SendTPUEmbeddingGradients": "apply_gradients",
}


@dataclasses.dataclass
class _Step:
    """The operations of one name on one core; by name, as they hold a graph.

    Attributes:
      ops: From what made it to an operation.
      choice: Which mode to enqueue with.
    """

    ops: dict[str, str] = dataclasses.field(default_factory=dict)
    choice: str | None = None


# By graph, then by core and name. A step may be spread over several calls of
# `strategy.run` in one function, which are one program to the compiler.
_steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def correct_modes(graph: tf.Graph, core: int, new: Iterable[tf.Operation]):
    """Takes the mode that each named step has by now.

    Args:
      graph: The one that `strategy.run` traces into.
      core: Its number.
      new: The operations that the core's program has added.

    Raises:
      RuntimeError: If there are two operations of a kind under one name,
        which the compiler refuses.
    """
    by_name = _steps.setdefault(graph, {})
    for op in new:
        if op.type in _CALLS and _name_of(op) is not None:
            step = by_name.setdefault((core, _name_of(op)), _Step())
            _add(step, op, _CALLS[op.type])
    for step in by_name.values():
        if step.choice is not None and "dequeue" in step.ops:
            choice = graph.get_operation_by_name(step.choice)
            enqueue = graph.get_operation_by_name(step.ops["enqueue"])
            _tf_private.replace_op_input(
                enqueue,
                len(enqueue.inputs) - 1,
                choice.inputs[1 if "apply_gradients" in step.ops else 2],
            )


def _name_of(op: tf.Operation) -> str | None:
    try:
        return tf.compat.as_str(op.get_attr(_NAME_ATTR))
    except ValueError:
        return None


def _add(step: _Step, op: tf.Operation, call: str):
    if call in step.ops:
        raise RuntimeError(
            f"A name must belong to one `{call}` in a program for a TPU: its "
            "compiler pairs calls by it. Received: a second one with "
            f"name={_name_of(op)!r}."
        )
    step.ops[call] = op.name
    mode = op.inputs[-1].op if call == "enqueue" else None
    if mode is not None and mode.type == "SelectV2":
        step.choice = mode.name
