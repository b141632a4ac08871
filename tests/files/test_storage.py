"""Operations on files work for local paths and for other file systems."""

import contextlib
import errno
import io
import os

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap._core import files
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.serving import export
from tf_layoutmap.vocabulary import checkpoint_files, row_files


@pytest.fixture(params=["local", "file", "ram"])
def folder(request, tmp_path):
    """Returns an empty folder on a file system."""
    if request.param == "local":
        return str(tmp_path)
    if request.param == "file":
        return f"file://{tmp_path}"
    found = f"ram://storage/{tmp_path.name}"
    tf.io.gfile.makedirs(found)
    return found


def test_files_are_written_read_and_removed(folder):
    path = f"{folder}/inner/a"
    assert not storage.exists(path) and not storage.is_file(path)
    with pytest.raises(FileNotFoundError, match="inner/a") as caught:
        storage.read_bytes(path)
    assert caught.value.strerror
    storage.make_folders(f"{folder}/inner")
    storage.make_folders(f"{folder}/inner")
    # A shorter text replaces the whole file.
    for text in ("first text \u00e9", "second"):
        storage.write_text(path, text)
        assert storage.read_text(path) == text
        assert storage.size(path) == len(text.encode())
    assert storage.is_file(path) and not storage.is_folder(path)
    assert storage.is_folder(f"{folder}/inner")
    assert not storage.is_file(f"{folder}/inner")
    storage.copy(path, f"{folder}/b")
    storage.rename(f"{folder}/b", f"{folder}/c")
    assert storage.names_in(folder) == ["c", "inner"]
    assert sorted(storage.files_below(folder)) == ["c", "inner/a"]
    assert not storage.is_empty(folder)
    storage.remove(path)
    storage.remove(path)
    assert storage.is_empty(f"{folder}/inner")
    storage.remove_tree(folder)
    assert not storage.is_file(f"{folder}/c")


def test_the_beginning_of_a_path_is_not_a_file(folder):
    storage.make_folders(f"{folder}/a")
    storage.write_text(f"{folder}/a/state.json.partial", "")
    assert not storage.is_file(f"{folder}/a/state.json")
    storage.write_text(f"{folder}/a/state.json", "x")
    assert storage.is_file(f"{folder}/a/state.json")


def test_a_file_that_does_not_exist_can_be_closed():
    """The garbage collector calls `close`, and reports its errors."""
    one = storage._RemoteFile.__new__(storage._RemoteFile)
    with pytest.raises(FileNotFoundError):
        one.__init__("ram://storage/missing")
    one.close()
    assert one.closed


def test_a_folder_with_a_link_is_not_empty(tmp_path):
    assert storage.is_empty(str(tmp_path))
    (tmp_path / "link").symlink_to("missing")
    assert not storage.is_empty(str(tmp_path))
    with pytest.raises(ValueError, match="new, empty or a SavedModel"):
        export.check_target(str(tmp_path))
    with pytest.raises(FileExistsError, match="_meta.json"):
        row_files._check_replaceable(str(tmp_path))


def test_the_parts_of_a_file_are_read_in_any_order(folder):
    values = {"one": np.arange(300_000), "two": np.ones([3, 4])}
    buffer = io.BytesIO()
    np.savez(buffer, **values)
    storage.write_bytes(f"{folder}/a", buffer.getvalue())
    with storage.reading(f"{folder}/a") as file:
        with np.load(file) as found:
            for name in ("two", "one"):
                np.testing.assert_array_equal(found[name], values[name])
    with storage.reading(f"{folder}/a") as file:
        file.seek(-10, io.SEEK_END)
        assert file.read() == buffer.getvalue()[-10:]
        file.seek(4)
        assert file.read(6) == buffer.getvalue()[4:10]
        assert file.tell() == 10


def test_a_text_file_is_replaced(folder):
    for text in ("a long first text", "second"):
        files.write_text(f"{folder}/report", text)
        assert storage.read_text(f"{folder}/report") == text
        assert storage.names_in(folder) == ["report"]
    with pytest.raises(ZeroDivisionError):
        with files.replacing_file(f"{folder}/report") as new:
            storage.write_text(new, "half")
            raise ZeroDivisionError
    assert storage.read_text(f"{folder}/report") == "second"
    assert storage.names_in(folder) == ["report"]


def test_a_folder_gets_its_name_with_its_last_file(folder):
    path = f"{folder}/00000001"
    if storage.is_local(path):
        path = storage.local_path(path)
    with files.staged(f"{path}.staging") as staging:
        new = files.new_folder(staging, path, "meta")
        storage.write_text(f"{new}/data", "1")
        assert not storage.is_file(f"{path}/meta")
        files.publish_folder(staging, new, path, "meta", "text")
    assert storage.names_in(path) == ["data", "meta"]
    assert storage.names_in(folder) == ["00000001"]
    with pytest.raises(FileExistsError, match="00000001.*another writer"):
        with files.staged(f"{path}.staging") as staging:
            new = files.new_folder(staging, path, "meta")
            files.publish_folder(staging, new, path, "meta", "other")
    assert storage.read_text(f"{path}/meta") == "text"
    assert storage.names_in(folder) == ["00000001"]


def test_a_writer_does_not_publish_files_of_another_writer():
    folder = "ram://storage/writers"
    path = f"{folder}/00000001"

    def begin():
        staging = stack.enter_context(files.staged(f"{folder}/staging"))
        new = files.new_folder(staging, path, "meta")
        storage.write_text(f"{new}/data", staging)
        return staging, new

    with contextlib.ExitStack() as stack:
        first, second = begin(), begin()
        with pytest.raises(OSError, match="another writer has started.*00001"):
            files.publish_folder(*first, path, "meta", "first")
        assert not storage.is_file(f"{path}/meta")
        files.publish_folder(*second, path, "meta", "second")
        assert storage.read_text(f"{path}/data") == second[0]
        assert storage.names_in(path) == ["data", "meta"]


def test_a_writer_that_fails_keeps_the_folder_of_another_writer():
    path = "ram://storage/replaced/1"

    @contextlib.contextmanager
    def writing(text):
        with files.replacing_folder(path, "meta"):
            storage.write_text(f"{path}/data", text)
            yield
            storage.write_text(f"{path}/meta.partial", text)

    with pytest.raises(OSError, match="another writer has started.*/1"):
        with writing("first"), writing("second"):
            pass
    assert storage.read_text(f"{path}/meta") == "second"
    with pytest.raises(ZeroDivisionError):
        with writing("third"):
            with writing("fourth"):
                pass
            raise ZeroDivisionError
    assert storage.read_text(f"{path}/data") == "fourth"
    assert storage.names_in(path) == ["data", "meta"]


def test_the_names_of_paths():
    assert storage.name_of("gs://a/b/") == storage.name_of("a/b") == "b"
    assert storage.absolute("gs://a/b//") == "gs://a/b"
    assert storage.absolute("a/../b/") == os.path.abspath("b")
    assert storage.absolute("file:///a/b/") == "/a/b"


def test_a_prefix_of_a_checkpoint_is_not_a_folder():
    """In memory, the beginning of a path is also a folder."""
    prefix = "ram://storage/prefix/ck"
    tf.io.gfile.makedirs("ram://storage/prefix")
    tf.train.Checkpoint(a=tf.Variable([1.0])).write(prefix)
    assert tf.io.gfile.isdir(prefix)
    reader = storage.open_checkpoint(prefix)
    key = "a/.ATTRIBUTES/VARIABLE_VALUE"
    assert reader.get_tensor(key).tolist() == [1.0]
    with pytest.raises((tf.errors.NotFoundError, ValueError)):
        storage.open_checkpoint("ram://storage/missing")


def test_a_checkpoint_is_readable_if_the_rename_of_its_index_fails(monkeypatch):
    prefix = "ram://storage/renamed/ck"
    tf.io.gfile.makedirs("ram://storage/renamed")
    rename = storage.rename

    def write(value):
        tensors = [(name, tf.constant(value)) for name in "xyz"]
        checkpoint_files.write_checkpoint(prefix, tensors)

    def fail(old, new):
        if not new.endswith(".index"):
            return rename(old, new)
        storage.copy(old, new)
        raise OSError(errno.EIO, "the old file cannot be removed", new)

    write(1.0)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "rename", fail)
        with pytest.raises(OSError, match="cannot be removed"):
            write(2.0)
    assert storage.open_checkpoint(prefix).get_tensor("x") == 2.0
    write(3.0)
    assert storage.open_checkpoint(prefix).get_tensor("x") == 3.0


def test_an_unknown_scheme_is_named():
    with pytest.raises(OSError, match="nowhere"):
        storage.write_text("nowhere://a/b", "text")
