"""Prints the locations of packages for the C++ build, one KEY=value per line.

Run the script as `python -I probe.py`, so that setup.py and Bazel get the same
result for any PYTHONPATH. Folders in TF_LAYOUTMAP_BUILD_PACKAGES have priority.
setup.py sets this variable if pip runs an isolated build. The script does not
import the packages, because importing TensorFlow takes seconds.

If a package is missing, the exit status is 1 and stderr contains one sentence.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import sysconfig


def package_dir(module: str, remedy: str) -> pathlib.Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            f"Building tf_layoutmap requires the Python package {module!r} in "
            f"{sys.executable}. Install it: {remedy}"
        )
    return pathlib.Path(spec.submodule_search_locations[0])


def tensorflow_version(folder: pathlib.Path) -> str:
    """Returns the version of the TensorFlow distribution in `folder`."""
    # TensorFlow has several distributions, which install the same files.
    for name in (
        "tensorflow-cpu",
        "tensorflow",
        "tensorflow-tpu",
        "tensorflow-rocm",
        "tf-nightly",
        "tf-nightly-cpu",
    ):
        for found in importlib.metadata.distributions(
            name=name, path=[str(folder)]
        ):
            return found.version
    sys.exit(
        "The files of TensorFlow exist but it has no installed distribution. "
        "Reinstall it: pip install --force-reinstall tensorflow-cpu"
    )


def existing(path: pathlib.Path, remedy: str) -> pathlib.Path:
    if not path.exists():
        sys.exit(
            f"Building tf_layoutmap requires {path}, which does not exist: "
            f"{remedy}"
        )
    return path


def main() -> None:
    folders = os.environ.get("TF_LAYOUTMAP_BUILD_PACKAGES", "")
    sys.path[:0] = filter(None, folders.split(os.pathsep))
    # The interpreter may be started through a symbolic link that changes later.
    # The links to TensorFlow's files stay valid, because they use real paths.
    tensorflow = package_dir("tensorflow", "pip install tensorflow-cpu")
    pybind11 = package_dir("pybind11", "pip install pybind11")
    python_include = pathlib.Path(sysconfig.get_paths()["include"])
    found = {
        "TF_VERSION": tensorflow_version(tensorflow.parent),
        "TF_INCLUDE": existing(tensorflow / "include", "reinstall TensorFlow"),
        "TF_LIB": existing(
            tensorflow / "libtensorflow_framework.so.2",
            "only Linux is supported",
        ),
        "PYBIND11_INCLUDE": existing(
            pybind11 / "include", "pip install pybind11"
        ),
        "PYTHON_INCLUDE": existing(
            python_include / "Python.h", "apt-get install python3-dev"
        ).parent,
        "EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
    }
    for key, value in found.items():
        if isinstance(value, pathlib.Path):
            value = os.path.realpath(value)
        print(f"{key}={value}")


if __name__ == "__main__":
    main()
