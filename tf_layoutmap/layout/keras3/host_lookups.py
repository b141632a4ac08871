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


class KeysOnHost(Protocol):
    """The table of a layer on a mesh whose lookups run on the host."""

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        ...

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the mark weight of the layer."""
        ...

    def look_up(self, keys: Any, *, is_training: bool) -> HostLookup:
        """Returns the rows of keys."""
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
      table: The table.
      rows: The rows on the host.
      store_gradients: Function that stores the gradients of the rows and
        returns their mark. None if the lookup is not a training step.
      position: Number of earlier lookups in the table in the same step.
    """

    table: KeysOnHost
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


def keys_of(layer: Any) -> KeysOnHost | None:
    """Returns the table of a layer on a mesh if it is on the host, or None."""
    return getattr(layer, "_mesh_keys", None)


def run(
    calls: Sequence[tuple[KeysOnHost, Any]], *, is_training: bool
) -> list[HostLookup]:
    """Runs the lookups of a step.

    Args:
      calls: Table and host keys of each lookup.
      is_training: Whether gradients of the rows will be computed.
    """
    if is_training:
        for table in dict.fromkeys(table for table, _ in calls):
            table.start_step()
    lookups: list[HostLookup] = []
    for table, keys in calls:
        lookup = table.look_up(keys, is_training=is_training)
        lookup.position = sum(other.table is table for other in lookups)
        lookups.append(lookup)
    return lookups


def attach(keys: Any, rows: RowsOnMesh) -> None:
    """Attaches rows to a tensor of keys, for the next call of the layer."""
    setattr(keys, _ROWS, [*getattr(keys, _ROWS, []), rows])


def rows_for(table: KeysOnHost, keys: Any) -> RowsOnMesh | None:
    """Returns the rows that `attach` set for a lookup in `table`, or None."""
    rows = getattr(keys, _ROWS, [])
    for number, entry in enumerate(rows):
        if entry.lookup.table is table:
            return rows.pop(number)
    return None


class StepGradients:
    """The gradients of the rows of a step that is being traced."""

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._gradients: dict[int, tf.Tensor] = {}

    def add(self, rows: RowsOnMesh, gradient: tf.Tensor) -> None:
        """Adds the gradient of the rows of one lookup.

        Raises:
          RuntimeError: If the lookup already has a gradient.
          NotImplementedError: If a branch or another function computes the
            gradient.
        """
        layer = rows.lookup.table.layer_name
        assert rows.index is not None
        if rows.index in self._gradients:
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
        self._gradients[rows.index] = gradient

    def tensors(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the gradients, and the index of the lookup of each one.

        The order is the order in which the tape has computed the gradients. The
        engine sums the gradients of equal keys in this order.
        """
        return (
            list(self._gradients.values()),
            [tf.constant(index) for index in self._gradients],
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
    for table in dict.fromkeys(
        lookup.table for lookup in lookups if lookup.store_gradients is not None
    ):
        table.finish_step([pair for pair in pairs if pair[0].table is table])
