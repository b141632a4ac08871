"""What a checkpoint says of its objects, changed where variables come or go."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tensorflow.core.protobuf import trackable_object_graph_pb2

# The tensor that holds it, as TensorFlow names it.
KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"


def read(serialized: bytes) -> trackable_object_graph_pb2.TrackableObjectGraph:
    """Returns the graph of a checkpoint, of the tensor that holds it."""
    return trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        serialized
    )


def changed(
    serialized: bytes,
    siblings: Mapping[str, Mapping[str, str]],
    removed: Collection[str],
) -> bytes:
    """Returns the graph with other variables.

    Args:
      serialized: As the checkpoint has it.
      siblings: By the tensor of a variable that is there, what comes beside
        it: by name of the attribute, the tensor.
      removed: Tensors of variables that go.
    """
    graph = read(serialized)
    node_of = {
        attribute.checkpoint_key: number
        for number, node in enumerate(graph.nodes)
        for attribute in node.attributes
    }
    gone = {node_of[key] for key in removed}
    new_number: dict[int, int] = {}
    found = trackable_object_graph_pb2.TrackableObjectGraph()
    for number, node in enumerate(graph.nodes):
        if number not in gone:
            new_number[number] = len(found.nodes)
            found.nodes.append(node)
    for node in found.nodes:
        kept = [child for child in node.children if child.node_id not in gone]
        for child in kept:
            child.node_id = new_number[child.node_id]
        del node.children[:]
        node.children.extend(kept)
        for slot in node.slot_variables:
            slot.original_variable_node_id = new_number[
                slot.original_variable_node_id
            ]
            slot.slot_variable_node_id = new_number[slot.slot_variable_node_id]
    for key, by_name in siblings.items():
        sibling = new_number[node_of[key]]
        parent = next(
            node
            for node in found.nodes
            if any(child.node_id == sibling for child in node.children)
        )
        for name, tensor in by_name.items():
            parent.children.add(local_name=name, node_id=len(found.nodes))
            node = found.nodes.add()
            node.attributes.add(name="VARIABLE_VALUE", checkpoint_key=tensor)
            node.has_checkpoint_values.value = True
    return found.SerializeToString()
