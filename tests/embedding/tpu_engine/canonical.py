"""A form of a graph in which names do not matter.

Each operation is a hash of its type, attributes, device and the hashes of
what it reads and waits for. Two graphs are the same when they hold the same
hashes as often.
"""

import collections
import hashlib

from tensorflow.python.framework import function_def_to_graph


def operations(graph, ignored_scope=None):
    """Counts the operations of a function's graph by what they are.

    Args:
      graph: A FuncGraph.
      ignored_scope: Operations below this name scope are left out, and nobody
        waits for them.

    Returns:
      Counter of `(type, hash)`.
    """
    hashes = {}
    arguments = {tensor.op.name: index
                 for index, tensor in enumerate(graph.inputs)}

    def is_ignored(op):
        return ignored_scope is not None and any(
            part.split("_check")[0] + "_check" == ignored_scope
            for part in op.name.split("/") if "_check" in part)

    def of(op):
        pending = [op]
        while pending:
            one = pending[-1]
            parents = [t.op for t in one.inputs] + [
                parent for parent in one.control_inputs
                if not is_ignored(parent)]
            missing = [p for p in parents if p.name not in hashes]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            hashes[one.name] = _digest(
                one.type, one.device, arguments.get(one.name),
                sorted(_attributes(graph, one)),
                [(hashes[t.op.name], t.value_index) for t in one.inputs],
                sorted(hashes[parent.name] for parent in one.control_inputs
                       if not is_ignored(parent)))
        return hashes[op.name]

    found = collections.Counter(
        (op.type, of(op)) for op in graph.get_operations()
        if not is_ignored(op))
    found["returned", _digest(
        [(of(t.op), t.value_index) for t in graph.outputs])] += 1
    return found


def _digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _attributes(graph, op):
    for key, value in op.node_def.attr.items():
        if value.HasField("func"):
            yield key, _of_function(graph, value.func.name)
        elif value.list.func:
            yield key, tuple(
                _of_function(graph, one.name) for one in value.list.func)
        else:
            yield key, value.SerializeToString(deterministic=True).hex()


def _of_function(graph, name):
    while name not in graph._functions:
        graph = graph.outer_graph
    definition = graph._functions[name].cached_definition
    body = function_def_to_graph.function_def_to_graph(definition)
    return _digest(sorted(operations(body).items()))
