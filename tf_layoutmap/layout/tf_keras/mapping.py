"""From the names of a tf_keras model's weights to DVariables.

tf_keras has no name for a weight before its layer has a place in a model. So
weights are made without a value first, and swapped, wherever the model holds
them, for the variable their name asks for.
"""

# DOC-MERGE: The variables of a tf_keras model, with their names and who holds them.
# DOC-MERGE: The variables of tf_keras models on a mesh.
import collections
import functools
import itertools
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from tf_layoutmap._core import tf_keras_private, tf_private
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.mesh import pinning, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh
from tf_layoutmap.layout.mesh.variable import StoredVariable
from tf_layoutmap.layout.replication import gathered_reads

dtensor = tf.experimental.dtensor


class HostReadableVariable(StoredVariable):
    """A DVariable that values from the host go into and come out of.

    tf_keras reads and writes weights as arrays to save, load and count them;
    a plain DVariable gives a value only if every device holds all of it.
    """

    def value(self) -> tf.Tensor:
        """The tensor; whole in a layer that needs it so, while it is traced."""
        axes = {*self.layout.sharding_specs} - {dtensor.UNSHARDED}
        if (
            not axes
            or tf.executing_eagerly()
            or (not gathered_reads.in_gathering_layer())
        ):
            return super().value()
        reads = gathered_reads.current()
        if reads is not None:
            return reads.read(self, super().value)
        return gathered_reads.gathered_along(axes, super().value(), self.layout)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Rows of the table; of all of it where `value` is whole."""
        if gathered_reads.in_gathering_layer():
            return tf.gather(self.value(), indices, name=name)
        return super().sparse_read(indices, name)

    def numpy(self) -> np.ndarray:
        """The whole value, gathered on the host."""
        with tf.init_scope():
            return transfer.to_host(self)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns a value from the host, cut up there, or one on the mesh."""
        if tf.executing_eagerly() and not (
            isinstance(value, tf.Variable) or pinning.on_mesh(value)
        ):
            with tf.device("CPU:0"):
                value = tf.convert_to_tensor(value, self.dtype)
            if value.shape == self.shape:
                value = transfer.to_mesh(value, self.layout)
        with tracing.default_mesh(self.layout.mesh):
            return super().assign(value, *args, **kwargs)


def make_variable(
    value: Any, *, name: str, trainable: bool
) -> HostReadableVariable:
    """Returns a variable that starts as the eager DTensor `value`."""
    return HostReadableVariable(value, name=name, trainable=trainable)


def move_to_mesh(variable: Any, mesh: Mesh) -> Any:
    """Returns `variable` as one on `mesh`, replicated if it is elsewhere."""
    if isinstance(variable, HostReadableVariable):
        return variable
    if isinstance(variable, dtensor.DVariable):
        # The same object: others hold it already.
        variable.__class__ = HostReadableVariable
        return variable
    with tf.init_scope():
        value = transfer.to_mesh(
            variable.numpy(),
            dtensor.Layout.replicated(mesh, variable.shape.rank),
        )
        return make_variable(
            value,
            name=variable.name.removesuffix(":0"),
            trainable=variable.trainable,
        )


# Lists and tables that hold again what an attribute holds.
CACHES = frozenset(tf_keras_private.LAYOUT_MODULE._KERAS_ATTRIBUTES_TO_SKIP)
# Optimizers, losses and metrics are no weights; penalties come in _regularize.
_NOT_WEIGHTS = frozenset(
    (
        "optimizer",
        "compiled_loss",
        "compiled_metrics",
        "_metrics",
        "_captured_weight_regularizer",
    )
)


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

    def __init__(self, found: Iterable[Found]):
        self._all = {
            name for one in found for name in self.of_variable(one, None)
        }

    def aliases(self, found: Found, owner: Any) -> tuple[str, ...]:
        del found, owner
        return ()

    def all_names(self) -> set[str]:
        return self._all

    def of_variable(self, found: Found, owner: Any) -> list[str]:
        del owner
        names = dict(found.names)
        names[found.path] = None
        names[found.path.replace("/", ".")] = None
        return list(names)

    def with_holders(self, layer: Any) -> list[Any]:
        return [layer]


def find_variables(model: Any, wanted: Callable[[Any], bool]) -> list[Found]:
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
        if not CACHES.intersection(path):
            one.names[
                ".".join((*prefix, *(str(part).lstrip("_") for part in path)))
            ] = None
    layers = assignments.layers_of_variables(model)
    for one in found.values():
        one.owner = layers.get(id(one.variable))
    order = {id(v): i for i, v in enumerate(model.weights)}
    return sorted(
        found.values(), key=lambda one: order.get(id(one.variable), len(order))
    )


def _paths(model: Any) -> Iterator[tuple[Any, tuple, tuple, Any]]:
    def is_variable(x: Any) -> bool:
        return isinstance(x, tf.Variable)

    by_name = isinstance(model, tf_keras.Sequential) or hasattr(
        model, "_nested_inputs"
    )
    roots = (
        [(layer, (layer.name,)) for layer in model.layers] if (by_name) else []
    )
    for root, prefix in (*roots, (model, ())):
        for path, variable in root._flatten(
            predicate=is_variable, with_path=True
        ):
            yield root, prefix, path, variable


def is_pending(variable: Any) -> bool:
    """Whether `variable` has no value, or one outside of any mesh."""
    variable = getattr(variable, "_variable", variable)
    return isinstance(variable, tf.Variable) and not isinstance(
        variable, dtensor.DVariable
    )


def assign_layouts(
    layout_map: Any, found: list[Found]
) -> list[assignments.LayoutAssignment]:
    """Returns which layout each of `found` gets; allocates nothing."""
    return assignments.assign(
        layout_map, found, _Names(found), owners=[one.owner for one in found]
    )


# Counts pending weights in the order of their creation.
_numbers = itertools.count(1)


def map_model(model: Any, context: Any) -> dict[int, Any]:
    """Gives every pending variable of `model` its value, on the mesh.

    Returns:
      The new variables, by the `id` of the variable that each one replaces.

    Raises:
      ValueError: Some layout does not fit. Nothing is allocated then.
    """
    found = find_variables(model, is_pending)
    assigned = assign_layouts(context.layout_map, found)
    assignments.raise_problems(assigned)
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
    if isinstance(generator, tf_keras_private.RandomGenerator):
        generator._maybe_init()


def _made(variable: Any, layout: Layout, init: str) -> Any:
    name = variable.name.removesuffix(":0")
    with tf.init_scope():
        if not isinstance(variable, tf_keras_private.LazyInitVariable):
            value = transfer.to_mesh(variable.numpy(), layout)
        else:
            value = initial_values.initial_value(
                *_initializer(variable, init), layout, init
            )
        made = make_variable(value, name=name, trainable=variable.trainable)
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
    if isinstance(holder, tf_private.ListWrapper):
        tf_private.replace_item(holder, part, new)
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
        inner._state_var = move_to_mesh(inner._state_var, mesh)


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
