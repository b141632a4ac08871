"""Loops in which each device repeats a compiled step without the host.

A loop with an unknown number of steps runs from the host (`host_loops.py`). For
every step, the host starts a function on each device and waits for all devices.
After DTensor has compiled the step, a `DeviceLoop` runs the other steps in one
call. Each device runs the same function, whose `tf.while_loop` calls the
program that DTensor compiled. The loop variables stay on the devices, and each
loop evaluates its own condition. A condition on a mesh is replicated, so the
loops of all devices run the same number of steps.

The key of a collective op contains the name of the loop and the number of the
iteration, so the loop must have the same name on all devices. Therefore, the
function of a device is not inlined.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh

dtensor = tf.experimental.dtensor

# Names that DTensor gives to the arguments of a function. The number of the
# device is an argument only if the program uses it.
_INPUT = r"op_input_(\d+)"
_DEVICE_ID = "device_id"


class Program(NamedTuple):
    """The program that DTensor compiled for a function, and its arguments.

    Attributes:
      name: Name of the function that every device runs.
      inputs: For each argument of the program, the index of an input of the
        function; None for the number of the device.
      outputs: For each output of the function, the index of a result of the
        program.
      dtypes: Dtypes of the results of the program.
    """

    name: str
    inputs: list[int | None]
    outputs: list[int]
    dtypes: list[tf.DType]


def program_of(function: Any) -> Program | None:
    """Returns the program that a function of DTensor runs.

    Args:
      function: `FunctionDef` of the function that calls one program per mesh.

    Returns:
      The program; None if the function has another structure.
    """
    nodes = {node.name: node for node in function.node_def}
    calls = [
        node for node in nodes.values() if node.op == "StatefulPartitionedCall"
    ]
    if len(calls) != 1:
        return None
    (call,) = calls
    names = [arg.name for arg in function.signature.input_arg]
    passed = [name for name in call.input if not name.startswith("^")]
    results = []
    for arg in function.signature.output_arg:
        source = function.ret[arg.name].split(":")
        node = nodes.get(source[0])
        if node is not None and node.op == "Identity":
            source = node.input[0].split(":")
        if source[0] != call.name:
            return None
        results.append(int(source[-1]))
    inputs: list[int | None] = []
    for name in passed:
        number = re.fullmatch(_INPUT, name)
        if name not in names or (number is None and name != _DEVICE_ID):
            return None
        inputs.append(None if number is None else int(number[1]))
    return Program(
        call.attr["f"].func.name,
        inputs,
        results,
        [tf.as_dtype(dtype) for dtype in call.attr["Tout"].list.type],
    )


def can_run_on(mesh: Mesh) -> bool:
    """Returns whether the devices of a mesh can repeat a step.

    Processes would have to agree on the keys of collective ops. Devices other
    than CPUs were not tested.
    """
    return mesh.device_type() == "CPU" and mesh.num_local_devices() == mesh.size


class DeviceLoop:
    """Runs a compiled step on each device until the condition is false."""

    def __init__(
        self,
        mesh: Mesh,
        program: Program,
        variables: Sequence[Any],
        captures: Sequence[Any],
        is_endless: bool,
    ):
        """Traces the function.

        Args:
          mesh: Mesh whose devices all belong to this process.
          program: Program of the step. The inputs of the step are the loop
            variables and the captured tensors. Its outputs are the new loop
            variables and the condition.
          variables: Loop variables on the mesh.
          captures: Captured tensors on the mesh.
          is_endless: Whether the condition is always true.
        """
        self._mesh = mesh
        self._program = program
        self._is_endless = is_endless
        self._num_variables = len(variables)
        self._layouts = [dtensor.fetch_layout(x) for x in variables]
        # Arguments of one device: the maximum number of steps, the first value
        # of the condition, the loop variables and the captured tensors.
        specs = [tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)]
        for x in (*variables, *captures):
            part = _parts(x)[0]
            specs.append(tf.TensorSpec(part.shape, part.dtype))
        with tracing.off_mesh():
            # The name of the function of one device.
            self._one_device = _concrete_function(
                self._loop,
                [tf.TensorSpec([], tf.int32), *specs],
                _noinline=True,
            )
            self._all_devices = _concrete_function(
                self._loops, specs * mesh.num_local_devices()
            )

    def _loop(
        self, device_id: Any, limit: Any, more: Any, *values: Any
    ) -> list[Any]:
        """Runs the loop of one device; returns the final loop variables."""
        variables = values[: self._num_variables]
        captures = values[self._num_variables :]

        def body(number: Any, more: Any, *variables: Any) -> list[Any]:
            inputs = [*variables, *captures]
            results = tf_private.call_by_name(
                self._program.name,
                [
                    device_id if index is None else inputs[index]
                    for index in self._program.inputs
                ],
                self._program.dtypes,
            )
            *after, has_next = (
                results[index] for index in self._program.outputs
            )
            for x, before in zip((has_next, *after), (more, *variables)):
                x.set_shape(before.shape)
            return [
                number + 1,
                more if self._is_endless else has_next,
                *after,
            ]

        _, _, *results = tf.while_loop(
            lambda number, more, *_: tf.logical_and(more, number < limit),
            body,
            [tf.constant(0), more, *variables],
            # A step starts after the previous step.
            parallel_iterations=1,
        )
        return results

    def _loops(self, *arguments: Any) -> list[Any]:
        """Runs the loops of all devices; returns all final loop variables."""
        devices = self._mesh.local_devices()
        size = len(arguments) // len(devices)
        results = []
        for i, (device, device_id) in enumerate(
            zip(devices, self._mesh.local_device_ids())
        ):
            mine = arguments[i * size : (i + 1) * size]
            with tf.device(device):
                results += tf_private.call_by_name(
                    self._one_device.name,
                    [tf.constant(device_id), *mine],
                    [x.dtype for x in mine[2 : 2 + self._num_variables]],
                )
        return results

    def run(
        self,
        variables: Sequence[Any],
        captures: Sequence[Any],
        limit: int,
        more: bool,
    ) -> list[Any]:
        """Runs the loop and returns the final values of its variables.

        Args:
          variables: Loop variables on the mesh.
          captures: Captured tensors on the mesh.
          limit: Maximum number of steps.
          more: First value of the condition.
        """
        parts = [_parts(x) for x in (*variables, *captures)]
        with tracing.off_mesh():
            scalars = [tf.constant(limit, tf.int32), tf.constant(more)]
            arguments = [x for mine in zip(*parts) for x in (*scalars, *mine)]
            results = self._all_devices._call_flat(arguments, [])
        return [
            dtensor.pack([*results[i :: self._num_variables]], layout)
            for i, layout in enumerate(self._layouts)
        ]


def _concrete_function(
    function: Any, specs: Sequence[tf.TensorSpec], **attributes: Any
) -> Any:
    results: list[Any] = []

    def traced(*arguments: Any) -> list[Any]:
        results.extend(function(*arguments))
        return results

    # With control dependencies, the loop of a device would wait for the loop of
    # another device, which may wait for a collective op of the first device.
    graph = tf_private.func_graph_from_py_func(
        function.__name__, traced, specs, {}, add_control_dependencies=False
    )
    # The outputs of the graph are copies, which wait for the loops of all
    # devices. The results themselves stay on their devices.
    graph.outputs = [*results]
    return tf_private.ConcreteFunction.from_func_graph(graph, None, attributes)


def _parts(x: Any) -> list[Any]:
    """Returns the tensor or the resource handle of each device."""
    return tf_private.dtensor_device().unpack(x)
