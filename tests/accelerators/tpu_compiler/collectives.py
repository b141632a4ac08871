"""Replaces the collectives of a function of one device by custom calls.

XLA converts the custom calls to StableHLO without knowing them, and `compiling`
then replaces them by collectives of StableHLO. TensorFlow's own collectives for
XLA lack int64.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2
from tensorflow.python.framework import function_def_to_graph

OP, TARGET = "XlaCustomCallV2", "all_reduce"
_MERGES = ("Add", "Max", "Min", "Mul")
# Index of the input that contains the group of devices, for each collective.
_GROUP_INPUTS = {"CollectiveReduceV2": 2, "CrossReplicaSum": 1}
# Name of the output of each collective.
_OUTPUTS = {"CollectiveReduceV2": "data", "CrossReplicaSum": "output"}
# Part of the names of nodes with which DTensor moves data.
_DTENSOR = "/DTensor"
_KEPT_BY_TPUS = (tf.int32.as_datatype_enum, tf.bfloat16.as_datatype_enum)


def device_argument(function: function_pb2.FunctionDef) -> int | None:
    """Returns which argument is the index of the device, or None.

    Nodes that DTensor creates use this argument.
    """
    found = None
    for index, argument in enumerate(function.signature.input_arg):
        if argument.type != tf.int32.as_datatype_enum:
            continue
        (shape,) = function.arg_attr[index].attr["_output_shapes"].list.shape
        users = [
            node.name
            for node in function.node_def
            if argument.name in node.input
        ]
        if not shape.dim and any(map(_is_of_dtensor, users)):
            assert found is None, (found, index)
            found = index
    return found


def _is_of_dtensor(name: str) -> bool:
    return _DTENSOR in name or name.startswith("tf.")


def groups_of_keys(keys: Sequence[int]) -> list[list[int]]:
    """Returns the groups of devices whose collectives have the same key.

    >>> groups_of_keys([5, 6, 5, 6])
    [[0, 2], [1, 3]]

    Args:
      keys: The key of the group of each device.
    """
    found: dict[int, list[int]] = {}
    for device, key in enumerate(keys):
        found.setdefault(key, []).append(device)
    return list(found.values())


def groups_of(
    function: function_pb2.FunctionDef, num_devices: int
) -> dict[str, list[list[int]]]:
    """Returns the groups of devices of all collectives, by name.

    Args:
      function: The function of one device. DTensor computes the key of a group
        from the index of the device.
      num_devices: Number of devices.
    """
    group_input = {
        node.name: node.input[_GROUP_INPUTS[node.op]]
        for node in function.node_def
        if node.op in _GROUP_INPUTS
    }
    values = _values(function, set(group_input.values()), num_devices)
    found = {}
    for node in function.node_def:
        if node.name not in group_input:
            continue
        by_device = values[group_input[node.name]]
        found[node.name] = (
            groups_of_keys([int(one) for one in by_device])
            if node.op == "CollectiveReduceV2"
            else by_device[0].tolist()
        )
    return found


def _values(
    function: function_pb2.FunctionDef, names: set[str], num_devices: int
) -> dict[str, list[Any]]:
    """Computes inputs of nodes that depend on the index of the device only."""
    if not names:
        return {}
    graph_def, flat_names = function_def_to_graph.function_def_to_graph_def(
        function
    )
    # Other nodes can refer to variables, which do not exist here.
    by_name = {node.name: node for node in graph_def.node}
    outputs = {flat_names[one].partition(":")[0] for one in names}
    needed = sorted(outputs)
    for name in needed:
        for one in by_name[name].input:
            before = one.lstrip("^").partition(":")[0]
            if before not in needed:
                needed.append(before)
    del graph_def.node[:]
    graph_def.node.extend(by_name[name] for name in needed)
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    arguments = [
        f"{name}:0" for name in needed if by_name[name].op == "Placeholder"
    ]
    assert len(arguments) <= 1 and (
        not arguments or device_argument(function) is not None
    )
    with tf.compat.v1.Session(graph=graph) as session:
        return {
            name: [
                session.run(flat_names[name], dict.fromkeys(arguments, device))
                for device in range(num_devices)
            ]
            for name in sorted(names)
        }


def replace(
    function: function_pb2.FunctionDef,
    groups: Mapping[str, Sequence[Sequence[int]]],
) -> int:
    """Replaces the collectives of a function.

    Args:
      function: The function of one device, which is modified.
      groups: Result of `groups_of`.

    Returns:
      The number of collectives.

    Raises:
      NotImplementedError: If the function has another collective.
    """
    by_name = {node.name: node for node in function.node_def}
    renamed: dict[str, str] = {}
    added = []
    for node in function.node_def:
        if node.name in groups:
            names = _OUTPUTS[node.op]
            output, more = _replace_node(node, by_name, groups[node.name])
            renamed[f"{node.name}:{names}:0"] = output
            added += more
        elif node.op.startswith(("Collective", "AllToAll", "XlaAllReduce")):
            raise NotImplementedError(f"{node.op} ({node.name}) on a TPU.")
    for node in function.node_def:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    for name, value in function.ret.items():
        function.ret[name] = renamed.get(value, value)
    # The added nodes use the outputs before their names are replaced.
    function.node_def.extend(added)
    return len(renamed)


def _replace_node(
    node: node_def_pb2.NodeDef,
    by_name: Mapping[str, node_def_pb2.NodeDef],
    groups: Sequence[Sequence[int]],
) -> tuple[str, list[node_def_pb2.NodeDef]]:
    """Replaces a collective by a custom call.

    Returns:
      The output that replaces the output of the collective, and added nodes.
    """
    merge, final = "Add", "Id"
    if node.op == "CollectiveReduceV2":
        merge = node.attr["merge_op"].s.decode()
        final = node.attr["final_op"].s.decode()
    if merge not in _MERGES or final not in ("Id", "Div"):
        raise NotImplementedError(f"{merge} and {final} ({node.name}).")
    name, dtype = node.name, node.attr["T"].type
    (shape,) = node.attr["_output_shapes"].list.shape
    value = node.input[0]
    cast = by_name.get(value.partition(":")[0])
    # DTensor converts the values to these dtypes on CPUs and GPUs only.
    is_cast = (
        cast is not None and cast.op == "Cast" and _is_of_dtensor(cast.name)
    )
    reduced = cast.attr["SrcT"].type if is_cast else dtype
    if is_cast and reduced in _KEPT_BY_TPUS:
        value = cast.input[0]
    else:
        reduced = dtype
    after = [one for one in node.input if one.startswith("^")]
    node.Clear()
    node.name, node.op = name, OP
    node.input.extend([value, *after])
    node.attr["call_target_name"].s = TARGET.encode()
    node.attr["backend_config"].s = json.dumps(
        {"merge": merge, "groups": groups}
    ).encode()
    node.attr["has_side_effect"].b = False
    node.attr["operand_dtypes"].list.type.append(reduced)
    node.attr["result_dtypes"].list.type.append(reduced)
    node.attr["result_shapes"].list.shape.add().CopyFrom(shape)
    output, added = f"{name}:results:0", []
    if reduced != dtype:
        added.append(
            node_def_pb2.NodeDef(name=f"{name}/cast", op="Cast", input=[output])
        )
        added[-1].attr["SrcT"].type = reduced
        added[-1].attr["DstT"].type = dtype
        output = f"{name}/cast:y:0"
    if final == "Div":
        count = node_def_pb2.NodeDef(name=f"{name}/count", op="Const")
        count.attr["dtype"].type = dtype
        count.attr["value"].tensor.CopyFrom(
            tf.make_tensor_proto(len(groups[0]), tf.as_dtype(dtype))
        )
        mean = node_def_pb2.NodeDef(
            name=f"{name}/mean",
            op="RealDiv",
            input=[output, f"{name}/count:output:0"],
        )
        mean.attr["T"].type = dtype
        output = f"{name}/mean:z:0"
        added += [count, mean]
    return output, added


def with_dynamic_updates(function: function_pb2.FunctionDef) -> None:
    """Replaces updates of slices whose position depends on the device.

    XLA requires constant positions in `TensorStridedSliceUpdate`, with which
    DTensor writes the shard of a device into the gathered tensor.
    """
    for node in function.node_def:
        if node.op != "TensorStridedSliceUpdate":
            continue
        if any(node.attr[one].i for one in node.attr if one.endswith("_mask")):
            raise NotImplementedError(f"{node.op} with a mask ({node.name}).")
        value, begin, _, _, update, *after = node.input
        dtype, index = node.attr["T"].type, node.attr["Index"].type
        name = node.name
        node.Clear()
        node.name, node.op = name, "XlaDynamicUpdateSlice"
        node.input.extend([value, update, begin, *after])
        node.attr["T"].type, node.attr["Tindices"].type = dtype, index


def without_hints(function: function_pb2.FunctionDef) -> None:
    """Removes the attributes with which TensorFlow annotates nodes."""
    for node in function.node_def:
        node.device = ""
        for name in [one for one in node.attr if one.startswith("_")]:
            del node.attr[name]


def with_device_id(function: function_pb2.FunctionDef) -> None:
    """Replaces the argument with the index of the device by XLA's replica."""
    removed = device_argument(function)
    if removed is None:
        return
    name = function.signature.input_arg[removed].name
    function.node_def.add(name="device_of_replica", op="XlaReplicaId")
    for node in function.node_def:
        for index, one in enumerate(node.input):
            if one == name:
                node.input[index] = "device_of_replica:id:0"
    assert name not in function.ret.values()
    del function.signature.input_arg[removed]
    attributes = [
        function.arg_attr[index]
        for index in range(len(function.signature.input_arg) + 1)
        if index != removed
    ]
    copies = [
        type(one).FromString(one.SerializeToString()) for one in attributes
    ]
    function.arg_attr.clear()
    for index, one in enumerate(copies):
        function.arg_attr[index].CopyFrom(one)
