"""Which steps of a traced function are forward-only without saying so.

A program for a TPU may leave `training` at its default in a function that
only evaluates: the TPU's compiler sees that no gradients are sent, and looks
up only. The same is seen here, while the function is traced: a step that is
enqueued and dequeued in it under one `name`, and never applied, is
forward-only.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private


@dataclasses.dataclass
class _Calls:
    """What one function does under one name."""

    # Read by the function each time it runs; written while it is traced. None
    # where a forward-only step is found by others.
    is_forward: tf.Variable | None
    num_enqueued: int = 0
    num_forward: int = 0  # of those, enqueued with training=False
    is_dequeued: bool = False
    is_applied: bool = False

    def update(self):
        """Writes what is known by now."""
        if self.is_forward is not None:
            self.is_forward.assign(self.is_dequeued and not self.is_applied)


class StepModes:
    """The calls of one embedding in each function being traced."""

    def __init__(self, finds_forward_steps: bool = True):
        """Starts to note.

        Args:
          finds_forward_steps: Whether `enqueued` changes the mode of steps
            that are never applied. The TPU's compiler does so itself.
        """
        self._finds_forward_steps = finds_forward_steps
        # By the outermost function: loops and branches are part of it.
        self._calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def enqueued(self, name: str | None, training: Any) -> Any:
        """Returns `training`, or a tensor that may be false instead."""
        calls = self._of(name)
        if calls is None:
            return training
        calls.num_enqueued += 1
        calls.num_forward += training is False
        if calls.is_forward is None:
            return training
        self._update(calls)
        return tf.logical_and(
            training, tf.logical_not(calls.is_forward.read_value())
        )

    def dequeued(self, name: str | None):
        """Notes a `dequeue` of this name."""
        calls = self._of(name)
        if calls is not None:
            calls.is_dequeued = True
            self._update(calls)

    def applied(self, name: str | None):
        """Notes an `apply_gradients` of this name.

        Raises:
          RuntimeError: If all that the function enqueued under the name is
            forward-only.
        """
        calls = self._of(name)
        if calls is None:
            return
        if calls.num_enqueued and calls.num_forward == calls.num_enqueued:
            raise RuntimeError(
                "`apply_gradients` must not follow `enqueue(training=False)`: "
                "a TPU would wait forever. Enqueue with training=True, or "
                f"under another name. Received: name={name!r}."
            )
        calls.is_applied = True
        self._update(calls)

    def _of(self, name: str | None) -> _Calls | None:
        graph = _outermost_function()
        if graph is None:
            return None
        by_name = self._calls.setdefault(graph, {})
        if name not in by_name:
            by_name[name] = _Calls(self._create_flag())
        return by_name[name]

    def _create_flag(self) -> tf.Variable | None:
        if not self._finds_forward_steps:
            return None
        with tf.init_scope(), tf.device("/device:CPU:0"):
            # Of no strategy: one for all replicas.
            return _tf_private.ResourceVariable(
                False, trainable=False, name="is_forward"
            )

    def _update(self, calls: _Calls):
        with tf.init_scope():
            calls.update()


def _outermost_function():
    """The function being traced, around all loops; None in eager mode."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(
        graph.outer_graph, "outer_graph"
    ):
        graph = graph.outer_graph
    return graph
