"""Checkpoints of TensorFlow that are written one tensor at a time.

A checkpoint is an index and data files, whose names have their number:
`ck.index` and `ck.data-00000-of-00003` to `-00002-of-00003`. So a checkpoint
takes another's place when its index does, if its data files are as many as no
other's: those of both are then there for a moment.
"""

# DOC-MERGE: What a checkpoint says of its objects, changed where variables come or go.
from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_layoutmap._core import files, paths


def prefix_of(path: str | os.PathLike[str]) -> str:
    """Returns a path as the prefix of a checkpoint, without a slash at its end.

    >>> prefix_of("models/ck-1/")
    'models/ck-1'
    """
    prefix = os.fspath(path)
    return prefix.rstrip("/") or prefix


def is_same_checkpoint(one: str, other: str) -> bool:
    """Returns whether two prefixes name the same checkpoint.

    Args:
      one: A prefix, or a folder whose newest checkpoint is meant.
      other: A prefix.
    """
    newest = (
        tf.train.latest_checkpoint(one) if (tf.io.gfile.isdir(one)) else None
    )
    return paths.is_same(f"{newest or one}.index", f"{other}.index")


def located(prefix: str) -> str:
    """Returns a prefix whose folder is resolved.

    Files of a checkpoint that are links stay links: writers replace the link.
    """
    folder, name = os.path.split(prefix)
    return os.path.join(paths.resolve(folder), name)


def data_files(prefix: str) -> dict[str, int]:
    """Returns the data files at a prefix, and how many each is one of."""
    found: dict[str, int] = {}
    matching = (
        glob.glob(f"{glob.escape(prefix)}.data-*")
        if paths.is_local(prefix)
        else tf.io.gfile.glob(f"{prefix}.data-*")
    )
    for path in matching:
        match = re.fullmatch(r"\.data-\d{5}-of-(\d{5})", path[len(prefix) :])
        if match:
            found[path] = int(match[1])
    return found


def write_checkpoint(target: str, tensors: Iterable[tuple[str, Any]]) -> None:
    """Writes a checkpoint of TensorFlow.

    Each tensor is written before the next one is asked for, so that one at a
    time is in memory. A checkpoint at `target` is replaced at the end by one
    renaming, after the disk has the new one, and stays if something fails or
    the process is killed. What killed writers of it left is removed.

    Args:
      target: Its prefix.
      tensors: Names and values, at least one.

    Raises:
      OSError: If it cannot be written, or is being written by another process.
    """
    target = located(target)
    files.make_parent(target)
    with files.staged(target, alone=True) as folder:
        parts: list[_Part] = []
        for name, value in tensors:
            with tf.device("CPU:0"):
                value = tf.constant(value)
            parts.append(
                _Part(
                    os.path.join(folder, f"part-{len(parts)}"),
                    [name],
                    [value],
                    target,
                )
            )
            del value
        taken = counts_in_use(target)
        while len(parts) in taken:
            _join_smallest(parts, target)
        new = os.path.join(folder, "new")
        with files.os_errors(target):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[part.prefix for part in parts],
                destination_prefix=new,
                delete_old_dirs=False,
            )
        replace_checkpoint(new, target)


class _Part:
    """A checkpoint of a few tensors, which becomes a data file."""

    def __init__(
        self,
        prefix: str,
        names: list[str],
        values: list[tf.Tensor],
        target: str,
    ):
        """Writes it.

        Args:
          prefix: Where to.
          names: Of the tensors.
          values: Of each.
          target: Of what it is a part, for messages.
        """
        self.prefix = prefix
        self._names = names
        self._dtypes = [value.dtype for value in values]
        with tf.device("CPU:0"), files.os_errors(target):
            tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=values,
            )
            self.num_bytes = sum(
                tf.io.gfile.stat(path).length for path in data_files(prefix)
            )

    def join(self, other: _Part, target: str) -> _Part:
        """Returns a part with the tensors of both."""
        with tf.device("CPU:0"), files.os_errors(target):
            values = [
                value
                for part in (self, other)
                for value in tf.raw_ops.RestoreV2(
                    prefix=part.prefix,
                    tensor_names=part._names,
                    shape_and_slices=[""] * len(part._names),
                    dtypes=part._dtypes,
                )
            ]
        return _Part(
            f"{self.prefix}-joined", self._names + other._names, values, target
        )


def _join_smallest(parts: list[_Part], target: str) -> None:
    """Joins two parts, so that there is one data file less."""
    if len(parts) == 1:
        raise FileExistsError(
            f"A checkpoint of one tensor cannot take the place of another at "
            f"once: remove the one at {target!r} before."
        )
    parts.sort(key=lambda part: part.num_bytes)
    parts[:2] = [parts[0].join(parts[1], target)]


def counts_in_use(prefix: str) -> set[int]:
    """Returns the numbers of data files that a new checkpoint must not have."""
    if not tf.io.gfile.exists(f"{prefix}.index"):
        return set()
    count = _count_of(f"{prefix}.index")
    return set(data_files(prefix).values()) if count is None else {count}


def _count_of(index: str) -> int | None:
    """The number of data files that an index names, if it can be read.

    An index is a table of strings by key, sorted and here uncompressed. It
    begins with a `BundleHeaderProto`, whose key is empty; the first field of
    that is this number.
    """
    with tf.io.gfile.GFile(index, "rb") as file:
        head = file.read(16)
    # No bytes shared with the key before, none of its own, length, field 1.
    match = re.match(rb"\x00\x00[\x02-\x7f]\x08([\x80-\xff]*[\x00-\x7f])", head)
    if match is None:
        return None
    return sum((byte & 127) << 7 * place for place, byte in enumerate(match[1]))


def replace_checkpoint(new: str, target: str) -> None:
    """Renames a checkpoint; `target` is the old or the new one at any time.

    Args:
      new: Prefix of a checkpoint on the same file system. Its number of data
        files differs from the number at `target`.
      target: Prefix, as returned by `located`.

    Raises:
      OSError: A file cannot be renamed.
    """
    folder, moved = os.path.dirname(target), set[str]()
    for path in (*data_files(new), f"{new}.index"):
        files.sync(path)
    try:
        for path in sorted(data_files(new)):
            to = target + path[len(new) :]
            moved.add(to)
            files.rename(path, to)
        files.sync(folder)
        files.rename(f"{new}.index", f"{target}.index")
    except BaseException:
        # Unless the index was renamed, and then interrupted.
        if tf.io.gfile.exists(f"{new}.index"):
            for path in moved:
                files.remove(path)
        raise
    files.sync(folder)
    # Of the checkpoint before, and of writers that were killed.
    for path in data_files(target).keys() - moved:
        files.remove(path)


# The tensor that holds it, as TensorFlow names it.
OBJECT_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"


def read_object_graph(
    serialized: bytes,
) -> trackable_object_graph_pb2.TrackableObjectGraph:
    """Returns the graph of a checkpoint, of the tensor that holds it."""
    return trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        serialized
    )


def changed_object_graph(
    serialized: bytes,
    siblings: Mapping[str, Mapping[str, str]],
    removed: Collection[str],
) -> bytes:
    """Returns the graph with other variables.

    Args:
      serialized: As the checkpoint has it.
      siblings: By the tensor of a variable that is there, what comes beside
        it: by name of the attribute, the tensor.
      removed: Tensors of variables that go.
    """
    graph = read_object_graph(serialized)
    node_of = {
        attribute.checkpoint_key: number
        for number, node in enumerate(graph.nodes)
        for attribute in node.attributes
    }
    gone = {node_of[key] for key in removed}
    new_number: dict[int, int] = {}
    found = trackable_object_graph_pb2.TrackableObjectGraph()
    for number, node in enumerate(graph.nodes):
        if number not in gone:
            new_number[number] = len(found.nodes)
            found.nodes.append(node)
    for node in found.nodes:
        kept = [child for child in node.children if child.node_id not in gone]
        for child in kept:
            child.node_id = new_number[child.node_id]
        del node.children[:]
        node.children.extend(kept)
        for slot in node.slot_variables:
            slot.original_variable_node_id = new_number[
                slot.original_variable_node_id
            ]
            slot.slot_variable_node_id = new_number[slot.slot_variable_node_id]
    for key, by_name in siblings.items():
        sibling = new_number[node_of[key]]
        parent = next(
            node
            for node in found.nodes
            if any(child.node_id == sibling for child in node.children)
        )
        for name, tensor in by_name.items():
            parent.children.add(local_name=name, node_id=len(found.nodes))
            node = found.nodes.add()
            node.attributes.add(name="VARIABLE_VALUE", checkpoint_key=tensor)
            node.has_checkpoint_values.value = True
    return found.SerializeToString()
