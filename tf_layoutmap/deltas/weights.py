"""Finds the weights of models that are not in the tables of embeddings.

`ModelWeights` finds the variables of Keras models, modules and checkpoints:
kernels, biases, statistics, tables that the model trains itself, and the state
of optimizers. `BaseGraph` finds the same variables in the base checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_layoutmap._core import tf_private, user_warnings
from tf_layoutmap.deltas import base as base_file
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.deltas.served.chain import Delta, weight_tensor
from tf_layoutmap.deltas.served.changes import as_array
from tf_layoutmap.embedding.table_access import TableAccess
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.vocabulary import checkpoint_files

Array = np.ndarray[Any, Any]
# Attributes from an object to another one.
Path = tuple[str, ...]

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
# TensorFlow's class is used for slot variables of tables in tf_keras, and for
# variables that the partitioner of a strategy shards.
_SHARDED = (ShardedVariable, tf_private.TensorFlowShardedVariable)
_VARIABLES = (tf.Variable, *_SHARDED)


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A variable of a model that is not in the table of an embedding.

    Attributes:
      label: Name of the weight in deltas.
      variable: The variable of TensorFlow or Keras, or the `ShardedVariable`.
      key: Checkpoint key in the base, or an empty string.
      is_state: Whether only optimizers use the variable.
    """

    label: str
    variable: Any
    key: str
    is_state: bool

    @property
    def name(self) -> str:
        """Name of the variable, for messages."""
        return name_of(self.variable)

    def read(self) -> Array:
        """Returns the current value."""
        return read(self.variable)

    def stored(self, base: Any, deltas: Sequence[Delta]) -> Array | None:
        """Returns the value after all deltas, or None if no file has one.

        Args:
          base: Reader of the base.
          deltas: The deltas, in the order in which they were written.
        """
        value = read_changed(self.label, deltas)
        if value is None and self.key:
            value = as_array(base_file.read_tensor(base, self.key))
        return value


def read_changed(label: str, deltas: Sequence[Delta]) -> Array | None:
    """Returns the last value of a weight in deltas, or None."""
    for delta in reversed(deltas):
        if delta.meta.weights.get(label, {}).get("is_changed"):
            reader = storage.open_checkpoint(delta.tensors)
            return as_array(
                base_file.read_tensor(reader, weight_tensor(label), "a delta")
            )
    return None


def read(variable: Any) -> Array:
    """Returns the value of a variable; see `Weight.variable`.

    If the strategy has several processes, all processes must call the function,
    because statistics of replicas can be summed over the processes.
    """
    value = variable_of(variable)
    if isinstance(value, tf.experimental.dtensor.DVariable):
        return np.asarray(transfer.to_host(value))
    if isinstance(value, tf.Variable):
        value = value.read_value()
    elif isinstance(value, tf_private.TensorFlowShardedVariable):
        value = tf.convert_to_tensor(value)
    return as_array(value.numpy())


def digest(value: Array) -> bytes:
    """Returns a checksum of an array."""
    content = (
        repr(value.tolist()).encode()
        if value.dtype == object
        else np.ascontiguousarray(value).tobytes()
    )
    return hashlib.sha256(content).digest()


def name_of(variable: Any) -> str:
    """Returns the name of a variable of TensorFlow or Keras."""
    name = getattr(variable, "path", None) or getattr(variable, "name", "")
    return str(name).removesuffix(":0")


def variable_of(variable: Any) -> Any:
    """Returns the TensorFlow variable or the table of a Keras variable."""
    if not _is_keras_variable(variable):
        return variable
    # Keras variables on a mesh have an unsharded value in addition.
    on_mesh = getattr(variable, "divided_value", None)
    return variable.value if on_mesh is None else on_mesh


def aliases(variable: Any) -> Iterator[int]:
    """Yields the `id` of all objects that represent the same variable."""
    inner_variable = variable_of(variable)
    yield id(variable)
    yield id(inner_variable)
    # tf_keras wraps variables under a mixed policy.
    inner = getattr(variable, "_variable", None)
    if inner is not None:
        yield id(inner)
    if isinstance(inner_variable, _SHARDED):
        yield from map(id, inner_variable.variables)


def _is_keras_variable(variable: Any) -> bool:
    """Whether an object is a variable of Keras 3, without importing Keras."""
    return not isinstance(variable, _VARIABLES) and all(
        hasattr(variable, name) for name in ("path", "shape", "dtype", "_value")
    )


def _is_variable(variable: Any) -> bool:
    if _is_keras_variable(variable):
        # Keras can create the value later.
        return variable._value is not None
    return isinstance(variable, _VARIABLES)


class ModelWeights:
    """The weights of models at the time of the last call of `find`."""

    def __init__(self, objects: Sequence[Any], base: BaseGraph):
        """Finds models in the base.

        Args:
          objects: Models, modules and checkpoints, and embeddings and layers
            that have no weights.
          base: Objects of the base checkpoint.

        Raises:
          ValueError: If the base contains a model several times.
        """
        self._objects = list(objects)
        self._models = [
            member
            for member in objects
            if not isinstance(member, TableAccess)
            and not is_table_layer(member)
        ]
        self._base = base
        self._labels: dict[int, str] = {}
        for model in self._models:
            base.locate(model)

    def find(self) -> list[Weight]:
        """Returns all weights in an order that depends only on the models.

        Layers and optimizers can create variables after the writer is created,
        so a writer calls the method before each delta.
        """
        self._labels = {}
        weights: list[Weight] = []
        for number, model in enumerate(self._models):
            self._base.follow(model)
            for is_state in (False, True):
                for path, variable in _variables(
                    model, skips_state=not is_state
                ):
                    key = self._base.key_of(variable)
                    if is_state and not key:
                        continue
                    label = key.removesuffix(_VALUE) or ":".join(
                        ["", str(number), "/".join(path)]
                    )
                    self._add(weights, Weight(label, variable, key, is_state))
                if not is_state:
                    # Checkpoints do not contain all variables, such as seeds.
                    for index, variable in enumerate(_listed_variables(model)):
                        label = f":{number}:variables/{index}"
                        self._add(weights, Weight(label, variable, "", False))
        return weights

    def _add(self, weights: list[Weight], weight: Weight) -> None:
        """Adds a weight, unless it has been found earlier."""
        ids = list(aliases(weight.variable))
        if any(alias in self._labels for alias in ids):
            return
        self._labels.update(dict.fromkeys(ids, weight.label))
        weights.append(weight)

    def names_of_table_layers(self) -> set[str]:
        """Returns the names of variables that layers of tables use."""
        return {
            alias_name
            for member in self._objects
            for variable in _variables_of_table_layers(member)
            for alias_name in (
                name_of(variable),
                name_of(variable_of(variable)),
            )
        }

    def label_of(self, variable: Any) -> str | None:
        """Returns the label of a variable, or None."""
        for alias in (id(variable), id(variable_of(variable))):
            if alias in self._labels:
                return self._labels[alias]
        return None


def embeddings_below(model: Any) -> list[TableAccess]:
    """Returns the embeddings that a model, module or checkpoint contains."""
    return [
        child
        for _, child in _walk(model, skips_state=False)
        if isinstance(child, TableAccess)
    ]


def table_layers_below(model: Any) -> list[Any]:
    """Returns the layers of `tlm.layers` that have their tables in embeddings.

    Args:
      model: Such a layer, or an object that can contain such layers.
    """
    if isinstance(model, TableAccess) or not hasattr(
        model, "_trackable_children"
    ):
        return []
    return [
        child
        for _, child in _walk(model, skips_state=False)
        if is_table_layer(child)
    ]


def _variables(model: Any, *, skips_state: bool) -> Iterator[tuple[Path, Any]]:
    """Yields the variables below an object, and the paths to them."""
    for path, child in _walk(model, skips_state=skips_state):
        if _is_variable(child):
            yield path, child


def _walk(model: Any, *, skips_state: bool) -> Iterator[tuple[Path, Any]]:
    """Yields an object and all objects below it, breadth first.

    Objects below embeddings are not visited.

    Args:
      model: An object that `tf.train.Checkpoint` can save.
      skips_state: Whether objects below optimizers, and variables of layers
        whose table is in an embedding, are not visited either.
    """
    todo: list[tuple[Path, Any]] = [((), model)]
    seen = {id(model)}
    for path, parent in todo:
        yield path, parent
        if isinstance(parent, TableAccess) or _is_variable(parent):
            continue
        of_tables = is_table_layer(parent)
        for name, child in _children(parent):
            if id(child) in seen or (
                skips_state
                and (
                    hasattr(child, "apply_gradients")
                    or (of_tables and not isinstance(child, TableAccess))
                )
            ):
                continue
            seen.add(id(child))
            todo.append(((*path, name), child))


def is_table_layer(layer: Any) -> bool:
    """Returns whether a layer of `tlm.layers` has its tables in an embedding.

    Modules of this level cannot import the classes of the layers.
    """
    return hasattr(layer, "_named_vocabularies") and isinstance(
        getattr(layer, "embedding", None), TableAccess
    )


def _children(parent: Any) -> list[tuple[str, Any]]:
    children = tf.train.TrackableView.children(parent)
    if isinstance(parent, tf.train.Checkpoint):
        children = {
            name: child
            for name, child in children.items()
            if name != "save_counter"
        }
    return list(children.items())


def _listed_variables(model: Any) -> list[Any]:
    """Returns the variables that a module, or a layer below it, lists."""
    tables = {
        alias
        for embedding in embeddings_below(model)
        for by_name in embedding._variables.values()
        for variable in by_name.values()
        for alias in aliases(variable)
    }
    skipped = {
        alias
        for variable in _variables_of_table_layers(model)
        for alias in aliases(variable)
    }
    return [
        variable
        for _, listing in _walk(model, skips_state=True)
        # Layers of both Keras versions have this method.
        if listing is model or hasattr(listing, "_flatten_layers")
        for variable in getattr(listing, "variables", ())
        if _is_variable(variable)
        and not any(alias in tables | skipped for alias in aliases(variable))
    ]


def _variables_of_table_layers(model: Any) -> list[Any]:
    """Returns the variables that layers of tables have in addition."""
    return [
        variable
        for layer in table_layers_below(model)
        for variable in getattr(layer, "variables", ())
    ]


class BaseGraph:
    """The objects of the base checkpoint, and the objects of the program."""

    def __init__(self, base: str, root: Any = None):
        """Reads the object graph of a checkpoint.

        Args:
          base: Prefix of the checkpoint.
          root: The object that was saved as the checkpoint, or None.
        """
        self._base = base
        reader = base_file.open_checkpoint(base)
        self._shapes = reader.get_variable_to_shape_map()
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        if _OBJECT_GRAPH in self._shapes:
            graph.ParseFromString(base_file.read_tensor(reader, _OBJECT_GRAPH))
        self._children = [
            {child.local_name: child.node_id for child in node.children}
            for node in graph.nodes
        ]
        self._keys = [
            next(
                (attribute.checkpoint_key for attribute in node.attributes), ""
            )
            for node in graph.nodes
        ]
        # Objects of the program by node. The objects are kept alive, because
        # `_nodes` identifies them by their `id`.
        self._nodes: dict[int, int] = {}
        self._objects: list[Any] = []
        self._root = root
        if root is not None and self._keys:
            self._match(root, 0)

    def locate(self, model: Any) -> None:
        """Finds a model with embeddings in the base.

        Raises:
          ValueError: If the base contains several objects with the same tables.
        """
        if id(model) in self._nodes:
            return
        tables = [
            (
                (*path, base_file.ATTRIBUTE, table, name),
                list(variable.shape),
            )
            for path, child in _walk(model, skips_state=False)
            if isinstance(child, TableAccess)
            for table, by_name in child._variables.items()
            for name, variable in by_name.items()
        ]
        places = [
            node
            for node in range(len(self._keys))
            if all(
                self._shapes.get(self._key_at(node, path)) == shape
                for path, shape in tables
            )
        ]
        if len(places) > 1:
            raise ValueError(
                "Argument `base` must be a checkpoint that holds the model "
                f"once. Received: base={self._base!r}, where the tables of the "
                f"model occur {len(places)} times; pass the object that was "
                "saved as argument `root`."
            )
        if places:
            self._match(model, places[0])

    def follow(self, model: Any) -> None:
        """Finds objects that were created after the model was found."""
        for start in (self._root, model):
            if id(start) in self._nodes:
                self._match(start, self._nodes[id(start)])

    def prefix_of(self, embedding: Any) -> str | None:
        """Returns the prefix of an embedding's checkpoint keys, or None."""
        node = self._nodes.get(id(embedding))
        if node is None:
            return None
        for table, by_name in embedding._variables.items():
            for name in by_name:
                key = self._key_at(node, (base_file.ATTRIBUTE, table, name))
                suffix = checkpoint_files.key_of(
                    base_file.ATTRIBUTE, table, name
                )
                if key.endswith(suffix):
                    return key.removesuffix(suffix)
        return None

    def key_of(self, variable: Any) -> str:
        """Returns the key of a variable with the same shape, or ''."""
        node = self._nodes.get(id(variable))
        key = "" if node is None else self._keys[node]
        return key if self._shapes.get(key) == list(variable.shape) else ""

    def _key_at(self, node: int, path: Path) -> str:
        """Returns the key at the end of a path, or an empty string."""
        for name in path:
            if name not in self._children[node]:
                return ""
            node = self._children[node][name]
        return self._keys[node]

    def _match(self, start: Any, node: int) -> None:
        """Maps an object and the objects below it to nodes."""
        todo = [(start, node)]
        seen = {id(start)}
        for current, number in todo:
            if id(current) not in self._nodes:
                self._nodes[id(current)] = number
                self._objects.append(current)
            if isinstance(current, TableAccess) or _is_variable(current):
                continue
            nodes = self._children[number]
            for name, child in _children(current):
                if name in nodes and id(child) not in seen:
                    seen.add(id(child))
                    todo.append((child, nodes[name]))


def check_same(
    weights: Sequence[Weight], deltas: Sequence[Delta], directory: str
) -> None:
    """Compares the weights of a writer with existing deltas.

    Raises:
      ValueError: If existing deltas contain weights that the writer does not
        write. Optimizers can create their state later.
    """
    before = deltas[-1].meta.weights if deltas else {}
    now = {weight.label for weight in weights}
    missing = [
        label
        for label, description in before.items()
        if not description["is_state"] and label not in now
    ]
    if missing:
        raise ValueError(
            "All deltas in a directory must be of the same weights. The "
            "existing deltas contain weights that this writer does not write: "
            f"{missing[:3]} ({len(missing)} of {len(before)}). Pass the same "
            "model and the same `root` as before to tlm.deltas.DeltaWriter "
            f"(directory {directory!r})."
        )


def warn_about_others(weights: Sequence[Weight]) -> None:
    """Warns that a writer of tables does not write the weights of a model."""
    names = sorted({weight.name for weight in weights if not weight.is_state})
    if names:
        user_warnings.warn(
            f'Deltas with weights="tables" do not contain {len(names)} weights '
            f"of the model: {', '.join(names[:5])}"
            + (", ..." if len(names) > 5 else "")
            + ". A served model combines new rows with old weights. Use "
            'weights="all" to write all weights.'
        )


def changed(
    weights: Sequence[Weight], digests: Mapping[str, bytes]
) -> tuple[dict[str, Array], dict[str, bytes]]:
    """Returns the values of weights that changed, and all new checksums.

    Args:
      weights: All weights.
      digests: Checksums at the last delta, by label.
    """
    values, now = {}, {}
    for weight in weights:
        value = weight.read()
        now[weight.label] = digest(value)
        if now[weight.label] != digests.get(weight.label):
            values[weight.label] = value
    return values, now
