"""One set of versions, in the package and in what pip reads."""

import pathlib
import re

import pytest

from tf_layoutmap import _requirements

ROOT = pathlib.Path(__file__).parent.parent


def test_pip_is_told_the_versions_that_are_checked():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'\nTF_MINOR = "{_requirements.TENSORFLOW}"\n' in setup
    major, minor = _requirements.KERAS.split(".")
    assert f'"keras>={major}.{minor},<{major}.{int(minor) + 1}"' in setup
    # tf_keras names TensorFlow's minor version as its own.
    assert _requirements.TF_KERAS == _requirements.TENSORFLOW


def test_pip_is_not_told_to_install_tensorflow():
    """Two packages own its files: whichever is there would be overwritten."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (required,) = re.findall(r"install_requires=\[(.*?)\]", setup, re.S)
    assert "tensorflow" not in required and "TF_MINOR" not in required
    assert "tf_keras" not in required


def test_the_same_pythons_are_named_everywhere():
    files = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md",
             ".ci/make_venv", "third_party/tf/tf_configure.bzl"]
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "3.11 to 3.13" in " ".join(text.split()), name
        assert not re.search(r"3\.10 to 3\.", text), name
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert 'python_requires=">=3.11,<3.14"' in setup
    assert re.findall(r'Python :: (3\.\d+)"', setup) == [
        "3.11", "3.12", "3.13"]
    assert 'target-version = "py311"' in (
        ROOT / "ruff.toml").read_text(encoding="utf-8")


def test_only_a_missing_package_is_called_not_installed():
    def said(name):
        return _requirements.not_installed(
            "tlm.X", ModuleNotFoundError("No module", name=name))

    assert said("h5py") is None
    assert said("tensorflow.python.tpu.no_such_module") is None
    assert said(None) is None
    error = said("tensorflow")
    assert error.name == "tensorflow"
    assert str(error) == (
        "tlm.X needs TensorFlow, which is not installed. Install it: "
        'pip install "tensorflow-cpu==2.21.*" (or tensorflow).')


@pytest.mark.parametrize("version", ["3.15.1", "3.15.0-rc1", "3.15"])
def test_a_minor_version_is_its_first_two_numbers(version):
    assert _requirements.minor(version) == "3.15"
