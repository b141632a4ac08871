"""From the names of a tf_keras model's weights to DVariables.

tf_keras has no name for a weight before its layer has a place in a model. So
weights are made without a value first, and swapped, wherever the model holds
them, for the variable their name asks for.
"""

import collections
import functools
import itertools
from collections.abc import Mapping, MutableMapping
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from tf_layoutmap import _tf_keras_private, _tf_private
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.layouts import Layout, Mesh
from tf_layoutmap.layout.plan import assignments
from tf_layoutmap.layout.tf_keras import variable as tf_keras_variable
from tf_layoutmap.layout.tf_keras.found_variables import (
    CACHES,
    Found,
    assign_layouts,
    find,
    is_pending,
)

dtensor = tf.experimental.dtensor

# Counts pending weights in the order of their creation.
_numbers = itertools.count(1)


def map_model(model: Any, context: Any) -> dict[int, Any]:
    """Gives every pending variable of `model` its value, on the mesh.

    Returns:
      The new variables, by the `id` of the variable that each one replaces.

    Raises:
      ValueError: Some layout does not fit. Nothing is allocated then.
    """
    found = find(model, is_pending)
    assigned = assign_layouts(context.layout_map, found)
    assignments.refuse(assigned)
    swapped = {}
    # In the order in which the weights were made: some initializers draw from
    # one sequence of random numbers.
    for one, target in sorted(
        zip(found, assigned, strict=True),
        key=lambda pair: _number_of(pair[0].variable),
    ):
        old = getattr(one.variable, "_variable", one.variable)
        new = swapped[id(old)] = _made(
            old, target.settled_layout(), context.init
        )
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
    return swapped


def _number_of(variable: Any) -> int:
    """Returns the position of a pending weight in the order of creation."""
    variable = getattr(variable, "_variable", variable)
    return getattr(variable, "_layoutmap_number", 0)


def draw_seed(variable: Any) -> None:
    """Draws the seed of a pending weight, in the order without a mesh."""
    variable._layoutmap_number = next(_numbers)
    initializer = getattr(variable._initial_value, "func", None)
    _begin(getattr(initializer, "_random_generator", None))


def _begin(generator: Any) -> None:
    """Makes a generator of tf_keras draw its seed.

    The initializers of TensorFlow itself (`tf.initializers`) have a generator
    of the same name that draws when it is called.
    """
    if isinstance(generator, _tf_keras_private.RandomGenerator):
        generator._maybe_init()


def _made(variable: Any, layout: Layout, init: str) -> Any:
    name = variable.name.removesuffix(":0")
    with tf.init_scope():
        if not isinstance(variable, _tf_keras_private.LazyInitVariable):
            value = transfer.to_mesh(variable.numpy(), layout)
        else:
            value = initial_values.initial_value(
                *_initializer(variable, init), layout, init
            )
        made = tf_keras_variable.make(
            value, name=name, trainable=variable.trainable
        )
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
    if isinstance(
        drawn, (tf_keras.initializers.Zeros, tf_keras.initializers.Ones)
    ) or (
        init == "sharded"
        and isinstance(drawn, tf_keras.initializers.Initializer)
    ):
        same = getattr(keras.initializers, type(drawn).__name__, None)
        if same is not None and (
            type(drawn).__module__.startswith("tf_keras.")
        ):
            return same.from_config(drawn.get_config()), shape, dtype
    return (lambda shape, dtype: initial()), shape, dtype


def _swap(found: Found, new: Any) -> None:
    """Puts `new` wherever a model holds `found`."""
    # Lists first: a layer that is given an attribute appends it to its list
    # of weights, unless it stands there already.
    for root, path in sorted(
        found.places, key=lambda p: not CACHES.intersection(p[1])
    ):
        holder = root
        for part in path[:-1]:
            holder = _get(holder, part)
        _put(holder, path[-1], new)


def _put(holder: Any, part: Any, new: Any) -> None:
    if isinstance(holder, _tf_private.ListWrapper):
        _tf_private.replace_item(holder, part, new)
    elif isinstance(part, int) or isinstance(holder, MutableMapping):
        holder[part] = new
    elif getattr(holder, part, None) is not new:
        setattr(holder, part, new)


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


def _move_generator(generator: Any, mesh: Mesh) -> None:
    """Replicates the state of a layer's random numbers on the mesh."""
    _begin(generator)
    inner = getattr(generator, "_generator", None)
    if inner is not None and not isinstance(
        inner._state_var, dtensor.DVariable
    ):
        inner._state_var = tf_keras_variable.move_to_mesh(
            inner._state_var, mesh
        )


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
