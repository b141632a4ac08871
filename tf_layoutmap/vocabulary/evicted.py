"""Passes evicted keys to the callback `on_evict`, or writes them to a file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from tf_layoutmap._core import files, paths
from tf_layoutmap.deltas.served import storage

if TYPE_CHECKING:
    import numpy.typing as npt

    from tf_layoutmap.vocabulary.kept_strings import KeptStrings


@dataclasses.dataclass(frozen=True, eq=False)
class EvictedKeys:
    """Evicted keys of one table, with the values of their rows.

    >>> evicted = []
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> words = tlm.layers.ShardedEmbedding(
    ...     tlm.vocabulary.OpenVocabulary(100, on_evict=evicted.append), 8,
    ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
    >>> _ = words(np.array([[0]]))
    >>> _ = words.vocabulary.write([5, 7])
    >>> _ = words.vocabulary.evict([7])
    >>> evicted[0].keys.tolist(), evicted[0].rows.shape
    ([7], (1, 8))

    Attributes:
      table: Name of the table.
      keys: `[num_keys]` int64. If the ids are strings, the keys are hashes.
      rows: Rows of the keys, `[num_keys, dim]`, in the dtype of the stored
        table.
      slots: Maps the name of each slot variable to its values for the keys,
        `[num_keys, dim]` or `[num_keys, 1]` float32.
      strings: With `keep_strings=True`, an array of dtype object with the bytes
        of each key's string, `[num_keys]`. An element is None if the string is
        not known. Otherwise None.
    """

    table: str
    keys: npt.NDArray[np.int64]
    rows: npt.NDArray[np.floating]
    slots: dict[str, npt.NDArray[np.float32]]
    strings: np.ndarray | None = None


def teller(
    on_evict: Callable[[EvictedKeys], Any] | str,
    table: str,
    slot_names: Sequence[str],
    kept_strings: KeptStrings | None = None,
) -> Callable[..., None]:
    """Returns a function that passes evicted keys to `on_evict`.

    The arguments of the returned function are arrays: the keys, the rows, and
    the values of each slot variable.

    Args:
      on_evict: Same as for `OpenVocabulary`.
      table: Name of the table.
      slot_names: Names of the slot variables, in the order of the arguments.
      kept_strings: The strings of the table's keys, or None.
    """
    callback = _as_callback(on_evict)

    def report(keys: Any, rows: Any, *slots: Any) -> None:
        if not len(keys):
            return
        keys = np.array(keys)
        callback(
            EvictedKeys(
                table,
                keys,
                np.array(rows),
                {name: np.array(slot) for name, slot in zip(slot_names, slots)},
                None if kept_strings is None else kept_strings.names(keys),
            )
        )

    return report


def under_name(
    on_evict: Callable[[EvictedKeys], Any] | str | os.PathLike[str],
    name: str,
) -> Callable[[EvictedKeys], Any]:
    """Returns an `on_evict` callback that reports `name` as the table's name.

    Args:
      on_evict: Same as for `OpenVocabulary`.
      name: Name of the table in the user's program.
    """
    callback = _as_callback(on_evict)
    return lambda evicted: callback(dataclasses.replace(evicted, table=name))


def _as_callback(
    on_evict: Callable[[EvictedKeys], Any] | str | os.PathLike[str],
) -> Callable[[EvictedKeys], Any]:
    return on_evict if callable(on_evict) else _File(os.fspath(on_evict))


class _File:
    """Writes a TFRecord file with one record for each eviction."""

    def __init__(self, path: str):
        self._path = path
        self._writer: Any = None
        # The current file, and the size of its complete records in bytes.
        self._file = ""
        self._num_bytes = 0

    def __call__(self, evicted: EvictedKeys) -> None:
        """Writes a record.

        Raises:
          OSError: If the record cannot be written. All previous records in the
            file are complete, and the next record is written to a new file.
        """
        with files.os_errors(self._path):
            if self._writer is None:
                self._open()
            try:
                self._write(evicted)
                self._num_bytes = tf.io.gfile.stat(self._file).length
            except BaseException:
                self._discard_writer()
                raise

    def _open(self) -> None:
        """Creates and opens a new file. Existing files are not changed."""
        files.make_parent(self._path)
        number = 0
        while not files.make_new(f"{self._path}-{number:05d}"):
            number += 1
        self._file, self._num_bytes = f"{self._path}-{number:05d}", 0
        logging.warning(
            "Evicted keys of `on_evict=%r` are written to the TFRecord file "
            "%r.",
            self._path,
            self._file,
        )
        self._writer = tf.io.TFRecordWriter(self._file)

    def _discard_writer(self) -> None:
        """Closes the file, and removes an incomplete record at its end."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(tf.errors.OpError, OSError):
            writer.close()
        with contextlib.suppress(OSError):
            if not self._num_bytes:
                storage.remove(self._file)
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
        if evicted.strings is not None:
            features["strings"] = tf.train.Feature(
                bytes_list=tf.train.BytesList(
                    value=[string or b"" for string in evicted.strings]
                )
            )
            features["has_string"] = tf.train.Feature(
                int64_list=tf.train.Int64List(
                    value=[
                        int(string is not None) for string in evicted.strings
                    ]
                )
            )
        self._writer.write(
            tf.train.Example(
                features=tf.train.Features(feature=features)
            ).SerializeToString()
        )
        # The record is flushed, so that it remains even if the process is
        # killed.
        self._writer.flush()


def _floats(values: np.ndarray[Any, Any]) -> tf.train.Feature:
    return tf.train.Feature(
        float_list=tf.train.FloatList(value=values.astype(np.float32).ravel())
    )
