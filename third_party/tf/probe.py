"""Prints the locations of packages for the C++ build, one KEY=value per line.

Run the script as `python -I probe.py`, so that setup.py and Bazel get the same
result for any PYTHONPATH. Folders in TF_LAYOUTMAP_BUILD_PACKAGES have priority.
setup.py sets this variable if pip runs an isolated build. The script does not
import the packages, because importing TensorFlow takes seconds.

With TF_LAYOUTMAP_ARCH=aarch64, the build is for aarch64. The folders must then
contain a TensorFlow for aarch64. Python's headers are the headers of the
interpreter, because they depend only on the sizes of types, which are the same
on x86-64.

If a package is missing, the exit status is 1 and stderr contains one sentence.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys
import sysconfig

# The numbers of architectures in the headers of ELF files.
ELF_MACHINES = {"aarch64": 183, "x86_64": 62}

# tensorflow-cpu has wheels only for x86-64.
TF_PACKAGE = (
    "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"
)


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
        for distribution in importlib.metadata.distributions(
            name=name, path=[str(folder)]
        ):
            return distribution.version
    sys.exit(
        "The files of TensorFlow exist but it has no installed distribution. "
        f"Reinstall it: pip install --force-reinstall {TF_PACKAGE}"
    )


def existing(path: pathlib.Path, remedy: str) -> pathlib.Path:
    if not path.exists():
        sys.exit(
            f"Building tf_layoutmap requires {path}, which does not exist: "
            f"{remedy}"
        )
    return path


def library_of_arch(path: pathlib.Path, arch: str) -> pathlib.Path:
    """Returns the path of a library, which must be for an architecture."""
    existing(path, "only Linux is supported")
    if arch == platform.machine():
        return path
    with path.open("rb") as file:
        header = file.read(20)
    machine = int.from_bytes(header[18:20], "little")
    if machine != ELF_MACHINES.get(arch):
        sys.exit(
            f"Building tf_layoutmap for {arch} requires a TensorFlow for "
            f"{arch}. Received: {path} for another architecture (ELF machine "
            f"{machine}). `make wheel ARCH={arch}` installs a suitable one."
        )
    return path


def python_config(include: pathlib.Path, arch: str) -> dict[str, object]:
    """Returns the location of Debian's pyconfig.h for another architecture.

    In Debian, pyconfig.h includes a file in a folder of the architecture for
    which the compiler generates code. Only the folder of this machine's
    architecture is installed.
    """
    triple = f"{platform.machine()}-linux-gnu"
    folder = include.parent / triple / include.name
    if arch == platform.machine() or not folder.exists():
        return {}
    return {
        "PYTHON_CONFIG": folder,
        "PYTHON_CONFIG_NAME": f"{arch}-linux-gnu/{include.name}",
    }


def main() -> None:
    arch = os.environ.get("TF_LAYOUTMAP_ARCH") or platform.machine()
    folders = os.environ.get("TF_LAYOUTMAP_BUILD_PACKAGES", "")
    sys.path[:0] = filter(None, folders.split(os.pathsep))
    # The interpreter may be started through a symbolic link that changes later.
    # The links to TensorFlow's files stay valid, because they use real paths.
    tensorflow = package_dir("tensorflow", f"pip install {TF_PACKAGE}")
    pybind11 = package_dir("pybind11", "pip install pybind11")
    python_include = pathlib.Path(sysconfig.get_paths()["include"])
    probed = {
        "TF_VERSION": tensorflow_version(tensorflow.parent),
        "TF_INCLUDE": existing(tensorflow / "include", "reinstall TensorFlow"),
        "TF_LIB": library_of_arch(
            tensorflow / "libtensorflow_framework.so.2", arch
        ),
        "PYBIND11_INCLUDE": existing(
            pybind11 / "include", "pip install pybind11"
        ),
        "PYTHON_INCLUDE": existing(
            python_include / "Python.h", "apt-get install python3-dev"
        ).parent,
        "EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX").replace(
            platform.machine(), arch
        ),
        **python_config(python_include, arch),
    }
    for key, value in probed.items():
        if isinstance(value, pathlib.Path):
            value = os.path.realpath(value)
        print(f"{key}={value}")


if __name__ == "__main__":
    main()
