"""Files and folders are replaced completely or not at all."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.files import snapshots
from tf_layoutmap._core import files, ops, paths
from tf_layoutmap.ps import lost_calls, waiting


def folder_of(path, text):
    (path / "inner").mkdir(parents=True)
    (path / "a").write_text(text)
    (path / "inner" / "b").write_text(text)
    return path


def text_of(path):
    one, two = (path / "a").read_text(), (path / "inner" / "b").read_text()
    assert one == two
    return one


def replace(target, text):
    with files.staged(str(target)) as folder:
        new = folder_of(target.parent / folder / "new", text)
        files.replace_folder(str(new), str(target))


def test_different_spellings_of_a_path_are_equal(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("")
    (tmp_path / "link").symlink_to("real")
    os.link(tmp_path / "real" / "file", tmp_path / "hard")
    monkeypatch.chdir(tmp_path)
    for other in (
        "real/file",
        "./real//file",
        "link/file",
        "hard",
        "real/../link/file",
        f"file://{tmp_path}/real/file",
    ):
        assert paths.is_same(other, str(tmp_path / "real" / "file")), other
    assert paths.is_same("real/", "link") and paths.is_same("new/", "new")
    assert not paths.is_same("real", "real/file")
    assert not paths.is_same("new", "other")
    assert paths.is_same("gs://a/b/", "gs://a/b")
    assert not paths.is_same("gs://a/b", "a/b")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced(can_exchange, tmp_path, monkeypatch):
    if not can_exchange:

        def refuse(*_):
            raise OSError(errno.EINVAL, "not on this file system")

        monkeypatch.setattr(ops, "exchange_paths", refuse)
    target = tmp_path / "target"
    for text in ("one", "two", "three"):
        replace(target, text)
        assert text_of(target) == text
        assert os.listdir(tmp_path) == ["target"]


def test_a_folder_is_complete_whenever_a_writer_is_killed(
    tmp_path, monkeypatch
):
    target = folder_of(tmp_path / "all" / "target", "old")
    copies = snapshots.Snapshots(tmp_path / "all", tmp_path / "copies")
    with copies.of_operations(monkeypatch):
        replace(target, "new")
    found = [text_of(one / "target") for one in copies.folders]
    assert found == sorted(found, reverse=True)
    assert {*found} == {"old", "new"}
    # All files are flushed to disk before the folder gets its final name.
    names = [name for name, _ in copies.calls]
    assert names.index("exchange_paths") > names.index("fsync") + 3
    # The next writer removes the files that a killed writer left.
    for one in copies.folders:
        replace(one / "target", "next")
        assert text_of(one / "target") == "next"
        assert os.listdir(one) == ["target"]


def test_the_old_folder_of_a_killed_writer_is_restored(tmp_path):
    """Covers file systems that cannot exchange two folders atomically."""
    target = tmp_path / "target"
    folder_of(tmp_path / f"target.partial-{'0' * 16}" / "old", "old")
    with files.staged(str(target)):
        assert text_of(target) == "old"
    assert os.listdir(tmp_path) == ["target"]


def test_files_of_live_writers_are_kept(tmp_path):
    target = str(tmp_path / "target")
    program = (
        "import fcntl, os, sys\n"
        "handle = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(handle, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    live = f"{target}.partial-{'1' * 16}"
    os.mkdir(live)
    # Folders with other names, and files that are not folders, must be kept.
    others = [
        f"{target}.partial-1",
        f"{target}2.partial-{'0' * 16}",
        f"{target}.partial-{'2' * 16}",
    ]
    for other in others:
        with open(other, "w", encoding="utf-8"):
            pass
    with subprocess.Popen(
        [sys.executable, "-c", program, live],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            with files.staged(target) as one, files.staged(target) as two:
                assert os.path.isdir(live)
                assert os.path.isdir(one) and os.path.isdir(two)
            with pytest.raises(
                OSError, match="another process or thread is writing it.*target"
            ) as caught:
                with files.staged(target, alone=True):
                    pass
            assert caught.value.errno == errno.EBUSY
        finally:
            process.kill()
    with files.staged(target, alone=True):
        assert not os.path.exists(live)
    assert all(os.path.exists(other) for other in others)
    assert len(os.listdir(tmp_path)) == len(others)


def test_a_file_system_without_locks_is_supported(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    leftover = tmp_path / f"target.partial-{'0' * 16}"
    leftover.mkdir()
    replace(tmp_path / "target", "one")
    assert text_of(tmp_path / "target") == "one"
    # The folder is kept, because its writer may still be running.
    assert leftover.exists()


def test_a_link_to_a_file_is_kept(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("old")
    (tmp_path / "link").symlink_to("real/file")
    with pytest.raises(ZeroDivisionError):
        with files.replacing_file(str(tmp_path / "link")) as new:
            with open(new, "w", encoding="utf-8") as file:
                file.write("half")
            raise ZeroDivisionError
    assert (tmp_path / "real" / "file").read_text() == "old"
    with files.replacing_file(str(tmp_path / "link")) as new:
        with open(new, "w", encoding="utf-8") as file:
            file.write("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "new"
    assert os.listdir(tmp_path / "real") == ["file"]


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (tf.errors.ResourceExhaustedError, errno.ENOSPC),
        (tf.errors.PermissionDeniedError, errno.EACCES),
        (tf.errors.NotFoundError, errno.ENOENT),
        (tf.errors.UnavailableError, errno.EIO),
    ],
)
def test_tensorflow_errors_become_os_errors(error, number):
    with pytest.raises(OSError, match="^.Errno .*] x.data; why: 'x'$") as one:
        with files.os_errors("x"):
            raise error(
                None,
                None,
                "{{function_node __wrapped__SaveV2_device_"
                "/job:a/device:CPU:0}} x.data; why [Op:SaveV2]",
            )
    assert one.value.errno == number


@pytest.mark.parametrize(
    "kind", [waiting.ServerLostError, waiting.StepDeadlineError]
)
def test_the_loss_of_a_server_is_not_an_error_of_files(kind):
    """The values of the files can be on a server."""
    cause = tf.errors.UnavailableError(None, None, "Socket closed")
    with pytest.raises(kind, match="ps 1 is lost"):
        with files.os_errors("x"):
            raise lost_calls.error_of(kind, "ps 1 is lost", cause)


def test_names_with_a_prefix_are_found_in_a_folder_with_any_name(tmp_path):
    folder = tmp_path / r"a[b]*?\c"
    folder.mkdir()
    for name in ("x-1", "x-[2]", "y-1"):
        (folder / name).write_text("")
    prefix = str(folder / "x-")
    assert files.with_prefix(prefix) == [f"{prefix}1", f"{prefix}[2]"]
    assert files.with_prefix(str(tmp_path / "missing" / "x")) == []
