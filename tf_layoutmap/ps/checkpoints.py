"""Writes the checkpoints of a `tlm.ps.Run`, each in a separate directory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging
from google.protobuf import message

from tf_layoutmap._core import files, tf_private
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.ps import folder_locks, messages
from tf_layoutmap.vocabulary import checkpoint_files

# The name contains the number of closures. If the same number is saved again,
# the name also contains a revision.
_NAME = re.compile(r"closure-(\d+)(?:\.(\d+))?")
_UNFINISHED = ".being-written"
_REMOVED = ".being-removed"
_STATE = "run.json"
_PREFIX = "variables"
# On file systems that are not local, the last digits of a revision are random.
_RANDOM = 10**6
# `tf.train.Checkpoint.save` adds an object with this name.
_COUNTER = "save_counter"
# The attribute of an embedding that contains the variables of its tables.
_TABLES = "/_variables/"
# Errors of TensorFlow for files that are missing, incomplete or changed.
_DAMAGED = (
    tf.errors.DataLossError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    IndexError,
    message.DecodeError,
)


class Saved(NamedTuple):
    """A complete checkpoint.

    Attributes:
      prefix: Prefix for `tf.train.Checkpoint.read`.
      num_done: Number of closures whose updates are in the checkpoint.
    """

    prefix: str
    num_done: int


class CheckpointFolder:
    """Directory of the checkpoints of a run; removes old checkpoints."""

    def __init__(self, folder: str | os.PathLike, max_to_keep: int):
        """Opens the directory, and creates it if it does not exist.

        Raises:
          OSError: If the directory is not writable or cannot be created, or if
            another program uses it.
        """
        path = os.fspath(folder)
        self._is_local = storage.is_local(path)
        # Local paths lose `.` and repeated slashes.
        self._folder = (
            str(pathlib.Path(storage.local_path(path)))
            if self._is_local
            else storage.absolute(path)
        )
        self._max_to_keep = max_to_keep
        storage.make_folders(self._folder)
        self._lock = folder_locks.lock(self._folder)
        self._remove_unfinished()
        for _, _, path in self._named():
            if not self._is_complete(path):
                logging.warning(
                    "%s is not a complete checkpoint, because it has no file "
                    "%s. It is ignored; delete it.",
                    path,
                    _STATE,
                )

    def newest(self) -> Saved | None:
        """Returns the newest complete checkpoint."""
        saved = self._all()
        if not saved:
            return None
        num_done, _, path = saved[-1]
        return Saved(os.path.join(path, _PREFIX), num_done)

    @contextlib.contextmanager
    def naming_damaged(self, saved: Saved) -> Iterator[None]:
        """Converts errors of damaged files to an error that names them.

        Args:
          saved: The checkpoint that the context reads.

        Raises:
          OSError: If a file is missing, incomplete or changed.
        """
        try:
            yield
        except (tf.errors.OpError, IndexError, message.DecodeError) as error:
            # TensorFlow's reader raises OpError instead of a derived class.
            if type(error) is not tf.errors.OpError and not isinstance(
                error, _DAMAGED
            ):
                raise
            path = os.path.dirname(saved.prefix)
            before = [
                storage.name_of(other)
                for _, _, other in self._all()
                if other != path
            ]
            raise OSError(
                errno.EIO,
                f"The newest checkpoint is damaged "
                f"({messages.sentence_of(str(error))}). To "
                + (
                    f"continue from {before[-1]!r}"
                    if before
                    else "start without a checkpoint"
                )
                + ", remove the directory",
                path,
            ) from error

    def save(self, num_done: int, write: Callable[[str], object]):
        """Writes a checkpoint, which readers see completely or not at all.

        On the local file system, the checkpoint is written under a temporary
        name, and then renamed. On other file systems, the file `run.json` is
        written last, and a directory without this file is ignored.

        An existing checkpoint with the same number of closures is replaced,
        because user code may have changed variables since then. No single
        system call can replace a directory. The new checkpoint therefore gets
        another name, and the old checkpoint is removed afterwards.

        Args:
          num_done: Number of closures whose updates are in the checkpoint.
          write: Function of a prefix, such as `tf.train.Checkpoint.write`.

        Raises:
          OSError: If the checkpoint cannot be written. Incomplete files are
            removed, and earlier checkpoints are not changed.
          tf.errors.UnavailableError, tf.errors.AbortedError: If a server is
            lost.
        """
        state = json.dumps({"num_done": num_done})
        name = self._next_name(num_done)
        if self._is_local:
            self._save_local(name, write, state)
        else:
            self._save_remote(os.path.join(self._folder, name), write, state)
            # Another program decides which checkpoints it keeps.
            self._check_owner()
        newest = {number: path for number, _, path in self._all()}
        kept = list(newest.values())[-self._max_to_keep :]
        for _, _, path in self._all():
            if path not in kept:
                self._remove(path)

    def _save_local(
        self, name: str, write: Callable[[str], object], state: str
    ) -> None:
        temporary = os.path.join(self._folder, f"{_UNFINISHED}-{name}")
        try:
            os.mkdir(temporary)
            _call_write(write, os.path.join(temporary, _PREFIX))
            storage.write_text(os.path.join(temporary, _STATE), state)
            # The files are synchronized before the rename. Otherwise, after a
            # crash of the machine, the directory could have its final name and
            # incomplete files.
            files.sync_tree(temporary)
            os.rename(temporary, os.path.join(self._folder, name))
            files.sync(self._folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _save_remote(
        self, path: str, write: Callable[[str], object], state: str
    ) -> None:
        self._check_owner()
        try:
            # The path is different for each writer.
            files.new_folder(path, path, _STATE)
            _call_write(write, os.path.join(path, _PREFIX))
            self._check_owner()
            files.publish_folder(path, path, path, _STATE, state)
        except BaseException:
            with contextlib.suppress(OSError):
                if not self._is_complete(path):
                    self._remove(path)
            raise

    def _check_owner(self) -> None:
        """Checks that this program still owns the directory.

        Raises:
          OSError: If another program owns it.
        """
        if self._lock is not None:
            self._lock.check()

    def _next_name(self, num_done: int) -> str:
        revisions = [
            revision
            for number, revision, _ in self._named()
            if number == num_done
        ]
        if self._is_local:
            return f"closure-{num_done}" + (
                f".{revisions[-1] + 1}" if revisions else ""
            )
        # Without a lock, another program may write a checkpoint of the same
        # number. The random part makes their names different.
        steps = max(revisions, default=0) // _RANDOM + 1
        revision = steps * _RANDOM + secrets.randbelow(_RANDOM)
        return f"closure-{num_done}.{revision}"

    def _is_complete(self, path: str) -> bool:
        """Returns whether a directory is a complete checkpoint.

        On a file system that is not local, another program can remove the index
        of a checkpoint that this program completes.
        """
        return storage.exists(os.path.join(path, _STATE)) and (
            self._is_local
            or (
                storage.is_file(os.path.join(path, _STATE))
                and storage.is_file(os.path.join(path, f"{_PREFIX}.index"))
            )
        )

    def _all(self) -> list[tuple[int, int, str]]:
        """Returns the complete checkpoints, from oldest to newest."""
        return [entry for entry in self._named() if self._is_complete(entry[2])]

    def _named(self) -> list[tuple[int, int, str]]:
        """Returns all paths with the name of a checkpoint, sorted."""
        return sorted(
            (
                int(match[1]),
                int(match[2] or 0),
                os.path.join(self._folder, name),
            )
            for name in storage.names_in(self._folder)
            if (match := _NAME.fullmatch(name))
        )

    def _remove(self, path: str):
        """Removes a checkpoint.

        On the local file system, the directory is renamed before it is deleted.
        """
        if not self._is_local:
            with contextlib.suppress(OSError):
                storage.remove(os.path.join(path, _STATE))
                storage.remove_tree(path, f"{_PREFIX}.index")
            return
        temporary = os.path.join(
            self._folder, f"{_REMOVED}-{storage.name_of(path)}"
        )
        try:
            os.rename(path, temporary)
        except OSError:
            return  # The checkpoint remains.
        shutil.rmtree(temporary, ignore_errors=True)

    def _remove_unfinished(self):
        if not self._is_local:
            for _, _, path in self._named():
                if not self._is_complete(path):
                    self._remove(path)
            return
        for name in storage.names_in(self._folder):
            if name.startswith((f"{_UNFINISHED}-", f"{_REMOVED}-")):
                shutil.rmtree(
                    os.path.join(self._folder, name), ignore_errors=True
                )


def _call_write(write: Callable[[str], object], prefix: str) -> None:
    """Calls `write(prefix)`, and converts TensorFlow's errors to `OSError`.

    Each server writes its own shards. If the disk of a server is full, for
    example, TensorFlow raises `ResourceExhaustedError`. Python raises `OSError`
    for a full disk.
    """
    try:
        write(prefix)
    except (tf.errors.UnavailableError, tf.errors.AbortedError):
        raise  # A server is lost.
    except tf.errors.OpError as error:
        raise OSError(
            files.error_number(error),
            "A server did not write its part of the checkpoint "
            f"({messages.sentence_of(error.message)})",
            prefix,
        ) from error


def check_objects(
    prefix: str,
    objects: Any,
    allow_missing: bool | Collection[str],
) -> None:
    """Checks that objects match the objects in a checkpoint.

    No values are restored. Variables that layers and optimizers create later,
    in `build`, are not checked.

    Args:
      prefix: Prefix of the checkpoint.
      objects: A `tf.train.Checkpoint` of the objects to restore.
      allow_missing: Names of objects that may be in the checkpoint without
        being in `objects`. True for all names.

    Raises:
      ValueError: If a variable has a different shape in the checkpoint, or if
        an object is only in the checkpoint or only in `objects`.
    """
    shapes, nodes = _read_graph(prefix)
    matched, wrong = _match(nodes, objects, shapes)
    names = {
        child.local_name: child.node_id
        for child in nodes[0].children
        if child.local_name != _COUNTER
    }
    problems = [
        f"{_shown(name)} has shape {list(shape)}, and {shapes[key]} in the "
        "checkpoint"
        for name, key, shape in wrong
    ]
    lost = {
        name: missing
        for name, node_id in sorted(names.items())
        if not (
            allow_missing
            if isinstance(allow_missing, bool)
            else name in allow_missing
        )
        and (
            missing := [
                path
                for node, path in _paths_below(nodes, node_id, name).items()
                if node not in matched and nodes[node].attributes
            ]
        )
    }
    differing = [name for name, _, _ in wrong]
    if lost:
        examples = [example for missing in lost.values() for example in missing]
        differing += examples
        problems.append(
            f"the objects lack {list(lost)}, completely or in part "
            f"({_first(examples)}), and the next checkpoint would lose it; "
            f"pass the missing objects, or name them in "
            f"`allow_missing={list(lost)}`"
        )
    added = sorted(
        set(tf.train.TrackableView.children(objects)) - {*names, _COUNTER}
    )
    if added:
        problems.append(f"the checkpoint lacks {added}")
    if problems:
        raise ValueError(
            "Argument `objects` must match the newest checkpoint, "
            f"{prefix!r}. Received objects with these differences: "
            f"{'; '.join(problems)}.{_remedy(differing)}"
        )


def not_restored(prefix: str, objects: Any) -> str:
    """Returns the differences of objects whose variables have no value.

    Args:
      prefix: Prefix of the checkpoint.
      objects: A `tf.train.Checkpoint`.
    """
    _, nodes = _read_graph(prefix)
    lacking = []
    todo = [("", 0, objects)]
    visited = set()
    while todo:
        path, node_id, trackable = todo.pop()
        if id(trackable) in visited:
            continue
        visited.add(id(trackable))
        known = {
            child.local_name: child.node_id
            for child in (nodes[node_id].children if node_id >= 0 else ())
        }
        if node_id < 0 and isinstance(trackable, tf.Variable):
            lacking.append(path)
        for name, child in tf.train.TrackableView.children(trackable).items():
            todo.append(
                (f"{path}/{name}".lstrip("/"), known.get(name, -1), child)
            )
    if not lacking:
        return ""
    return f"the checkpoint lacks {_first(lacking)}.{_remedy(lacking)}"


def _read_graph(prefix: str) -> tuple[Mapping[str, Sequence[int]], Any]:
    """Returns the shapes of the variables and the objects of a checkpoint."""
    reader = storage.open_checkpoint(prefix)
    nodes = checkpoint_files.read_object_graph(
        reader.get_tensor(checkpoint_files.OBJECT_GRAPH_KEY)
    ).nodes
    return reader.get_variable_to_shape_map(), nodes


def _shown(path: str) -> str:
    """Returns a path without the attributes of this package."""
    return path.replace(_TABLES, "/")


def _first(names: Sequence[str]) -> str:
    shown = [repr(_shown(name)) for name in sorted(names)]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + more


def _remedy(paths: Iterable[str]) -> str:
    """Returns a sentence for paths of tables, or an empty text."""
    if not any(_TABLES in path for path in paths):
        return ""
    return (
        " Tables must have the names, shapes and optimizers of the checkpoint; "
        "the optimizer of a table determines its slot variables. "
        "tlm.vocabulary.convert converts a checkpoint for another capacity, "
        "or for an open vocabulary."
    )


def _match(
    nodes: Any,
    root: Any,
    shapes: Mapping[str, Sequence[int]],
) -> tuple[set[int], list[tuple[str, str, list[int]]]]:
    """Returns the nodes of `root`, and the variables with a wrong shape."""
    matched: set[int] = set()
    later: set[int] = set()
    wrong = []
    todo = [("", 0, root)]
    while todo:
        path, node_id, trackable = todo.pop()
        if node_id in matched:
            continue
        matched.add(node_id)
        node = nodes[node_id]
        matched.update(
            slot.slot_variable_node_id for slot in node.slot_variables
        )
        for attribute in node.attributes:
            key = attribute.checkpoint_key
            if (
                attribute.name != tf_private.VARIABLE_VALUE_KEY
                or key not in shapes
                or not hasattr(trackable, "shape")
            ):
                continue
            shape = tf.TensorShape(trackable.shape)
            if not shape.is_compatible_with(tf.TensorShape(shapes[key])):
                wrong.append((repr(path), key, shape.as_list()))
        if _creates_variables_later(trackable):
            later.update(_paths_below(nodes, node_id))
        children = tf.train.TrackableView.children(trackable)
        for child in node.children:
            name = child.local_name
            if name in children:
                todo.append(
                    (
                        f"{path}/{name}".lstrip("/"),
                        child.node_id,
                        children[name],
                    )
                )
    return matched | later, wrong


def _creates_variables_later(trackable: Any) -> bool:
    """Returns whether an object is a layer or optimizer that is not built."""
    if hasattr(trackable, "built"):
        return not trackable.built
    # The optimizers of tf_keras have no attribute `built`.
    return hasattr(trackable, "iterations") and not getattr(
        trackable, "_built", False
    )


def _paths_below(nodes: Any, node_id: int, path: str = "") -> dict[int, str]:
    """Returns the paths of a node and all its descendants, by node."""
    paths: dict[int, str] = {}
    todo = [(node_id, path)]
    while todo:
        node, path = todo.pop()
        if node not in paths:
            paths[node] = path
            todo.extend(
                (child.node_id, f"{path}/{child.local_name}")
                for child in nodes[node].children
            )
    return paths
