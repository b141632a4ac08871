"""What variables and layers of one layout map have in common."""

import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.plan import assignments
from tf_layoutmap.layout.plan.variable_names import LayerList, ObjectPaths

_active = threading.local()


class LayoutMapWarning(UserWarning):
    """A layout map that does less than it says."""


class Registry:
    """Layers and waiting variables of one layout map, in all its scopes."""

    def __init__(self):
        self.lock = threading.RLock()
        self.layers = LayerList()
        self.waiting: list[weakref.ref] = []
        self.winners: set[str] = set()
        self.losers: set[str] = set()
        self.warned: set[str] = set()


_registries: "weakref.WeakKeyDictionary[Any, Registry]" = (
    weakref.WeakKeyDictionary())
_registries_lock = threading.Lock()


class MeshHome:
    """One use of a layout map: the map, its mesh and how weights start."""

    def __init__(self, layout_map: Any, init: str, batch_dim: str | None):
        self.layout_map = layout_map
        self.init = init
        self.mesh = layout_map.mesh_in_use()
        self.batch_dim = batch_dim
        with _registries_lock:
            self.registry = _registries.setdefault(layout_map, Registry())

    def __deepcopy__(self, memo: dict) -> "MeshHome":
        return self

    def add_layer(self, layer: Any) -> None:
        """Makes `layer` and what it will build belong here."""
        vars(layer)["_mesh_home"] = self
        with self.registry.lock:
            self.registry.layers.add(layer)

    def add_variable(self, variable: Any) -> None:
        """Notes that `variable` waits for its value."""
        with self.registry.lock:
            self.registry.waiting.append(weakref.ref(variable))

    def _waiting(self) -> list[Any]:
        found = (ref() for ref in self.registry.waiting)
        return [v for v in found if v is not None and v._value is None]

    def place(self, variables: Iterable[Any]) -> list[assignments.Placement]:
        """Returns the placements of `variables` as things stand."""
        with self.registry.lock:
            return assignments.place(
                self.layout_map, variables, ObjectPaths(self.registry.layers))

    def planned_layout(self, variable: Any) -> Any:
        """Returns the layout that a waiting variable will get."""
        placed = self.place([variable])
        assignments.refuse(placed)
        return placed[0].layout

    def realise(self, variable: Any = None) -> None:
        """Gives values to all variables whose layer is built.

        One walk over the models serves them all.

        Args:
          variable: One that must have its value after this, built or not.

        Raises:
          ValueError: Some layout does not fit; nothing is allocated then.
        """
        registry = self.registry
        with registry.lock:
            if variable is not None and variable._value is not None:
                return
            waiting = self._waiting()
            batch = [v for v in waiting if v is variable or _is_settled(v)]
            if variable is not None and not any(v is variable for v in batch):
                batch.append(variable)
            placed = self.place(batch)
            assignments.refuse(placed)
            for one in placed:
                if one.variable._value is None:
                    self._give_value(one)
            registry.waiting = [weakref.ref(v) for v in self._waiting()]

    def _give_value(self, placed: assignments.Placement) -> None:
        variable = placed.variable
        with tf.init_scope():
            value = initial_values.initial_value(
                variable._initializer, tuple(variable._shape),
                variable._dtype, placed.layout, variable._mesh_home.init)
            variable._value = initial_values.make_variable(
                value, name=variable.name, trainable=getattr(
                    variable, "_made_trainable", variable.trainable))
        variable._initializer = None
        if placed.pattern is not None:
            self.registry.winners.add(placed.pattern)
        self.registry.losers.update(placed.losers)

    def check_all_patterns_used(self) -> None:
        """Warns of keys that no variable went by; raises in a strict map.

        Silent while some layer is still to be built.
        """
        registry = self.registry
        with registry.lock:
            layers = list(registry.layers)
            if not layers or self._waiting() or not all(
                    layer.built for layer in layers if "built" in vars(layer)):
                return
            unused = [key for key in self.layout_map
                      if key not in registry.winners | registry.warned]
            registry.warned.update(unused)
        if not unused:
            return
        sentence = "; ".join(
            f"key {key!r} " + (
                "matches only variables that an earlier key claims"
                if key in registry.losers else "matches no variable")
            for key in unused)
        sentence = (f"The LayoutMap says more than it does: {sentence}. See "
                    "layout_map.explain(model) for the names of the "
                    "variables.")
        if self.layout_map.strict:
            raise ValueError(sentence)
        warnings.warn(sentence, LayoutMapWarning, stacklevel=3)


def _is_settled(variable: Any) -> bool:
    """Whether the layer of a variable has done all of its `build`."""
    owner, is_state = assignments.owner_of(variable)
    return is_state or owner is None or bool(owner.built)


def active_home() -> MeshHome | None:
    """Returns the innermost open scope of this thread, or None.

    Outside all scopes, the home that `set_standing_home` has set.
    """
    stack = getattr(_active, "stack", None)
    return stack[-1] if stack else getattr(_active, "standing", None)


def set_standing_home(home: MeshHome | None) -> None:
    """Makes what this thread creates outside all scopes belong to `home`."""
    _active.standing = home


class activated:  # noqa: N801 - a context manager, named as one.
    """While open, what Keras creates in this thread belongs to `home`."""

    def __init__(self, home: MeshHome):
        self._home = home

    def __enter__(self) -> MeshHome:
        if not hasattr(_active, "stack"):
            _active.stack = []
        _active.stack.append(self._home)
        return self._home

    def __exit__(self, *_: object) -> None:
        _active.stack.pop()


def home_of(thing: Any) -> MeshHome | None:
    """Returns the home of a layer, optimizer or variable, or None."""
    return getattr(thing, "__dict__", {}).get("_mesh_home")


def home_of_new_variable() -> tuple[MeshHome | None, Any, bool]:
    """Returns home, owner and kind of a variable that is being created.

    The home is that of the innermost creator that has one, so that a layer
    made under a scope keeps it when it is built later; else the open scope.
    """
    callers = _keras_private.name_scope_callers()
    home = next((h for h in map(home_of, callers) if h is not None),
                active_home())
    if home is None:
        return None, None, False
    owner = callers[0] if callers else None
    is_layer = isinstance(owner, keras.layers.Layer)
    return (home, weakref.ref(owner) if is_layer else None,
            owner is not None and not is_layer)


def home_of_model(model: Any) -> MeshHome | None:
    """Returns the home of a model or of the first of its variables."""
    home = home_of(model)
    if home is None:
        for variable in model.variables:
            home = home_of(variable)
            if home is not None:
                break
    return home
