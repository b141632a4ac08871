"""The TPU program that is being traced, and the border between it and the host.

TensorFlow traces the function that is passed to `TPUStrategy.run` once for all
replicas. The ops of the function become the TPU program. The ops around the
function, in the same graph, run on the host. Inputs and outputs of the program
are the ops `TPUReplicatedInput` and `TPUReplicatedOutput`, which exist once for
all replicas and have one tensor per replica on the host.

`ReplicatedProgram` moves tensors between the program and the host while the
function is being traced. The program then gets additional inputs and outputs,
as if the user's function had more arguments and results.

The emulation traces a function once per core, and its cores are CPUs. A program
of an emulated core can therefore contain ops of the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_layoutmap._core import tf_private
from tf_layoutmap._core.strategies import HOST

# Types of ops that call functions.
_CALLS = frozenset(
    {
        "Case",
        "If",
        "PartitionedCall",
        "StatelessCase",
        "StatelessIf",
        "StatelessWhile",
        "While",
    }
)
# Attribute of the ops of the program, whose value is the name of the program.
_PROGRAM_ATTR = "_tpu_replicate"
# Attribute of the `Identity` of an argument or a result of the program. The
# TPU compiler removes these ops if their value is not used.
_INPUT_ATTR = "_tpu_input_identity"
_OUTPUT_ATTR = "_tpu_output_identity"
# Device in a program of a core of the replica. Results of replicas with several
# cores are on the first core.
_CORE = "/device:TPU_REPLICATED_CORE:0"

# Function that returns whether a graph is the program of an emulated TPU. For a
# real TPU, `_context_of` recognizes the TPU program by the control flow
# context.
_is_emulated: Callable[[Any], bool] | None = None
# Function that returns the TPU name of an input's device on an emulated TPU.
_input_device_of: Callable[[str], str] | None = None


def set_emulated(
    is_emulated: Callable[[Any], bool] | None,
    input_device_of: Callable[[str], str] | None = None,
) -> None:
    """Registers callables of the emulation. None removes a callable.

    Args:
      is_emulated: Function that returns whether a graph is traced as the
        program of a core.
      input_device_of: Function that returns the TPU name for the device of an
        input.
    """
    global _is_emulated, _input_device_of
    _is_emulated, _input_device_of = is_emulated, input_device_of


def emulated_input_device() -> Callable[[str], str] | None:
    """Returns the function `input_device_of` of the emulation, or None."""
    return _input_device_of


def is_in_tpu_program(method: str = "enqueue") -> bool:
    """Returns whether the caller is traced as part of a TPU program.

    Args:
      method: Name of the method that is called, for the message.

    Raises:
      RuntimeError: If the caller is in control flow or in a separate
        `tf.function` inside the TPU program.
    """
    here = tf.compat.v1.get_default_graph()
    graph = here
    while graph is not None and not _is_program(graph):
        graph = getattr(graph, "outer_graph", None)
    if graph is None:
        return False
    if graph is not here:
        raise RuntimeError(
            f"`{method}` must be called directly in the function that is "
            "passed to `strategy.run`, not in control flow or a tf.function "
            "inside it: otherwise the compiler is not able to move it out of "
            f"the TPU program. The current graph {here} does not match graph "
            f"{graph}, which contains the TPUReplicateContext."
        )
    return True


def _is_program(graph: Any) -> bool:
    if _is_emulated is not None and _is_emulated(graph):
        return True
    return _context_of(graph) is not None


def _context_of(graph: Any) -> Any:
    """Returns the control flow context of a TPU program, or None."""
    context = tf_private.control_flow_context_of(graph)
    while context is not None:
        if isinstance(context, tf_private.tpu_replication.TPUReplicateContext):
            return context
        context = context.outer_context
    return None


def run_on_host(function: Callable[[], None]) -> None:
    """Calls `function` in a scope whose operations run on the host."""
    tf_private.tpu_replication.outside_compilation(function)


def is_program_input(op: tf.Operation) -> bool:
    """Returns whether an op is the `Identity` of an argument of a program."""
    return _has_attr(op, _INPUT_ATTR)


def _has_attr(op: tf.Operation, name: str) -> bool:
    try:
        return bool(op.get_attr(name))
    except ValueError:
        return False


def check_direct_inputs(named_values: Sequence[tuple[str, Any]]) -> None:
    """Checks that inputs are arguments of the function that runs.

    Raises:
      ValueError: If an input is the output of another op. The message names
        the input and the op.
    """
    for path, value in named_values:
        for tensor in tf.nest.flatten(value, expand_composites=True):
            if tensor.op.type == "Placeholder" or is_program_input(tensor.op):
                continue
            raise ValueError(
                "Inside `strategy.run`, the inputs of `enqueue` must be "
                "unchanged arguments of the function that runs. Received: "
                f"input {path!r}, which is the output of op {tensor.op.name} "
                f"(type {tensor.op.type}) and does not have the "
                "`_tpu_input_identity` attr. A dynamic batch size can cause "
                "this error: pass tf.distribute.RunOptions("
                "experimental_enable_dynamic_batch_size=False) to "
                "`strategy.run`. A Keras layer that casts its inputs can "
                "cause it, too."
            )


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Scope whose ops are not part of the program that is being traced.

    Outside of a program, and in the program of an emulated core, the scope has
    no effect.
    """
    if tf.executing_eagerly() or (
        _context_of(tf.compat.v1.get_default_graph()) is None
    ):
        yield
        return
    # This scope leaves the control flow context of the program, and the control
    # dependencies of its ops on ops of the program.
    with tf.control_dependencies(None):
        yield


def is_replicated() -> bool:
    """Returns whether a program of all replicas is being traced, once."""
    return not tf.executing_eagerly() and any(
        _context_of(graph) is not None for graph in tf_private.graphs_around()
    )


class ReplicatedProgram:
    """A TPU program that is being traced once for all replicas.

    Attributes:
      num_replicas: Number of replicas of the program.
      context: Control flow context, which identifies the program.
    """

    def __init__(self, num_replicas: int, context: Any):
        """Wraps the program that is being traced.

        Args:
          num_replicas: Number of replicas of the strategy.
          context: Control flow context of the program.
        """
        self.num_replicas = num_replicas
        self.context = context

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """Returns a scope whose ops are around the program."""
        return on_host()

    def values_on_host(self, path: str, tensor: Any) -> list[Any]:
        """Returns the value of each replica, as tensors on the host.

        If the program computes the tensor only from its arguments and from
        constants, the method copies the ops of this computation to the host.

        Args:
          path: Name of the value, for the message.
          tensor: Tensor of the program or of the host, or any other value.

        Raises:
          ValueError: If a variable, a function call or the replica's state is
            part of the computation.
        """
        if not tf.is_symbolic_tensor(tensor) or not _has_attr(
            tensor.op, _PROGRAM_ATTR
        ):
            return [tensor] * self.num_replicas
        with self.on_host():
            return [
                _copy_to_host(path, tensor, replica, {})
                for replica in range(self.num_replicas)
            ]

    def to_program(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Makes one tensor per replica an input of the program.

        Args:
          values: Tensor of each replica on the host.
        """
        with self.on_host():
            replicated = tf.raw_ops.TPUReplicatedInput(inputs=list(values))
        program_input = tf.identity(replicated)
        # The ranks and the known sizes of the replicas can differ.
        program_input.set_shape(values[0].shape)
        _set_flag(program_input.op, _INPUT_ATTR)
        return program_input

    def to_host(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Makes a tensor an output of the program.

        Args:
          tensor: Tensor that the program computes.

        Returns:
          The tensor of each replica, on the host.
        """
        with tf.device(_CORE):
            result = tf.identity(tensor)
        _set_flag(result.op, _OUTPUT_ATTR)
        with self.on_host():
            return list(
                tf.raw_ops.TPUReplicatedOutput(
                    input=result, num_replicas=self.num_replicas
                )
            )


def _copy_to_host(
    path: str, tensor: tf.Tensor, replica: int, copies: dict[Any, Any]
) -> tf.Tensor:
    """Returns the value of a tensor of the program in one replica.

    Args:
      path: Name of the value, for the message.
      tensor: Tensor of the program or of the host.
      replica: Index of the replica.
      copies: The outputs of ops that have been copied for this replica.
    """
    op = tensor.op
    if not _has_attr(op, _PROGRAM_ATTR):
        if op.type == "TPUReplicatedInput":
            return op.inputs[replica]
        return tensor
    if op not in copies:
        if op.op_def.is_stateful or op.type in _CALLS:
            raise ValueError(
                "Inside `strategy.run`, the inputs of `enqueue` must be "
                "arguments of the function that runs, or must be computed from "
                "arguments without variables, random numbers and calls of "
                "tf.functions: the host computes them before the TPU program "
                f"starts. Received: input {path!r}, which op {op.name} (type "
                f"{op.type}) computes."
            )
        inputs = [
            _copy_to_host(path, input_tensor, replica, copies)
            for input_tensor in op.inputs
        ]
        with tf.device(HOST):
            copies[op] = (
                tf.compat.v1.get_default_graph()
                .create_op(
                    op.type,
                    inputs,
                    [output.dtype for output in op.outputs],
                    attrs={
                        name: value
                        for name, value in op.node_def.attr.items()
                        if not name.startswith("_")
                    },
                )
                .outputs
            )
    return copies[op][tensor.value_index]


def _set_flag(op: Any, attr: str) -> None:
    tf_private.set_op_attr(
        op,
        attr,
        attr_value_pb2.AttrValue(b=True),  # pyright: ignore[reportAttributeAccessIssue] Created at import time.
    )


def replicated_program(
    num_replicas: int, method: str
) -> ReplicatedProgram | None:
    """Returns the program of all replicas that is being traced, or None.

    The result is also None in the program of an emulated core.

    Args:
      num_replicas: Number of replicas of the strategy.
      method: Name of the method that is called, for the message.

    Raises:
      RuntimeError: If the caller is in control flow or in a separate
        `tf.function` inside a TPU program.
    """
    if tf.executing_eagerly() or not is_in_tpu_program(method):
        return None
    context = _context_of(tf.compat.v1.get_default_graph())
    return None if context is None else ReplicatedProgram(num_replicas, context)
