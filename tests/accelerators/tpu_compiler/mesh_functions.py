"""Writes the functions that DTensor compiles for one device of a mesh.

    python -m tests.accelerators.tpu_compiler.mesh_functions LIBRARY FOLDER CASE

The devices of the mesh are GPUs in host memory (`fake_gpu`), because models on
a mesh of CPUs use C++ ops that have no kernels for TPUs. The layouts are the
layouts of `tlm.plan`. In FOLDER, the program writes a `FunctionDefLibrary` for
each function, and `case.json` with the plan and the names of the functions. The
first function of a library is the function of a device.
"""

import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context

import tf_layoutmap as tlm
from tests.accelerators import fake_gpu, kernel_lists
from tests.accelerators.tpu_compiler import models
from tf_layoutmap._core import keras_private, tf_private
from tf_layoutmap.layout.mesh import shard_map

MESH = {"batch": 2, "model": 2}
# The function with which DTensor runs a traced function on a mesh.
_ON_MESH = re.compile(r"__inference_(\w+)_\d+__func_\d+_\d+_\d+")
# Number of tokens that precede the generated tokens.
_PROMPT = 8


def functions_on_mesh(before: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the functions that DTensor has compiled since a point in time.

    Args:
      before: The names of all functions at that time.

    Yields:
      The name of the traced function, and the name of the function of one
      device.
    """
    for name in sorted(kernel_lists.function_names() - before):
        found = _ON_MESH.fullmatch(name)
        if found is None:
            continue
        for node in context.context().get_function_def(name).node_def:
            if node.op == "StatefulPartitionedCall":
                yield found.group(1), node.attr["f"].func.name


def library_of(name: str) -> function_pb2.FunctionDefLibrary:
    """Returns a function, followed by the functions that it calls."""
    names, library = [name], function_pb2.FunctionDefLibrary()
    for one in names:
        function = context.context().get_function_def(one)
        library.function.append(function)
        for node in function.node_def:
            names += [
                called
                for called in tf_private.names_of_functions(node)
                if called not in names
            ]
    return library


def plan_of(case: models.Case) -> tlm.planning.Plan:
    return tlm.plan(
        case.make(),
        mesh=MESH,
        batch_size=models.BATCH,
        optimizer="adam",
        # The speed of this machine does not select the layouts.
        costs=tlm.planning.MachineCosts.typical(),
    )


def write_case(
    folder: pathlib.Path,
    plan: tlm.planning.Plan,
    libraries: dict[str, function_pb2.FunctionDefLibrary],
) -> None:
    """Writes the functions of a model, by name, and its plan.

    The memory in `case.json` is the memory of the first device.
    """
    for number, library in enumerate(libraries.values()):
        path = folder / f"{number}.functions.pb"
        path.write_bytes(library.SerializeToString(deterministic=True))
    folder.joinpath("case.json").write_text(
        json.dumps(
            {
                "functions": list(libraries),
                "memory": plan.solution.memory()[0],
                "choices": plan.choices,
            }
        )
    )


def run(case: models.Case, folder: pathlib.Path) -> None:
    """Trains a model on a mesh, and writes its functions."""
    plan = plan_of(case)
    mesh = tlm.distribution.DeviceMesh(
        tuple(MESH.values()), [*MESH], tlm.distribution.list_devices("gpu")
    )
    with tlm.layout_map_scope(plan.layout_map(mesh)):
        model = case.make()
    inputs, labels = case.batch()
    model.compile("adam", case.loss(), jit_compile=False)
    libraries = {}

    def record(kind: str, step: Any) -> None:
        before = kernel_lists.function_names()
        step()
        for traced, name in functions_on_mesh(before):
            # Keras' steps have a common name; `generate` consists of several
            # functions.
            title = kind if traced == "_run_or_trace" else f"{kind}: {traced}"
            assert title not in libraries, title
            libraries[title] = library_of(name)

    record("train", lambda: model.train_on_batch(inputs, labels))
    record("predict", lambda: model.predict_on_batch(inputs))
    if case.generates:
        is_prompt = np.arange(models.LENGTH) < _PROMPT
        prompt = {
            **inputs,
            "padding_mask": np.tile(is_prompt, [models.BATCH, 1]),
        }
        model.compile(sampler="greedy", jit_compile=False)
        record("generate", lambda: model.generate(prompt, stop_token_ids=None))
    assert libraries
    write_case(folder, plan, libraries)


def main() -> None:
    path, folder, name = sys.argv[1:]
    fake_gpu.load(path, np.prod(list(MESH.values())))
    with (
        # Recurrent layers would call cuDNN, which does not exist here.
        mock.patch.object(
            keras_private.backend_rnn, "cudnn_ok", return_value=False
        ),
        # `shard_map` then uses the ops that it uses on a mesh of TPUs.
        mock.patch.object(shard_map, "_has_tpus", return_value=True),
    ):
        run(models.CASES[name], pathlib.Path(folder))


if __name__ == "__main__":
    main()
