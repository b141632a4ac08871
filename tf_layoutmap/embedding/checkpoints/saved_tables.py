"""Tables of an embedding in a checkpoint, stacked for SparseCores or not.

The object graph of a checkpoint contains the variables of each embedding, as
children of the attribute `_variables`: `{stack: {"parameters": rows, slot name:
slot variable}}`. If the tables are stacked, another child of the embedding
contains the layouts of all tables. Otherwise, each table is a stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2

from tf_layoutmap.embedding.checkpoints import layouts as table_layouts
from tf_layoutmap.embedding.checkpoints.layouts import (
    Array,
    Layouts,
    TableLayout,
)

VARIABLES = "_variables"
PARAMETERS = "parameters"
# Child of an embedding with stacked tables, which contains the layouts.
LAYOUTS = "_sparse_core_table_layouts"

Graph = trackable_object_graph_pb2.TrackableObjectGraph
# The slot variables of each table, by table and name. The value says whether
# the variable has one number per row (see `SlotSpec.is_per_row`).
Slots = Mapping[str, Mapping[str, bool]]


@dataclasses.dataclass(eq=False)
class SavedEmbedding:
    """The variables of one embedding in a checkpoint.

    Attributes:
      path: Prefix of the checkpoint, for messages.
      node: Index of the embedding in the object graph.
      nodes: Indices of the variables, by stack and by variable name.
      keys: Tensor names of the variables, by stack and by variable name.
      layouts: Layouts of the tables, by name.
      layouts_node: Index of the variable that contains the layouts, or None if
        the tables are not stacked.
      shapes: Shapes of the tensors of the checkpoint, by name.
      read_tensor: Function that takes the name of a tensor and returns it.
    """

    path: str
    node: int
    nodes: dict[str, dict[str, int]]
    keys: dict[str, dict[str, str]]
    layouts: dict[str, TableLayout]
    layouts_node: int | None
    shapes: Mapping[str, Any]
    read_tensor: Callable[[str], Any]
    _last: tuple[str, Array] | None = None

    def slots(self, table: str) -> dict[str, bool]:
        """Returns the saved slot variables of a table.

        The value says whether the variable has one number per row, which is
        False if the table has only one column.
        """
        layout = self.layouts[table]
        has_columns = layout.unsharded_shape[1] > 1
        return {
            name: has_columns and list(self.shapes[key])[1:] == [1]
            for name, key in self.keys.get(
                layout.stacked_table_name, {}
            ).items()
            if name != PARAMETERS
        }

    def values(
        self, layouts: Layouts, slots: Slots
    ) -> Iterator[tuple[str, str, Array]]:
        """Yields stack, variable name and value of variables with new layouts.

        The last tensor that was read stays in memory. The order of the
        variables avoids repeated reads of a tensor.

        Args:
          layouts: New layouts of the tables, which `check` has accepted.
          slots: Slot variables of each table; equal for all tables of a stack.
        """
        stacks = sorted(
            table_layouts.by_stack(layouts.values()).items(),
            key=lambda item: (
                self.layouts[item[1][0].table_name].stacked_table_name
            ),
        )
        names = sorted({name for table in layouts for name in slots[table]})
        for name in (PARAMETERS, *names):
            for stack, group in stacks:
                in_stack = slots[group[0].table_name]
                if name == PARAMETERS or name in in_stack:
                    tables = (
                        self._read(layout.table_name, name) for layout in group
                    )
                    yield (
                        stack,
                        name,
                        table_layouts.stacked(
                            ((rows, _padding(name, rows)) for rows in tables),
                            group,
                            in_stack.get(name, False),
                        ),
                    )
        self._last = None

    def _read(self, table: str, variable: str) -> Array:
        layout = self.layouts[table]
        key = self.keys[layout.stacked_table_name][variable]
        if self._last is None or self._last[0] != key:
            self._last = None  # Frees the memory before the next read.
            self._last = key, np.asarray(self.read_tensor(key))
        return table_layouts.unstacked(self._last[1], layout)

    def check(self, layouts: Layouts, slots: Slots) -> None:
        """Checks that the checkpoint contains exactly these tables.

        Args:
          layouts: Layouts of the tables of the program.
          slots: Slot variables of each table that are read.

        Raises:
          ValueError: If tables are missing or have other shapes or slot
            variables, or if a variable does not match the saved layouts.
        """
        where = f"(checkpoint {self.path!r})"
        if self.layouts.keys() != layouts.keys():
            raise ValueError(
                "The tables must be the tables of the checkpoint, "
                f"{sorted(self.layouts)}. Received: {sorted(layouts)} {where}."
            )
        for name, saved in self.layouts.items():
            shape = list(layouts[name].unsharded_shape)
            if list(saved.unsharded_shape) != shape:
                raise ValueError(
                    f"Table {name!r} must be restored from a table of shape "
                    f"{shape}. Received: shape {list(saved.unsharded_shape)} "
                    f"{where}."
                )
            keys = self.keys.get(saved.stacked_table_name, {})
            if missing := {PARAMETERS, *slots[name]} - keys.keys():
                raise ValueError(
                    f"Table {name!r} must be restored from a table with the "
                    f"variables {[PARAMETERS, *sorted(slots[name])]}. "
                    f"Received: {sorted(keys)}, without {sorted(missing)} "
                    f"{where}."
                )
            for variable in (PARAMETERS, *slots[name]):
                key = keys[variable]
                is_per_row = slots[name].get(variable, False)
                accepted = {table_layouts.stack_shape(saved, is_per_row)}
                if shape[1] == 1:  # Both kinds have one number per row.
                    accepted.add(
                        table_layouts.stack_shape(saved, not is_per_row)
                    )
                if tuple(self.shapes[key]) not in accepted:
                    expected = " or ".join(map(str, map(list, accepted)))
                    raise ValueError(
                        f"Variable {variable!r} of table {name!r} must be "
                        f"saved in a tensor of shape {expected}. "
                        f"Received: shape {list(self.shapes[key])} ({key!r} "
                        f"in checkpoint {self.path!r})."
                    )


def read_embedding(
    graph: Graph,
    node: int,
    path: str,
    shapes: Mapping[str, Any],
    read_tensor: Callable[[str], Any],
) -> SavedEmbedding | None:
    """Returns the embedding at a node of an object graph, or None.

    For the arguments, see `SavedEmbedding`.
    """
    children = children_of(graph, node)
    if VARIABLES not in children:
        return None
    nodes = {
        stack: {
            name: variable
            for name, variable in children_of(graph, number).items()
            if graph.nodes[variable].attributes
        }
        for stack, number in children_of(graph, children[VARIABLES]).items()
    }
    if not nodes or any(PARAMETERS not in names for names in nodes.values()):
        return None
    keys = {
        stack: {name: key_of(graph, number) for name, number in names.items()}
        for stack, names in nodes.items()
    }
    if LAYOUTS in children:
        layouts = sparse_core_layout_pb2.SparseCoreTableLayouts.FromString(
            read_tensor(key_of(graph, children[LAYOUTS]))
        ).tables
    else:
        layouts = [
            table_layouts.of_table(name, shapes[by_name[PARAMETERS]])
            for name, by_name in keys.items()
        ]
    return SavedEmbedding(
        path,
        node,
        nodes,
        keys,
        {layout.table_name: layout for layout in layouts},
        children.get(LAYOUTS),
        shapes,
        read_tensor,
    )


def children_of(graph: Graph, node: int) -> dict[str, int]:
    """Returns the indices of the children of a node, by attribute name."""
    return {
        child.local_name: child.node_id for child in graph.nodes[node].children
    }


def key_of(graph: Graph, node: int) -> str:
    """Returns the tensor name of a variable."""
    return graph.nodes[node].attributes[0].checkpoint_key


def _padding(variable: str, value: Array) -> float:
    """Returns the value with which a variable is padded.

    The padding of accumulators must not be 0, because optimizers divide by
    accumulators. Accumulators do not decrease in training, so their minimum is
    their initial value, or near it.
    """
    return float(np.min(value)) if variable == "accumulators" else 0.0
