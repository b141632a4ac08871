"""setup.py says what it does, and leaves no Bazel behind that it started."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# Notes what it is asked for, and fails: nothing is there to be copied.
BAZEL = """#!/bin/sh
echo "$*" >> "$CALLS"
[ "$1" != build ]
"""


@pytest.fixture
def checkout(tmp_path):
    """As much of the project as setup.py reads before it calls Bazel."""
    folder = tmp_path / "checkout"
    for name in ("setup.py", "tf_layoutmap/__init__.py",
                 "third_party/tf/probe.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    bazel = tmp_path / "bazel"
    bazel.write_text(BAZEL)
    bazel.chmod(0o755)
    return folder


def run_setup(checkout, *arguments):
    """Returns what was printed, and what Bazel was asked for."""
    calls = checkout.parent / "calls"
    calls.unlink(missing_ok=True)
    environment = {**os.environ, "BAZEL": str(checkout.parent / "bazel"),
                   "CALLS": str(calls), "PYTHON_BIN_PATH": sys.executable}
    ended = subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments], cwd=checkout,
        env=environment, capture_output=True, text=True, timeout=120,
        check=False)
    assert "`bazel build //cc:native` failed" in ended.stderr
    return ended.stdout, calls.read_text().splitlines()


def test_what_pip_starts_is_shut_down_again(checkout):
    said, calls = run_setup(checkout, "build")
    assert calls == ["build //cc:native", "shutdown"]
    # Before minutes of silence: what, how long, how much memory.
    for word in ("native parts with Bazel", "minutes", "GB of memory"):
        assert word in said
    assert len(said.splitlines()) == 1


def test_who_builds_again_and_again_keeps_the_server(checkout):
    _, calls = run_setup(checkout, "build_ext", "--inplace")
    assert calls == ["build //cc:native"]


def test_a_server_that_was_there_is_left_alone(checkout):
    # As a server of Bazel's looks in the list of processes.
    server = subprocess.Popen([
        sys.executable, "-c", "import time; time.sleep(100)",
        f"--workspace_directory={checkout}"])
    try:
        _, calls = run_setup(checkout, "build")
    finally:
        server.kill()
        server.wait()
    assert calls == ["build //cc:native"]
