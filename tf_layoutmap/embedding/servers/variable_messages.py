"""Fewer messages for the variables of a step that are on servers.

TensorFlow sends each tensor between two processes in a separate message. A
Keras layer or optimizer reads its variables one by one, such as the learning
rates of all layers. `reduce_messages` changes the ops of a traced step:

* All variables that the worker reads from a server are one tensor. The server
  concatenates their values, and the worker splits them.
* A variable that no op of the closure has written since an earlier step has
  read it is not read again. A change by another process is therefore read by
  the next closure.
* The results of the step do not wait for ops that read or change variables on
  servers (see `resource_order.end_on_server`).

The function does not change a read that may depend on an earlier read of the
step, for example because the step writes the variable before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.servers import resource_order
from tf_layoutmap.sharded.routing.checks import known_size

# A larger value is sent in a separate message, because copying it to and from a
# joined tensor takes more time than a message.
_MAX_BYTES = 256 << 10
# Prefix of the types of this package's ops.
_PREFIX = "LayoutMap>"
# Values are sent as int32.
_DTYPES = (tf.float32, tf.int32, tf.int64)


@dataclasses.dataclass
class ReadValues:
    """The values of variables that a traced closure has read in one graph.

    Attributes:
      num_ops: Number of ops of the graph that were processed.
      values: Maps the id of the captured handle of a variable to its value. No
        processed op writes the variable after this value was read.
    """

    num_ops: int = 0
    values: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)


def reduce_messages(graph: Any, first_op: int, known: ReadValues) -> None:
    """Reduces the messages of the ops of a step.

    Args:
      graph: Graph of the step, which is the default graph.
      first_op: Number of ops in the graph before the step.
      known: The values that earlier steps have read in this graph. The function
        adds the values that this step reads.
    """
    servers = resource_order.servers_of(graph)
    all_ops = graph.get_operations()
    if not servers:
        return
    last_write: dict[int, int] = {}
    for number, op in enumerate(all_ops[known.num_ops :], known.num_ops):
        if op.type == "ReadVariableOp":
            value = known.values.get(id(op.inputs[0]))
            if value is not None and number >= first_op:
                _replace(_use(op.outputs[0], servers), value)
        _, written = resource_order.read_and_written_by(op)
        for resource in written:
            known.values.pop(resource, None)
            last_write[resource] = number
        if (
            number >= first_op
            and not op.type.startswith(_PREFIX)
            and not servers.keys().isdisjoint(written)
        ):
            tf_private.run_independently_of_results(op)
    by_server: dict[str, list[_Use]] = {}
    for number, op in _independent_reads(all_ops[first_op:], servers):
        use = _use(op.outputs[0], servers)
        if not use.inputs:
            continue
        by_server.setdefault(servers[id(op.inputs[0])], []).append(use)
        if last_write.get(id(op.inputs[0]), -1) < first_op + number:
            known.values[id(op.inputs[0])] = use.value
    received: dict[int, tf.Tensor] = {}
    for server, uses in by_server.items():
        small = [use for use in uses if _is_small(use.value)]
        if len(small) > 1:
            received |= _join_reads(server, small)
    for op in all_ops[first_op:]:
        if (
            op.type == "ReadVariableOp"
            and id(op.inputs[0]) in servers
            and op.outputs[0].consumers()
        ):
            tf_private.run_independently_of_results(op)
    known.values = {
        key: received.get(id(value), value)
        for key, value in known.values.items()
    }
    known.num_ops = len(graph.get_operations())


def _independent_reads(
    ops: Sequence[Any], servers: dict[int, str]
) -> list[tuple[int, Any]]:
    """Returns the position and the op of reads that may be joined.

    No read depends on an op that uses the value of another read. An op depends
    on another op by inputs, by control dependencies, or because one of them
    writes a resource that both use.
    """
    independent: list[tuple[int, Any]] = []
    joined: set[Any] = set()
    dependent: set[Any] = set()
    used: set[int] = set()
    written: set[int] = set()
    for number, op in enumerate(ops):
        reads, writes = resource_order.read_and_written_by(op)
        if (
            any(
                tensor.op in dependent or tensor.op in joined
                for tensor in op.inputs
            )
            or any(source in dependent for source in op.control_inputs)
            or (reads | writes) & written
            or writes & used
        ):
            dependent.add(op)
            used |= reads | writes
            written |= writes
        elif op.type == "ReadVariableOp" and id(op.inputs[0]) in servers:
            joined.add(op)
            independent.append((number, op))
    return independent


def _is_small(value: tf.Tensor) -> bool:
    return (
        value.dtype in _DTYPES
        and value.shape.is_fully_defined()
        and value.dtype.size * (value.shape.num_elements() or 0) <= _MAX_BYTES
    )


@dataclasses.dataclass(frozen=True)
class _Use:
    """A value on a server, and the inputs of ops of the worker that use it."""

    value: tf.Tensor
    inputs: Sequence[tuple[Any, int]]


def _join_reads(server: str, uses: Sequence[_Use]) -> dict[int, tf.Tensor]:
    """Replaces values that a worker uses by parts of one tensor.

    Returns:
      Maps the id of each replaced value to its part.
    """
    parts_of: dict[int, tf.Tensor] = {}
    # Scalars of the same type need one op instead of one op per scalar.
    groups: dict[Any, list[_Use]] = {}
    for number, use in enumerate(uses):
        key = use.value.dtype if use.value.shape.rank == 0 else number
        groups.setdefault(key, []).append(use)
    with (
        tf.control_dependencies(None),
        tf_private.stop_recording(),
        tf.name_scope(""),
    ):
        with tf.device(None), tf.device(server):
            parts = [
                _to_words(
                    tf.stack([use.value for use in group])
                    if group[0].value.shape.rank == 0
                    else tf.reshape(group[0].value, [-1])
                )
                for group in groups.values()
            ]
            message = tf.concat(parts, axis=0)
        with tf.device(None):
            received = tf.split(message, [known_size(part) for part in parts])
            for group, words in zip(groups.values(), received):
                for use, value in zip(group, _from_words(words, group)):
                    _replace(use, value)
                    parts_of[id(use.value)] = value
    return parts_of


def _replace(use: _Use, value: tf.Tensor) -> None:
    """Replaces a value in the ops of the worker."""
    for op, index in use.inputs:
        tf_private.replace_op_input(op, index, value)


def _to_words(values: tf.Tensor) -> tf.Tensor:
    """Returns the bits of a vector as an int32 vector."""
    if values.dtype == tf.int32:
        return values
    return tf.reshape(tf.bitcast(values, tf.int32), [-1])


def _from_words(words: tf.Tensor, group: Sequence[_Use]) -> list[tf.Tensor]:
    """Returns the values of a group, from the result of `_to_words`."""
    dtype, shape = group[0].value.dtype, group[0].value.shape
    if dtype.size == 2 * words.dtype.size:
        words = tf.reshape(words, [-1, 2])
    values = words if dtype == words.dtype else tf.bitcast(words, dtype)
    if shape.rank == 0:
        return tf.unstack(values, num=len(group))
    return [tf.reshape(values, shape)]


def _use(value: tf.Tensor, servers: dict[int, str]) -> _Use:
    """Returns the inputs of ops of the worker that are `value`."""
    return _Use(
        value,
        [
            (op, index)
            for op in value.consumers()
            if not _is_on_server(op, servers)
            for index, tensor in enumerate(op.inputs)
            if tensor is value
        ],
    )


def _is_on_server(op: Any, servers: dict[int, str]) -> bool:
    return tf.DeviceSpec.from_string(
        op.device
    ).job == resource_order.SERVER_JOB or any(
        id(tensor) in servers for tensor in op.inputs
    )
