"""Contexts, which hold the layers and variables of one layout map.

Layers and variables that are created under a scope belong to the context of the
scope. A context assigns a layout to each variable. The context initializes the
variables when their layer is built, and reports keys of the map that match no
variable.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private, user_warnings
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.mesh.device_mesh import Layout
from tf_layoutmap.layout.mesh.errors import LayoutMapWarning
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.variable_names import LayerList, ObjectPaths

_active = threading.local()

# Whether the planner calls a model to read its operations. Models on a mesh and
# other models must then have the same operations.
is_planning: ThreadValue[bool] = ThreadValue(False)


class Registry:
    """Layers and pending variables of one layout map, across all its scopes."""

    def __init__(self):
        self.lock = threading.RLock()
        self.layers = LayerList()
        self.pending: list[weakref.ref] = []
        self.matched: set[str] = set()
        self.shadowed: set[str] = set()
        self.warned: set[str] = set()
        # Number of calls of `MeshContext.discard_traces`.
        self.num_discarded_traces = 0

    def record(self, assigned: assignments.LayoutAssignment) -> None:
        """Records which key matched a variable, and which keys it shadows."""
        if assigned.pattern is not None:
            self.matched.add(assigned.pattern)
        self.shadowed.update(assigned.shadowed)


_registries: "weakref.WeakKeyDictionary[Any, Registry]" = (
    weakref.WeakKeyDictionary()
)
_registries_lock = threading.Lock()


class Planner(Protocol):
    """Plans the layouts of complete models (`layout_map_scope("auto")`)."""

    def plan_for_variable(self, context: Any, variable: Any, /) -> None:
        """Plans the model of a variable; None plans all complete models."""
        ...

    def start_step(self, model: Any, batch: Any, /) -> None:
        """Records the model and the batch of a step that builds the model."""
        ...

    def plan_for_step(self, context: Any, model: Any, /) -> None:
        """Plans the model of a step that is about to run."""
        ...

    def is_planned(self, variable: Any, /) -> bool:
        """Returns whether the layout of a pending variable is known."""
        ...


class MeshContext:
    """A layout map with the mesh and the options of a scope."""

    def __init__(self, layout_map: Any, batch_dim: str | None):
        self.layout_map = layout_map
        self.mesh = layout_map.mesh_in_use()
        self.batch_dim = batch_dim
        # Returns the layout of a new variable, for user-defined distributions
        # of Keras. None if the layout map selects all layouts.
        self.layout_of: Callable[[Any], Any] | None = None
        # Adds the layouts of a complete model to the layout map. None if user
        # code has written the map.
        self.planner: Planner | None = getattr(layout_map, "planner", None)
        with _registries_lock:
            self.registry = _registries.setdefault(layout_map, Registry())

    def __deepcopy__(self, memo: dict) -> "MeshContext":
        return self

    def add_layer(self, layer: Any) -> None:
        """Adds `layer`; the variables it builds will belong to this context."""
        vars(layer)["_mesh_context"] = self
        with self.registry.lock:
            self.registry.layers.add(layer)

    def add_variable(self, variable: Any) -> None:
        """Adds `variable` to the variables that have no value yet."""
        if self.layout_of is not None and (
            getattr(variable, "_given_layout", None) is None
        ):
            variable._given_layout = self.layout_of(variable)
        with self.registry.lock:
            self.registry.pending.append(weakref.ref(variable))

    def discard_traces(self) -> None:
        """Makes the steps of all models trace their functions again.

        Called after a variable that traced functions use was replaced.
        """
        self.registry.num_discarded_traces += 1

    def _pending(self) -> list[Any]:
        variables = (ref() for ref in self.registry.pending)
        return [v for v in variables if v is not None and v._value is None]

    def assign_layouts(
        self, variables: Iterable[Any]
    ) -> list[assignments.LayoutAssignment]:
        """Returns the layout that the current names of each variable select."""
        with self.registry.lock:
            return assignments.assign(
                self.layout_map, variables, ObjectPaths(self.registry.layers)
            )

    def planned_layout(self, variable: Any) -> Layout:
        """Returns the layout that a pending variable will get."""
        if self.planner is not None:
            self.planner.plan_for_variable(self, variable)
        assigned = self.assign_layouts([variable])
        assignments.raise_problems(assigned)
        return assigned[0].settled_layout()

    def initialize_pending(self, variable: Any = None) -> None:
        """Initializes the pending variables whose layer is built.

        The names of all variables are found in one search of the models.

        Args:
          variable: Variable to initialize even if its layer is not built.

        Raises:
          ValueError: If a layout does not fit its variable. No variable is
            allocated in this case.
        """
        registry = self.registry
        with registry.lock:
            if variable is not None and variable._value is not None:
                return
            if self.planner is not None:
                self.planner.plan_for_variable(self, variable)
            pending = self._pending()
            batch = [
                v
                for v in pending
                if v is variable
                or (
                    _is_layer_built(v)
                    and (self.planner is None or self.planner.is_planned(v))
                )
            ]
            if variable is not None and not any(v is variable for v in batch):
                batch.append(variable)
            assigned = self.assign_layouts(batch)
            assignments.raise_problems(assigned)
            for assignment in assigned:
                if assignment.variable._value is None:
                    self._initialize(assignment)
            registry.pending = [weakref.ref(v) for v in self._pending()]

    def _initialize(self, assigned: assignments.LayoutAssignment) -> None:
        variable = assigned.variable
        initializer = variable.pending_initializer
        variable._initialized_in_full = initial_values.is_computed_in_full(
            initializer, variable._dtype
        )
        with tf.init_scope():
            value = initial_values.initial_value(
                initializer,
                tuple(variable._shape),
                variable._dtype,
                assigned.settled_layout(),
                name=variable.path,
            )
            variable.set_value_on_mesh(
                value,
                trainable=getattr(
                    variable, "_made_trainable", variable.trainable
                ),
            )
        self.registry.record(assigned)

    def check_all_patterns_used(self) -> None:
        """Warns about keys that match no variable; raises if the map is strict.

        Does nothing until all layers are built.
        """
        registry = self.registry
        with registry.lock:
            layers = list(registry.layers)
            if (
                not layers
                or self._pending()
                or not all(
                    layer.built for layer in layers if "built" in vars(layer)
                )
            ):
                return
            unused = [
                key
                for key in self.layout_map
                if key not in registry.matched | registry.warned
                and not self.layout_map._is_layer_output(key)
            ]
            registry.warned.update(unused)
        if not unused:
            return
        sentence = "; ".join(
            f"key {key!r} "
            + (
                "matches only variables that an earlier key matches"
                if key in registry.shadowed
                else "matches no variable"
            )
            for key in unused
        )
        sentence = (
            f"The LayoutMap has keys without effect: {sentence}. See "
            "layout_map.explain(model) for the names of the "
            "variables."
        )
        if self.layout_map.strict:
            raise ValueError(sentence)
        user_warnings.warn(sentence, LayoutMapWarning)


def _is_layer_built(variable: Any) -> bool:
    """Returns whether the layer of a variable has finished its `build`."""
    owner, is_state = assignments.owner_of(variable)
    return is_state or owner is None or bool(owner.built)


def active_context() -> MeshContext | None:
    """Returns the context of the innermost open scope of this thread, or None.

    Outside all scopes, returns the context that `set_standing_context` has set,
    or the context of the object that was passed to
    `keras.distribution.set_distribution`: a `tlm.distribution` object or, after
    `tlm.distribution.enable()`, a distribution of Keras.
    """
    stack = getattr(_active, "stack", None)
    if stack:
        return stack[-1]
    standing = getattr(_active, "standing", None)
    return (
        standing
        if standing is not None
        else getattr(
            keras.distribution.distribution(), "_context_if_set_in_keras", None
        )
    )


def set_standing_context(context: MeshContext | None) -> None:
    """Sets the context of objects that this thread creates outside scopes."""
    _active.standing = context


class activated:  # noqa: N801 - context managers have lowercase names.
    """Context manager in which new objects of this thread use `context`.

    If `context` is None, new objects are not placed on a mesh.
    """

    def __init__(self, context: MeshContext | None):
        self._context = context

    def __enter__(self) -> MeshContext | None:
        if not hasattr(_active, "stack"):
            _active.stack = []
        _active.stack.append(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _active.stack.pop()


def context_of(thing: Any) -> MeshContext | None:
    """Returns the context of a Keras object, or None if it has none."""
    return getattr(thing, "__dict__", {}).get("_mesh_context")


def context_of_new_variable() -> tuple[MeshContext | None, Any, bool]:
    """Returns the context and owner of the variable that is being created.

    If several objects are creating the variable, the innermost one that has a
    context determines the context. Therefore, variables of a layer that is
    built later belong to the context in which the layer was created. If no
    creator has a context, the open scope determines the context.

    Returns:
      The context or None; a weak reference to the layer that creates the
      variable, or None; and whether the variable is state, which means that its
      creator is not a layer but, for example, a metric or an optimizer.
    """
    callers = keras_private.name_scope_callers()
    context = next(
        (h for h in map(context_of, callers) if h is not None), active_context()
    )
    if context is None:
        return None, None, False
    owner = callers[0] if callers else None
    is_layer = isinstance(owner, keras.layers.Layer)
    return (
        context,
        weakref.ref(owner) if is_layer else None,
        owner is not None and not is_layer,
    )


def context_of_model(model: Any) -> MeshContext | None:
    """Returns the context of a model, or of its first variable that has one."""
    context = context_of(model)
    if context is None:
        for variable in model.variables:
            context = context_of(variable)
            if context is not None:
                break
    return context
