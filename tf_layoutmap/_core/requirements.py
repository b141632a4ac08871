"""Supported versions of other packages, and errors with install commands.

The module does not import other packages, so it works without TensorFlow and
Keras.
"""

# setup.py and the Makefile read TENSORFLOW here. pyproject.toml cannot read
# Python, so it repeats the versions.
TENSORFLOW = "2.21"
# `_core/keras_private.py` has one column for each of these versions.
KERAS = ("3.12", "3.13", "3.14", "3.15", "3.16")
TF_KERAS = "2.21"

# Environment variable that allows newer versions of Keras, if it is "1".
ALLOW_UNTESTED = "TF_LAYOUTMAP_ALLOW_UNTESTED"


def _range(name: str, versions: tuple[str, ...]) -> str:
    """Returns the requirement of pip for consecutive minor versions.

    >>> _range("keras", ("3.12", "3.13"))
    'keras>=3.12,<3.14'
    """
    major, newest = versions[-1].split(".")
    return f"{name}>={versions[0]},<{major}.{int(newest) + 1}"


# Maps the import name of each package to its title and its pip arguments.
# `--no-deps` is required for tf_keras, because its dependency `tensorflow`
# overwrites the files of `tensorflow-cpu`.
_PACKAGES = {
    "tensorflow": (
        "TensorFlow",
        f'"tensorflow-cpu=={TENSORFLOW}.*" (or tensorflow)',
    ),
    "keras": ("Keras 3", f'"{_range("keras", KERAS)}"'),
    "tf_keras": ("tf_keras", f'--no-deps "tf_keras=={TF_KERAS}.*"'),
}


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
        tuple(int(number) for number in minor(one).split("."))
        for one in (version, minor_version)
    )
    return first > second


def remedy(package: str) -> str:
    """Returns the command that installs a supported version.

    >>> remedy("keras")
    'pip install "keras>=3.12,<3.17"'
    """
    return f"pip install {_PACKAGES[package][1]}"


def needs(package: str, supported: tuple[str, ...]) -> str:
    """Returns a sentence with the supported versions of a package.

    >>> needs("keras", ("3.12", "3.13"))
    'tf_layoutmap supports Keras 3.12 to 3.13 only.'
    >>> needs("tensorflow", ("2.21",))
    'tf_layoutmap supports TensorFlow 2.21.* only.'
    """
    title = _PACKAGES[package][0].removesuffix(" 3")
    versions = (
        f"{supported[0]}.*"
        if len(supported) == 1
        else f"{supported[0]} to {supported[-1]}"
    )
    return f"tf_layoutmap supports {title} {versions} only."


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
    title = _PACKAGES[package][0].removesuffix(" 3")
    untested = (
        f" Or set {ALLOW_UNTESTED}=1 to try this version, which was not tested."
        if package == "keras" and is_newer(version, supported[-1])
        else ""
    )
    return ImportError(
        f"{needs(package, supported)} Received: {title} {version}. "
        f"Install a supported version: {remedy(package)}.{untested}",
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
    if error.name not in _PACKAGES:
        return None
    title, _ = _PACKAGES[error.name]
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
    is_own = error.name in _PACKAGES and str(error).startswith("tf_layoutmap")
    return error if is_own else None
