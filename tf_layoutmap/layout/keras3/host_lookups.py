"""Lookups in tables on the host for a step on a mesh.

DTensor has no rules for the operations of these tables, such as assigning rows
to keys. For a layer that directly follows the inputs of a model, the host
therefore looks up the rows before each step, and passes the rows to the mesh
together with the batch. The first tensor of ids on the mesh (or a mask, if the
ids are strings) carries the rows to the call of the layer (`attach`,
`rows_for`).

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

# Attribute of a tensor of ids that holds the rows of calls with the tensor.
_ROWS = "_layoutmap_rows_of_ids"


class TablesOnHost(Protocol):
    """The tables of a layer on a mesh whose lookups run on the host."""

    @property
    def layer_name(self) -> str:
        """Name of the layer."""
        ...

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape of the mark weight of the layer."""
        ...

    def look_up(
        self, inputs: Any, weights: Any, *, is_training: bool
    ) -> HostLookup:
        """Returns the rows of a call of the layer."""
        ...

    def start_step(self) -> None:
        """Prepares for a step whose lookups have gradients."""
        ...

    def finish_step(
        self, gradients: Sequence[tuple[HostLookup, Sequence[tf.Tensor]]]
    ) -> None:
        """Applies the gradients of a step, if its optimizer was applied."""
        ...


@dataclasses.dataclass(eq=False)
class HostLookup:
    """A lookup that the host has run.

    Attributes:
      table: The tables of the layer.
      rows: The rows on the host, one tensor for each feature of the layer.
      store_gradients: Function that stores the gradients of the rows and
        returns their mark. None if the lookup is not a training step.
      position: Number of earlier lookups of the layer in the same step.
    """

    table: TablesOnHost
    rows: list[tf.Tensor]
    store_gradients: Callable[[Sequence[tf.Tensor]], tf.Tensor] | None
    position: int = 0


@dataclasses.dataclass(eq=False)
class RowsOnMesh:
    """The rows of a lookup, copied to the mesh.

    Attributes:
      lookup: The lookup.
      rows: The rows on the mesh, one tensor for each feature of the layer.
      index: Index of the lookup in the step, or None outside of a step.
    """

    lookup: HostLookup
    rows: list[tf.Tensor]
    index: int | None = None


def tables_of(layer: Any) -> TablesOnHost | None:
    """Returns the host tables of a layer on a mesh, or None."""
    return getattr(layer, "_host_tables", None)


def run(
    calls: Sequence[tuple[TablesOnHost, Any, Any]], *, is_training: bool
) -> list[HostLookup]:
    """Runs the lookups of a step.

    Args:
      calls: Tables, host inputs and host weights of each lookup.
      is_training: Whether gradients of the rows will be computed.
    """
    if is_training:
        for table in dict.fromkeys(table for table, _, _ in calls):
            table.start_step()
    lookups: list[HostLookup] = []
    for table, inputs, weights in calls:
        lookup = table.look_up(inputs, weights, is_training=is_training)
        lookup.position = sum(other.table is table for other in lookups)
        lookups.append(lookup)
    return lookups


def attach(ids: Any, rows: RowsOnMesh) -> None:
    """Attaches rows to a tensor of ids, for the next call of the layer."""
    setattr(ids, _ROWS, [*getattr(ids, _ROWS, []), rows])


def rows_for(table: TablesOnHost, ids: Any) -> RowsOnMesh | None:
    """Returns the rows that `attach` set for a lookup in `table`, or None."""
    rows = getattr(ids, _ROWS, [])
    for number, entry in enumerate(rows):
        if entry.lookup.table is table:
            return rows.pop(number)
    return None


class StepGradients:
    """The gradients of the rows of a step that is being traced."""

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._gradients: dict[int, list[tf.Tensor]] = {}

    def add(self, rows: RowsOnMesh, gradients: Sequence[tf.Tensor]) -> None:
        """Adds the gradients of the rows of one lookup.

        Raises:
          RuntimeError: If the lookup already has gradients.
          NotImplementedError: If a branch or another function computes the
            gradients.
        """
        layer = rows.lookup.table.layer_name
        assert rows.index is not None
        if rows.index in self._gradients:
            raise RuntimeError(
                "A lookup in a table on the host can be trained only once. "
                "Received: a second gradient of a lookup of layer "
                f"{layer!r} in one step on a mesh."
            )
        for gradient in gradients:
            if gradient.graph is not self._graph:
                raise NotImplementedError(
                    "On a mesh, gradients of a layer whose tables are on the "
                    "host must be computed at the top level of a step. "
                    "Received: a gradient in function "
                    f"{gradient.graph.name!r} (layer {layer!r})."
                )
        self._gradients[rows.index] = list(gradients)

    def tensors(self) -> tuple[list[list[tf.Tensor]], list[tf.Tensor]]:
        """Returns the gradients of each lookup, and the index of the lookup.

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
    gradients: Sequence[Sequence[tf.Tensor]],
    indices: Sequence[Any],
) -> None:
    """Applies the gradients of a step.

    Args:
      lookups: The lookups of the step.
      gradients: Gradients of the rows of lookups, on the host.
      indices: Index of the lookup of each element of `gradients`.
    """
    pairs = [
        (lookups[int(index)], own) for index, own in zip(indices, gradients)
    ]
    for table in dict.fromkeys(
        lookup.table for lookup in lookups if lookup.store_gradients is not None
    ):
        table.finish_step([pair for pair in pairs if pair[0].table is table])
