"""The lookup of a layer over servers, from its call to the optimizer.

A layer does not know whether gradients will follow, nor whether they will be
applied. Here a step is traced, or run eagerly, by one thread: so what it has
looked up last is what its gradients are of.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private


@dataclasses.dataclass(eq=False)
class Lookup:
    """A call of a layer.

    Attributes:
      plan: Of `StepOps.plan`.
      fetched: What the servers sent.
      gradients: Of the activations, flat; empty before they are known.
    """

    plan: Any
    fetched: Any
    gradients: Sequence[tf.Tensor] = ()


class Lookups:
    """The last lookup of each thread."""

    def __init__(self):
        """Starts without one."""
        self._of_thread = threading.local()

    def open(self, plan: Any, fetched: Any) -> Lookup:
        """Notes a lookup; one that was not applied is forgotten."""
        self._of_thread.lookup = Lookup(plan, fetched)
        return self._of_thread.lookup

    def follow(self, lookup: Lookup, gradients: Sequence[tf.Tensor]):
        """Keeps the gradients of a lookup.

        Raises:
          NotImplementedError: It is not the last one.
        """
        if getattr(self._of_thread, "lookup", None) is not lookup:
            raise NotImplementedError(
                "A layer with tables on parameter servers must be called once "
                "in a training step: give it the features of both calls under "
                "names of their own."
            )
        lookup.gradients = gradients

    def take(self) -> Lookup:
        """Returns the lookup whose gradients are applied now.

        Raises:
          RuntimeError: There are none, or they are of another function.
        """
        lookup = getattr(self._of_thread, "lookup", None)
        self._of_thread.lookup = None
        if lookup is None or not lookup.gradients:
            raise RuntimeError(
                "There are no gradients of tables on parameter servers to "
                "apply; call the layer inside the tape, once per step."
            )
        if not all(map(_is_known_here, (lookup.plan, *lookup.gradients))):
            raise RuntimeError(
                "A layer with tables on parameter servers must be called in "
                "the function that applies its gradients: its lookup is a part "
                "of the step. Received: a call inside of a tf.function of its "
                "own; remove `@tf.function` from what calls the layer, such as "
                "`call` of the model, in a training step."
            )
        return lookup


def _is_known_here(tensor: tf.Tensor) -> bool:
    """Whether a tensor is of the function being traced, or one around it."""
    return not tf.is_symbolic_tensor(tensor) or any(
        graph is tensor.graph for graph in _tf_private.graphs_around()
    )
