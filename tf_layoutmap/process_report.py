"""Describes versions, machine and settings of this process for bug reports.

`describe` returns the report. `problems` returns errors of packages
that cannot be imported. `check_process` runs the self-check.
"""

import csv
import importlib
import os
import pathlib
import platform
import sys
import types
from collections.abc import Iterator
from typing import Any

import tf_layoutmap
from tf_layoutmap._core import requirements

_PACKAGE = str(pathlib.Path(__file__).parent) + os.sep
# Digests of the replaced functions of Keras; `python -m tests.versions digests`
# writes the column of the installed version.
KERAS_DIGESTS = pathlib.Path(__file__).parent / "_core/keras_digests.csv"
_ROOTS = ("tensorflow", "keras", "tf_keras")
_NOT_INSTALLED = "not installed"
# Packages of which each contains the module `tensorflow`, and the library that
# tensorflow-tpu loads.
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "libtpu")
# Prefixes of environment variables that affect results or devices. The list
# does not contain variables that identify a person or a machine.
_SWITCHES = (
    "DTENSOR_",
    "TF_ENABLE_",
    "TF_DETERMINISTIC",
    "TF_XLA_FLAGS",
    "TF_NUM_",
    "TF_USE_LEGACY_KERAS",
    "TF_LAYOUTMAP_LOCAL_COLLECTIVES",
    "XLA_FLAGS",
    "KERAS_BACKEND",
    "CUDA_VISIBLE_DEVICES",
)


def describe() -> str:
    """Returns versions, machine, settings and replaced names of this process.

    The command `python -m tf_layoutmap` prints this report for a new process,
    and runs the self-check. To get a report about the process of your program,
    call this function:

    ```python
    print(tlm.process.describe())
    ```

    Returns:
      Lines of text. The report also lists packages that are not installed or
      cannot be imported.
    """
    lines = [f"{title + ':':<16}{value}" for title, value in _facts()]
    replaced = replaced_names()
    lines.append(
        "Replaced in this process: "
        + ("nothing" if not replaced else f"{len(replaced)} names")
    )
    lines += [f"  {name}" for name in replaced]
    return "\n".join(lines)


def _facts() -> Iterator[tuple[str, str]]:
    yield "tf_layoutmap", _own_version()
    yield "TensorFlow", _tensorflow_version()
    yield "Keras", _version("keras")
    yield (
        "tf_keras",
        requirements.installed_version("tf_keras") or _NOT_INSTALLED,
    )
    yield "numpy", _version("numpy")
    yield "protobuf", _version("google.protobuf")
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "Platform", f"{platform.platform()}, {' '.join(platform.libc_ver())}"
    yield "Processors", f"{os.cpu_count()}, instruction set {_cpu_level()}"
    yield (
        "Environment",
        ", ".join(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith(_SWITCHES)
        )
        or "nothing set",
    )


def _own_version() -> str:
    version = tf_layoutmap.__version__
    built_for = requirements.built_version()
    if built_for is None:
        return f"{version}, native parts not built"
    version += f", built for TensorFlow {built_for}"
    try:
        from tf_layoutmap._core import ops  # noqa: F401
    except ImportError:
        return f"{version}, native parts not loaded"
    return version


def _tensorflow_version() -> str:
    """Returns the imported version, and the packages that can contain it."""
    installed = [
        f"{name} {version}"
        for name in _TENSORFLOWS
        if (version := requirements.installed_version(name)) is not None
    ]
    end = f" (installed: {', '.join(installed)})" if installed else ""
    return _version("tensorflow") + end


def _version(module: str) -> str:
    try:
        return importlib.import_module(module).__version__
    except ModuleNotFoundError as error:
        return (
            _NOT_INSTALLED
            if error.name == module.partition(".")[0]
            else f"does not import: {error}"
        )
    except ImportError as error:
        return f"does not import: {error}"


def _cpu_level() -> str:
    try:
        from tf_layoutmap._core import ops
    except ImportError:
        return "unknown"
    return ops.native.cpu_level()


def replaced_names() -> list[str]:
    """Returns the names in TensorFlow and Keras that are currently replaced.

    The function searches all imported modules of TensorFlow, Keras and tf_keras
    for functions of this package. If a function is in several modules, it is
    listed once.
    """
    places: dict[int, list[str]] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in _ROOTS or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if _is_ours(value):
                places.setdefault(id(value), []).append(f"{name}.{attribute}")
            elif isinstance(value, type) and value.__module__ == name:
                for method, function in list(vars(value).items()):
                    if _is_ours(function):
                        places.setdefault(id(function), []).append(
                            f"{name}.{value.__qualname__}.{method}"
                        )
    return sorted(
        first + (f" (and in {len(rest)} more places)" if rest else "")
        for first, *rest in places.values()
    )


def unknown_functions() -> list[str]:
    """Returns the replaced functions of Keras that differ from those tested.

    A patch version of Keras can change such a function. The file of digests has
    one row per function and one column per minor version of Keras.
    """
    from tf_layoutmap._core import keras_private

    known = {
        row["function"]: row[keras_private.COLUMN].split()
        for row in csv.DictReader(KERAS_DIGESTS.read_text().splitlines())
    }
    return [
        f"{name} of Keras {_version('keras')} (digest {digest})"
        for name, digest in keras_digests().items()
        if digest not in known.get(name, ())
    ]


def keras_digests() -> dict[str, str]:
    """Maps each replaced function of Keras to the digest of its source."""
    from tf_layoutmap._core import patch_entry, patches

    return {
        f"{entry.owner.partition(':')[2]}.{entry.name}": digest
        for group in patches.GROUPS
        # The modules of these groups import tf_keras, which is optional.
        if not group.startswith("tf_keras")
        for entry in patches.entries_of(group)
        if entry.seen_in == patch_entry.KERAS
        and (digest := patches.digest(entry)) is not None
    }


def _is_ours(value: Any) -> bool:
    if isinstance(value, property):
        value = value.fget
    value = (
        getattr(value, "__func__", value)
        if isinstance(value, classmethod | staticmethod)
        else value
    )
    # The code object is compared, because a wrapper has the name and the module
    # of the function that it wraps.
    while isinstance(value, types.FunctionType):
        if value.__code__.co_filename.startswith(_PACKAGE):
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def problems() -> list[str]:
    """Returns the distinct errors of imports of all public names."""
    errors = {}
    for name in tf_layoutmap.__all__:
        try:
            value = getattr(tf_layoutmap, name)
            for inner in getattr(value, "__all__", ()):
                if inner != "tf_keras":  # tf_keras is optional.
                    getattr(value, inner)
        except ImportError as error:
            # Two messages count as the same error if only the name before
            # "needs" differs.
            errors.setdefault(str(error).partition(" needs ")[2], str(error))
    return list(errors.values())


def check_process() -> str:
    """Runs the self-check of DTensor on two logical CPUs.

    If TensorFlow is already initialized, the self-check uses the existing
    devices.

    Returns:
      A description of the checks that were run.

    Raises:
      RuntimeError: If the self-check failed.
    """
    use_two_devices()
    return tf_layoutmap.layout.self_check()


def use_two_devices() -> None:
    """Splits the CPU into two devices if TensorFlow is not initialized yet."""
    tf = importlib.import_module("tensorflow")
    try:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
    except RuntimeError:
        pass  # TensorFlow is already initialized.
