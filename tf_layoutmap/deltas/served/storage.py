"""Operations on files and folders, local or on another file system.

A path with a scheme, such as `gs://bucket/model`, is on a file system that
TensorFlow supports. All other paths, and paths with the scheme `file://`, are
local. TensorFlow is imported only for paths that are not local. All errors are
`OSError`.

Remote file systems guarantee less than local ones. The package relies only on
these properties:

- A file that was closed can be read under its path, and `is_file` finds it.
- A rename of one file, and its removal, are final.

In particular, a folder cannot be renamed, a file cannot be created exclusively,
and a list of names can be out of date. A folder that readers must see
completely or not at all therefore contains one file that is written last and
removed first, its marker. Each reader checks the marker.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import posixpath
import shutil
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import IO, Any

# A folder with this file and without its marker is not complete, and can be
# replaced. The file contains a token of the writer that was started last.
INCOMPLETE = "incomplete.partial"


def is_local(path: str) -> bool:
    """Returns whether a path is on the local file system."""
    return "://" not in path or path.startswith("file://")


def local_path(path: str) -> str:
    """Returns a path without the scheme `file://`, for Python functions.

    >>> local_path("file:///a/b"), local_path("gs://a/b")
    ('/a/b', 'gs://a/b')
    """
    return path.removeprefix("file://")


def absolute(path: str) -> str:
    """Returns an absolute path without a trailing slash. Links remain.

    >>> absolute("gs://bucket/model/")
    'gs://bucket/model'
    """
    if is_local(path):
        return os.path.abspath(local_path(path))
    return path.rstrip("/")


def name_of(path: str) -> str:
    """Returns the last part of a path.

    >>> name_of("gs://bucket/deltas/00000001/"), name_of("deltas/00000001/")
    ('00000001', '00000001')
    """
    return posixpath.basename(path.rstrip("/"))


def error_number(error: Exception) -> int:
    """Returns the `errno` of TensorFlow's error about a file."""
    names = {
        "AlreadyExistsError": errno.EEXIST,
        "NotFoundError": errno.ENOENT,
        "OutOfRangeError": errno.EFBIG,
        "PermissionDeniedError": errno.EACCES,
        "ResourceExhaustedError": errno.ENOSPC,
    }
    return names.get(type(error).__name__, errno.EIO)


def _tensorflow() -> Any:
    """Imports TensorFlow, which local paths do not require."""
    return importlib.import_module("tensorflow")


def _gfile(call: Callable[[Any], Any], path: str) -> Any:
    """Calls a function of `tf.io.gfile`; raises its errors as `OSError`."""
    tf = _tensorflow()
    try:
        return call(tf.io.gfile)
    except tf.errors.OpError as error:
        number = error_number(error)
        # Some file systems return errors without a message.
        message = error.message or os.strerror(number)
        raise OSError(number, message, path) from None


def exists(path: str) -> bool:
    """Returns whether a file or folder exists."""
    if is_local(path):
        return os.path.exists(local_path(path))
    return _gfile(lambda gfile: gfile.exists(path), path)


def is_folder(path: str) -> bool:
    """Returns whether a path is a folder."""
    if is_local(path):
        return os.path.isdir(local_path(path))
    return _gfile(lambda gfile: gfile.isdir(path), path)


def is_file(path: str) -> bool:
    """Returns whether a path is a file.

    On some file systems, `exists` is also True for the beginning of a path.
    """
    if is_local(path):
        return os.path.isfile(local_path(path))
    return exists(path) and not is_folder(path)


def names_in(path: str) -> list[str]:
    """Returns the sorted names of the files and folders in a folder.

    On a file system that is not local, the list can be out of date.
    """
    if is_local(path):
        return sorted(os.listdir(local_path(path)))
    # Some file systems return the names of folders with a slash.
    names = _gfile(lambda gfile: gfile.listdir(path), path)
    return sorted({name.rstrip("/") for name in names} - {""})


def size(path: str) -> int:
    """Returns the size of a file in bytes."""
    if is_local(path):
        return os.path.getsize(local_path(path))
    return _gfile(lambda gfile: gfile.stat(path).length, path)


@contextlib.contextmanager
def reading(path: str) -> Generator[IO[bytes]]:
    """Opens a file for random access."""
    if is_local(path):
        with open(local_path(path), "rb") as file:
            yield file
        return
    with _RemoteFile(path) as remote, io.BufferedReader(remote, 2**20) as file:
        yield file


class _RemoteFile(io.RawIOBase):
    """A Python file object that reads with `tf.io.gfile`."""

    def __init__(self, path: str):
        super().__init__()
        self._path = path
        # `close` is also called if the file does not exist. The first read
        # opens the file.
        self._file = _gfile(lambda gfile: gfile.GFile(path, "rb"), path)
        self._size = size(path)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        def read(_: Any) -> bytes:
            self._file.seek(self._position)
            return self._file.read(len(buffer))

        data = _gfile(read, self._path) if len(buffer) else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._position,
            io.SEEK_END: self._size,
        }
        self._position = starts[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def read_bytes(path: str) -> bytes:
    """Returns the contents of a file."""
    with reading(path) as file:
        return file.read()


def read_text(path: str) -> str:
    """Returns the contents of a text file; invalid bytes are replaced."""
    return read_bytes(path).decode("utf-8", errors="replace")


def write_bytes(path: str, content: bytes) -> None:
    """Writes a new file.

    While the file is being written, it can be visible in part. Some file
    systems append to an existing file, so it is removed first.
    """
    if is_local(path):
        with open(local_path(path), "wb") as file:
            file.write(content)
        return
    remove(path)

    def write(gfile: Any) -> None:
        with gfile.GFile(path, "wb") as file:
            file.write(content)

    _gfile(write, path)


def write_text(path: str, content: str) -> None:
    """Writes a new text file, as `write_bytes`."""
    write_bytes(path, content.encode())


def make_folders(path: str) -> None:
    """Creates a folder and its parents, if they do not exist."""
    if is_local(path):
        os.makedirs(local_path(path), exist_ok=True)
        return
    _gfile(lambda gfile: gfile.makedirs(path), path)


def rename(old: str, new: str) -> None:
    """Renames a file, which replaces a file or link at `new`.

    On a file system that is not local, this is often a copy. If the process is
    killed, both files can exist. If only the removal of `old` fails, no error
    is raised, because readers can already see the new file.
    """
    if is_local(new):
        os.replace(local_path(old), local_path(new))
        return
    try:
        _gfile(lambda gfile: gfile.rename(old, new, overwrite=True), new)
    except OSError:
        if not _are_equal(old, new):
            raise
        with contextlib.suppress(OSError):
            remove(old)


def _are_equal(path: str, other: str) -> bool:
    """Returns whether two files exist and have the same contents."""
    try:
        with reading(path) as first, reading(other) as second:
            while chunk := first.read(2**20):
                if chunk != second.read(len(chunk)):
                    return False
            return not second.read(1)
    except OSError:
        return False


def remove(path: str) -> None:
    """Removes a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if is_local(path):
            os.remove(local_path(path))
        elif is_file(path):
            _gfile(lambda gfile: gfile.remove(path), path)


def remove_tree(path: str, marker: str = "") -> None:
    """Removes a folder and its contents. Files with errors remain.

    On a file system that is not local, files that its lists do not contain yet
    also remain.

    Args:
      path: The folder.
      marker: Name of the file that is removed first. Its errors are raised.
    """
    if marker:
        remove(posixpath.join(path, marker))
    if is_local(path):
        shutil.rmtree(local_path(path), ignore_errors=True)
        return
    _remove_contents(path)
    with contextlib.suppress(OSError):
        remove(posixpath.join(path, INCOMPLETE))
        if is_folder(path):
            _gfile(lambda gfile: gfile.rmtree(path), path)


def _remove_contents(path: str) -> None:
    """Removes the contents of a folder, except the file `INCOMPLETE`."""
    with contextlib.suppress(OSError):
        for name in names_in(path):
            inner = posixpath.join(path, name)
            with contextlib.suppress(OSError):
                if is_folder(inner):
                    remove_tree(inner)
                elif name != INCOMPLETE:
                    remove(inner)


def copy(old: str, new: str) -> None:
    """Copies a file, also to another file system."""
    if is_local(old) and is_local(new):
        shutil.copyfile(local_path(old), local_path(new))
        return
    remove(new)
    _gfile(lambda gfile: gfile.copy(old, new), new)


def is_empty(path: str) -> bool:
    """Returns whether a folder contains no file or folder.

    A link is a file, even if its target does not exist.
    """
    return is_folder(path) and not any(
        is_local(path) or exists(posixpath.join(path, name))
        for name in names_in(path)
    )


def begin_folder(path: str, marker: str) -> str:
    """Empties a folder that is not local, or creates it.

    Readers reject the folder until `end_folder` is called.

    Args:
      path: The folder.
      marker: Name of the file that will be written last.

    Returns:
      The token of this writer, for `end_folder`.
    """
    token = uuid.uuid4().hex
    make_folders(path)
    # Whenever this process is killed, the folder is complete or has this file.
    write_text(posixpath.join(path, INCOMPLETE), token)
    remove(posixpath.join(path, marker))
    _remove_contents(path)
    return token


def is_writer(path: str, token: str) -> bool:
    """Returns whether no other writer has started to write the folder."""
    try:
        return read_text(posixpath.join(path, INCOMPLETE)) == token
    except FileNotFoundError:
        return False


def end_folder(path: str, marker: str, token: str) -> None:
    """Renames the file `{marker}.partial` to `marker`.

    Args:
      path: The folder.
      marker: Same as for `begin_folder`.
      token: Token of this writer: the contents of the file `INCOMPLETE`.

    Raises:
      OSError: If another writer has started to write the folder, or the file
        cannot be renamed.
    """
    if not is_writer(path, token):
        raise OSError(
            errno.EBUSY,
            "another writer has started to write the same folder, and has "
            "removed the files of this writer. End one of the writers",
            path,
        )
    file = posixpath.join(path, marker)
    rename(f"{file}.partial", file)
    with contextlib.suppress(OSError):
        if is_writer(path, token):
            remove(posixpath.join(path, INCOMPLETE))


def is_unfinished(path: str, marker: str) -> bool:
    """Returns whether a writer was killed after `begin_folder`."""
    return is_file(posixpath.join(path, INCOMPLETE)) and not is_file(
        posixpath.join(path, marker)
    )


def files_below(path: str) -> Iterator[str]:
    """Yields the paths of all files in a folder, relative to the folder."""
    for name in names_in(path):
        inner = posixpath.join(path, name)
        if is_folder(inner):
            for file in files_below(inner):
                yield posixpath.join(name, file)
        elif is_file(inner):
            yield name


def open_checkpoint(prefix: str) -> Any:
    """Returns TensorFlow's reader of a checkpoint.

    In contrast to `tf.train.load_checkpoint`, a prefix is not confused with a
    folder. On some file systems, the beginning of a path is also a folder.

    Args:
      prefix: Prefix of the checkpoint, or a folder. A folder represents its
        newest checkpoint.

    Raises:
      ValueError: If the folder contains no checkpoint.
      tf.errors.OpError: If the checkpoint cannot be read.
    """
    tf = _tensorflow()
    with contextlib.suppress(OSError):
        if is_file(f"{prefix}.index"):
            return tf.compat.v1.train.NewCheckpointReader(prefix)
    # If the index cannot be accessed, this function raises the error.
    return tf.train.load_checkpoint(prefix)


def read_tensor(reader: Any, prefix: str, key: str) -> Any:
    """Returns a tensor of a checkpoint as an array.

    The reader's own `get_tensor` copies the tensor while it holds Python's
    global interpreter lock, so that lookups of other threads wait for
    milliseconds. An operation of TensorFlow does not hold the lock.

    Args:
      reader: Result of `open_checkpoint(prefix)`.
      prefix: Prefix of the checkpoint.
      key: Name of a tensor of the checkpoint.

    Raises:
      tf.errors.OpError: If the tensor cannot be read.
    """
    (tensor,) = _tensorflow().raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=[key],
        shape_and_slices=[""],
        dtypes=[reader.get_variable_to_dtype_map()[key]],
    )
    return tensor.numpy()
