"""Compiles StableHLO for TPUs that this machine does not have.

    PYTHON compiling.py FOLDER NUM_DEVICES TOPOLOGY ...

PYTHON is an interpreter of an environment with JAX and libtpu. TensorFlow is
not imported, because it cannot be in a process with this version of libtpu.
For each file `N.mlir.bc` of FOLDER, the program adds the result for each TPU to
`N.json`: the bytes of a device, or the error.
"""

import json
import os
import pathlib
import sys
from typing import Any

# Without these variables, libtpu waits for the metadata server of a TPU VM,
# raises an error if another process has loaded libtpu, and JAX searches for a
# TPU.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.experimental import topologies
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

_TARGET = "all_reduce"
_MERGES = {
    "Add": stablehlo.AddOp,
    "Max": stablehlo.MaxOp,
    "Min": stablehlo.MinOp,
    "Mul": stablehlo.MulOp,
}


def _operations(module: Any) -> list[Any]:
    found = []

    def visit(operation):
        found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def replace_operations(module: Any) -> None:
    """Replaces the operations that this compiler does not know.

    A custom call of `collectives` becomes an all-reduce. `mhlo.copy`, which has
    no effect on values, is removed.
    """
    for operation in _operations(module):
        if operation.name == "mhlo.copy":
            replacement = operation.operands[0]
        elif _is_collective(operation):
            replacement = _all_reduce(operation)
        else:
            continue
        operation.results[0].replace_all_uses_with(replacement)
        operation.operation.erase()


def _is_collective(operation: Any) -> bool:
    if operation.name != "stablehlo.custom_call":
        return False
    target = operation.attributes["call_target_name"]
    return ir.StringAttr(target).value == _TARGET


def _all_reduce(call: Any) -> Any:
    """Returns the result of an all-reduce that is inserted before a call."""
    settings = json.loads(
        ir.StringAttr(call.attributes["backend_config"]).value
    )
    (value,) = call.operands
    location = call.operation.location
    with ir.InsertionPoint(call.operation), location:
        scalar = ir.RankedTensorType.get([], value.type.element_type)
        reduced = stablehlo.AllReduceOp(
            [value.type],
            [value],
            ir.DenseIntElementsAttr.get(
                np.asarray(settings["groups"], np.int64)
            ),
        )
        block = reduced.regions[0].blocks.append(
            scalar, scalar, arg_locs=[location] * 2
        )
        with ir.InsertionPoint(block):
            merged = _MERGES[settings["merge"]](*block.arguments)
            stablehlo.return_([merged.result])
    return reduced.results[0]


def compile_for(
    program: bytes, topology: Any, num_devices: int
) -> dict[str, int]:
    """Compiles a program, and returns the bytes that it uses on a device."""
    devices = list(topology.devices)[:num_devices]
    options = compiler.get_compile_options(
        num_replicas=num_devices,
        num_partitions=1,
        device_assignment=np.arange(num_devices).reshape(num_devices, 1),
    )
    with mlir.make_ir_context():
        module = ir.Module.parse(program)
        replace_operations(module)
        module.operation.verify()
        executable = devices[0].client.compile(
            module,
            executable_devices=xla_client.DeviceList(tuple(devices)),
            compile_options=options,
        )
    stats = executable.get_compiled_memory_stats()
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliases": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }


def main() -> None:
    folder, num_devices, *names = sys.argv[1:]
    by_name = {
        name: topologies.get_topology_desc(platform="tpu", topology_name=name)
        for name in names
    }
    for path in sorted(pathlib.Path(folder).glob("*.mlir.bc")):
        facts_path = path.with_name(
            path.name.removesuffix(".mlir.bc") + ".json"
        )
        facts = json.loads(facts_path.read_text())
        facts["compiled"] = {}
        for name, topology in by_name.items():
            try:
                found: Any = compile_for(
                    path.read_bytes(), topology, int(num_devices)
                )
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:3000]}
            facts["compiled"][name] = found
        facts_path.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
