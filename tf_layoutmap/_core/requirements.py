"""The versions that this one is written for, and what to install.

Pure, so that the sentences come where TensorFlow or Keras is missing.
"""

# setup.py and the Makefile read the first of them here. pyproject.toml cannot
# read, so it has the numbers too.
TENSORFLOW = "2.21"
KERAS = "3.15"
TF_KERAS = "2.21"

# By the name that is imported: what readers know it by, and what pip is told.
# Not `pip install tf_keras` alone: that brings `tensorflow`, which overwrites
# the files of `tensorflow-cpu`.
_PACKAGES = {
    "tensorflow": (
        "TensorFlow",
        f'"tensorflow-cpu=={TENSORFLOW}.*" (or tensorflow)',
    ),
    "keras": ("Keras 3", f'"keras=={KERAS}.*"'),
    "tf_keras": ("tf_keras", f'--no-deps "tf_keras=={TF_KERAS}.*"'),
}


def minor(version: str) -> str:
    """The part of a version that has to be the same.

    >>> minor("2.21.0-rc1")
    '2.21'
    """
    return ".".join(version.split(".")[:2])


def remedy(package: str) -> str:
    """Returns the command that installs a supported version.

    >>> remedy("keras")
    'pip install "keras==3.15.*"'
    """
    return f"pip install {_PACKAGES[package][1]}"


def needs(package: str, supported: str) -> str:
    """Returns the sentence that says which versions are supported.

    >>> needs("keras", "3.15")
    'tf_layoutmap supports Keras 3.15.* only.'
    """
    title = _PACKAGES[package][0].removesuffix(" 3")
    return f"tf_layoutmap supports {title} {supported}.* only."


def other_version(
    package: str,
    version: str,
    supported: str,
) -> ImportError | None:
    """Returns the error for another minor version of a package.

    Args:
      package: The name that is imported.
      version: The one that is installed.
      supported: The minor version that is supported, such as `"2.21"`.

    Returns:
      An ImportError with the remedy; None when it is that version.
    """
    if minor(version) == supported:
        return None
    title = _PACKAGES[package][0].removesuffix(" 3")
    return ImportError(
        f"{needs(package, supported)} Received: {title} {version}. "
        f"Install the supported one: {remedy(package)}.",
        name=package,
    )


def not_installed(who: str, error: ModuleNotFoundError) -> ImportError | None:
    """Returns the error for a package that is missing as a whole.

    Args:
      who: What needs it.
      error: What an import raised.

    Returns:
      An ImportError with the remedy; None when the error is about something
      else: a part of a package, or what one of them needs itself.
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
    """Returns the error with the remedy for what an import raised.

    Args:
      who: What needs the import.
      error: What it raised.

    Returns:
      As `not_installed`; or the error itself, if it is from this module.
    """
    if isinstance(error, ModuleNotFoundError):
        return not_installed(who, error)
    is_own = error.name in _PACKAGES and str(error).startswith("tf_layoutmap")
    return error if is_own else None
