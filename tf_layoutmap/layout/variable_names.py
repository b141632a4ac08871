"""Names of layers and variables in the models that contain them."""

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import keras

from tf_layoutmap._core import keras_private

# Keras attributes that hold the same objects as other attributes, or refer back
# to a parent object.
_SKIPPED = frozenset(
    (
        "_functional",
        "_inbound_nodes",
        "_layers",
        "_losses",
        "_metrics",
        "_non_trainable_variables",
        "_operations",
        "_operations_by_depth",
        "_nodes",
        "_nodes_by_depth",
        "_outbound_nodes",
        "_seed_generators",
        "_tracked",
        "_tracker",
        "_trainable_variables",
        "_compile_metrics",
        "_compile_loss",
        "_auto_config",
        "_build_shapes_dict",
        "optimizer",
    )
)
_SKIPPED_PREFIXES = ("_self_", "_unconditional", "_mesh_")
_MAX_DEPTH = 4
# Maximum number of paths for a layer. A layer that many parents share would
# otherwise have very many paths.
_MAX_PATHS = 32


def _walk(
    name: str, value: Any, kinds: Any, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yields the instances of `kinds` in nested lists and dicts of a value."""
    if isinstance(value, kinds):
        yield name, value
    elif depth < _MAX_DEPTH and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{name}.{index}", item, kinds, depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(f"{name}.{key}", item, kinds, depth + 1)


def attributes(layer: Any, kinds: Any) -> Iterator[tuple[str, Any]]:
    """Yields name and value of each attribute that is an instance of `kinds`.

    Leading underscores are removed from names. For example, the name of the
    attribute `_kernel` of a `Dense` layer is `kernel`.
    """
    for name, value in list(vars(layer).items()):
        if isinstance(value, (*kinds, list, tuple, dict)) and (
            name not in _SKIPPED and not name.startswith(_SKIPPED_PREFIXES)
        ):
            yield from _walk(name.lstrip("_"), value, kinds)


def _is_ready(layer: Any) -> bool:
    """Returns whether the `__init__` of `layer` has run.

    If a subclass of `keras.Model` is a Functional model, Keras creates an
    additional object of this class without running its `__init__`. Keras does
    not use this object, but it exists until the next garbage collection.
    """
    layer_vars = vars(layer)
    return "_tracker" in layer_vars and (
        "_operations" in layer_vars
        or not isinstance(layer, keras_private.Functional)
    )


def _by_name(layer: Any) -> bool:
    return isinstance(layer, (keras.Sequential, keras_private.Functional))


class ObjectPaths:
    """The paths of layers and variables when this object is created.

    * In a subclassed model: attribute names, `"encoder.blocks.0.kernel"`.
    * In a Functional or Sequential model: the name of the layer, then
      attribute names, `"dense_1.kernel"`.
    * In all models: the path of the variable in Keras,
      `"model/dense_1/kernel"`, also without the name of the model, and with
      dots instead of slashes.
    """

    def __init__(self, layers: Iterable[Any]):
        """Collects `layers` and all layers that they contain."""
        self._layers: dict[int, Any] = {}
        self._parents: dict[int, list[tuple[int, str]]] = {}
        self._restarts: dict[int, list[str]] = {}
        # Maps the id of a layer, and whether paths may start at an inner model,
        # to the paths.
        self._paths: dict[tuple[int, bool], list[str]] = {}
        self._named: dict[str, set[int]] | None = None
        self._all: set[str] | None = None
        self._owned: dict[int, dict[int, list[str]]] = {}
        self._index: dict[int, list[tuple[Any, str]]] | None = None
        todo = [layer for layer in layers if _is_ready(layer)]
        # A Sequential model contains a Functional model with the same layers.
        # The names of this inner model must not be added.
        inside = {id(vars(layer).get("_functional")) for layer in todo}
        todo = [layer for layer in todo if id(layer) not in inside]
        while todo:
            layer = todo.pop()
            if id(layer) in self._layers:
                continue
            self._layers[id(layer)] = layer
            for edge, child in self._children(layer):
                self._parents.setdefault(id(child), []).append(
                    (id(layer), edge)
                )
                if id(child) not in self._layers:
                    todo.append(child)
        self._model_names = {
            layer.name
            for layer in self._layers.values()
            if isinstance(layer, keras.Model)
        }

    def _children(self, layer: Any) -> Iterator[tuple[str, Any]]:
        if _by_name(layer):
            for child in layer.layers:
                self._restarts.setdefault(id(child), []).append(child.name)
                yield child.name, child
        for edge, child in attributes(layer, (keras.layers.Layer,)):
            if _is_ready(child) and child is not layer:
                yield edge, child

    def of_layer(self, layer: Any, restarts: bool = True) -> list[str]:
        """Returns the paths of `layer`; the path of an outermost model is "".

        Args:
          layer: A layer.
          restarts: Whether to include paths that start at an inner model, not
            at the outermost model.
        """
        return self._of_layer(id(layer), layer, (), restarts)

    def _of_layer(
        self, key: int, layer: Any, seen: tuple, restarts: bool
    ) -> list[str]:
        if (key, restarts) in self._paths:
            return self._paths[key, restarts]
        paths: dict[str, None] = {}
        for parent, edge in self._parents.get(key, ()):
            if parent in seen:
                continue
            for path in self._of_layer(
                parent, self._layers[parent], (*seen, key), restarts
            ):
                paths[_join(path, edge)] = None
        for name in self._restarts.get(key, ()) if restarts else ():
            paths[name] = None
        if not self._parents.get(key):
            paths["" if isinstance(layer, keras.Model) else layer.name] = None
        layer_paths = list(paths)[:_MAX_PATHS]
        if not seen:
            self._paths[key, restarts] = layer_paths
        return layer_paths

    def with_holders(self, layer: Any) -> list[Any]:
        """Returns `layer` and all layers that contain it, at any depth."""
        holders, todo = {}, [id(layer)]
        while todo:
            key = todo.pop()
            if key not in holders:
                holders[key] = self._layers.get(key, layer)
                todo += [parent for parent, _ in self._parents.get(key, ())]
        return list(holders.values())

    def outermost(self, layer: Any = None) -> list[Any]:
        """Returns the layers that no other layer contains.

        Args:
          layer: Returns only the layers that contain this layer, or the layer
            itself; None for all layers.
        """
        layers = (
            self._layers.values() if layer is None else self.with_holders(layer)
        )
        return [layer for layer in layers if not self._parents.get(id(layer))]

    def of_variable(self, variable: Any, owner: Any) -> list[str]:
        """Returns all names of `variable`; the first one is the preferred key.

        Names that omit the name of an inner model are included, unless such a
        name is also the full name of another variable.

        Args:
          variable: A Keras variable.
          owner: The layer that created the variable; None to search for the
            layers that contain it.
        """
        full = self._names(variable, owner, aliases=False)
        named = self._full_names()
        return [
            name
            for name in self._names(variable, owner, aliases=True)
            if name in full or named.get(name, set()) <= {id(variable)}
        ]

    def aliases(self, variable: Any, owner: Any) -> set[str]:
        """Returns names of a variable that omit the name of an inner model."""
        return {*self._names(variable, owner, aliases=True)} - {
            *self._names(variable, owner, aliases=False)
        }

    def all_names(self) -> Collection[str]:
        """Returns all names of the variables of all layers."""
        if self._all is None:
            self._all = {
                name
                for held, layer in self._held()
                for name in self.of_variable(held, layer)
            }
        return self._all

    def _full_names(self) -> dict[str, set[int]]:
        if self._named is None:
            self._named = {}
            for held, layer in self._held():
                for name in self._names(held, layer, aliases=False):
                    self._named.setdefault(name, set()).add(id(held))
        return self._named

    def _held(self) -> Iterator[tuple[Any, Any]]:
        for layer in self._layers.values():
            for _, held in attributes(layer, (keras.Variable,)):
                yield held, layer

    def _names(self, variable: Any, owner: Any, aliases: bool) -> list[str]:
        names: dict[str, None] = {}
        if owner is not None:
            owned = self._owned.get(id(owner))
            if owned is None:
                owned = self._owned[id(owner)] = {}
                for name, held in attributes(owner, (keras.Variable,)):
                    owned.setdefault(id(held), []).append(name)
            ends = [*owned.get(id(variable), ()), variable.name]
            for path in self.of_layer(owner, aliases):
                names.update((_join(path, end), None) for end in ends)
        else:
            for layer, name in self._holders(variable):
                for path in self.of_layer(layer, aliases):
                    names[_join(path, name)] = None
        paths = [variable.path]
        root, _, rest = variable.path.partition("/")
        if aliases and rest and root in self._model_names:
            paths.append(rest)
        for path in paths:
            names[path] = None
            names[path.replace("/", ".")] = None
        return list(names)

    def _holders(self, variable: Any) -> list[tuple[Any, str]]:
        if self._index is None:
            self._index = {}
            for layer in self._layers.values():
                for name, held in attributes(layer, (keras.Variable,)):
                    self._index.setdefault(id(held), []).append((layer, name))
        return self._index.get(id(variable), [])


def _join(path: str, end: str) -> str:
    return f"{path}.{end}" if path else end


class LayerList:
    """Weak references to layers, in the order in which they were added."""

    def __init__(self):
        self._refs: list[weakref.ref] = []

    def add(self, layer: Any) -> None:
        self._refs.append(weakref.ref(layer))

    def __iter__(self) -> Iterator[Any]:
        self._refs = [ref for ref in self._refs if ref() is not None]
        for ref in list(self._refs):
            layer = ref()
            if layer is not None:
                yield layer
