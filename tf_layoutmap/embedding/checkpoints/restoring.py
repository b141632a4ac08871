"""Restores checkpoints whose tables are stacked in another way.

TensorFlow restores each variable from the variable with the same name in the
checkpoint. If tables are stacked only in the checkpoint, only in the program,
or in different ways, `TableRestore` reads the tables instead. TensorFlow still
restores all other objects of the checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import tensorflow as tf

from tf_layoutmap._core import patches
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.embedding.checkpoints import layouts as table_layouts
from tf_layoutmap.embedding.checkpoints import saved_tables
from tf_layoutmap.embedding.checkpoints.layouts import Array
from tf_layoutmap.embedding.checkpoints.saved_tables import (
    LAYOUTS,
    PARAMETERS,
    Layouts,
    SavedEmbedding,
    Slots,
)
from tf_layoutmap.embedding.configs import optimizer_specs

if TYPE_CHECKING:

    class _Trackable:  # Declares a method of TensorFlow's base class.
        def _lookup_dependency(self, name: str) -> Any: ...

    class _Embedding:  # Declares the methods of TensorFlow's class.
        _table_config: list[Any]
        _variables: dict[str, dict[str, Any]]
        _built: bool
        embedding_layouts: dict[str, Any]

        def build(self) -> None: ...
else:
    _Trackable = _Embedding = object

Variables = Mapping[str, Mapping[str, Any]]


class TableRestore(_Trackable):
    """Base class of embeddings that restore tables with any layouts.

    A subclass implements the first three methods, and calls `_finish_restore`
    after it has created its variables.
    """

    _is_stacked = False
    _pending_tables: _Pending | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Lets TensorFlow call `restore_tables` for each restored object."""
        del args, kwargs
        patches.ensure("table_restores")
        return super().__new__(cls)

    def _layouts_and_slots(self) -> tuple[Layouts, Slots]:
        """Returns the tables of the program."""
        raise NotImplementedError

    def _restored_variables(self) -> Variables | None:
        """Returns the variables, or None if they do not exist yet."""
        raise NotImplementedError

    def _assign_tables(
        self, values: Iterable[tuple[str, str, Array]], variables: Variables
    ) -> None:
        """Assigns values, which follow the stack and the variable name."""
        raise NotImplementedError

    def _finish_restore(self, variables: Variables) -> None:
        """Assigns the tables of a restore before the variables existed."""
        pending, self._pending_tables = self._pending_tables, None
        if pending is not None:
            pending.assign(self, variables)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pending:
    """A restore of the tables of one embedding.

    Attributes:
      saved: The embedding in the checkpoint.
      layouts: Layouts of the tables in the program.
      slots: Slot variables of the tables in the program.
      checkpoint: TensorFlow's object for this restore.
    """

    saved: SavedEmbedding
    layouts: Layouts
    slots: Slots
    checkpoint: Any

    def assign(self, embedding: TableRestore, variables: Variables) -> None:
        """Assigns all variables, and marks them as restored."""
        embedding._assign_tables(
            self.saved.values(self.layouts, self.slots), variables
        )
        restored = [
            *(
                variable
                for by_name in variables.values()
                for variable in by_name.values()
            ),
            embedding._lookup_dependency(LAYOUTS),
        ]
        for number, variable in enumerate(restored):
            if variable is not None:
                # An earlier restore whose values are still pending must not
                # overwrite the variable.
                variable._maybe_initialize_trackable()
                variable._update_uid = self.checkpoint.restore_uid
                # `assert_consumed` compares the values of this dict with the
                # objects of the program. TensorFlow's own keys are integers.
                key = id(embedding), number
                self.checkpoint.object_by_proto_id[key] = variable


def restore_tables(
    original: Callable[..., Any], position: Any, trackable: Any
) -> Any:
    """Restores the tables of an embedding before its other children.

    Args:
      original: TensorFlow's function, which first calls the checks of the
        object (`_checkpoint_adapter`).
      position: Node of the object graph of a checkpoint that is restored.
      trackable: The object that is restored from the node.
    """
    adapter = original(position, trackable)
    if isinstance(trackable, TableRestore):
        _restore(position, trackable)
    return adapter


def _restore(position: Any, embedding: TableRestore) -> None:
    embedding._pending_tables = None  # A later restore replaces an earlier one.
    checkpoint, node = position.checkpoint, position.proto_id
    graph, path = checkpoint.object_graph_proto, checkpoint.save_path_string
    is_stacked = LAYOUTS in saved_tables.children_of(graph, node)
    if not is_stacked and not embedding._is_stacked:
        return
    reader = storage.open_checkpoint(path)
    saved = saved_tables.read_embedding(
        graph,
        node,
        path,
        reader.get_variable_to_shape_map(),
        functools.partial(storage.read_tensor, reader, path),
    )
    if saved is None:
        return
    layouts, slots = embedding._layouts_and_slots()
    if is_stacked and table_layouts.same_rows(saved.layouts, layouts):
        return
    saved.check(layouts, slots)
    # TensorFlow skips nodes to which an object belongs.
    nodes = {
        saved.nodes[saved.layouts[table].stacked_table_name][name]
        for table in layouts
        for name in (PARAMETERS, *slots[table])
    }
    for node in nodes | {saved.layouts_node} - {None}:
        checkpoint.object_by_proto_id[node] = embedding
        checkpoint.matched_proto_ids.add(node)
    pending = _Pending(saved, layouts, slots, checkpoint)
    variables = embedding._restored_variables()
    if variables is None:
        embedding._pending_tables = pending
        return
    # Detects a damaged file before the first variable changes.
    for _ in saved.values(layouts, slots):
        pass
    pending.assign(embedding, variables)


class SparseCoreRestore(TableRestore, _Embedding):
    """Methods of a `TPUEmbeddingV2` that restores tables with any layouts.

    A subclass inherits from this class and from TensorFlow's class, in this
    order. TensorFlow's own class restores other layouts only before `build`,
    and then without slot variables.
    """

    _is_stacked = True

    def build(self) -> None:
        """Creates the variables, with the values of a pending restore."""
        is_new = not self._built
        super().build()
        if is_new:
            self._finish_restore(self._variables)

    def _checkpoint_adapter(self, path: str) -> None:
        del path  # TensorFlow's adapter ignores slot variables.

    def _layouts_and_slots(self) -> tuple[Layouts, Slots]:
        slots = {}
        for table in self._table_config:
            optimizer = optimizer_specs.read_optimizer(
                table.optimizer, table=table.name
            )
            slots[table.name] = {
                slot.name: slot.is_per_row
                for slot in (optimizer.slots if optimizer else ())
            }
        return self.embedding_layouts, slots

    def _restored_variables(self) -> Variables | None:
        return self._variables if self._built else None

    def _assign_tables(
        self, values: Iterable[tuple[str, str, Array]], variables: Variables
    ) -> None:
        for stack, name, value in values:
            start = 0
            for shard in variables[stack][name].values:
                stop = start + shard.shape[0]
                with tf.device(shard.device):
                    shard.assign(value[start:stop])
                start = stop
