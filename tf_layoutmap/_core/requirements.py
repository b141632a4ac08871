"""Supported versions of other packages, and errors with install commands.

The module does not import other packages, so it works without TensorFlow and
Keras.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import sys
from typing import Any

# The build supports these versions, and a built package one of them, see
# `built_for`. setup.py and the Makefile read TENSORFLOW here. pyproject.toml
# cannot read Python, so it repeats the versions.
TENSORFLOW = ("2.20", "2.21")
# `_core/keras_private.py` has one column for each of these versions.
KERAS = ("3.12", "3.13", "3.14", "3.15", "3.16")
# A version of tf_keras supports the same minor version of TensorFlow.
TF_KERAS = TENSORFLOW
# The only supported version of the package tensorflow-tpu, and the first
# supported and the first unsupported version of libtpu for it. `pip install
# tensorflow-tpu` installs the newest libtpu, which lacks functions that
# TensorFlow calls while it is imported.
TENSORFLOW_TPU = "2.20"
LIBTPU = ("0.0.17", "0.0.32")
# Environment variable that replaces the library of the package libtpu.
_LIBTPU_PATH = "TPU_LIBRARY_PATH"

# Environment variable that allows newer versions of Keras, if it is "1".
ALLOW_UNTESTED = "TF_LAYOUTMAP_ALLOW_UNTESTED"


def _range(name: str, versions: tuple[str, ...]) -> str:
    """Returns the requirement of pip for consecutive minor versions.

    >>> _range("keras", ("3.12", "3.13"))
    'keras>=3.12,<3.14'
    """
    major, newest = versions[-1].split(".")
    return f"{name}>={versions[0]},<{major}.{int(newest) + 1}"


# Maps the import name of each package to its title.
_TITLES = {"tensorflow": "TensorFlow", "keras": "Keras", "tf_keras": "tf_keras"}


def _pip_arguments(package: str) -> str:
    if package == "keras":
        return f'"{_range("keras", KERAS)}"'
    version = built_for()
    if package == "tensorflow":
        # tensorflow-cpu has wheels only for x86-64.
        if platform.machine() != "x86_64":
            return f'"tensorflow=={version}.*"'
        return f'"tensorflow-cpu=={version}.*" (or tensorflow)'
    # `--no-deps` is required for tf_keras, because its dependency `tensorflow`
    # overwrites the files of `tensorflow-cpu`.
    return f'--no-deps "tf_keras=={version}.*"'


def built_version() -> str | None:
    """Returns the version of TensorFlow that the libraries were built for.

    None if the libraries are not built.
    """
    try:
        build_info = importlib.import_module("tf_layoutmap._build_info")
    except ModuleNotFoundError:
        return None
    return build_info.TF_VERSION


def built_for() -> str:
    """Returns the minor version of TensorFlow that this build supports.

    If the libraries are not built, the function returns the newest version.
    """
    version = built_version()
    return TENSORFLOW[-1] if version is None else minor(version)


def local_version(tensorflow: str) -> str:
    """Returns the end of the versions of wheels for a minor version.

    >>> local_version("2.21")
    '+tf221'
    """
    return f"+tf{tensorflow.replace('.', '')}"


def minor(version: str) -> str:
    """Returns the part of a version that must equal the supported version.

    >>> minor("2.21.0-rc1")
    '2.21'
    """
    return ".".join(version.split(".")[:2])


def is_newer(version: str, minor_version: str) -> bool:
    """Returns whether a version has a higher minor version.

    >>> is_newer("3.17.0", "3.16"), is_newer("3.16.9", "3.16")
    (True, False)
    >>> is_newer("4.0.0-dev", "3.16")
    True
    """
    first, second = (
        tuple(int(number) for number in minor(text).split("."))
        for text in (version, minor_version)
    )
    return first > second


def remedy(package: str) -> str:
    """Returns the command that installs a supported version.

    >>> remedy("keras")
    'pip install "keras>=3.12,<3.17"'
    """
    return f"pip install {_pip_arguments(package)}"


def needs(package: str, supported: tuple[str, ...]) -> str:
    """Returns a sentence with the supported versions of a package.

    >>> needs("keras", ("3.12", "3.13"))
    'tf_layoutmap supports Keras 3.12 to 3.13 only.'
    >>> needs("tensorflow", ("2.21",))
    'This build of tf_layoutmap supports TensorFlow 2.21.* only.'
    """
    # The libraries of a build are for one version of TensorFlow.
    subject = "" if package == "keras" else "This build of "
    versions = (
        f"{supported[0]}.*"
        if len(supported) == 1
        else f"{supported[0]} to {supported[-1]}"
    )
    return f"{subject}tf_layoutmap supports {_TITLES[package]} {versions} only."


def other_version(
    package: str, version: str, supported: tuple[str, ...]
) -> ImportError | None:
    """Returns the error for an unsupported minor version of a package.

    Args:
      package: Import name of the package.
      version: Installed version.
      supported: Supported minor versions, such as `("2.21",)`, in ascending
        order.

    Returns:
      An ImportError with a remedy; None if the version is supported.
    """
    if minor(version) in supported:
        return None
    other = ""
    if package == "keras" and is_newer(version, supported[-1]):
        other = (
            f" Or set {ALLOW_UNTESTED}=1 to try this version, which was not "
            "tested."
        )
    elif package == "tensorflow" and minor(version) in TENSORFLOW:
        other = (
            f" Or install the build of tf_layoutmap for TensorFlow "
            f"{minor(version)}: the version of its wheel ends with "
            f"{local_version(minor(version))}, and `pip install "
            "--no-build-isolation .` in a checkout builds it."
        )
    return ImportError(
        f"{needs(package, supported)} Received: {_TITLES[package]} {version}. "
        f"Install a supported version: {remedy(package)}.{other}",
        name=package,
    )


def not_installed(who: str, error: ModuleNotFoundError) -> ImportError | None:
    """Returns the error for a package that is not installed.

    Args:
      who: Name of the module or feature that requires the package.
      error: Error that an import raised.

    Returns:
      An ImportError with a remedy. None if the error is about a different
      module, such as a submodule or a dependency of the package.
    """
    if error.name not in _TITLES:
        return None
    title = "Keras 3" if error.name == "keras" else _TITLES[error.name]
    return ImportError(
        f"{who} needs {title}, which is not installed. Install it: "
        f"{remedy(error.name)}.",
        name=error.name,
    )


def refusal(who: str, error: ImportError) -> ImportError | None:
    """Converts an error that an import raised to an error with a remedy.

    Args:
      who: Name of the module or feature that requires the import.
      error: Error that the import raised.

    Returns:
      `error` if this module created it, otherwise the result of
      `not_installed`.
    """
    if isinstance(error, ModuleNotFoundError):
        return not_installed(who, error)
    is_own = error.name in _TITLES and str(error).startswith(
        ("tf_layoutmap", "This build of tf_layoutmap")
    )
    return error if is_own else None


def check_libtpu_before_tensorflow() -> None:
    """Makes the next import of TensorFlow call `check_libtpu` first."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _CheckingFinder())


def check_libtpu() -> None:
    """Checks that libtpu does not abort the process that imports TensorFlow.

    The function reads the metadata of the installed packages.

    Raises:
      ImportError: If TensorFlow is for TPUs and libtpu is too new.
    """
    tensorflow = installed_version("tensorflow-tpu")
    libtpu = installed_version("libtpu")
    first, end = LIBTPU
    if (
        tensorflow is None
        or libtpu is None
        or minor(tensorflow) != TENSORFLOW_TPU
        or _release(libtpu) < _release(end)
        or os.environ.get(_LIBTPU_PATH)
    ):
        return
    raise ImportError(
        f"tf_layoutmap needs a libtpu that tensorflow-tpu {tensorflow} "
        f"supports. Received: libtpu {libtpu}, with which `import tensorflow` "
        "aborts the process. Install a supported version: pip install "
        f'"libtpu>={first},<{end}".',
        name="tensorflow",
    )


def installed_version(name: str) -> str | None:
    """Returns the version of an installed package without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, without the end of a nightly version.

    >>> _release("0.0.32.1"), _release("0.0.33.dev20260101+nightly")
    ((0, 0, 32, 1), (0, 0, 33))
    """
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


class _CheckingFinder:
    """Finder of modules that checks libtpu before TensorFlow is imported."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> None:
        """Returns None, so that the other finders find the module."""
        del path, target
        if name == "tensorflow":
            # After an error, the next import must raise it again.
            check_libtpu()
            sys.meta_path.remove(self)
