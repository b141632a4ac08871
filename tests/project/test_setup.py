"""setup.py reports its steps and shuts down only Bazel servers it started."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tf_layoutmap._core import requirements

ROOT = pathlib.Path(__file__).parents[2]

# Stand-in for Bazel, which records its arguments and fails.
BAZEL = """#!/bin/sh
echo "$*" >> "$CALLS"
[ "$1" = build ] || exit 0
echo "$TF_LAYOUTMAP_BUILD_PACKAGES" > "$CALLS.packages"
exit 1
"""


# Arguments of Bazel if the output is not a terminal.
BUILD = (
    "build --show_progress --curses=no --show_progress_rate_limit=20 "
    "//cc:native"
)


@pytest.fixture
def checkout(tmp_path):
    """Copies the files that setup.py reads before it calls Bazel."""
    folder = tmp_path / "checkout"
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "tf_layoutmap/__init__.py",
        "tf_layoutmap/_core/requirements.py",
        "tf_layoutmap/_version.py",
        "third_party/tf/probe.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    bazel = tmp_path / "bazel"
    bazel.write_text(BAZEL)
    bazel.chmod(0o755)
    return folder


def run_setup(checkout, *arguments):
    """Returns the printed text and the calls of Bazel."""
    calls = checkout.parent / "calls"
    calls.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "BAZEL": str(checkout.parent / "bazel"),
        "CALLS": str(calls),
        "PYTHON_BIN_PATH": sys.executable,
    }
    ended = subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "`bazel build //cc:native` failed" in ended.stderr
    return ended.stdout, calls.read_text().splitlines()


def test_a_bazel_server_started_by_pip_is_shut_down(checkout):
    printed, calls = run_setup(checkout, "build")
    assert calls == [BUILD, "shutdown"]
    # Before a long step, setup.py prints its description, duration and memory.
    for word in ("native parts with Bazel", "minutes", "GB of memory"):
        assert word in printed
    assert len(printed.splitlines()) == 1


def test_an_in_place_build_keeps_the_server(checkout):
    _, calls = run_setup(checkout, "build_ext", "--inplace")
    assert calls == [BUILD]


def test_a_running_server_is_not_shut_down(checkout):
    # Starts a process that looks like a Bazel server in the list of processes.
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; time.sleep(100)",
            f"--workspace_directory={checkout}",
        ]
    )
    try:
        _, calls = run_setup(checkout, "build")
    finally:
        server.kill()
        server.wait()
    assert calls == [BUILD]


@pytest.fixture
def isolated(checkout, tmp_path):
    """Runs setup.py as pip before 26 does, with packages from PYTHONPATH."""

    def run(version, **environment):
        folder = tmp_path / "overlay"
        for name in ("tensorflow", "pybind11"):
            (folder / name / "include").mkdir(parents=True)
            (folder / name / "__init__.py").touch()
        (folder / "tensorflow/libtensorflow_framework.so.2").touch()
        metadata = folder / f"tensorflow_cpu-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Name: tensorflow-cpu\nVersion: {version}\n")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHON_BIN_PATH"
        }
        ended = subprocess.run(
            [sys.executable, "setup.py", "-q", "build"],
            cwd=checkout,
            env={
                **inherited,
                "BAZEL": str(tmp_path / "bazel"),
                "CALLS": str(tmp_path / "calls"),
                "PYTHONPATH": str(folder),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return folder, ended.stderr

    return run


def test_an_isolated_build_uses_its_packages(isolated, tmp_path):
    folder, printed = isolated(f"{requirements.TENSORFLOW}.99")
    assert "`bazel build //cc:native` failed" in printed
    assert (tmp_path / "calls.packages").read_text() == f"{folder}\n"


def test_another_tensorflow_in_an_isolated_build_raises(isolated):
    _, printed = isolated("2.20.7")
    assert "Received: TensorFlow 2.20.7 in" in printed


def test_a_configured_interpreter_uses_its_own_packages(isolated, tmp_path):
    _, printed = isolated("2.20.7", PYTHON_BIN_PATH=sys.executable)
    assert "`bazel build //cc:native` failed" in printed
    assert (tmp_path / "calls.packages").read_text() == "\n"
