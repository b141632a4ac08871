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

Two messages are at the same time if they depend on the same number of earlier
messages (`_times`), so that neither of them depends on the other one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import graphlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# Key of the ops that have side effects without a resource. Ids are positive.
_NO_RESOURCE = -1
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
    # Values that other servers use, by the id of the handle of the variable.
    shared: dict[int, tf.Tensor] = {}
    for number, op in enumerate(all_ops[known.num_ops :], known.num_ops):
        if number >= first_op and _is_read(op, servers):
            key = id(op.inputs[0])
            use = _use(op.outputs[0], servers, _is_worker)
            value = known.values.get(key)
            if value is not None:
                _replace_read(use, value)
            elif use.inputs:
                known.values[key] = use.value
            elsewhere = _use(
                op.outputs[0],
                servers,
                functools.partial(_is_other_server, servers[key]),
            )
            _replace_read(elsewhere, shared.setdefault(key, op.outputs[0]))
        _, written = resource_order.read_and_written_by(op)
        for resource in written:
            known.values.pop(resource, None)
            shared.pop(resource, None)
        if (
            number >= first_op
            and not op.type.startswith(_PREFIX)
            and not servers.keys().isdisjoint(written)
        ):
            tf_private.run_independently_of_results(op)
    step_ops = all_ops[first_op:]
    times = _times(step_ops, servers)
    reads: dict[tuple[str, int], list[_Use]] = {}
    for op in step_ops:
        if not _is_read(op, servers):
            continue
        use = _use(op.outputs[0], servers, _is_worker)
        if use.inputs and _is_small(use.value):
            key = servers[id(op.inputs[0])], times[op]
            reads.setdefault(key, []).append(use)
    sent = _sent_values(step_ops, servers, times)
    received: dict[int, tf.Tensor] = {}
    for (server, _), uses in reads.items():
        if len(uses) > 1:
            received |= _join(uses, server, "")
    for (source, target, _), uses in sent.items():
        if len(uses) > 1:
            _join(uses, source, target)
    for op in step_ops:
        if _is_read(op, servers) and op.outputs[0].consumers():
            tf_private.run_independently_of_results(op)
    known.values = {
        key: received.get(id(value), value)
        for key, value in known.values.items()
    }
    known.num_ops = len(graph.get_operations())


def _is_read(op: Any, servers: dict[int, str]) -> bool:
    """Returns whether an op reads the value of a variable on a server."""
    return op.type == "ReadVariableOp" and id(op.inputs[0]) in servers


def _times(ops: Sequence[Any], servers: dict[int, str]) -> dict[Any, int]:
    """Returns the number of successive messages that each op waits for.

    An op depends on another op by inputs, by control dependencies, or because
    one of them writes a resource that both use. TensorFlow also orders stateful
    ops without a resource.
    """
    places = {op: _place(op, servers) for op in ops}
    before: dict[Any, set[Any]] = {}
    last_writer: dict[int, Any] = {}
    readers: dict[int, list[Any]] = {}
    for op in ops:
        sources = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
        reads, writes = resource_order.read_and_written_by(op)
        if not reads and not writes and op.op_def.is_stateful:
            writes = {_NO_RESOURCE}
        for resource in reads | writes:
            if resource in last_writer:
                sources.add(last_writer[resource])
        for resource in writes:
            sources.update(readers.pop(resource, ()))
            last_writer[resource] = op
        for resource in reads:
            readers.setdefault(resource, []).append(op)
        before[op] = {source for source in sources if source in places}
    times: dict[Any, int] = {}
    for op in graphlib.TopologicalSorter(before).static_order():
        times[op] = max(
            (
                times[source] + (places[source] != places[op])
                for source in before[op]
            ),
            default=0,
        )
    return times


def _sent_values(
    ops: Sequence[Any], servers: dict[int, str], times: Mapping[Any, int]
) -> dict[tuple[str, str, int], list[_Use]]:
    """Returns the small values that ops send to TensorFlow's ops on servers.

    A server gets its own copy of a constant instead.

    Returns:
      Maps the sender, the receiver and the time to the values. The sender is a
      server, or an empty string for the worker.
    """
    inputs: dict[tuple[str, int], list[tuple[Any, int]]] = {}
    values: dict[int, tf.Tensor] = {}
    for op in ops:
        server = _place(op, servers)
        if not server or op.type.startswith(_PREFIX) or _calls_function(op):
            continue
        for index, tensor in enumerate(op.inputs):
            if tensor.dtype in _DTYPES and _place(tensor.op, servers) != server:
                values[id(tensor)] = tensor
                inputs.setdefault((server, id(tensor)), []).append((op, index))
    sent: dict[tuple[str, str, int], list[_Use]] = {}
    for (server, key), used in inputs.items():
        use = _Use(values[key], used)
        if not _is_small(use.value):
            continue
        if use.value.op.type == "Const":
            # The constant may be the only input that waits for the batch.
            with (
                _outside_of_the_program(server),
                tf.control_dependencies(use.value.op.control_inputs),
            ):
                _replace(use, tf.constant(tf.get_static_value(use.value)))
            continue
        source = use.value.op
        sent.setdefault(
            (_place(source, servers), server, times.get(source, 0)), []
        ).append(use)
    return sent


def _calls_function(op: Any) -> bool:
    """Returns whether an op runs a function, whose ops have own devices."""
    return any(
        attribute.type in ("func", "list(func)") for attribute in op.op_def.attr
    )


def _is_small(value: tf.Tensor) -> bool:
    return (
        value.dtype in _DTYPES
        and value.shape.is_fully_defined()
        and value.dtype.size * (value.shape.num_elements() or 0) <= _MAX_BYTES
    )


@dataclasses.dataclass(frozen=True)
class _Use:
    """A value, and the inputs of ops in another process that use it."""

    value: tf.Tensor
    inputs: Sequence[tuple[Any, int]]


def _join(
    uses: Sequence[_Use], source: str, target: str
) -> dict[int, tf.Tensor]:
    """Replaces values that another process uses by parts of one tensor.

    Args:
      uses: The values and their uses.
      source: Server that sends the values, or an empty string for the worker.
      target: Server that uses the values, or an empty string for the worker.

    Returns:
      Maps the id of each replaced value to its part.
    """
    parts_of: dict[int, tf.Tensor] = {}
    # Scalars of the same type need one op instead of one op per scalar. A type
    # itself is not a key, because `tf.float32 == 1`.
    groups: dict[str | int, list[_Use]] = {}
    for number, use in enumerate(uses):
        key = use.value.dtype.name if use.value.shape.rank == 0 else number
        groups.setdefault(key, []).append(use)
    with _outside_of_the_program(source):
        parts = [
            _to_words(
                tf.stack([use.value for use in group])
                if group[0].value.shape.rank == 0
                else tf.reshape(group[0].value, [-1])
            )
            for group in groups.values()
        ]
        message = tf.concat(parts, axis=0)
    with _outside_of_the_program(target):
        received = tf.split(message, [known_size(part) for part in parts])
        for group, words in zip(groups.values(), received):
            for use, value in zip(group, _from_words(words, group)):
                _replace(use, value)
                parts_of[id(use.value)] = value
    return parts_of


def _replace(use: _Use, value: tf.Tensor) -> None:
    """Replaces a value in the ops that use it."""
    for op, index in use.inputs:
        tf_private.replace_op_input(op, index, value)


def _replace_read(use: _Use, value: tf.Tensor) -> None:
    """Replaces a read of a variable by an earlier read.

    TensorFlow lets an op wait for control inputs only by its inputs, if these
    wait for the same control inputs. The read may, for example, be the only
    input of an op that waits for the batch.
    """
    waits = set(use.value.op.control_inputs) - set(value.op.control_inputs)
    _replace(use, value)
    if waits:
        for op in {op for op, _ in use.inputs}:
            tf_private.add_control_inputs(op, list(waits))


@contextlib.contextmanager
def _outside_of_the_program(server: str) -> Iterator[None]:
    """Context of new ops that do not depend on the contexts of the program.

    Args:
      server: Device of the ops, or an empty string for the worker.
    """
    with (
        tf.control_dependencies(None),
        tf_private.stop_recording(),
        tf.name_scope(""),
        tf.device(None),
        tf.device(server or None),
    ):
        yield


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


def _use(
    value: tf.Tensor, servers: dict[int, str], places: Callable[[str], bool]
) -> _Use:
    """Returns the inputs that are `value`, of ops at the selected places."""
    return _Use(
        value,
        [
            (op, index)
            for op in value.consumers()
            if places(_place(op, servers))
            for index, tensor in enumerate(op.inputs)
            if tensor is value
        ],
    )


def _place(op: Any, servers: dict[int, str]) -> str:
    """Returns the server of an op, or an empty string for the worker."""
    device = op.device or ""
    if _job(device) == resource_order.SERVER_JOB:
        return device
    return next(
        (servers[id(tensor)] for tensor in op.inputs if id(tensor) in servers),
        "",
    )


def _is_worker(place: str) -> bool:
    return not place


def _is_other_server(server: str, place: str) -> bool:
    return place not in ("", server)


@functools.cache
def _job(device: str) -> str | None:
    return tf.DeviceSpec.from_string(device).job
