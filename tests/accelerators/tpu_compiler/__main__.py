r"""Compiles the functions of all models for TPUs, and writes the page.

    python -m tests.accelerators.tpu_compiler --jax_python PYTHON \
        --tensorflow_tpu_python PYTHON [MODEL ...]

With names of models, the program prints the results and does not write the
page. The exit code is 1 if a function of a model is not compiled.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import keras
import tensorflow as tf

from tests.accelerators import fake_gpu
from tests.accelerators.tpu_compiler import models, page

FOLDER = page.PAGE.parents[1] / "build/tpu_compiled"
NUM_DEVICES = 4
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
STRATEGY = "dense part of a DLRM under TPUStrategy"
SPARSE_CORES = "ops of SparseCores"
# Number of SparseCores of a chip.
CORES_PER_CHIP = {"v5p:2x2x1": 4, "v6e:2x2": 2}
_PROGRAMS = "tests.accelerators.tpu_compiler."
_COMPILING = pathlib.Path(__file__).with_name("compiling.py")
_SPARSE_CORE_FUNCTIONS = _COMPILING.with_name("sparse_core_functions.py")


def compile_model(name: str, library: str, jax_python: str) -> page.Model:
    """Compiles the functions of a model, and returns the results."""
    folder = _empty_folder(name)
    if name == STRATEGY:
        writer = [_PROGRAMS + "strategy_functions", folder]
    else:
        writer = [_PROGRAMS + "mesh_functions", library, folder, name]
    _run(
        [sys.executable, "-m", *writer],
        [sys.executable, "-m", _PROGRAMS + "lowering", folder, NUM_DEVICES],
        [jax_python, _COMPILING, folder, NUM_DEVICES, *TOPOLOGIES],
    )
    return page.read(name, folder)


def compile_sparse_cores(
    tensorflow_python: str, jax_python: str
) -> dict[str, page.Model]:
    """Compiles the ops of SparseCores; returns the results by TPU."""
    found = {}
    for topology, num_cores in CORES_PER_CHIP.items():
        name = f"{SPARSE_CORES} {topology.partition(':')[0]}"
        folder = _empty_folder(name)
        _run(
            [
                tensorflow_python,
                _SPARSE_CORE_FUNCTIONS,
                folder,
                num_cores,
                NUM_DEVICES,
            ],
            [jax_python, _COMPILING, folder, NUM_DEVICES, topology],
        )
        found[topology] = page.read(name, folder)
    return found


def _empty_folder(name: str) -> pathlib.Path:
    folder = FOLDER / name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{name} ...", flush=True)
    return folder


def _run(*commands: Sequence[object]) -> None:
    for command in commands:
        # libtpu and TensorFlow print many messages.
        done = subprocess.run(
            list(map(str, command)),
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout[-5000:])


def versions(jax_python: str) -> str:
    """Returns the versions of the packages that affect the results."""
    code = (
        "from importlib import metadata\n"
        "print(*(f'{one} {metadata.version(one)}'"
        " for one in ('jax', 'libtpu')), sep=', ')"
    )
    printed = subprocess.run(
        [jax_python, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    return f"{printed}, TensorFlow {tf.__version__}, Keras {keras.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.accelerators.tpu_compiler"
    )
    names = [*models.CASES, STRATEGY, SPARSE_CORES]
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--jax_python", required=True)
    parser.add_argument("--tensorflow_tpu_python", required=True)
    options = parser.parse_args()
    unknown = sorted(set(options.models) - set(names))
    if unknown:
        parser.error(f"MODEL must be one of {names}. Received: {unknown}.")
    chosen = options.models or names
    library = str(fake_gpu.library())
    found = [
        compile_model(name, library, options.jax_python)
        for name in chosen
        if name != SPARSE_CORES
    ]
    sparse_cores = {}
    if SPARSE_CORES in chosen:
        sparse_cores = compile_sparse_cores(
            options.tensorflow_tpu_python, options.jax_python
        )
    text = page.section(
        found, TOPOLOGIES, versions(options.jax_python), sparse_cores
    )
    print(text)
    if not options.models:
        page.PAGE.write_text(page.with_section(page.PAGE.read_text(), text))
    if page.failures(found, TOPOLOGIES):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
