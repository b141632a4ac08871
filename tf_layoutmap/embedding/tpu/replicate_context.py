"""Whether `enqueue` is called by a TPU program, and what it may be given.

In `strategy.run` all inputs of `enqueue` must be arguments of the function,
and it must be called at its top level: the compiler takes the operation out of
the TPU's program and puts it before that, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private

# Says of a graph whether an emulated TPU's program is traced into it; those of
# a real one are known by their context.
_is_emulated: Callable[[Any], bool] | None = None
# What a TPU's name is for the device of an input.
_input_device_of: Callable[[str], str] | None = None


def set_emulated(
    is_emulated: Callable[[Any], bool] | None,
    input_device_of: Callable[[str], str] | None = None,
):
    """Lets an emulation say what its programs are; None takes it back.

    Args:
      is_emulated: Whether a graph is traced as the program of a core.
      input_device_of: From the device of an input to its name on a TPU.
    """
    global _is_emulated, _input_device_of
    _is_emulated, _input_device_of = is_emulated, input_device_of


def is_in_tpu_program() -> bool:
    """Whether the calling code is traced as a replica's program on a TPU.

    Raises:
      RuntimeError: If it is, but in control flow or in a function of its own.
    """
    here = tf.compat.v1.get_default_graph()
    graph = here
    while graph is not None and not _is_replicated(graph):
        graph = getattr(graph, "outer_graph", None)
    if graph is None:
        return False
    if graph is not here:
        raise RuntimeError(
            "`enqueue` must be called directly in the function that is given "
            "to `strategy.run`, not in control flow or a tf.function inside "
            "it: it could not be taken out of the TPU's program. The current "
            f"graph {here} does not match graph {graph}, which contains the "
            "TPUReplicateContext."
        )
    return True


def _is_replicated(graph: Any) -> bool:
    if _is_emulated is not None and _is_emulated(graph):
        return True
    context = _tf_private.control_flow_context_of(graph)
    while context is not None:
        if isinstance(context, _tf_private.tpu_replication.TPUReplicateContext):
            return True
        context = context.outer_context
    return False


def run_on_host(function: Callable[[], None]):
    """Calls `function` so that its operations run on the replica's host."""
    _tf_private.tpu_replication.outside_compilation(function)


def check_direct_inputs(named_values: Sequence[tuple[str, Any]]):
    """Refuses what is no argument of the function that `strategy.run` runs.

    Raises:
      ValueError: It names the input and the operation that made it.
    """
    for path, value in named_values:
        for tensor in tf.nest.flatten(value, expand_composites=True):
            if tensor.op.type == "Placeholder" or _is_program_input(tensor.op):
                continue
            raise ValueError(
                "Inside `strategy.run`, `enqueue` must be given arguments of "
                "the function that is run, unchanged. Received: input "
                f"{path!r}, which is the output of op {tensor.op.name} (type "
                f"{tensor.op.type}) and does not have the "
                "`_tpu_input_identity` attr. A dynamic batch size can cause "
                "this: pass tf.distribute.RunOptions("
                "experimental_enable_dynamic_batch_size=False) to "
                "`strategy.run`; or a Keras layer that casts its inputs."
            )


def _is_program_input(op: tf.Operation) -> bool:
    try:
        return bool(op.get_attr("_tpu_input_identity"))
    except ValueError:
        return False


def check_on_host(named_values: Sequence[tuple[str, Any]]):
    """Refuses inputs that a dataset has brought to a TPU already.

    Raises:
      ValueError: It names the input and the device.
    """
    for path, value in named_values:
        for tensor in tf.nest.flatten(value, expand_composites=True):
            for device in _devices_of(tensor):
                if tf.DeviceSpec.from_string(device).device_type == "TPU":
                    raise ValueError(
                        f"Received input {path!r} which is on a TPU input "
                        f"device {device}; the ids of `enqueue` must be on "
                        "the host. Distribute the dataset with "
                        "tf.distribute.InputOptions("
                        "experimental_fetch_to_device=False)."
                    )


def _devices_of(tensor: tf.Tensor) -> list[str]:
    if _input_device_of is not None:
        return [_input_device_of(_device_before_program(tensor))]
    if hasattr(tensor, "numpy"):  # Eager.
        return [tensor.device or ""]
    source = tensor.op
    if source.type == "Identity" and (
        source.inputs[0].op.type == "TPUReplicatedInput"
    ):
        return [one.device for one in source.inputs[0].op.inputs]
    return [tensor.device]


def _device_before_program(tensor: tf.Tensor) -> str:
    """Where what came into an emulated core's program as this input was."""
    if not hasattr(tensor, "numpy"):
        if _is_program_input(tensor.op):
            tensor = tensor.op.inputs[0]
        if tensor.op.type == "Placeholder":
            return ""  # Its device is only where a loop was traced.
    return tensor.device or ""
