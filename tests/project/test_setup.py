"""setup.py reports its steps and shuts down only Bazel servers it started."""

import email
import os
import pathlib
import platform
import runpy
import shutil
import subprocess
import sys

import pytest

from tf_layoutmap import _version
from tf_layoutmap._core import requirements

ROOT = pathlib.Path(__file__).parents[2]

# Stand-in for Bazel, which records its arguments and fails.
BAZEL = """#!/bin/sh
echo "$*" >> "$CALLS"
[ "$1" = build ] || exit 0
echo "$TF_LAYOUTMAP_BUILD_PACKAGES" > "$CALLS.packages"
exit 1
"""


# Builds for older versions of TensorFlow have their own output trees.
IS_NEWEST = requirements.built_for() == requirements.TENSORFLOW[-1]
CONFIG = "" if IS_NEWEST else f"--config=tf{requirements.built_for()} "
# Arguments of Bazel if the output is not a terminal.
BUILD = (
    f"build {CONFIG}--show_progress --curses=no --show_progress_rate_limit=20 "
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

    def run(
        version, *arguments, name="tensorflow-cpu", library=b"", **environment
    ):
        folder = tmp_path / f"overlay-{version}"
        for module in ("tensorflow", "pybind11"):
            (folder / module / "include").mkdir(parents=True)
            (folder / module / "__init__.py").touch()
        path = folder / "tensorflow/libtensorflow_framework.so.2"
        path.write_bytes(library)
        start = f"{name.replace('-', '_')}-{version}"
        metadata = folder / f"{start}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Name: {name}\nVersion: {version}\n")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHON_BIN_PATH"
        }
        ended = subprocess.run(
            [sys.executable, "setup.py", "-q", *(arguments or ["build"])],
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


@pytest.mark.parametrize("minor", requirements.TENSORFLOW)
def test_an_isolated_build_uses_its_packages(minor, isolated, tmp_path):
    folder, printed = isolated(f"{minor}.99")
    assert "`bazel build //cc:native` failed" in printed
    assert (tmp_path / "calls.packages").read_text() == f"{folder}\n"
    calls = (tmp_path / "calls").read_text()
    is_newest = minor == requirements.TENSORFLOW[-1]
    assert (f"build --config=tf{minor} " in calls) == (not is_newest)


def test_another_tensorflow_in_an_isolated_build_raises(isolated):
    _, printed = isolated("2.19.7")
    assert f"against TensorFlow {' or '.join(requirements.TENSORFLOW)}." in (
        printed
    )
    assert "Received: TensorFlow 2.19.7 in" in printed


def test_a_configured_interpreter_uses_its_own_packages(isolated, tmp_path):
    _, printed = isolated("2.19.7", PYTHON_BIN_PATH=sys.executable)
    assert "`bazel build //cc:native` failed" in printed
    assert (tmp_path / "calls.packages").read_text() == "\n"


# The header of an ELF file contains the number of the architecture.
AARCH64_LIBRARY = b"\x7fELF".ljust(18, b"\0") + b"\xb7\0"


@pytest.mark.parametrize("minor", requirements.TENSORFLOW)
def test_a_build_for_aarch64_has_its_own_outputs(minor, isolated, tmp_path):
    _, printed = isolated(
        f"{minor}.0", library=AARCH64_LIBRARY, TF_LAYOUTMAP_ARCH="aarch64"
    )
    assert "`bazel build //cc:native` failed" in printed
    is_newest = minor == requirements.TENSORFLOW[-1]
    config = "aarch64" if is_newest else f"aarch64-tf{minor}"
    calls = (tmp_path / "calls").read_text()
    assert f"build --config={config} " in calls
    assert f"build:{config} " in (ROOT / ".bazelrc").read_text()


def test_a_build_for_aarch64_requires_its_tensorflow(isolated):
    _, printed = isolated(
        "2.21.0", library=bytes(20), TF_LAYOUTMAP_ARCH="aarch64"
    )
    assert "requires a TensorFlow for aarch64. Received: " in printed
    assert "make wheel ARCH=aarch64" in printed


def test_debian_python_headers_are_used_for_another_architecture(tmp_path):
    probe = runpy.run_path(str(ROOT / "third_party/tf/probe.py"))
    include = tmp_path / "python3.11"
    assert probe["python_config"](include, "other") == {}
    folder = tmp_path / f"{platform.machine()}-linux-gnu/python3.11"
    folder.mkdir(parents=True)
    assert probe["python_config"](include, platform.machine()) == {}
    assert probe["python_config"](include, "other") == {
        "PYTHON_CONFIG": folder,
        "PYTHON_CONFIG_NAME": "other-linux-gnu/python3.11",
    }


@pytest.mark.parametrize(
    "arch, arguments, expected",
    [
        ("aarch64", ["build_ext", "--inplace"], "Build a wheel: make wheel"),
        ("riscv64", ["build"], "must be aarch64 on x86_64, or"),
    ],
)
def test_an_unsupported_build_for_another_architecture_raises(
    arch, arguments, expected, isolated, tmp_path
):
    _, printed = isolated(
        "2.21.0",
        *arguments,
        library=AARCH64_LIBRARY,
        TF_LAYOUTMAP_ARCH=arch,
    )
    assert expected in printed
    assert not (tmp_path / "calls").exists()


def metadata(checkout):
    text = (checkout / "tf_layoutmap.egg-info/PKG-INFO").read_text()
    return email.message_from_string(text)


def extra(found, name):
    """Returns the requirements of an extra, in any order."""
    end = f'extra == "{name}"'
    return {
        one.partition(";")[0].strip()
        for one in found.get_all("Requires-Dist")
        if one.endswith(end)
    }


@pytest.mark.parametrize(
    "name, minor",
    [
        ("tensorflow", "2.21"),
        ("tensorflow-cpu", "2.20"),
        ("tensorflow-tpu", "2.20"),
    ],
)
def test_the_metadata_contains_the_minor_version(
    name, minor, isolated, checkout
):
    isolated(f"{minor}.0", "egg_info", name=name)
    found = metadata(checkout)
    end = f"+tf{minor.replace('.', '')}"
    assert found["Version"] == _version.__version__ + end
    for one in ("tensorflow", "tensorflow-cpu"):
        assert extra(found, one) == {f"{one}=={minor}.*"}
    tpu = {"tensorflow-tpu==2.20.*", "libtpu<0.0.32,>=0.0.17"}
    assert extra(found, "tensorflow-tpu") == (tpu if minor == "2.20" else set())
    # tensorflow-cpu would be installed over another distribution.
    assert not [
        one
        for one in found.get_all("Requires-Dist")
        if one.startswith("tensorflow") and "extra" not in one
    ]
    assert "hypothesis" in extra(found, "test")


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_a_source_distribution_supports_all_versions(
    is_unpacked, isolated, checkout
):
    """pip requires that its wheel has the same version."""
    if is_unpacked:
        (checkout / "PKG-INFO").touch()
        isolated("2.20.0", "egg_info")
    else:
        isolated("2.20.0", "sdist")
    found = metadata(checkout)
    assert found["Version"] == _version.__version__
    versions = "==2.20.*" if is_unpacked else "<2.22,>=2.20"
    assert extra(found, "tensorflow") == {f"tensorflow{versions}"}
