"""Versions that the package supports match the metadata that pip reads."""

import os
import pathlib
import re
import subprocess
import tomllib

import pytest

from tf_layoutmap import _version
from tf_layoutmap._core import keras_private, requirements

ROOT = pathlib.Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def test_pip_requirements_match_the_checked_versions():
    for name in ("tensorflow", "tensorflow-cpu"):
        # Builds with build isolation compile against the newest version.
        (built_against,) = [
            requirement
            for requirement in PYPROJECT["build-system"]["requires"]
            if requirement.split(">")[0] == name
        ]
        assert built_against.split(";")[0] == requirements._range(
            name, requirements.TENSORFLOW
        )
    assert (
        requirements.remedy("keras").split('"')[1] in (PROJECT["dependencies"])
    )
    assert requirements.KERAS == tuple(keras_private._COLUMNS)


def commands_of_make(*arguments):
    return subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_makefile_finds_the_minor_versions_of_tensorflow():
    commands = commands_of_make("wheels").stdout.splitlines()
    versions = " ".join(requirements.TENSORFLOW)
    assert commands[-1].startswith("bash .ci/wheels tensorflow")
    assert commands[-1].endswith(f" {versions}")
    ended = commands_of_make("build", "TF=2.1")
    assert f"TF must be one of {versions}. Received: TF=2.1" in ended.stderr


@pytest.mark.parametrize("minor", requirements.TENSORFLOW)
def test_each_version_of_tensorflow_has_its_environment_and_outputs(minor):
    commands = commands_of_make("cc-test", "wheel", f"TF={minor}").stdout
    is_newest = minor == requirements.TENSORFLOW[-1]
    venv = ".venv" if is_newest else f".venv-{minor}"
    assert f"bash .ci/wheel {venv}/bin/python {minor}\n" in commands
    config = f"--config=tf{minor}"
    assert (f"test {config} //cc/..." in commands) == (not is_newest)
    if not is_newest:
        assert f"build:tf{minor} " in (ROOT / ".bazelrc").read_text()


def test_a_wheel_for_aarch64_uses_a_separate_environment():
    ended = commands_of_make("wheel", "ARCH=aarch64", "TF=2.20").stdout
    folder = ".tools/aarch64/2.20"
    assert f"aarch64_packages .venv-2.20/bin/python 2.20 {folder}\n" in ended
    assert "bash .ci/system_packages aarch64\n" in ended
    last = ended.splitlines()[-1]
    assert last.startswith("TF_LAYOUTMAP_ARCH=aarch64 ")
    assert last.endswith("bash .ci/wheel .venv-2.20/bin/python 2.20")
    assert f"/{folder}/lib/python*/site-packages" in last
    ended = commands_of_make("wheel", "ARCH=riscv64").stderr
    assert "ARCH must be" in ended and "Received: ARCH=riscv64" in ended


def test_the_package_does_not_require_tensorflow():
    """With such a requirement, pip could overwrite `tensorflow-cpu`."""
    for requirement in PROJECT["dependencies"]:
        assert not requirement.startswith(("tensorflow", "tf_keras"))


def test_the_version_is_defined_in_one_file():
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", _version.__version__)
    copies = [
        path
        for path in sorted((ROOT / "tf_layoutmap").rglob("*.py"))
        if re.search(r"^__version__\s*=", path.read_text(), re.M)
    ]
    assert copies == [ROOT / "tf_layoutmap" / "_version.py"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changes, re.M).group(1)
    assert newest == _version.__version__


def test_the_metadata_names_the_author_of_the_documentation():
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    author = re.search(r'^author = "(.*)"$', conf, re.M).group(1)
    (listed,) = PROJECT["authors"]
    assert listed["name"].lower() == author.lower()


def test_all_files_list_the_same_python_versions():
    files = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/design.md",
        ".ci/make_venv",
        "third_party/tf/tf_configure.bzl",
    ]
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "3.11 to 3.13" in " ".join(text.split()), name
        assert not re.search(r"3\.10 to 3\.", text), name
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert [
        line.split()[-1]
        for line in PROJECT["classifiers"]
        if "Python :: 3." in line
    ] == ["3.11", "3.12", "3.13"]


def test_only_a_missing_package_is_reported_as_not_installed():
    def said(name):
        return requirements.not_installed(
            "tlm.X", ModuleNotFoundError("No module", name=name)
        )

    assert said("h5py") is None
    assert said("tensorflow.python.tpu.no_such_module") is None
    assert said(None) is None
    error = said("tensorflow")
    assert error.name == "tensorflow"
    assert str(error) == (
        "tlm.X needs TensorFlow, which is not installed. Install it: "
        f'pip install "tensorflow-cpu=={requirements.built_for()}.*" (or '
        "tensorflow)."
    )


@pytest.mark.parametrize(
    "machine, found",
    [
        ("x86_64", 'pip install "tensorflow-cpu=={}.*" (or tensorflow)'),
        ("aarch64", 'pip install "tensorflow=={}.*"'),
    ],
)
def test_the_install_command_names_a_package_for_the_machine(
    machine, found, monkeypatch
):
    """tensorflow-cpu has no wheels for aarch64."""
    monkeypatch.setattr(requirements.platform, "machine", lambda: machine)
    expected = found.format(requirements.built_for())
    assert requirements.remedy("tensorflow") == expected


@pytest.mark.parametrize("version", ["3.15.1", "3.15.0-rc1", "3.15"])
def test_a_minor_version_is_its_first_two_numbers(version):
    assert requirements.minor(version) == "3.15"
