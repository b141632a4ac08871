"""Computes a canonical form of graphs, which does not depend on names.

Each operation becomes a hash of its type, attributes, device, and the hashes of
its inputs and control inputs. Two graphs are equal if each hash occurs equally
often in both. Branches and loop bodies are also graphs, and their arguments are
represented by the hashes of the caller's inputs. The order of captured
arguments is ignored.
"""

import collections
import hashlib
import re

from tensorflow.python.framework import function_def_to_graph

# The names of TPU programs consist of a function name and a number.
_FUNCTION_NUMBER = re.compile(
    rb"((?:while_(?:body|cond)|cond_(?:true|false)))_[0-9]+"
)

# These attributes list the captured arguments in order.
_ORDERS_OF_CAPTURES = (
    "T",
    "Tin",
    "output_shapes",
    "_read_only_resource_inputs",
)


def operations(graph, ignored_scope=None, arguments=None):
    """Counts the operations in the graph of a function by type and hash.

    Args:
      graph: A FuncGraph.
      ignored_scope: Name scope whose operations are ignored. They are also
        ignored as control inputs of other operations.
      arguments: Values that represent the inputs of the graph, or None to use
        the indices of the inputs.

    Returns:
      Counter of `(type, hash)`.
    """
    hashes = {}
    represented_by = {
        tensor.op.name: index if arguments is None else arguments[index]
        for index, tensor in enumerate(graph.inputs)
    }

    def is_ignored(op):
        return ignored_scope is not None and any(
            part.startswith(ignored_scope) for part in op.name.split("/")
        )

    def digest(op):
        read = [(hashes[t.op.name], t.value_index) for t in op.inputs]
        attributes, is_call = _attributes(graph, op, ignored_scope, read)
        return _digest(
            op.type,
            op.device,
            represented_by.get(op.name),
            attributes,
            sorted(read) if is_call else read,
            sorted(
                hashes[parent.name]
                for parent in op.control_inputs
                if not is_ignored(parent)
            ),
        )

    def hash_of(op):
        pending = [op]
        while pending:
            parents = [t.op for t in pending[-1].inputs] + [
                parent
                for parent in pending[-1].control_inputs
                if not is_ignored(parent)
            ]
            missing = [p for p in parents if p.name not in hashes]
            if missing:
                pending.extend(missing)
            else:
                one = pending.pop()
                hashes[one.name] = digest(one)
        return hashes[op.name]

    found = collections.Counter(
        (op.type, hash_of(op))
        for op in graph.get_operations()
        if not is_ignored(op)
    )
    found[
        "returned",
        _digest([(hash_of(t.op), t.value_index) for t in graph.outputs]),
    ] += 1
    return found


def _digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _attributes(graph, op, ignored_scope, read):
    """Returns the sorted attributes, and whether one is a function."""
    attributes = op.node_def.attr
    calls = {
        key: [
            one.name
            for one in (
                [value.func] if value.HasField("func") else value.list.func
            )
        ]
        for key, value in attributes.items()
    }
    is_call = any(calls.values())
    # The first input of a conditional operation is the condition.
    arguments = read[1:] if op.type in ("If", "StatelessIf", "Case") else read
    found = []
    for key, value in attributes.items():
        if calls[key]:
            found.append(
                (
                    key,
                    [
                        _of_function(graph, name, ignored_scope, arguments)
                        for name in calls[key]
                    ],
                )
            )
        elif value.HasField("s"):
            found.append((key, _FUNCTION_NUMBER.sub(rb"\1", value.s)))
        elif not (is_call and key in _ORDERS_OF_CAPTURES):
            found.append((key, value.SerializeToString(deterministic=True)))
    return sorted(found, key=lambda item: item[0]), is_call


def _of_function(graph, name, ignored_scope, arguments):
    while name not in graph._functions:
        graph = graph.outer_graph
    body = function_def_to_graph.function_def_to_graph(
        graph._functions[name].cached_definition
    )
    return _digest(sorted(operations(body, ignored_scope, arguments).items()))
