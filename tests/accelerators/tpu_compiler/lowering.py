"""Converts functions of one device to StableHLO.

    python -m tests.accelerators.tpu_compiler.lowering FOLDER NUM_DEVICES

For each file `N.functions.pb` of FOLDER, the program writes `N.mlir.bc` and the
sizes of the arguments, `N.json`, or the error. XLA's kernels are the kernels
for CPUs, because TensorFlow for CPUs has no others.
"""

import json
import math
import pathlib
import sys
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, tensor_shape_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph

from tests.accelerators.tpu_compiler import collectives


def _spec(
    shape: tensor_shape_pb2.TensorShapeProto, dtype: int
) -> tf.TensorSpec:
    spec = tf.TensorSpec(tf.TensorShape(shape), tf.as_dtype(dtype))
    assert spec.shape.is_fully_defined(), spec
    return spec


def _num_bytes(spec: tf.TensorSpec) -> int:
    return math.prod(spec.shape.as_list()) * spec.dtype.size


def lower(
    library: function_pb2.FunctionDefLibrary, num_devices: int
) -> tuple[bytes, dict[str, Any]]:
    """Returns the StableHLO of a function, and facts about it.

    Args:
      library: A function, followed by the functions that it calls.
      num_devices: Number of devices that run the function.
    """
    function, *called = library.function
    num_nodes = len(function.node_def)
    groups = collectives.groups_of(function, num_devices)
    num_collectives = collectives.replace(function, groups)
    num_int64 = sum(
        tf.int64.as_datatype_enum in node.attr["operand_dtypes"].list.type
        for node in function.node_def
        if node.op == collectives.OP
    )
    collectives.with_dynamic_updates(function)
    collectives.without_hints(function)
    collectives.with_device_id(function)
    for one in called:
        # The groups of devices are only known for the first function.
        collectives.replace(one, {})
        collectives.without_hints(one)
        context.context().add_function_def(one)
    graph_def, flat_names = function_def_to_graph.function_def_to_graph_def(
        function
    )
    variables, specs, inputs = [], [], {}
    for index, argument in enumerate(function.signature.input_arg):
        attributes = function.arg_attr[index].attr
        if argument.type == tf.resource.as_datatype_enum:
            (shape,) = attributes["_handle_shapes"].list.shape
            (dtype,) = attributes["_handle_dtypes"].list.type
            spec = _spec(shape, dtype)
            variables.append(tf.Variable(tf.zeros(spec.shape, spec.dtype)))
            inputs[argument.name] = variables[-1]
        else:
            (shape,) = attributes["_output_shapes"].list.shape
            inputs[argument.name] = len(specs)
            specs.append(_spec(shape, argument.type))
    kept = [one for one in graph_def.node if one.name not in inputs]
    del graph_def.node[:]
    graph_def.node.extend(kept)
    outputs = [
        flat_names[function.ret[one.name]]
        for one in function.signature.output_arg
    ]

    @tf.function(jit_compile=True, autograph=False, input_signature=specs)
    def run(*arguments):
        graph: Any = tf.compat.v1.get_default_graph()
        values = {
            name: arguments[one]
            if isinstance(one, int)
            else graph.capture(one.handle)
            for name, one in inputs.items()
        }
        return tf.graph_util.import_graph_def(
            graph_def,
            input_map={f"{name}:0": x for name, x in values.items()},
            return_elements=outputs,
            name="",
        )

    arguments = [tf.zeros(one.shape, one.dtype) for one in specs]
    program = run.experimental_get_compiler_ir(*arguments)(
        stage="stablehlo_serialized"
    )
    return program, {
        "nodes": num_nodes,
        "collectives": num_collectives,
        "int64_collectives": num_int64,
        "variable_bytes": sum(
            math.prod(one.shape.as_list()) * one.dtype.size for one in variables
        ),
        "input_bytes": sum(map(_num_bytes, specs)),
    }


def main() -> None:
    folder, num_devices = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    for path in sorted(folder.glob("*.functions.pb")):
        name = path.name.removesuffix(".functions.pb")
        library = function_pb2.FunctionDefLibrary.FromString(path.read_bytes())
        try:
            program, facts = lower(library, num_devices)
            folder.joinpath(f"{name}.mlir.bc").write_bytes(program)
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {error}"[:3000]}
        folder.joinpath(f"{name}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
