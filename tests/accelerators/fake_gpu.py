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

import contextlib
import ctypes
import dataclasses
import gzip
import inspect
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = pathlib.Path(__file__).with_name("cuda_kernels_2.21.pb.gz")
TARGET = "cc/testing/fake_gpu.so"


def library(target: str = TARGET) -> pathlib.Path:
    """Builds a library for tests, and returns its path."""
    bazel = shutil.which("bazel") or shutil.which("bazelisk")
    assert bazel, "Install Bazel, for example with `make build`."
    environment = {**os.environ, "PYTHON_BIN_PATH": sys.executable}

    # The import of this file must not import the package.
    from tf_layoutmap._core import requirements

    # As in the Makefile, older versions have their own outputs.
    version = requirements.built_for()
    is_newest = version == requirements.TENSORFLOW[-1]
    options = [] if is_newest else [f"--config=tf{version}"]

    def run(command: str, *arguments: str) -> str:
        done = subprocess.run(
            [bazel, command, *options, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("build", "//" + ":".join(target.rsplit("/", 1)))
    return pathlib.Path(run("info", "bazel-bin").strip(), target)


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


def load_for_tests(path: pathlib.Path | str, count: int) -> None:
    """Adds devices to this process, which runs programs of Keras.

    Keras then compiles models without XLA, unless they request XLA.

    Args:
      path: The library.
      count: Number of devices, at least 1.
    """
    load(path, count)
    from keras.src.trainers import trainer

    trainer.model_supports_jit = lambda model: False


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a tensor between the host and a device.

    Attributes:
      to: Destination, `"device"` or `"host"`.
      num_bytes: Size of the tensor in bytes.
      dtype: Name of the dtype.
      shape: Shape, such as `"[2,3]"`.
      op: Name of the op whose output is copied, or an empty string if eager
        code copies the tensor.
    """

    to: str
    num_bytes: int
    dtype: str
    shape: str
    op: str


@contextlib.contextmanager
def record_copies(path: pathlib.Path | str) -> Iterator[list[Copy]]:
    """Records the copies between the host and the devices of all threads.

    Args:
      path: The library, which the process has loaded.

    Yields:
      A list. At the end of the block, the copies are added to it.
    """
    recorder = ctypes.CDLL(str(path))
    recorder.fake_gpu_stop_recording.restype = ctypes.c_char_p
    recorder.fake_gpu_start_recording()
    copies: list[Copy] = []
    try:
        yield copies
    finally:
        for line in recorder.fake_gpu_stop_recording().decode().splitlines():
            to, num_bytes, dtype, shape, edge = line.split("\t")
            # The executor names an edge "edge_<number>_<op>".
            op = edge.split("_", 2)[2] if edge.startswith("edge_") else edge
            copies.append(Copy(to, int(num_bytes), dtype, shape, op))


# Tests that `make test-gpu` skips, by file or function, and why.
SKIPPED = {
    "tests/layers/base/test_servers_table.py": "creates the resources of a "
    "server on the default device; servers have no GPU",
    "tests/embedding/tpu/test_host_engine.py": "XLA compiles the program of a "
    "TPU for the CPU; XLA requires real GPUs",
    "test_updates_from_four_threads_are_all_applied": "operations of several "
    "threads on these devices raise each other's errors",
    "test_an_invalid_shard_raises_and_nothing_is_written": "creates variables "
    "at import, on the GPU",
    "test_a_type_spec_defaults_to_one_cpu_or_uses_its_devices": "compares "
    "names of devices",
    "test_a_function_accepts_tables_as_arguments": "a table on a GPU uses "
    "TensorFlow's ops, whose messages have another form",
    "test_reading_an_out_of_range_row_raises_with_the_table_name": "as above",
    "test_writing_a_mismatched_shape_writes_nothing": "as above",
    "test_copies_of_a_freed_graph_keep_its_gradients": "requires the CUDA "
    "library",
    "test_float32_uses_the_op": "on a GPU, `dot_interaction` uses TensorFlow's "
    "ops",
    "test_unknown_shapes_are_checked_when_the_op_runs": "as above",
}


def skip_items(items: Sequence[pytest.Item]) -> None:
    """Skips `SKIPPED`, and the test functions that request XLA.

    XLA would end the process, because it searches the devices of the CUDA
    library.
    """
    for item in items:
        function = getattr(item, "function", None)
        if function is None:
            continue
        name = getattr(item, "originalname", item.name)
        reason = SKIPPED.get(name, SKIPPED.get(item.nodeid.split("::")[0]))
        if "jit_compile=True" in inspect.getsource(function):
            reason = "XLA requires real GPUs"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


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
