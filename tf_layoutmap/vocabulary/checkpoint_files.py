"""Writes TensorFlow checkpoints one tensor at a time.

A checkpoint consists of an index and data files. The names of data files
contain the number of data files: for example `ck.index`, and
`ck.data-00000-of-00003` to `ck.data-00002-of-00003`. If two checkpoints have
different numbers of data files, their data files have different names and can
exist at the same time. The new checkpoint then replaces the old checkpoint
by a rename of the new index, which is one file. On local file systems, this is
atomic.

The module can also add and remove variables in the object graph of a
checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_layoutmap._core import files, paths, tf_private
from tf_layoutmap.deltas.served import storage


def prefix_of(path: str | os.PathLike[str]) -> str:
    """Returns a path as the prefix of a checkpoint, without trailing slashes.

    >>> prefix_of("models/ck-1/")
    'models/ck-1'
    """
    prefix = os.fspath(path)
    return prefix.rstrip("/") or prefix


def is_same_checkpoint(path: str, other: str) -> bool:
    """Returns whether two prefixes name the same checkpoint.

    Args:
      path: A prefix, or a folder. A folder represents the newest checkpoint in
        the folder.
      other: A prefix.
    """
    newest = (
        tf.train.latest_checkpoint(path) if tf.io.gfile.isdir(path) else None
    )
    return paths.is_same(f"{newest or path}.index", f"{other}.index")


def located(prefix: str) -> str:
    """Resolves links in the folder of a prefix.

    A symbolic link to a checkpoint file is not resolved, because a writer
    replaces the link itself, and not its target.
    """
    folder, name = os.path.split(prefix)
    return os.path.join(paths.resolve(folder), name)


def data_files(prefix: str) -> dict[str, int]:
    """Returns a dict from each data file to the file count in its name."""
    counts: dict[str, int] = {}
    for path in files.with_prefix(f"{prefix}.data-"):
        match = re.fullmatch(r"\.data-\d{5}-of-(\d{5})", path[len(prefix) :])
        if match:
            counts[path] = int(match[1])
    return counts


def files_of(prefix: str) -> list[str]:
    """Returns the data files of a checkpoint, in order.

    The index contains their number. In contrast to `data_files`, the function
    does not rely on a list of names, which can be out of date on some file
    systems.
    """
    count = _num_data_files(f"{prefix}.index") or 0
    return [
        f"{prefix}.data-{number:05d}-of-{count:05d}" for number in range(count)
    ]


class Reader:
    """Reader of the tensors of a checkpoint.

    Attributes:
      shapes: Shapes of the tensors, by name.
    """

    def __init__(self, prefix: str):
        """Opens the checkpoint.

        Raises:
          ValueError: If there is no checkpoint.
        """
        try:
            self._reader = storage.open_checkpoint(prefix)
        except (tf.errors.OpError, ValueError) as error:
            raise ValueError(
                "Argument `source` must be the prefix of a checkpoint of "
                f"TensorFlow. Received: source={prefix!r} ({error})."
            ) from None
        self._prefix = prefix
        self.shapes = {
            key: tuple(shape)
            for key, shape in self._reader.get_variable_to_shape_map().items()
        }

    def get_tensor(self, key: str) -> Any:
        """Returns a tensor.

        Raises:
          ValueError: If the checkpoint is truncated or corrupted.
        """
        try:
            return self._reader.get_tensor(key)
        except (tf.errors.OpError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"Could not read tensor {key!r} from the checkpoint at "
                f"{self._prefix!r}, which is truncated or corrupted: {error}."
            ) from None


def write_checkpoint(target: str, tensors: Iterable[tuple[str, Any]]) -> None:
    """Writes a TensorFlow checkpoint.

    Each tensor is written before the next tensor is requested. Only one tensor
    at a time is therefore in memory. If there is a checkpoint at `target`, one
    rename replaces this checkpoint after all new files have been synchronized
    to disk. If an error occurs or the process is killed before this rename, the
    existing checkpoint remains. The function also removes incomplete files of
    writers that were killed.

    Args:
      target: Prefix of the checkpoint.
      tensors: Names and values of the tensors, at least one.

    Raises:
      OSError: If the checkpoint cannot be written, or if another process is
        writing it.
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
        in_use = counts_in_use(target)
        while len(parts) in in_use:
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
    """A checkpoint of some tensors, for one data file of the target."""

    def __init__(
        self,
        prefix: str,
        names: list[str],
        values: list[tf.Tensor],
        target: str,
    ):
        """Writes the tensors.

        Args:
          prefix: Prefix to write to.
          names: Names of the tensors.
          values: Values of the tensors.
          target: Prefix of the complete checkpoint, for messages.
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
        self.num_bytes = sum(map(storage.size, files_of(prefix)))

    def join(self, other: _Part, target: str) -> _Part:
        """Returns a part with the tensors of this part and of `other`."""
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
    """Joins the two smallest parts into one part, with one data file."""
    if len(parts) == 1:
        raise FileExistsError(
            "A checkpoint of one tensor must not replace a checkpoint with one "
            "data file, because the replacement would not be atomic. "
            f"Remove the checkpoint at {target!r} first."
        )
    parts.sort(key=lambda part: part.num_bytes)
    parts[:2] = [parts[0].join(parts[1], target)]


def counts_in_use(prefix: str) -> set[int]:
    """Returns the numbers of data files that a new checkpoint must not have."""
    if not storage.is_file(f"{prefix}.index"):
        return set()
    count = _num_data_files(f"{prefix}.index")
    return set(data_files(prefix).values()) if count is None else {count}


def _num_data_files(index: str) -> int | None:
    """Reads the number of data files from an index; None if unreadable.

    An index is a sorted, uncompressed table of strings by key. The first entry
    of an index has an empty key and contains a `BundleHeaderProto`. The first
    field of this proto is the number of data files.
    """
    with storage.reading(index) as file:
        head = file.read(16)
    # The pattern matches zero bytes shared with the previous key, zero key
    # bytes, the length of the value, and field 1.
    match = re.match(rb"\x00\x00[\x02-\x7f]\x08([\x80-\xff]*[\x00-\x7f])", head)
    if match is None:
        return None
    return sum((byte & 127) << 7 * place for place, byte in enumerate(match[1]))


def replace_checkpoint(new: str, target: str) -> None:
    """Moves the checkpoint at `new` to `target`, atomically.

    At any time, `target` is either the complete old or the complete new
    checkpoint.

    Args:
      new: Prefix of a checkpoint on the same file system. The checkpoints at
        `new` and at `target` must have different numbers of data files.
      target: Prefix, as returned by `located`.

    Raises:
      OSError: If a file cannot be renamed.
    """
    folder, moved = os.path.dirname(target), set[str]()
    renames_index = False
    new_files = files_of(new)
    for path in (*new_files, f"{new}.index"):
        files.sync(path)
    try:
        for path in new_files:
            to = target + path[len(new) :]
            moved.add(to)
            storage.rename(path, to)
        files.sync(folder)
        renames_index = True
        storage.rename(f"{new}.index", f"{target}.index")
    except BaseException:
        # If the index still has its old name, `target` is not the new
        # checkpoint yet, and the moved data files are removed. Otherwise
        # `target` is already the new checkpoint. If the file system is not
        # local, both can be true after a rename that has failed.
        if (paths.is_local(target) or not renames_index) and storage.is_file(
            f"{new}.index"
        ):
            for path in moved:
                storage.remove(path)
        raise
    files.sync(folder)
    # The other data files belong to the old checkpoint or to killed writers.
    for path in data_files(target).keys() - moved:
        storage.remove(path)


def key_of(*path: str) -> str:
    """Returns the checkpoint key of a variable at a path of attributes."""
    escaped = [step.replace(".", "..").replace("/", ".S") for step in path]
    return "/".join([*escaped, ".ATTRIBUTES", tf_private.VARIABLE_VALUE_KEY])


# In a checkpoint, the tensor with this name contains the object graph.
OBJECT_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"


def read_object_graph(
    serialized: bytes,
) -> trackable_object_graph_pb2.TrackableObjectGraph:
    """Parses the object graph of a checkpoint."""
    return trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        serialized
    )


def without_nodes(
    graph: trackable_object_graph_pb2.TrackableObjectGraph,
    removed: Collection[int],
) -> tuple[trackable_object_graph_pb2.TrackableObjectGraph, dict[int, int]]:
    """Removes nodes and all references to them from an object graph.

    Args:
      graph: The graph, which is not modified.
      removed: Indices of the nodes to remove.

    Returns:
      The new graph, and the new index of each other node by its old index.
    """
    changed = trackable_object_graph_pb2.TrackableObjectGraph()
    new_number: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        if number not in removed:
            new_number[number] = len(changed.nodes)
            changed.nodes.append(node)
    for node in changed.nodes:
        kept = [child for child in node.children if child.node_id in new_number]
        for child in kept:
            child.node_id = new_number[child.node_id]
        del node.children[:]
        node.children.extend(kept)
        slots = [
            slot
            for slot in node.slot_variables
            if {slot.original_variable_node_id, slot.slot_variable_node_id}
            <= new_number.keys()
        ]
        for slot in slots:
            slot.original_variable_node_id = new_number[
                slot.original_variable_node_id
            ]
            slot.slot_variable_node_id = new_number[slot.slot_variable_node_id]
        del node.slot_variables[:]
        node.slot_variables.extend(slots)
    return changed, new_number


def changed_object_graph(
    serialized: bytes,
    siblings: Mapping[str, Mapping[str, str]],
    removed: Collection[str],
) -> bytes:
    """Adds and removes variables in a serialized object graph.

    Args:
      serialized: The serialized object graph of the checkpoint.
      siblings: Variables to add. Each key is the tensor name of an existing
        variable, and the new variables get the same parent as this variable.
        The value maps attribute names of new variables to their tensor names.
      removed: Tensor names of variables to remove.
    """
    graph = read_object_graph(serialized)
    node_of = {
        attribute.checkpoint_key: number
        for number, node in enumerate(graph.nodes)
        for attribute in node.attributes
    }
    changed_graph, new_number = without_nodes(
        graph, {node_of[key] for key in removed}
    )
    for key, by_name in siblings.items():
        sibling = new_number[node_of[key]]
        parent = next(
            node
            for node in changed_graph.nodes
            if any(child.node_id == sibling for child in node.children)
        )
        for name, tensor in by_name.items():
            parent.children.add(
                local_name=name, node_id=len(changed_graph.nodes)
            )
            node = changed_graph.nodes.add()
            node.attributes.add(name="VARIABLE_VALUE", checkpoint_key=tensor)
            node.has_checkpoint_values.value = True
    return changed_graph.SerializeToString()
