"""Tests which programs may write checkpoints to a folder."""

import gc
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from absl import logging

from tf_layoutmap.ps import checkpoints, folder_locks

# Locks a file as another program does, without importing TensorFlow.
OTHER_PROGRAM = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
os.write(handle, b'{"process": 7, "host": "there"}')
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_program(tmp_path):
    """Yields a program that has locked the folder `tmp_path / "saved"`."""
    program = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROGRAM, str(tmp_path / "saved.owner")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout.readline() == "locked\n"
    yield program
    program.kill()
    program.communicate()


def write(prefix):
    pathlib.Path(prefix).write_text("values")


def test_a_folder_of_another_program_raises(tmp_path, other_program):
    folder = tmp_path / "saved"
    (folder / ".being-written-closure-3").mkdir(parents=True)
    with pytest.raises(OSError, match="process 7 on host there") as raised:
        checkpoints.CheckpointFolder(folder, 2)
    assert raised.value.filename == str(folder)
    # The other program may still write this checkpoint.
    assert os.listdir(folder) == [".being-written-closure-3"]
    # The lock ends with the program, also if the program is killed.
    other_program.kill()
    other_program.wait()
    opened = checkpoints.CheckpointFolder(folder, 2)
    assert os.listdir(folder) == []
    del opened


def test_a_lock_names_its_owner_and_is_shared_in_a_process(tmp_path):
    folder = tmp_path / "saved"
    first = checkpoints.CheckpointFolder(folder, 2)
    link = tmp_path / "link"
    link.symlink_to(folder)
    second = checkpoints.CheckpointFolder(link, 2)
    path = tmp_path / "saved.owner"
    assert json.loads(path.read_text()) == {
        "process": os.getpid(),
        "host": socket.gethostname(),
    }
    for held in (first, second):
        assert is_locked(path)
        del held
    del first, second
    gc.collect()
    assert not is_locked(path)


def is_locked(path):
    code = (
        "import fcntl, os, sys; "
        "fcntl.flock(os.open(sys.argv[1], os.O_RDWR), "
        "fcntl.LOCK_EX | fcntl.LOCK_NB)"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code, str(path)],
        stderr=subprocess.PIPE,
    )
    return b"BlockingIOError" in ended.stderr


def test_a_file_system_without_locks_warns(tmp_path, monkeypatch):
    def flock(handle, operation):
        raise OSError(95, "Operation not supported")

    warnings = []
    monkeypatch.setattr(folder_locks.fcntl, "flock", flock)
    monkeypatch.setattr(
        logging, "warning", lambda form, *args: warnings.append(form % args)
    )
    opened = checkpoints.CheckpointFolder(tmp_path / "saved", 2)
    opened.save(1, write)
    assert opened.newest().num_done == 1
    assert "does not support locks (Operation not supported)" in warnings[0]


@pytest.mark.parametrize("makes_folder", [True, False])
def test_an_incomplete_checkpoint_does_not_prevent_a_later_one(
    tmp_path, monkeypatch, makes_folder
):
    """A user may have copied a part of a checkpoint, or deleted a file."""
    warnings = []
    monkeypatch.setattr(
        logging, "warning", lambda form, *args: warnings.append(form % args)
    )
    opened = checkpoints.CheckpointFolder(tmp_path, 2)
    opened.save(5, write)
    incomplete = tmp_path / "closure-10"
    if makes_folder:
        incomplete.mkdir()
        (incomplete / "variables").write_text("half")
    else:
        incomplete.write_text("")
    opened = checkpoints.CheckpointFolder(tmp_path, 2)
    assert opened.newest().num_done == 5
    assert len(warnings) == 1
    assert f"{incomplete} is not a complete checkpoint" in warnings[0]
    for name in ("closure-10.1", "closure-10.2"):
        opened.save(10, write)
        assert opened.newest().prefix == str(tmp_path / name / "variables")
    assert sorted(os.listdir(tmp_path)) == [
        "closure-10",
        "closure-10.2",
        "closure-5",
    ]
