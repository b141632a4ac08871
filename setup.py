"""Builds the native parts of tf_layoutmap with Bazel.

What else pip needs to know stands in pyproject.toml. The op library is compiled
against TensorFlow: `pip install .` fetches one for the build alone. Without a
network, the installed one serves:

    pip install "tensorflow-cpu==2.21.*" pybind11 setuptools wheel
    pip install --no-build-isolation .
"""

import importlib.util
import os
import pathlib
import runpy
import shutil
import site
import subprocess
import sys

import setuptools
from setuptools.command import build_ext

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = "tf_layoutmap"

# The one minor version of TensorFlow that this version of the package is
# written for. The file imports nothing, so it can be run without the package.
TF_MINOR = runpy.run_path(str(HERE / PACKAGE / "_core" / "requirements.py"))[
    "TENSORFLOW"
]

# Tells third_party/tf/probe.py, which Bazel runs as well, about pip's isolated
# build environment.
BUILD_PACKAGES = "TF_LAYOUTMAP_BUILD_PACKAGES"

NO_BAZEL = """\
error: tf_layoutmap's native parts are built with Bazel, and neither `bazel` \
nor `bazelisk` is on PATH. Install one:
  Debian, Ubuntu:  apt-get install bazel-bootstrap g++
  elsewhere:       npm install -g @bazel/bazelisk   (or brew, winget)
or name the binary in the environment variable BAZEL."""

WRONG_TF = """\
error: this version of tf_layoutmap builds against TensorFlow {wanted}. \
Received: TensorFlow {found} in {python}. Fix it with:
  pip install "tensorflow-cpu=={wanted}.*" """


# What the largest files take with TensorFlow's headers, by GCC 14.
BUILDING = """\
Building tf_layoutmap's native parts with Bazel: about five minutes on two \
cores the first time, seconds when little has changed. Each of the {cores} \
cores here takes up to 2 GB of memory meanwhile, of {gigabytes:.0f} GB; \
`echo "build --jobs=1" >> ~/.bazelrc` lets one core work alone."""


def find_bazel() -> str:
    bazel = (
        os.environ.get("BAZEL")
        or shutil.which("bazel")
        or shutil.which("bazelisk")
    )
    if not bazel:
        sys.exit(NO_BAZEL)
    return bazel


def say_what_comes() -> None:
    """One line before minutes of silence: `pip install` shows it with -v."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    print(
        BUILDING.format(
            cores=len(os.sched_getaffinity(0)), gigabytes=memory / 1e9
        ),
        flush=True,
    )


def is_serving() -> bool:
    """Whether a Bazel server for this folder is running."""
    mine = f"--workspace_directory={HERE}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mine in process.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue  # It has ended, or is somebody else's.
    return False


def build_packages() -> str:
    """Folders of TensorFlow and pybind11 that `python -I` does not see.

    An isolated build of pip before 26 is the same interpreter with another
    search path, which comes by PYTHONPATH. Empty where nothing is isolated.
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
    """The environment of the probe and of Bazel: whose packages they take."""
    environment = dict(os.environ)
    if not environment.get("PYTHON_BIN_PATH"):
        environment["PYTHON_BIN_PATH"] = sys.executable
        folders = build_packages()
        if folders:
            environment[BUILD_PACKAGES] = folders
    return environment


def probe_packages(environment: dict[str, str]) -> dict[str, str]:
    """What third_party/tf/probe.py finds in `environment`."""
    python = environment["PYTHON_BIN_PATH"]
    # -I: the same answer as in Bazel, which does not know this PYTHONPATH.
    probe = subprocess.run(
        [python, "-I", str(HERE / "third_party/tf/probe.py")],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=environment,
    )
    if probe.returncode != 0:
        sys.exit(1)  # The probe has said why.
    found = dict(line.split("=", 1) for line in probe.stdout.splitlines())
    if not found["TF_VERSION"].startswith(TF_MINOR + "."):
        sys.exit(
            WRONG_TF.format(
                wanted=TF_MINOR, found=found["TF_VERSION"], python=python
            )
        )
    return found


def replace_file(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies beside the target and moves over it.

    A process that has the old library mapped keeps it, and Bazel's outputs are
    read-only, so writing into the old file would fail or crash somebody.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    fresh.unlink(missing_ok=True)
    shutil.copyfile(source, fresh)
    fresh.chmod(0o755)
    fresh.replace(target)


class BazelBuild(build_ext.build_ext):
    """Builds //cc:native and puts the results into the package."""

    def run(self):
        bazel = find_bazel()
        environment = build_environment()
        found = probe_packages(environment)
        say_what_comes()
        # Whoever runs `setup.py build_ext`, as the Makefile does, soon builds
        # again. Behind `pip install` nobody does, and 300 MB would stay.
        leave_nothing = "build_ext" not in sys.argv and not is_serving()
        progress = ["--show_progress"] if sys.stderr.isatty() else []
        try:
            status = subprocess.run(
                [bazel, "build", *progress, "//cc:native"],
                cwd=HERE,
                check=False,
                env=environment,
            ).returncode
        finally:
            if leave_nothing:
                subprocess.run([bazel, "shutdown"], cwd=HERE, check=False)
        if status != 0:
            sys.exit(f"error: `bazel build //cc:native` failed ({status}).")
        package = (
            HERE if self.inplace else pathlib.Path(self.build_lib)
        ) / PACKAGE
        built = HERE / "bazel-bin" / "cc"
        replace_file(
            built / "kernels/_layoutmap_ops.so", package / "_layoutmap_ops.so"
        )
        replace_file(
            built / "emulation/kernels/_layoutmap_emulation.so",
            package / "_layoutmap_emulation.so",
        )
        native = "_native" + found["EXT_SUFFIX"]
        replace_file(built / "python" / native, package / native)
        (package / "_build_info.py").write_text(
            '"""Written by setup.py: what the op library was built for."""\n\n'
            f'TF_VERSION = "{found["TF_VERSION"]}"\n',
            encoding="utf-8",
        )

    def get_source_files(self):
        return []  # MANIFEST.in names what an sdist holds.


class NativeDistribution(setuptools.Distribution):
    """Tells wheel that the files inside depend on Python and the platform."""

    def has_ext_modules(self):
        return True


setuptools.setup(
    license="Apache-2.0",
    ext_modules=[setuptools.Extension(PACKAGE + "._native", sources=[])],
    cmdclass={"build_ext": BazelBuild},
    distclass=NativeDistribution,
)
