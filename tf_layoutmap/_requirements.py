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
        "TensorFlow", f'"tensorflow-cpu=={TENSORFLOW}.*" (or tensorflow)'),
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
        f"{remedy(error.name)}.", name=error.name)
