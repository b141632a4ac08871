"""Writes divided tables into a checkpoint, a part of them in memory at a time.

TensorFlow asks for the values of all tensors before it writes the first. So a
save of it writes everything else, aside, and is told that tables have no value;
then the processes bring their rows to the first, which writes them in files of
some size as they come, and TensorFlow makes one checkpoint of all files.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.sharded.routing.shards import known_size

# Bytes that the first process collects in memory before it writes them to a
# file. The C library keeps much of it for the process: files of 128 MiB left it
# 300 MB larger after its first save.
PART_BYTES = 1 << 25
# Of a checkpoint: very large tables have larger files instead of more.
_MOST_PARTS = 256


class Gathered(Protocol):
    """A table whose rows all processes bring to the first one.

    Attributes:
      dtype: How rows are stored.
      shape: Rows and columns of all processes together.
    """

    dtype: tf.DType
    shape: tf.TensorShape

    def gather(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Yields the first row of each block, and its values."""
        ...

    def slice_spec(self, first: int, count: int) -> str:
        """Returns how a checkpoint calls `count` rows from `first` on."""
        ...


class _Noted(threading.local):
    """The tables that a save of this thread has met, and their keys."""

    tables: list[tuple[Gathered, str]] | None = None


_noted = _Noted()


def note(table: Gathered, key: str) -> bool:
    """Lets a table be written after all else; false where nobody will.

    Args:
      table: It.
      key: The name of its tensor in the checkpoint.
    """
    if _noted.tables is None:
        return False
    _noted.tables.append((table, key))
    return True


def whole(table: Gathered) -> tf.Tensor | None:
    """Returns all rows in the first process, and None in the others."""
    found = sorted(table.gather(), key=lambda one: one[0])
    return tf.concat([rows for _, rows in found], 0) if found else None


def save(
    original: Callable[..., Any],
    saver: Any,
    file_prefix: Any,
    checkpoint_number: Any = None,
    session: Any = None,
    options: Any = None,
) -> Any:
    """Saves as `original` does, and divided tables part by part."""
    if not tf.executing_eagerly() or not isinstance(
        file_prefix, (str, os.PathLike)
    ):
        return original(saver, file_prefix, checkpoint_number, session, options)
    target = os.fspath(file_prefix)
    if checkpoint_number:
        target = f"{target}-{int(checkpoint_number)}"
    parts = _Parts(f"{target}.being-written")
    _noted.tables = found = []
    try:
        try:
            parts.try_to(original, saver, parts.aside, None, session, options)
        finally:
            _noted.tables = None
        parts.expect(
            sum(
                table.dtype.size * table.shape.num_elements()
                for table, _ in found
            )
        )
        for table, key in found:
            parts.add(table, key)
        return parts.become(target)
    finally:
        parts.remove()


class _Parts:
    """Files that tables are written to, one after the other.

    After an error nothing more is written, but all rows are still brought here:
    the other processes would wait for this one.

    Attributes:
      aside: The beginning of their names, and the name of the first, which has
        all that is not divided.
    """

    def __init__(self, aside: str):
        """Takes the names; nothing is written."""
        self.aside = aside
        self._prefixes = [aside]
        self._error: Exception | None = None
        self._num_bytes = 0
        self._most_bytes = PART_BYTES
        self._slices: list[tuple[str, str, tf.Tensor]] = []

    def expect(self, num_bytes: int) -> None:
        """Sets the size of files by the bytes of all tables together."""
        self._most_bytes = max(PART_BYTES, num_bytes // _MOST_PARTS)

    def try_to(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function unless there was an error; notes its error."""
        if self._error is None:
            try:
                function(*arguments)
            except Exception as error:
                self._error = error

    def add(self, table: Gathered, key: str) -> None:
        """Writes a table; all processes call it."""
        if table.dtype not in _tf_private.SLICEABLE_DTYPES:
            rows = whole(table)
            if rows is not None:
                self._slices.append((key, "", rows))
                self._flush()
            return
        for first, rows in table.gather():
            self._slices.append(
                (key, table.slice_spec(first, known_size(rows, 0)), rows)
            )
            self._num_bytes += rows.dtype.size * int(tf.size(rows))
            if self._num_bytes >= self._most_bytes:
                self._flush()

    def become(self, target: str) -> tf.Tensor:
        """Makes one checkpoint of all files; returns its name.

        Raises:
          Exception: What went wrong before.
        """
        if self._slices:
            self._flush()
        if self._error is not None:
            raise self._error
        with tf.device("/cpu:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=self._prefixes,
                destination_prefix=target,
                delete_old_dirs=False,
            )
            return tf.constant(target)

    def remove(self) -> None:
        """Removes what is left of the files."""
        for path in tf.io.gfile.glob(f"{self.aside}*"):
            tf.io.gfile.remove(path)

    def _flush(self) -> None:
        names, specs, values = zip(*self._slices)
        self._slices, self._num_bytes = [], 0
        self._prefixes.append(f"{self.aside}-{len(self._prefixes)}")
        with tf.device("/cpu:0"):
            self.try_to(
                functools.partial(
                    tf.raw_ops.SaveV2,
                    prefix=self._prefixes[-1],
                    tensor_names=list(names),
                    shape_and_slices=list(specs),
                    tensors=list(values),
                )
            )
