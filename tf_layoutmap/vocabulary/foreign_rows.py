"""Readers of the rows that other systems save by key.

Each reader yields `KeyBlock`s. The formats were read from the sources of these
versions:

- TFRA 0.8.1 (TensorFlow Recommenders Addons): the files of
  `save_to_file_system` and `FileSystemSaver`, and the tensors of its tables in
  checkpoints.
- HugeCTR 25.03: the folder of a sparse model.
- NVIDIA's dynamic embeddings for TorchRec (`dynamicemb`) 0.1: the files of
  `DynamicEmbDump`.

TorchRec has no file format with keys and values.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.vocabulary import key_rows, vector_files

Array = np.ndarray[Any, Any]

# All of these systems write integers and floats in the byte order of x86.
_KEY = np.dtype("<i8")
_VALUE = np.dtype("<f4")


def read_tfra(
    path: str, name: str | None, dim: int
) -> Iterator[key_rows.KeyBlock]:
    """Yields the rows of a table of TFRA.

    Args:
      path: Folder with the files `{name}_mht_{i}of{n}-keys` and `-values`, or
        the prefix of a TensorFlow checkpoint with the tensors `{name}...-keys`
        and `{name}...-values`.
      name: Name of the table.
      dim: Number of columns of the rows.

    Raises:
      ValueError: If `name` is None, the table is missing, or the sizes of the
        keys and values do not match `dim`.
    """
    name = _required(name, "tfra")
    # On some file systems, the beginning of a path is also a folder.
    # If they cannot be accessed, the reader of checkpoints raises the error.
    is_prefix = False
    if not storage.is_local(path):
        with contextlib.suppress(OSError):
            is_prefix = storage.is_file(f"{path}.index")
    if is_prefix or not storage.is_folder(path):
        yield from _read_tfra_checkpoint(path, name, dim)
        return
    stem = name.replace("/", "_")
    pattern = re.compile(
        re.escape(stem) + r"(_mht_\d+of\d+(_rank\d+_size\d+)?)?-keys"
    )
    parts = [
        file.removesuffix("-keys")
        for file in _listed(path)
        if pattern.fullmatch(file)
    ]
    _check_found(parts, path, name, f"{stem}_mht_1of1-keys")
    for part in parts:
        file = posixpath.join(path, part)
        yield from _read_pair(f"{file}-keys", f"{file}-values", dim)


def _read_tfra_checkpoint(
    path: str, name: str, dim: int
) -> Iterator[key_rows.KeyBlock]:
    try:
        reader = storage.open_checkpoint(path)
    except (tf.errors.OpError, ValueError) as error:
        raise ValueError(
            checks.message(
                "path",
                "a folder or the prefix of a TensorFlow checkpoint",
                path,
                str(error),
            )
        ) from None
    tables = {
        key.removesuffix("-keys")
        for key in reader.get_variable_to_shape_map()
        if key.endswith("-keys")
    }
    # The shards of a table, or the table itself.
    parts = sorted(
        key
        for key in tables
        if key == name
        or re.fullmatch(
            re.escape(name.replace("/", "_")) + r"_mht_\d+of\d+", key
        )
        or key == f"{name}/.ATTRIBUTES/table"
    )
    if not parts:
        raise ValueError(
            checks.message(
                "name", f"one of the tables {sorted(tables)}", name, path
            )
        )
    for part in parts:
        keys = np.asarray(reader.get_tensor(f"{part}-keys"))
        values = np.asarray(reader.get_tensor(f"{part}-values"))
        if values.shape != (len(keys), dim):
            raise ValueError(
                f"The tensor {part + '-values'!r} in {path!r} must have the "
                f"shape {(len(keys), dim)}. Received: {values.shape}."
            )
        for first in range(0, len(keys), key_rows.BLOCK_SIZE):
            here = slice(first, first + key_rows.BLOCK_SIZE)
            # Keys can be integers or strings.
            yield key_rows.KeyBlock(keys[here], values[here].astype(np.float32))


def read_hugectr(path: str, dim: int) -> Iterator[key_rows.KeyBlock]:
    """Yields the rows of a sparse model of HugeCTR.

    Args:
      path: Folder of the sparse model, such as `0_sparse_9000.model`, with the
        files `key` and `emb_vector`.
      dim: Number of columns of the rows.

    Raises:
      ValueError: If a file does not exist, or the sizes of the files do not
        match `dim`.
    """
    yield from _read_pair(
        posixpath.join(path, "key"), posixpath.join(path, "emb_vector"), dim
    )


def read_dynamicemb(
    path: str, name: str | None, dim: int
) -> Iterator[key_rows.KeyBlock]:
    """Yields the rows of a table of NVIDIA's dynamic embeddings for TorchRec.

    Args:
      path: Folder with the files `{name}_emb_keys.rank_{i}.world_size_{n}` and
        `{name}_emb_values.rank_{i}.world_size_{n}`.
      name: Name of the table.
      dim: Number of columns of the rows.

    Raises:
      ValueError: If `name` is None, the table or a file of a rank is
        missing, or the sizes of the files do not match `dim`.
    """
    name = _required(name, "dynamicemb")
    pattern = re.compile(
        re.escape(f"{name}_emb_keys") + r"\.rank_(\d+)\.world_size_(\d+)"
    )
    parts = [
        match for file in _listed(path) if (match := pattern.fullmatch(file))
    ]
    _check_found(
        [match[0] for match in parts],
        path,
        name,
        f"{name}_emb_keys.rank_0.world_size_1",
    )
    sizes = {int(match[2]) for match in parts}
    ranks = sorted(int(match[1]) for match in parts)
    if len(sizes) != 1 or ranks != list(range(max(sizes))):
        raise ValueError(
            f"The folder {path!r} must contain the keys of each rank of one "
            f"world size for table {name!r}. Received: the files "
            f"{[match[0] for match in parts]}."
        )
    for match in parts:
        yield from _read_pair(
            posixpath.join(path, match[0]),
            posixpath.join(
                path, match[0].replace("_emb_keys.", "_emb_values.")
            ),
            dim,
        )


# A reader gets a path, the name of a table or None, and the number of columns.
_Reader = Callable[[str, str | None, int], Iterator[key_rows.KeyBlock]]


def _of_one_table(
    format: str, read: Callable[[str, int], Iterator[key_rows.KeyBlock]]
) -> _Reader:
    """Returns the reader of a format whose paths contain one table."""

    def reader(
        path: str, name: str | None, dim: int
    ) -> Iterator[key_rows.KeyBlock]:
        if name is not None:
            raise ValueError(
                checks.message(
                    "name",
                    f'None for format="{format}", whose paths contain one '
                    "table",
                    name,
                )
            )
        return read(path, dim)

    return reader


# Maps a format to its reader.
READERS: Mapping[str, _Reader] = {
    "tfra": read_tfra,
    "hugectr": _of_one_table("hugectr", read_hugectr),
    "dynamicemb": read_dynamicemb,
    "text": _of_one_table("text", vector_files.read_text),
    "word2vec": _of_one_table("word2vec", vector_files.read_word2vec),
}


def _required(name: str | None, format: str) -> str:
    if name is None:
        raise ValueError(
            checks.message(
                "name", f"the name of a table for format={format!r}", name
            )
        )
    return name


def _listed(path: str) -> list[str]:
    try:
        return sorted(tf.io.gfile.listdir(path))
    except tf.errors.OpError as error:
        raise ValueError(
            checks.message("path", "an existing folder", path, error.message)
        ) from None


def _check_found(parts: list[str], path: str, name: str, example: str) -> None:
    if not parts:
        raise ValueError(
            f"The folder {path!r} must contain the keys of table {name!r}, for "
            f"example {example!r}. Received: {_listed(path)[:20]}."
        )


def _read_pair(keys: str, values: str, dim: int) -> Iterator[key_rows.KeyBlock]:
    """Yields blocks from a file of int64 keys and a file of float32 rows."""
    sizes = []
    for file in (keys, values):
        try:
            sizes.append(tf.io.gfile.stat(file).length)
        except tf.errors.OpError as error:
            raise ValueError(
                f"The file {file!r} does not exist or cannot be read: "
                f"{error.message}."
            ) from None
    num_keys = sizes[0] // _KEY.itemsize
    if sizes[0] % _KEY.itemsize or sizes[1] != num_keys * dim * _VALUE.itemsize:
        raise ValueError(
            f"The file {keys!r} must contain int64 keys, and {values!r} one "
            f"row of {dim} float32 values for each key. Received: {sizes[0]} "
            f"bytes and {sizes[1]} bytes."
        )
    with (
        tf.io.gfile.GFile(keys, "rb") as key_file,
        tf.io.gfile.GFile(values, "rb") as value_file,
    ):
        for first in range(0, num_keys, key_rows.BLOCK_SIZE):
            size = min(key_rows.BLOCK_SIZE, num_keys - first)
            yield key_rows.KeyBlock(
                np.frombuffer(key_file.read(size * _KEY.itemsize), _KEY),
                np.frombuffer(
                    value_file.read(size * dim * _VALUE.itemsize), _VALUE
                ).reshape(size, dim),
            )
