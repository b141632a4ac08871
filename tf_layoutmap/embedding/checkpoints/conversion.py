"""`convert_checkpoint`: converts tables for other SparseCores, or for none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from tensorflow.core.tpu.kernels import sparse_core_layout_pb2

from tf_layoutmap._core import checks
from tf_layoutmap.embedding.checkpoints import layouts as table_layouts
from tf_layoutmap.embedding.checkpoints import saved_tables
from tf_layoutmap.embedding.checkpoints.layouts import TableLayout
from tf_layoutmap.embedding.checkpoints.saved_tables import (
    LAYOUTS,
    PARAMETERS,
    VARIABLES,
    Graph,
    SavedEmbedding,
    Slots,
    children_of,
)
from tf_layoutmap.vocabulary import checkpoint_files, parts

# Variable of a table with 16-bit rows. Converted tables are float32.
_ROUNDING_STEPS = "rounding_steps"
_Path = tuple[str, ...]


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    layouts: Mapping[str, TableLayout] | None = None,
    *,
    embedding: str | None = None,
) -> None:
    """Converts the tables of a checkpoint for SparseCores or for other devices.

    TensorFlow's `tf.tpu.experimental.embedding.TPUEmbeddingV2` saves tables in
    stacked variables, whose rows depend on the number of SparseCores. All other
    embeddings, such as `tlm.TPUEmbedding` and TensorFlow's `TPUEmbedding`, save
    one tensor for each table and for each of its slot variables. The function
    converts either format to the other format, and stacked variables to other
    stacks or another number of SparseCores. The values of rows and slot
    variables do not change, and all other variables are copied. Rows of 16 bits
    become float32.

    `tlm.TPUEmbedding` also restores a checkpoint with stacked tables directly.

    Args:
      source: Prefix of a TensorFlow checkpoint, such as the result of
        `tf.train.Checkpoint.save`.
      target: Prefix of the new checkpoint. `target` must differ from `source`.
        An existing checkpoint is replaced when the new checkpoint is complete.
      layouts: The attribute `embedding_layouts` of the `TPUEmbeddingV2` that
        will restore the checkpoint. The embedding does not have to be built.
        None writes one tensor per table.
      embedding: Attribute path of the embedding in the checkpoint, such as
        `"model/embedding"`. None selects the only embedding.

    Raises:
      TypeError: If `layouts` is not a mapping to layouts.
      ValueError: If `target` equals `source`, the checkpoint does not contain
        exactly one embedding or not the embedding `embedding`, `layouts` has
        other tables than the checkpoint or tables with other shapes, tables of
        a stack have different optimizers, a table has an open vocabulary, or
        `source` is truncated or corrupted. In this case, no file is written.
      OSError: If `target` cannot be written, or if another process is writing
        it. An existing checkpoint is not changed.
    """
    source, target = map(checkpoint_files.prefix_of, (source, target))
    if checkpoint_files.is_same_checkpoint(source, target):
        raise ValueError(
            checks.message("target", "another prefix than `source`", target)
        )
    if layouts is not None and not (
        isinstance(layouts, Mapping)
        and all(isinstance(layout, TableLayout) for layout in layouts.values())
    ):
        raise TypeError(
            checks.message(
                "layouts",
                "the `embedding_layouts` of a TPUEmbeddingV2",
                layouts,
            )
        )
    reader = checkpoint_files.Reader(source)
    graph = checkpoint_files.read_object_graph(
        reader.get_tensor(checkpoint_files.OBJECT_GRAPH_KEY)
        if checkpoint_files.OBJECT_GRAPH_KEY in reader.shapes
        else b""
    )
    path, saved = _find_embedding(graph, source, reader, embedding)
    if not layouts and saved.layouts_node is None:
        raise ValueError(
            "Argument `layouts` must be the `embedding_layouts` of a "
            "TPUEmbeddingV2 if the tables in `source` are not stacked. "
            f"Received: layouts={layouts!r} ({source!r})."
        )
    new_layouts = dict(layouts or {}) or {
        name: table_layouts.of_table(name, layout.unsharded_shape)
        for name, layout in saved.layouts.items()
    }
    slots = _slots(saved, new_layouts)
    saved.check(new_layouts, slots)
    checkpoint_files.write_checkpoint(
        target,
        _tensors(reader, graph, path, saved, new_layouts, slots, bool(layouts)),
    )


def _find_embedding(
    graph: Graph,
    source: str,
    reader: checkpoint_files.Reader,
    name: str | None,
) -> tuple[_Path, SavedEmbedding]:
    """Returns the embedding to convert and its attribute path."""
    paths: dict[int, _Path] = {0: ()} if graph.nodes else {}
    queue = list(paths)
    embeddings: dict[str | None, tuple[_Path, SavedEmbedding]] = {}
    for node in queue:  # The loop appends to the queue.
        for attribute, child in children_of(graph, node).items():
            if child not in paths:
                paths[child] = (*paths[node], attribute)
                queue.append(child)
        saved = saved_tables.read_embedding(
            graph, node, source, reader.shapes, reader.get_tensor
        )
        if saved is not None:
            embeddings["/".join(paths[node])] = paths[node], saved
    if name is None and len(embeddings) == 1:
        (name,) = embeddings
    if name not in embeddings:
        raise ValueError(
            checks.message(
                "embedding",
                f"the attribute path of an embedding in {source!r}, one of "
                f"{list(embeddings)}, or None if there is only one embedding",
                name,
            )
        )
    return embeddings[name]


def _slots(
    saved: SavedEmbedding, layouts: Mapping[str, TableLayout]
) -> dict[str, dict[str, bool]]:
    """Returns the slot variables that each table of the new layouts needs."""
    slots = {name: saved.slots(name) for name in saved.layouts}
    for name, owned in slots.items():
        owned.pop(_ROUNDING_STEPS, None)
        if parts.KEYS in owned:
            raise ValueError(
                f"Table {name!r} must have ids that are row indices, because "
                "SparseCores do not support open vocabularies. Received: a "
                f"table with an open vocabulary (checkpoint {saved.path!r}). "
                "Convert it first with tlm.vocabulary.convert."
            )
    for group in table_layouts.by_stack(layouts.values()).values():
        names = [layout.table_name for layout in group]
        in_stack: dict[str, bool] = {}
        for name in names:
            for slot, is_per_row in slots.get(name, {}).items():
                in_stack[slot] = is_per_row or in_stack.get(slot, False)
        slots.update(dict.fromkeys(names, in_stack))
    return slots


def _tensors(
    reader: checkpoint_files.Reader,
    graph: Graph,
    path: _Path,
    saved: SavedEmbedding,
    layouts: Mapping[str, TableLayout],
    slots: Slots,
    is_stacked: bool,
) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of the new checkpoint, computed on demand."""
    old = {node for nodes in saved.nodes.values() for node in nodes.values()}
    if saved.layouts_node is not None:
        old.add(saved.layouts_node)
    removed = {saved_tables.key_of(graph, node) for node in old}
    for key in sorted(
        reader.shapes.keys() - removed - {checkpoint_files.OBJECT_GRAPH_KEY}
    ):
        yield key, reader.get_tensor(key)
    keys: dict[str, dict[str, str]] = {}
    for stack, name, value in saved.values(layouts, slots):
        key = checkpoint_files.key_of(
            *path,
            *(
                [_attribute(stack, name)]
                if is_stacked
                else [VARIABLES, stack, name]
            ),
        )
        keys.setdefault(stack, {})[name] = key
        yield key, value
    if is_stacked:
        yield (
            checkpoint_files.key_of(*path, LAYOUTS),
            sparse_core_layout_pb2.SparseCoreTableLayouts(
                tables=layouts.values()
            ).SerializeToString(),
        )
    parent = children_of(graph, saved.node)[VARIABLES]
    graph, numbers = checkpoint_files.without_nodes(
        graph, {*old, parent, *children_of(graph, parent).values()}
    )
    _add_variables(graph, numbers[saved.node], path, keys, is_stacked)
    yield checkpoint_files.OBJECT_GRAPH_KEY, graph.SerializeToString()


def _attribute(stack: str, variable: str) -> str:
    """Returns the attribute of a `TPUEmbeddingV2` that holds a variable."""
    return stack if variable == PARAMETERS else f"{stack}/{variable}"


def _add_variables(
    graph: Graph,
    embedding: int,
    path: _Path,
    keys: Mapping[str, Mapping[str, str]],
    is_stacked: bool,
) -> None:
    """Adds the new variables to an embedding of the object graph."""

    def add(parent: int, name: str, key: str | None = None) -> int:
        number = len(graph.nodes)
        node = graph.nodes.add()
        node.has_checkpoint_values.value = True
        if key is not None:
            node.attributes.add(name="VARIABLE_VALUE", checkpoint_key=key)
        graph.nodes[parent].children.add(local_name=name, node_id=number)
        return number

    # TensorFlow's `TPUEmbedding` has a registered saver, which other classes
    # do not accept.
    graph.nodes[embedding].ClearField("registered_saver")
    parent = add(embedding, VARIABLES)
    for stack, by_name in keys.items():
        group = add(parent, stack)
        for name, key in by_name.items():
            number = add(group, name, key)
            if is_stacked:
                graph.nodes[embedding].children.add(
                    local_name=_attribute(stack, name), node_id=number
                )
    if is_stacked:
        add(embedding, LAYOUTS, checkpoint_files.key_of(*path, LAYOUTS))
