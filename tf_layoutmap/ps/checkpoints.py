"""Checkpoints of a run: each a folder, written aside and renamed."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tf_layoutmap.ps import messages

_NAME = re.compile(r"closure-(\d+)")
_ASIDE = ".being-written"
_STATE = "run.json"
_PREFIX = "variables"
# What TensorFlow makes of errors of the file system.
_ERRNOS = {
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
    tf.errors.PermissionDeniedError: errno.EACCES,
    tf.errors.NotFoundError: errno.ENOENT,
}


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
        num_done, path = found[-1]
        return Saved(str(path / _PREFIX), num_done)

    def save(self, num_done: int, write: Callable[[str], object]):
        """Writes a checkpoint; until it is complete it has no name.

        Args:
          num_done: Closures whose updates it holds.
          write: Called with a prefix; as `tf.train.Checkpoint.write`.

        Raises:
          OSError: It cannot be written. Nothing is left of it, and those before
            are as they were.
          tf.errors.UnavailableError, tf.errors.AbortedError: A server is lost.
        """
        name = f"closure-{num_done}"
        aside = self._folder / f"{_ASIDE}-{name}"
        try:
            aside.mkdir()
            _call_write(write, str(aside / _PREFIX))
            (aside / _STATE).write_text(json.dumps({"num_done": num_done}))
            final = self._folder / name
            if final.exists():  # Of the same closures: it holds the same.
                shutil.rmtree(aside)
            else:
                aside.rename(final)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        for _, path in self._all()[:-self._max_to_keep]:
            shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[tuple[int, pathlib.Path]]:
        found = []
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and (path / _STATE).exists():
                found.append((int(match[1]), path))
        return sorted(found)

    def _remove_unfinished(self):
        for path in self._folder.glob(f"{_ASIDE}-*"):
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
        number = _ERRNOS.get(type(error), errno.EIO)
        raise OSError(
            number, "A server cannot write its part of the checkpoint "
            f"({messages.sentence_of(error.message)})", prefix) from error
