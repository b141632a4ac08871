"""Lookups of keys that the host runs for a step on a mesh.

DTensor has no rules for the operations that assign rows to keys. For a layer
that directly follows the inputs of a model, the host therefore looks up the
rows before each step, and passes the rows to the mesh together with the batch.
The tensor of keys on the mesh (or a mask, if the keys are strings) carries the
rows to the call of the layer (`attach`, `rows_for`).

If the step is traced, it returns the gradients of the rows (`StepGradients`),
and the host applies them after the step (`apply_gradients`). In eager mode, the
layer itself passes the gradients to the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap.layout.mesh.tracing import ThreadValue

# Attribute of a tensor that holds the rows of its keys, by layer.
_ROWS = "_layoutmap_rows_of_keys"


class LooksUpOnHost(Protocol):
    """A layer whose lookups run on the host."""

    name: str
    # Shape of the mark weight of the layer.
    mark_shape: tuple[int, ...]

    def look_up_on_host(self, keys: Any, *, is_training: bool) -> HostLookup:
        """Returns the rows of host keys."""
        ...

    def start_step(self) -> None:
        """Prepares for a step whose lookups have gradients."""
        ...

    def finish_step(
        self, gradients: Sequence[tuple[HostLookup, tf.Tensor]]
    ) -> None:
        """Applies the gradients of a step, if its optimizer was applied."""
        ...


@dataclasses.dataclass(eq=False)
class HostLookup:
    """A lookup that the host has run.

    Attributes:
      layer: The layer.
      rows: The rows on the host.
      store_gradients: Function that stores the gradients of the rows and
        returns their mark. None if the lookup is not a training step.
      position: Number of earlier lookups of the layer in the same step.
    """

    layer: LooksUpOnHost
    rows: tf.Tensor
    store_gradients: Callable[[tf.Tensor], tf.Tensor] | None
    position: int = 0


@dataclasses.dataclass(eq=False)
class RowsOnMesh:
    """The rows of a lookup, copied to the mesh.

    Attributes:
      lookup: The lookup.
      rows: The rows on the mesh.
      index: Index of the lookup in the step, or None outside of a step.
    """

    lookup: HostLookup
    rows: tf.Tensor
    index: int | None = None


def looks_up_on_host(layer: Any) -> bool:
    """Returns whether a layer on a mesh has a table of keys on the host."""
    return bool(getattr(layer, "looks_up_on_host", False))


def run(
    calls: Sequence[tuple[LooksUpOnHost, Any]], *, is_training: bool
) -> list[HostLookup]:
    """Runs the lookups of a step.

    Args:
      calls: Layer and host keys of each lookup.
      is_training: Whether gradients of the rows will be computed.
    """
    if is_training:
        for layer in dict.fromkeys(layer for layer, _ in calls):
            layer.start_step()
    found: list[HostLookup] = []
    for layer, keys in calls:
        lookup = layer.look_up_on_host(keys, is_training=is_training)
        lookup.position = sum(one.layer is layer for one in found)
        found.append(lookup)
    return found


def attach(keys: Any, found: RowsOnMesh) -> None:
    """Attaches rows to a tensor of keys, for the next call of the layer."""
    setattr(keys, _ROWS, [*getattr(keys, _ROWS, []), found])


def rows_for(layer: Any, keys: Any) -> RowsOnMesh | None:
    """Returns the rows that `attach` set for a call of `layer`, or None."""
    rows = getattr(keys, _ROWS, [])
    for number, one in enumerate(rows):
        if one.lookup.layer is layer:
            return rows.pop(number)
    return None


class StepGradients:
    """The gradients of the rows of a step that is being traced."""

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._found: dict[int, tf.Tensor] = {}

    def add(self, found: RowsOnMesh, gradient: tf.Tensor) -> None:
        """Adds the gradient of the rows of one lookup.

        Raises:
          RuntimeError: If the lookup already has a gradient.
          NotImplementedError: If a branch or another function computes the
            gradient.
        """
        layer = found.lookup.layer.name
        assert found.index is not None
        if found.index in self._found:
            raise RuntimeError(
                "A lookup in a table with an open vocabulary can be trained "
                "only once. Received: a second gradient of a lookup of layer "
                f"{layer!r} in one step on a mesh."
            )
        if gradient.graph is not self._graph:
            raise NotImplementedError(
                "On a mesh, gradients of a layer with an open vocabulary must "
                "be computed at the top level of a step. Received: a gradient "
                f"in function {gradient.graph.name!r} (layer {layer!r})."
            )
        self._found[found.index] = gradient

    def tensors(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the gradients, and the index of the lookup of each one.

        The order is the order in which the tape has computed the gradients. The
        engine sums the gradients of equal keys in this order.
        """
        return (
            list(self._found.values()),
            [tf.constant(one) for one in self._found],
        )


_collected: ThreadValue[StepGradients | None] = ThreadValue(None)
collecting = _collected.set_to


def collected() -> StepGradients | None:
    """Returns the gradients of the step that this thread traces, or None."""
    return _collected.get()


def apply_gradients(
    lookups: Sequence[HostLookup],
    gradients: Sequence[tf.Tensor],
    indices: Sequence[Any],
) -> None:
    """Applies the gradients of a step.

    Args:
      lookups: The lookups of the step.
      gradients: Gradients of the rows, on the host.
      indices: Index of the lookup of each gradient.
    """
    pairs = [
        (lookups[int(index)], gradient)
        for index, gradient in zip(indices, gradients)
    ]
    for layer in dict.fromkeys(
        one.layer for one in lookups if one.store_gradients is not None
    ):
        layer.finish_step([pair for pair in pairs if pair[0].layer is layer])
