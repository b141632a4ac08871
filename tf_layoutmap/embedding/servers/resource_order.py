"""Order of the ops of a traced step that use the same variables on servers.

TensorFlow runs the ops of a `tf.function` that use the same resource in the
order of the program. An op that reads or updates rows on a server has the
resource of the server as its input instead of the variables, so TensorFlow
cannot see which variables the op uses. This module passes the variables to
TensorFlow. A read of a table after its update therefore returns the updated
rows. Variables that a step does not use directly are not captured.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private

# Job of the servers of a ParameterServerStrategy.
SERVER_JOB = "ps"
# Maps the id of a server's handle to the ids of the handles of its variables.
_variables_of: dict[int, frozenset[int]] = {}
# Numbers of the calls of `register`, and the number of the last call.
_numbers = itertools.count(1)
_last_number = 0
# Attribute of a graph with its number of captures and the result of `_related`.
# A dictionary with weak references to graphs would keep all graphs, because the
# result contains tensors of the graph.
_KNOWN = "_tf_layoutmap_related_resources"


def register(handle: tf.Tensor, variables: Iterable[tf.Tensor]) -> None:
    """Records the variables that ops with the handle of a server use.

    Args:
      handle: Handle of the resource of a server.
      variables: Handles of the variables.
    """
    global _last_number
    key = id(handle)
    _variables_of[key] = frozenset(map(id, variables))
    _last_number = next(_numbers)
    weakref.finalize(handle, _variables_of.pop, key, None)


def last_registration() -> int:
    """Returns a number that each call of `register` changes.

    A function that was traced when the function returned another number may
    contain handles that were replaced, for example by a resized vocabulary.
    """
    return _last_number


def _source(tensor: Any) -> Any:
    """Returns the tensor that a chain of captures passes to a function."""
    while tf.is_symbolic_tensor(tensor):
        outer = next(
            (
                external
                for external, internal in getattr(tensor.graph, "captures", ())
                if internal is tensor
            ),
            None,
        )
        if outer is None:
            break
        tensor = outer
    return tensor


def _related(graph: Any) -> dict[int, list[Any]]:
    """Returns the captured resources that each captured server uses.

    Args:
      graph: Graph of a function.

    Returns:
      Maps the id of the captured handle of a server to the captured handles of
      its variables, and of other servers with common variables.
    """
    captures = getattr(graph, "captures", ())
    size = len(captures)
    known_size, related = getattr(graph, _KNOWN, (None, {}))
    if known_size == size:
        return related
    servers, variables = [], {}
    for external, internal in captures:
        if internal.dtype != tf.resource:
            continue
        source = id(_source(external))
        if source in _variables_of:
            servers.append((internal, _variables_of[source]))
        else:
            variables[source] = internal
    related = {
        id(server): [
            *(variables[key] for key in used if key in variables),
            *(
                other
                for other, others in servers
                if other is not server and used & others
            ),
        ]
        for server, used in servers
    }
    setattr(graph, _KNOWN, (size, related))
    return related


def resources_of(graph: Any, handle: tf.Tensor) -> list[Any]:
    """Returns the tensors in a function that refer to a server's variables.

    Args:
      graph: Graph of the function. The handle is captured.
      handle: Handle of the resource of the server.

    Returns:
      The captured handle, and the other tensors of `_related`.
    """
    captured = graph.capture(handle)
    return [captured, *_related(graph).get(id(captured), ())]


def tensors_of(graph: Any, variables: Iterable[tf.Tensor]) -> set[int]:
    """Returns the ids of the tensors in a function that refer to variables.

    Args:
      graph: Graph of the function.
      variables: Handles of the variables.

    Returns:
      The ids of the captured handles of the variables, and of servers with at
      least one of the variables.
    """
    handles = set(map(id, variables))
    return {
        id(internal)
        for external, internal in getattr(graph, "captures", ())
        if internal.dtype == tf.resource
        and handles
        & {source := id(_source(external)), *_variables_of.get(source, ())}
    }


def servers_of(graph: Any) -> dict[int, str]:
    """Returns the server of each captured resource that is on a server.

    Args:
      graph: Graph of a function.

    Returns:
      Maps the id of the captured handle to the device of the server.
    """
    devices = {
        id(internal): getattr(_source(external), "device", None) or ""
        for external, internal in getattr(graph, "captures", ())
        if internal.dtype == tf.resource
    }
    return {
        key: device
        for key, device in devices.items()
        if tf.DeviceSpec.from_string(device).job == SERVER_JOB
    }


def end_on_server(result: tf.Tensor) -> tf.Tensor:
    """Returns `result`, and lets a step end without a message about its op.

    A call of the traced step ends after all ops on the servers have run. A
    control dependency of the results of the step on such an op would only
    require another message from the server to the worker.
    """
    if not tf.executing_eagerly():
        tf_private.run_independently_of_results(result.op)
    return result


def uses_variables(graph: Any) -> bool:
    """Returns whether a function uses variables of the servers that it uses.

    Args:
      graph: Graph of the function.
    """
    return any(_related(graph).values())


def _add_variables_of_servers(op: Any, reads: Any, writes: Any) -> bool:
    """Adds the variables of servers to the resources that an op uses.

    Args:
      op: Op of a traced function.
      reads: Set of the resources that the op reads.
      writes: Set of the resources that the op reads and writes.

    Returns:
      Whether a set has changed.
    """
    if not _variables_of or not (reads or writes):
        return False
    related = _related(op.graph)
    if not related:
        return False
    changed = False
    for resources in (writes, reads):
        for resource in list(resources):
            for other in related.get(id(resource), ()):
                if other not in resources and other not in writes:
                    resources.add(other)
                    changed = True
    return changed


tf_private.register_resource_resolver(_add_variables_of_servers)


def read_and_written_by(op: Any) -> tuple[set[int], set[int]]:
    """Returns the resources that an op uses, with the variables of servers.

    Args:
      op: Op of a traced function.

    Returns:
      The ids of the captured handles that the op reads, and of the captured
      handles that it reads and writes.
    """
    reads, writes = tf_private.read_and_written_resources(op)
    while _add_variables_of_servers(op, reads, writes):
        pass
    written = set(map(id, writes))
    return set(map(id, reads)) - written, written
