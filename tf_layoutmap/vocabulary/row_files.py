"""Files with keys and their rows, which `Vocabulary.export` writes.

A folder contains one file for each block of keys and `_meta.json`. The files
are `.npz` archives of NumPy or Parquet files. `write_folder` writes a folder,
and `read_folder` reads its blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import io
import json
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, files, paths
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.vocabulary import kept_strings, key_rows, key_tensors

FORMATS = ("numpy", "parquet")
# Readers of Parquet folders ignore files whose names begin with "_".
META_FILE = "_meta.json"
_VERSION = 1
_SLOT = "slot/"
_SUFFIXES = {"numpy": ".npz", "parquet": ".parquet"}
# Names of files, and of folders of a writer that was killed.
_NAME = re.compile(
    r"keys-(\d{5,})\.(?:npz|parquet)|_meta\.json\.partial-[0-9a-f]{16}"
)

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class FolderInfo:
    """The table from which a folder was written.

    Attributes:
      table: Name of the table.
      dim: Number of columns of the rows.
      slots: Number of columns of each slot variable, by name.
      key_type: `"integers"` or `"strings"`; the keys of strings are hashes.
    """

    table: str
    dim: int
    slots: dict[str, int]
    key_type: str


def write_folder(
    path: str,
    blocks: Iterable[key_rows.KeyBlock],
    format: str,
    info: FolderInfo,
) -> int:
    """Writes a folder, and returns the number of keys.

    Args:
      path: Folder to write. An existing folder is replaced when all files of
        the new folder are on the disk. On a file system that is not local,
        only its `_meta.json` is replaced, and then its other files are removed.
      blocks: Blocks to write, with counts and last steps.
      format: One of `FORMATS`.
      info: Description of the table.

    Raises:
      ImportError: If pyarrow is not installed, for `format="parquet"`.
      OSError: If the files cannot be written.
    """
    write = _write_npz if format == "numpy" else _parquet_writer()
    _check_replaceable(path)

    def write_all(folder: str, first: int) -> dict[str, Any]:
        written: list[dict[str, Any]] = []
        has_strings = False
        for number, block in enumerate(blocks, first):
            name = f"keys-{number:05d}{_SUFFIXES[format]}"
            with _new_file(posixpath.join(folder, name)) as file:
                write(block, file)
            written.append(
                {"name": name, "num_keys": len(block.keys), "step": block.step}
            )
            has_strings = block.strings is not None
        return {
            "version": _VERSION,
            "format": format,
            **dataclasses.asdict(info),
            "has_strings": has_strings,
            "num_keys": sum(file["num_keys"] for file in written),
            "files": written,
        }

    with files.os_errors(path):
        if paths.is_local(path):
            with files.replacing_folder(path, META_FILE) as folder:
                storage.make_folders(folder)
                meta = write_all(folder, 0)
                storage.write_text(
                    posixpath.join(folder, META_FILE),
                    json.dumps(meta, indent=1),
                )
        else:
            meta = _write_remote(path, write_all)
    return meta["num_keys"]


def _write_remote(
    path: str, write_all: Callable[[str, int], dict[str, Any]]
) -> dict[str, Any]:
    """Writes a folder on a file system that is not local.

    The numbers of the new files differ from the numbers of existing files.
    Readers therefore see the old or the new rows, until and after
    `_meta.json` is replaced. Files of earlier exports are removed at the end.

    Args:
      path: The folder.
      write_all: Function that takes a folder and the number of the first file,
        writes the files, and returns the contents of `_meta.json`.
    """
    path = paths.resolve(path)
    storage.make_folders(path)
    meta_path = posixpath.join(path, META_FILE)
    names = storage.names_in(path)
    # A list of names can be out of date.
    with contextlib.suppress(ValueError):
        names += [file["name"] for file in _read_meta(path)["files"]]
    old = {
        name: int(match[1])
        for name in names
        if (match := _NAME.fullmatch(name)) and match[1]
    }
    meta = write_all(path, max(old.values(), default=-1) + 1)
    files.write_text(meta_path, json.dumps(meta, indent=1))
    for name in old:
        with contextlib.suppress(OSError):
            storage.remove(posixpath.join(path, name))
    return meta


def _check_replaceable(path: str) -> None:
    """Raises an OSError if a folder contains other files than exported rows."""
    if (
        not storage.exists(path)
        or storage.is_file(posixpath.join(path, META_FILE))
        or (storage.is_folder(path) and not _other_names(path))
    ):
        return
    raise OSError(
        errno.EEXIST,
        f"the path exists, and does not contain {META_FILE!r} of an "
        "earlier export",
        path,
    )


def _other_names(path: str) -> list[str]:
    """Returns the names in a folder, except files of a killed writer."""
    names = storage.names_in(path)
    if paths.is_local(path):
        return names
    return [
        name
        for name in names
        if not _NAME.fullmatch(name)
        and storage.exists(posixpath.join(path, name))
    ]


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[IO[bytes]]:
    """Yields a file that can be written in any order."""
    if paths.is_local(path):
        with open(paths.local_path(path), "wb") as file:
            yield file
        return
    buffer = io.BytesIO()
    yield buffer
    storage.write_bytes(path, buffer.getvalue())


def _columns(block: key_rows.KeyBlock) -> dict[str, Array]:
    return {
        "keys": block.keys,
        "rows": block.rows,
        "counts": np.asarray(block.counts),
        "last_steps": np.asarray(block.last_steps),
        **{_SLOT + name: value for name, value in block.slots.items()},
    }


def _write_npz(block: key_rows.KeyBlock, file: IO[bytes]) -> None:
    strings = (
        {} if block.strings is None else kept_strings.to_columns(block.strings)
    )
    np.savez(file, **_columns(block), **strings)  # pyright: ignore[reportArgumentType] All values are arrays.


def _read_meta(path: str) -> dict[str, Any]:
    """Returns the contents of `_meta.json` in a folder.

    Raises:
      ValueError: If the file does not exist, is not valid, or has another
        version.
    """
    meta_path = posixpath.join(path, META_FILE)
    try:
        meta = json.loads(storage.read_text(meta_path))
        version = meta["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            checks.message(
                "path",
                "a folder that `Vocabulary.export` has written, with the file "
                f"{META_FILE!r}",
                path,
                str(error),
            )
        ) from None
    if version != _VERSION:
        raise ValueError(
            f"The file {meta_path!r} must have the version {_VERSION}. "
            f"Received: version {version!r}, written by another version of "
            "tf_layoutmap."
        )
    try:
        name = re.compile(rf"keys-\d+\{_SUFFIXES[meta['format']]}")
        is_valid = meta["key_type"] in key_tensors.KINDS.values() and all(
            name.fullmatch(file["name"])
            and isinstance(file["num_keys"], int)
            and isinstance(file["step"], int)
            for file in meta["files"]
        )
        is_valid = is_valid and isinstance(meta["slots"], dict)
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise _unreadable(meta_path, "an entry is missing or not valid")
    return meta


def read_folder(path: str) -> Iterator[key_rows.KeyBlock]:
    """Yields the blocks of a folder that `write_folder` has written.

    Raises:
      ImportError: If pyarrow is not installed, for Parquet files.
      ValueError: If a file is missing, truncated or modified.
    """
    meta = _read_meta(path)
    read = _read_npz if meta["format"] == "numpy" else _parquet_reader()
    for entry in meta["files"]:
        file_path = posixpath.join(path, entry["name"])
        try:
            with storage.reading(file_path) as file:
                block = _to_block(read(file), meta, entry["step"])
        except (
            tf.errors.OpError,
            OSError,
            ValueError,
            KeyError,
            EOFError,
            zipfile.BadZipFile,
        ) as error:
            raise _unreadable(file_path, str(error)) from None
        if len(block.keys) != entry["num_keys"]:
            raise _unreadable(
                file_path,
                f"{len(block.keys)} keys instead of {entry['num_keys']}",
            )
        yield block


def _unreadable(path: str, why: str) -> ValueError:
    return ValueError(
        f"Could not read the rows in {path!r}, which is missing, truncated or "
        f"modified: {why}."
    )


def _to_block(
    columns: dict[str, Array], meta: dict[str, Any], step: int
) -> key_rows.KeyBlock:
    return key_rows.KeyBlock(
        keys=columns["keys"],
        rows=columns["rows"],
        slots={name: columns[_SLOT + name] for name in meta["slots"]},
        counts=columns["counts"],
        last_steps=columns["last_steps"],
        step=step,
        key_type=meta["key_type"],
        strings=columns["strings"] if meta.get("has_strings") else None,
    )


def _read_npz(file: IO[bytes]) -> dict[str, Array]:
    # By default, `np.load` does not unpickle objects, which could run code.
    with np.load(file) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    if "string_splits" in columns:
        columns["strings"] = kept_strings.from_columns(columns)
    return columns


def _pyarrow() -> Any:
    """Returns the module pyarrow.

    Raises:
      ImportError: If pyarrow is not installed.
    """
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ImportError(
            "Parquet files require pyarrow, which is not installed: `pip "
            'install pyarrow`, or use format="numpy".'
        ) from error


# Names of the columns of a Parquet file, which has one row per key.
_SINGULAR = {
    "keys": "key",
    "rows": "row",
    "counts": "count",
    "last_steps": "last_step",
}


def _parquet_writer() -> Callable[[key_rows.KeyBlock, IO[bytes]], None]:
    arrow = _pyarrow()

    def write(block: key_rows.KeyBlock, file: IO[bytes]) -> None:
        columns = {}
        for name, value in _columns(block).items():
            array = arrow.array(value.ravel())
            if value.ndim == 2:
                array = arrow.FixedSizeListArray.from_arrays(
                    array, value.shape[1]
                )
            columns[_SINGULAR.get(name, name)] = array
        if block.strings is not None:
            columns["string"] = arrow.array(
                list(block.strings), type=arrow.large_binary()
            )
        # Trained rows are barely compressible, so compression would only take
        # time.
        arrow.parquet.write_table(
            arrow.table(columns),
            file,
            compression="none",
            use_dictionary=False,
            write_statistics=["key"],
        )

    return write


def _parquet_reader() -> Callable[[IO[bytes]], dict[str, Array]]:
    arrow = _pyarrow()
    plural = {column: name for name, column in _SINGULAR.items()}

    def read(file: IO[bytes]) -> dict[str, Array]:
        table = arrow.parquet.read_table(file)
        columns = {}
        for column in table.column_names:
            value = table[column].combine_chunks()
            if column == "string":
                columns["strings"] = kept_strings.as_objects(value.to_pylist())
                continue
            flat = value
            shape = [len(value)]
            if arrow.types.is_fixed_size_list(value.type):
                flat = value.flatten()
                shape.append(value.type.list_size)
            columns[plural.get(column, column)] = flat.to_numpy(
                zero_copy_only=False
            ).reshape(shape)
        return columns

    return read
