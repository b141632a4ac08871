"""Keys that give their rows away, told to a callback or written to a file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import files, paths


@dataclasses.dataclass(frozen=True, eq=False)
class EvictedKeys:
    """Keys of one table that gave their rows away, and what these held.

    Attributes:
      table: Name of the table.
      keys: `[num_keys]` int64; of strings, their hashes.
      rows: `[num_keys, dim]`, of the type that the table is stored in.
      slots: By name of the slot variable: `[num_keys, dim]` or
        `[num_keys, 1]` float32.
    """

    table: str
    keys: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]
    slots: dict[str, np.ndarray[Any, Any]]


def teller(
    on_evict: Callable[[EvictedKeys], Any] | str,
    table: str,
    slot_names: Sequence[str],
) -> Callable[..., None]:
    """Returns what takes keys, rows and slot variables, and passes them on.

    Args:
      on_evict: As of `OpenVocabulary`.
      table: Name of the table.
      slot_names: In the order in which they come.
    """
    tell = _told(on_evict)

    def take(keys: Any, rows: Any, *slots: Any) -> None:
        if not len(keys):
            return
        tell(
            EvictedKeys(
                table,
                np.array(keys),
                np.array(rows),
                {name: np.array(slot) for name, slot in zip(slot_names, slots)},
            )
        )

    return take


def under_name(
    on_evict: Callable[[EvictedKeys], Any] | str | os.PathLike[str],
    name: str,
) -> Callable[[EvictedKeys], Any]:
    """Returns an `on_evict` that is told another name of the table.

    Args:
      on_evict: As of `OpenVocabulary`.
      name: By which users know the table.
    """
    tell = _told(on_evict)
    return lambda evicted: tell(dataclasses.replace(evicted, table=name))


def _told(
    on_evict: Callable[[EvictedKeys], Any] | str | os.PathLike[str],
) -> Callable[[EvictedKeys], Any]:
    return on_evict if callable(on_evict) else _File(os.fspath(on_evict))


class _File:
    """A file of records, one for each time that keys go."""

    def __init__(self, path: str):
        self._path = path
        self._writer: Any = None
        # The file that the writer writes, and what its records take.
        self._file = ""
        self._num_bytes = 0

    def __call__(self, evicted: EvictedKeys) -> None:
        """Writes a record.

        Raises:
          OSError: If it cannot be written. The records before are complete,
            and the next one begins another file.
        """
        with files.os_errors(self._path):
            if self._writer is None:
                self._open()
            try:
                self._write(evicted)
                self._num_bytes = tf.io.gfile.stat(self._file).length
            except BaseException:
                self._give_up()
                raise

    def _open(self) -> None:
        """Opens a file that was not there: none is ever written over."""
        files.make_parent(self._path)
        number = 0
        while not files.make_new(f"{self._path}-{number:05d}"):
            number += 1
        self._file, self._num_bytes = f"{self._path}-{number:05d}", 0
        self._writer = tf.io.TFRecordWriter(self._file)

    def _give_up(self) -> None:
        """Closes the file, without half a record at its end."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(tf.errors.OpError, OSError):
            writer.close()
        with contextlib.suppress(OSError):
            if not self._num_bytes:
                files.remove(self._file)
            elif paths.is_local(self._file):
                os.truncate(paths.local_path(self._file), self._num_bytes)

    def _write(self, evicted: EvictedKeys) -> None:
        features = {
            "table": tf.train.Feature(
                bytes_list=tf.train.BytesList(value=[evicted.table.encode()])
            ),
            "keys": tf.train.Feature(
                int64_list=tf.train.Int64List(value=evicted.keys)
            ),
            "rows": _floats(evicted.rows),
            **{
                f"slot/{name}": _floats(slot)
                for name, slot in evicted.slots.items()
            },
        }
        self._writer.write(
            tf.train.Example(
                features=tf.train.Features(feature=features)
            ).SerializeToString()
        )
        # What a killed process has told is there.
        self._writer.flush()


def _floats(values: np.ndarray[Any, Any]) -> tf.train.Feature:
    return tf.train.Feature(
        float_list=tf.train.FloatList(value=values.astype(np.float32).ravel())
    )
