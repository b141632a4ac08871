"""Devices of type GPU in host memory.

`load` must be called before TensorFlow creates its devices, so each program
that uses these devices is a separate process. An op has a kernel for these
devices if TensorFlow's package for CUDA registers one. Placement, colocation
and copies are therefore the same as on a machine with GPUs. Speed, memory, and
the numerics of the kernels of a GPU are not. XLA does not compile for these
devices: compile models with `jit_compile=False`.

`cuda_kernels_2.21.pb.gz` is the list of kernels of the package `tensorflow`
2.21.0. `python -m tests.accelerators.fake_gpu PATH`, in an environment with the
package of another version, writes the list of that version.
"""

import gzip
import inspect
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = pathlib.Path(__file__).with_name("cuda_kernels_2.21.pb.gz")
TARGET = "cc/testing/fake_gpu.so"


def library() -> pathlib.Path:
    """Builds the library, and returns its path."""
    bazel = shutil.which("bazel") or shutil.which("bazelisk")
    assert bazel, "Install Bazel, for example with `make build`."
    environment = {**os.environ, "PYTHON_BIN_PATH": sys.executable}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [bazel, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("build", "//" + ":".join(TARGET.rsplit("/", 1)))
    return pathlib.Path(run("info", "bazel-bin").strip(), TARGET)


def load(path: pathlib.Path | str, count: int) -> None:
    """Adds devices to this process.

    Args:
      path: The library.
      count: Number of devices. With 0, the process remains unchanged.
    """
    if not count:
        return
    # TensorFlow is imported here, so that `library` does not import it.
    import tensorflow as tf

    os.environ["FAKE_GPUS"] = str(count)
    with tempfile.NamedTemporaryFile(suffix=".pb") as kernels:
        kernels.write(gzip.decompress(KERNELS.read_bytes()))
        kernels.flush()
        os.environ["FAKE_GPU_KERNELS"] = kernels.name
        tf.load_library(str(path))
    assert len(tf.config.list_physical_devices("GPU")) == count


def load_for_tests() -> None:
    """Adds `TF_LAYOUTMAP_FAKE_GPUS` devices to a process that runs tests.

    Keras then compiles models without XLA, unless they request XLA.
    """
    load(
        os.environ["TF_LAYOUTMAP_FAKE_GPU_LIBRARY"],
        int(os.environ["TF_LAYOUTMAP_FAKE_GPUS"]),
    )
    from keras.src.trainers import trainer

    trainer.model_supports_jit = lambda model: False


def skip_xla(items: Sequence[pytest.Item]) -> None:
    """Skips the test functions that request XLA, which would end the process.

    XLA searches the devices of the CUDA library.
    """
    for item in items:
        function = getattr(item, "function", None)
        if function and "jit_compile=True" in inspect.getsource(function):
            item.add_marker(pytest.mark.skip(reason="XLA requires real GPUs"))


def write_kernels(path: str) -> None:
    """Writes the kernels of the installed TensorFlow to a compressed file."""
    import tensorflow as tf
    from tensorflow.python.framework import kernels

    # The first compilation registers XLA's kernels.
    tf.function(tf.identity, jit_compile=True)(tf.constant(1.0))
    found = kernels.get_all_registered_kernels()
    pathlib.Path(path).write_bytes(
        gzip.compress(found.SerializeToString(), mtime=0)
    )


if __name__ == "__main__":
    write_kernels(sys.argv[1])
