"""Checkpoints of a run: each a folder, written aside and renamed."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import files, tf_private
from tf_layoutmap.ps import messages
from tf_layoutmap.vocabulary import checkpoint_files

# The number of closures; and if it was saved again after as many, how often.
_NAME = re.compile(r"closure-(\d+)(?:\.(\d+))?")
_ASIDE = ".being-written"
_REMOVED = ".being-removed"
_STATE = "run.json"
_PREFIX = "variables"
# What `tf.train.Checkpoint.save` adds to the objects.
_COUNTER = "save_counter"


class Saved(NamedTuple):
    """A complete checkpoint.

    Attributes:
      prefix: For `tf.train.Checkpoint.read`.
      num_done: Closures whose updates it holds.
    """

    prefix: str
    num_done: int


class CheckpointFolder:
    """The checkpoints of one run, the newest few of which are kept."""

    def __init__(self, folder: str | os.PathLike, max_to_keep: int):
        """Takes the folder, which is made if it is not there.

        Raises:
          OSError: It cannot be made, or written to.
        """
        self._folder = pathlib.Path(folder)
        self._max_to_keep = max_to_keep
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()

    def newest(self) -> Saved | None:
        """Returns the newest complete checkpoint."""
        found = self._all()
        if not found:
            return None
        num_done, _, path = found[-1]
        return Saved(str(path / _PREFIX), num_done)

    def save(self, num_done: int, write: Callable[[str], object]):
        """Writes a checkpoint; until it is complete it has no name.

        One of the same number of closures is replaced, as programs change
        variables between closures, too: a folder cannot be replaced in one
        operation, so the new one has another name, and the old one is removed
        after that.

        Args:
          num_done: Closures whose updates it holds.
          write: Called with a prefix; as `tf.train.Checkpoint.write`.

        Raises:
          OSError: It cannot be written. Nothing is left of it, and those before
            are as they were.
          tf.errors.UnavailableError, tf.errors.AbortedError: A server is lost.
        """
        name = self._next_name(num_done)
        aside = self._folder / f"{_ASIDE}-{name}"
        try:
            aside.mkdir()
            _call_write(write, str(aside / _PREFIX))
            (aside / _STATE).write_text(json.dumps({"num_done": num_done}))
            # A crash of the machine must not leave a name without its files.
            files.sync_tree(str(aside))
            aside.rename(self._folder / name)
            files.sync(str(self._folder))
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        newest = {number: path for number, _, path in self._all()}
        kept = list(newest.values())[-self._max_to_keep :]
        for _, _, path in self._all():
            if path not in kept:
                self._remove(path)

    def _next_name(self, num_done: int) -> str:
        revisions = [
            revision
            for number, revision, _ in self._all()
            if number == num_done
        ]
        return f"closure-{num_done}" + (
            f".{revisions[-1] + 1}" if revisions else ""
        )

    def _all(self) -> list[tuple[int, int, pathlib.Path]]:
        """The complete checkpoints, the newest last."""
        found = []
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and (path / _STATE).exists():
                found.append((int(match[1]), int(match[2] or 0), path))
        return sorted(found)

    def _remove(self, path: pathlib.Path):
        """Removes a checkpoint, which never has its name without its files."""
        aside = self._folder / f"{_REMOVED}-{path.name}"
        try:
            path.rename(aside)
        except OSError:
            return  # It stays; there is room for it, or the next write fails.
        shutil.rmtree(aside, ignore_errors=True)

    def _remove_unfinished(self):
        for pattern in (_ASIDE, _REMOVED):
            for path in self._folder.glob(f"{pattern}-*"):
                shutil.rmtree(path, ignore_errors=True)


def _call_write(write: Callable[[str], object], prefix: str) -> None:
    """Calls `write(prefix)`, whose errors about files become `OSError`s.

    Servers write their own shards: TensorFlow reports their full disk as a
    `ResourceExhaustedError`, not as the `OSError` that Python raises here.
    """
    try:
        write(prefix)
    except (tf.errors.UnavailableError, tf.errors.AbortedError):
        raise  # Not about files: a server is lost.
    except tf.errors.OpError as error:
        raise OSError(
            files.error_number(error),
            "A server cannot write its part of the checkpoint "
            f"({messages.sentence_of(error.message)})",
            prefix,
        ) from error


def check_objects(
    prefix: str,
    objects: Any,
    allow_missing: bool | Collection[str],
) -> None:
    """Checks that objects can take all that a checkpoint holds, and no less.

    Nothing is read into them. Variables that layers and optimizers create
    later, when they are built, are not checked.

    Args:
      prefix: Of the checkpoint.
      objects: A `tf.train.Checkpoint` of what is to be restored.
      allow_missing: Names of what the checkpoint may hold and `objects` may
        lack; True for all.

    Raises:
      ValueError: A variable has another shape than in the checkpoint; or
        either side has what the other lacks.
    """
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    nodes = checkpoint_files.read_object_graph(
        reader.get_tensor(checkpoint_files.OBJECT_GRAPH_KEY)
    ).nodes
    matched, wrong = _match(nodes, objects, shapes)
    names = {
        child.local_name: child.node_id
        for child in nodes[0].children
        if child.local_name != _COUNTER
    }
    problems = [
        f"{name} has shape {list(shape)}, and {shapes[key]} in the checkpoint"
        for name, key, shape in wrong
    ]
    lost = sorted(
        {
            name
            for name, node_id in names.items()
            if not (
                allow_missing
                if isinstance(allow_missing, bool)
                else name in allow_missing
            )
            for found in _below(nodes, node_id)
            if found not in matched
            for _ in nodes[found].attributes
        }
    )
    if lost:
        problems.append(
            f"they lack {lost}, or a part of it, which the next checkpoint "
            "would not have any more; pass what is missing, or name it in "
            f"`allow_missing={lost}`"
        )
    added = sorted(
        set(tf.train.TrackableView.children(objects)) - {*names, _COUNTER}
    )
    if added:
        problems.append(f"the checkpoint lacks {added}")
    if problems:
        raise ValueError(
            "Argument `objects` must be what the newest checkpoint was "
            f"written of, {prefix!r}. Received: objects where "
            f"{'; '.join(problems)}."
        )


def _match(
    nodes: Any,
    root: Any,
    shapes: Mapping[str, Sequence[int]],
) -> tuple[set[int], list[tuple[str, str, list[int]]]]:
    """Returns the nodes that objects take, and variables of another shape."""
    matched: set[int] = set()
    later: set[int] = set()
    wrong = []
    todo = [("", 0, root)]
    while todo:
        path, node_id, found = todo.pop()
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
                or not hasattr(found, "shape")
            ):
                continue
            shape = tf.TensorShape(found.shape)
            if not shape.is_compatible_with(tf.TensorShape(shapes[key])):
                wrong.append((repr(path), key, shape.as_list()))
        if _creates_variables_later(found):
            later.update(_below(nodes, node_id))
        children = tf.train.TrackableView.children(found)
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


def _creates_variables_later(found: Any) -> bool:
    """Whether an object is a layer or an optimizer that is not built yet."""
    if hasattr(found, "built"):
        return not found.built
    # An optimizer of tf_keras.
    return hasattr(found, "iterations") and not getattr(found, "_built", False)


def _below(nodes: Any, node_id: int) -> set[int]:
    """Returns a node and all below it."""
    found: set[int] = set()
    todo = [node_id]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo.extend(child.node_id for child in nodes[one].children)
    return found
