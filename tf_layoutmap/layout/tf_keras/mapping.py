"""From the names of a tf_keras model's weights to DVariables.

tf_keras has no name for a weight before its layer has a place in a model. So
weights are made without a value first, and swapped, wherever the model holds
them, for the variable their name asks for.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from tf_layoutmap import _tf_keras_private
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.plan import assignments
from tf_layoutmap.layout.tf_keras import variable as tf_keras_variable

dtensor = tf.experimental.dtensor

_CACHES = frozenset(_tf_keras_private.LAYOUT_MODULE._KERAS_ATTRIBUTES_TO_SKIP)
# Optimizers, losses and metrics are no weights; penalties come in _regularize.
_NOT_WEIGHTS = frozenset((
    "optimizer", "compiled_loss", "compiled_metrics", "_metrics",
    "_captured_weight_regularizer"))


class Found:
    """One variable of a model, with all the places that hold it."""

    def __init__(self, variable: Any):
        self.variable = variable
        self.places: list[tuple[Any, tuple]] = []
        self.names: dict[str, None] = {}
        self.owner: Any = None

    # What `assignments` asks of a Keras variable.
    @property
    def shape(self) -> Any:
        return self.variable.shape

    @property
    def _dtype(self) -> str:
        variable = getattr(self.variable, "_variable", self.variable)
        return tf.as_dtype(variable.dtype).name

    @property
    def path(self) -> str:
        return self.variable.name.removesuffix(":0")


class _Names:
    """The names of found variables, as `assignments` asks for them."""

    def of_variable(self, found: Found, owner: Any) -> list[str]:
        del owner
        names = dict(found.names)
        names[found.path] = None
        names[found.path.replace("/", ".")] = None
        return list(names)

    def with_holders(self, layer: Any) -> list[Any]:
        return [layer]


def find(model: Any, wanted: Callable[[Any], bool]) -> list[Found]:
    """Returns the `wanted` variables of `model` in the order of its weights.

    Names start with attributes in subclassed models, and with the name of the
    layer in Functional and Sequential ones: `"d1.kernel"`.
    """
    found: dict[int, Found] = {}
    for owner, prefix, path, variable in _paths(model):
        if not wanted(variable) or _NOT_WEIGHTS.intersection(path):
            continue
        one = found.setdefault(id(variable), Found(variable))
        one.places.append((owner, path))
        if not _CACHES.intersection(path):
            one.names[".".join((*prefix, *(
                str(part).lstrip("_") for part in path)))] = None
    for layer in model._flatten_layers():
        for variable in (*layer._trainable_weights,
                         *layer._non_trainable_weights):
            if id(variable) in found:
                found[id(variable)].owner = layer
    order = {id(v): i for i, v in enumerate(model.weights)}
    return sorted(found.values(),
                  key=lambda one: order.get(id(one.variable), len(order)))


def _paths(model: Any) -> Iterator[tuple[Any, tuple, tuple, Any]]:
    def is_variable(x: Any) -> bool:
        return isinstance(x, tf.Variable)

    by_name = isinstance(model, tf_keras.Sequential) or hasattr(
        model, "_nested_inputs")
    roots = [(layer, (layer.name,)) for layer in model.layers] if (
        by_name) else []
    for root, prefix in (*roots, (model, ())):
        for path, variable in root._flatten(
                predicate=is_variable, with_path=True):
            yield root, prefix, path, variable


def is_pending(variable: Any) -> bool:
    """Whether `variable` has no value, or one outside of any mesh."""
    variable = getattr(variable, "_variable", variable)
    return isinstance(variable, tf.Variable) and not isinstance(
        variable, dtensor.DVariable)


def assign_layouts(layout_map: Any, found: list[Found]) -> (
        list[assignments.LayoutAssignment]):
    """Returns which layout each of `found` gets; allocates nothing."""
    return assignments.assign(layout_map, found, _Names(),
                              owners=[one.owner for one in found])


def map_model(model: Any, context: Any) -> None:
    """Gives every pending variable of `model` its value, on the mesh.

    Raises:
      ValueError: Some layout does not fit. Nothing is allocated then.
    """
    found = find(model, is_pending)
    assigned = assign_layouts(context.layout_map, found)
    assignments.refuse(assigned)
    swapped = {}
    for one, target in zip(found, assigned, strict=True):
        old = getattr(one.variable, "_variable", one.variable)
        new = swapped[id(old)] = _made(old, target.layout, context.init)
        if old is not one.variable:
            one.variable._variable = new
        else:
            _swap(one, new)
        context.registry.note(target)
    for layer in model._flatten_layers():
        _regularize(layer, swapped)
        generator = getattr(layer, "_random_generator", None)
        if generator is not None:
            _move_generator(generator, context.mesh)
    _refer_to(model, swapped)


def draw_seed(variable: Any) -> None:
    """Draws the seed of a pending weight, in the order without a mesh."""
    initializer = getattr(variable._initial_value, "func", None)
    generator = getattr(initializer, "_random_generator", None)
    if generator is not None:
        generator._maybe_init()


def _made(variable: Any, layout: Any, init: str) -> Any:
    name = variable.name.removesuffix(":0")
    with tf.init_scope():
        if not isinstance(variable, _tf_keras_private.LazyInitVariable):
            value = transfer.to_mesh(variable.numpy(), layout)
        else:
            value = initial_values.initial_value(
                *_initializer(variable, init), layout, init)
        made = tf_keras_variable.make(
            value, name=name, trainable=variable.trainable)
        made._constraint = variable.constraint
        return made


def _initializer(variable: Any, init: str) -> tuple[Any, tuple, str]:
    """Returns what draws the first value, its shape and dtype.

    With "sharded", the initializer of Keras 3 with the same settings: each
    device then draws its own part.
    """
    initial = variable._initial_value
    shape, dtype = tuple(variable.shape), variable.dtype.name
    if not callable(initial):
        return (lambda shape, dtype: tf.cast(initial, dtype)), shape, dtype
    drawn = initial.func if isinstance(initial, functools.partial) else None
    if isinstance(drawn, (tf_keras.initializers.Zeros,
                          tf_keras.initializers.Ones)) or (
            init == "sharded" and
            isinstance(drawn, tf_keras.initializers.Initializer)):
        same = getattr(keras.initializers, type(drawn).__name__, None)
        if same is not None and (
                type(drawn).__module__.startswith("tf_keras.")):
            return same.from_config(drawn.get_config()), shape, dtype
    return (lambda shape, dtype: initial()), shape, dtype


def _swap(found: Found, new: Any) -> None:
    """Puts `new` wherever a model holds `found`."""
    # Lists first: a layer that is given an attribute appends it to its list
    # of weights, unless it stands there already.
    for root, path in sorted(
            found.places, key=lambda p: not _CACHES.intersection(p[1])):
        holder = root
        for part in path[:-1]:
            holder = _get(holder, part)
        end = path[-1]
        if isinstance(end, int) or isinstance(holder, Mapping):
            holder[end] = new
        elif getattr(holder, end, None) is not new:
            setattr(holder, end, new)


def _get(holder: Any, part: Any) -> Any:
    if isinstance(part, int) or isinstance(holder, Mapping):
        return holder[part]
    return getattr(holder, part)


def _regularize(layer: Any, swapped: dict[int, Any]) -> None:
    """Makes the penalties whose weight has its value now."""
    pending = getattr(layer, "_captured_weight_regularizer", [])
    kept = []
    for name, variable, regularizer in pending:
        new = swapped.get(id(variable))
        if new is None:
            kept.append((name, variable, regularizer))
        else:
            layer._handle_weight_regularization(name, new, regularizer)
    layer._captured_weight_regularizer = kept


def _move_generator(generator: Any, mesh: Any) -> None:
    """Replicates the state of a layer's random numbers on the mesh."""
    generator._maybe_init()
    inner = getattr(generator, "_generator", None)
    if inner is not None and not isinstance(
            inner._state_var, dtensor.DVariable):
        inner._state_var = tf_keras_variable.move_to_mesh(
            inner._state_var, mesh)


def _refer_to(model: Any, swapped: dict[int, Any]) -> None:
    """Makes checkpoints save the new variables where they knew the old."""
    todo, seen = collections.deque([model]), {id(model)}
    while todo:
        holder = todo.popleft()
        for name, child in holder._trackable_children().items():
            if id(child) in swapped:
                child = swapped[id(child)]
                holder._track_trackable(child, name, overwrite=True)
            if id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
