"""Replaces the weights of a tf_keras model with DVariables, by their names.

In tf_keras, the name of a weight is known only after its layer is part of a
model. Therefore, each weight is first created without a value. Later,
`map_model` assigns layouts by name and creates a `HostReadableVariable` for
each weight. `map_model` replaces the weight in all attributes, lists and dicts
of the model that contain the weight.
"""

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

from tf_layoutmap._core import (
    random_tensors,
    tf_keras_private,
    tf_private,
)
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh
from tf_layoutmap.layout.mesh.variable import StoredVariable
from tf_layoutmap.layout.replication import traces

dtensor = tf.experimental.dtensor

# Whether this thread calls a layer that needs the full values of its weights.
# Keras 3 does not need this value, because its weights refer to their layer.
in_gathering_layer = tracing.ThreadValue(False)


class HostReadableVariable(StoredVariable):
    """A DVariable whose value can be read and assigned on the host.

    tf_keras reads and writes weights as arrays to save, load and count them. A
    plain DVariable supports this only if it is replicated.
    """

    def value(self) -> tf.Tensor:
        """Returns the value; gathers it if the traced layer requires this."""
        axes = {*self.layout.sharding_specs} - {dtensor.UNSHARDED}
        if not axes or tf.executing_eagerly() or not in_gathering_layer.get():
            return super().value()
        if traces.is_fully_replicated():
            return traces.gathered_value(self, super().value)
        return traces.gathered_along(axes, super().value(), self.layout)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns rows of the table; gathers the table first if necessary."""
        if in_gathering_layer.get():
            return tf.gather(self.value(), indices, name=name)
        return super().sparse_read(indices, name)

    def numpy(self) -> np.ndarray:
        """Returns the full value, gathered on the host."""
        with tf.init_scope():
            return transfer.to_host(self)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns a DTensor, or a host value that the host shards."""
        if tf.executing_eagerly() and not (
            isinstance(value, tf.Variable) or tracing.on_mesh(value)
        ):
            with tf.device("CPU:0"):
                value = tf.convert_to_tensor(value, self.dtype)
            if value.shape == self.shape:
                value = transfer.to_mesh(value, self.layout)
        with tracing.default_mesh(self.layout.mesh):
            return super().assign(value, *args, **kwargs)


def make_variable(
    value: Any, *, name: str, trainable: bool, **options: Any
) -> HostReadableVariable:
    """Returns a variable on a mesh.

    Args:
      value: Initial value, an eager DTensor.
      name: Full name of the variable, including name scopes.
      trainable: Whether gradient tapes watch the variable.
      **options: `aggregation` and `synchronization`, as for `tf.Variable`.
    """
    # A name that ends with a slash is not added to the current name scope.
    return HostReadableVariable(
        value, name=f"{name}/", trainable=trainable, **options
    )


def move_to_mesh(variable: Any, mesh: Mesh) -> Any:
    """Returns `variable` on `mesh`; replicates it if it is not on the mesh."""
    if isinstance(variable, HostReadableVariable):
        return variable
    if isinstance(variable, dtensor.DVariable):
        # The object is changed in place, because other objects already hold it.
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
            aggregation=variable.aggregation,
            synchronization=variable.synchronization,
        )


# Attributes with lists and dicts of objects that are also in other attributes.
CACHES = frozenset(tf_keras_private.LAYOUT_MODULE._KERAS_ATTRIBUTES_TO_SKIP)
# Optimizers, losses and metrics are not weights. `_regularize` handles
# regularizers.
_NOT_WEIGHTS = frozenset(
    (
        "optimizer",
        "compiled_loss",
        "compiled_metrics",
        "_metrics",
        "_captured_weight_regularizer",
    )
)


class ModelVariable:
    """A variable of a model, with all attributes and lists that hold it."""

    def __init__(self, variable: Any):
        self.variable = variable
        self.places: list[tuple[Any, tuple]] = []
        self.names: dict[str, None] = {}
        self.owner: Any = None

    # The properties that `assignments` reads from a Keras variable.
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
    """Names of variables, in the form that `assignments` requires."""

    def __init__(self, variables: Iterable[ModelVariable]):
        self._all = {
            name
            for variable in variables
            for name in self.of_variable(variable, None)
        }

    def aliases(self, variable: ModelVariable, owner: Any) -> tuple[str, ...]:
        del variable, owner
        return ()

    def all_names(self) -> set[str]:
        return self._all

    def of_variable(self, variable: ModelVariable, owner: Any) -> list[str]:
        del owner
        names = dict(variable.names)
        names[variable.path] = None
        names[variable.path.replace("/", ".")] = None
        return list(names)

    def with_holders(self, layer: Any) -> list[Any]:
        return [layer]


def find_variables(
    model: Any, wanted: Callable[[Any], bool]
) -> list[ModelVariable]:
    """Returns the variables of `model` for which `wanted` returns true.

    The order is the order of `model.weights`. In subclassed models, names start
    with an attribute name. In Functional and Sequential models, names start
    with the layer name, for example `"d1.kernel"`.
    """
    _clear_dropout_masks(model)
    by_id: dict[int, ModelVariable] = {}
    for owner, prefix, path, variable in _paths(model):
        if not wanted(variable) or _NOT_WEIGHTS.intersection(path):
            continue
        model_variable = by_id.setdefault(id(variable), ModelVariable(variable))
        model_variable.places.append((owner, path))
        if not CACHES.intersection(path):
            model_variable.names[
                ".".join((*prefix, *(str(part).lstrip("_") for part in path)))
            ] = None
    layers = assignments.layers_of_variables(model)
    for model_variable in by_id.values():
        model_variable.owner = layers.get(id(model_variable.variable))
    order = {id(v): i for i, v in enumerate(model.weights)}
    return sorted(
        by_id.values(),
        key=lambda model_variable: order.get(
            id(model_variable.variable), len(order)
        ),
    )


def _clear_dropout_masks(model: Any) -> None:
    """Clears the cached dropout masks of recurrent cells.

    The masks are tensors of finished traces. tf_keras cannot flatten the dict
    of masks, because its keys are graphs. Each call of a recurrent layer
    creates new masks.
    """
    for layer in model._flatten_layers():
        for name in ("reset_dropout_mask", "reset_recurrent_dropout_mask"):
            reset = getattr(layer, name, None)
            if reset is not None:
                reset()


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
    """Returns whether `variable` has no value on a mesh yet."""
    variable = getattr(variable, "_variable", variable)
    return isinstance(variable, tf.Variable) and not isinstance(
        variable, dtensor.DVariable
    )


def assign_layouts(
    layout_map: Any, variables: list[ModelVariable]
) -> list[assignments.LayoutAssignment]:
    """Returns the layout of each variable; allocates no memory."""
    return assignments.assign(
        layout_map,
        variables,
        _Names(variables),
        owners=[variable.owner for variable in variables],
    )


# Assigns a number to each pending weight, in the order of creation.
_numbers = itertools.count(1)


def map_model(model: Any, context: Any) -> dict[int, Any]:
    """Initializes all pending variables of `model` on the mesh.

    Returns:
      The new variables, by the `id` of the variable that each one replaces.

    Raises:
      ValueError: If a layout does not fit its variable. No variable is
        allocated in this case.
    """
    variables = find_variables(model, is_pending)
    assigned = assign_layouts(context.layout_map, variables)
    assignments.raise_problems(assigned)
    swapped = {}
    # The values are initialized in the order in which the weights were created,
    # because some initializers share one sequence of random numbers.
    for variable, target in sorted(
        zip(variables, assigned, strict=True),
        key=lambda pair: _number_of(pair[0].variable),
    ):
        old = getattr(variable.variable, "_variable", variable.variable)
        new = swapped[id(old)] = _create_variable(old, target.settled_layout())
        new._layoutmap_batch_dim = context.batch_dim
        if old is not variable.variable:
            variable.variable._variable = new
        else:
            _swap(variable, new)
        context.registry.record(target)
    for layer in model._flatten_layers():
        _regularize(layer, swapped)
        generator = getattr(layer, "_random_generator", None)
        if generator is not None:
            _move_generator(generator, context.mesh)
    _replace_dependencies(model, swapped)
    return swapped


def _number_of(variable: Any) -> int:
    """Returns the position of a pending weight in the order of creation."""
    variable = getattr(variable, "_variable", variable)
    return getattr(variable, "_layoutmap_number", 0)


def draw_seed(variable: Any) -> None:
    """Draws the seed of a pending weight, in the order of creation."""
    variable._layoutmap_number = next(_numbers)
    initializer = getattr(variable._initial_value, "func", None)
    _draw_seed_now(getattr(initializer, "_random_generator", None))


def _draw_seed_now(generator: Any) -> None:
    """Draws the seed of a random generator of tf_keras.

    Other generators are ignored. Initializers of TensorFlow (`tf.initializers`)
    have a generator with the same name, which draws its seed only when the
    initializer is called.
    """
    if isinstance(generator, tf_keras_private.RandomGenerator):
        generator._maybe_init()


def _create_variable(variable: Any, layout: Layout) -> Any:
    name = variable.name.removesuffix(":0")
    in_full = False
    with tf.init_scope():
        if not isinstance(variable, tf_keras_private.LazyInitVariable):
            value = transfer.to_mesh(variable.numpy(), layout)
        else:
            initializer, shape, dtype = _initializer(variable)
            in_full = initial_values.is_computed_in_full(initializer, dtype)
            value = initial_values.initial_value(
                initializer, shape, dtype, layout, name=name
            )
        variable_on_mesh = make_variable(
            value,
            name=name,
            trainable=variable.trainable,
            aggregation=variable.aggregation,
            synchronization=variable.synchronization,
        )
        variable_on_mesh._constraint = variable.constraint
        variable_on_mesh._initialized_in_full = in_full
        return variable_on_mesh


def _initializer(variable: Any) -> tuple[Any, tuple, str]:
    """Returns the initializer of a variable, its shape and its dtype."""
    initial = variable._initial_value
    shape, dtype = tuple(variable.shape), variable.dtype.name
    if not callable(initial):
        return (lambda shape, dtype: tf.cast(initial, dtype)), shape, dtype
    drawn = initial.func if isinstance(initial, functools.partial) else None
    # Constants of Keras 3 are filled on each device, for all dtypes.
    if type(drawn) is tf_keras.initializers.Zeros:
        return keras.initializers.Zeros(), shape, dtype
    if type(drawn) is tf_keras.initializers.Ones:
        return keras.initializers.Ones(), shape, dtype
    if random_tensors.is_known(drawn, variable.dtype):
        return drawn, shape, dtype
    return (lambda shape, dtype: initial()), shape, dtype


def _swap(old: ModelVariable, new: Any) -> None:
    """Replaces `old` with `new` in all objects that hold `old`."""
    # Lists are updated first, because setting an attribute of a layer appends
    # the variable to the list of weights if the list does not contain it.
    for root, path in sorted(
        old.places, key=lambda p: not CACHES.intersection(p[1])
    ):
        holder = root
        for part in path[:-1]:
            holder = _get_item(holder, part)
        _set_item(holder, path[-1], new)


def _set_item(holder: Any, part: Any, new: Any) -> None:
    if isinstance(holder, tf_private.ListWrapper):
        tf_private.replace_item(holder, part, new)
    elif isinstance(part, int) or isinstance(holder, MutableMapping):
        holder[part] = new
    elif getattr(holder, part, None) is not new:
        setattr(holder, part, new)


def _get_item(holder: Any, part: Any) -> Any:
    if isinstance(part, int) or isinstance(holder, Mapping):
        return holder[part]
    return getattr(holder, part)


def _regularize(layer: Any, swapped: dict[int, Any]) -> None:
    """Creates the regularization losses of weights with new values."""
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
    """Moves the state of a layer's random generator to the mesh."""
    _draw_seed_now(generator)
    inner = getattr(generator, "_generator", None)
    if inner is not None and not isinstance(
        inner._state_var, dtensor.DVariable
    ):
        inner._state_var = move_to_mesh(inner._state_var, mesh)


def _replace_dependencies(model: Any, swapped: dict[int, Any]) -> None:
    """Replaces old variables with new variables in checkpoint dependencies."""
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
