"""`MeshVariable`, a Keras variable whose value is a DVariable.

The DVariable is created when it is first used. Until then, the variable holds
only its initializer. The reason is that the layout of a variable depends on its
name, and the name is known only after the layer is part of a model.
`merged_lora_weight` merges LoRA weights for saving.

`init_variable` and `new_layer` replace the Keras constructors that create
variables and layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private, placeholders, tf_private
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.keras3.context import (
    active_context,
    context_of,
    context_of_new_variable,
)
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import Layout, Mesh, axes_of_layout
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.mesh.variable import PaddedVariable
from tf_layoutmap.layout.ops import host_loops
from tf_layoutmap.layout.replication import traces

if TYPE_CHECKING:
    from tensorflow.experimental.dtensor import DVariable

dtensor = tf.experimental.dtensor


# Whether this thread builds a model, and its metrics, before its first step.
building_for_step = ThreadValue(False)
# Whether user code keeps the function that is being traced while Keras infers
# shapes.
keeping_trace = ThreadValue(False)


class MeshVariable(keras.Variable):
    """A `keras.Variable` on a mesh.

    Under a scope, `keras.Variable(...)` returns a `MeshVariable`. Reading,
    assigning, saving and loading work as for any other variable. The value that
    user code reads or assigns is the full value on the host, for every layout.
    """

    # None until the variable is initialized, as in variables of Keras.
    _value: Any
    # Whether rows of padding are added if the mesh does not divide the number
    # of rows evenly.
    pads_rows = False
    # The initializer of a variable without a value; None while Keras holds it
    # in `_initializer`.
    _pending_initializer: Callable[..., Any] | None = None
    # The name scope of TensorFlow in which Keras would create the value.
    _name_scope: str | None = None

    def __init__(
        self,
        initializer: Any,
        shape: Any = None,
        dtype: Any = None,
        *args: Any,
        **kwargs: Any,
    ):
        if (
            not callable(initializer)
            and not isinstance(initializer, str)
            and not keras_private.in_stateless_scope()
        ):
            value = self._host_constant(initializer, dtype)
            shape, dtype = value.shape, dtype or value.dtype
            initializer = _Constant(value)
        if kwargs.get("layout") is not None:
            # Some versions of Keras ignore the argument.
            self._layout = kwargs["layout"]
        super().__init__(initializer, shape, dtype, *args, **kwargs)
        # A gradient tape watches a DVariable only if it is created as
        # trainable. A layer may be frozen when the DVariable is created, and
        # trained later. Therefore, the initial value of `trainable` is stored.
        self._made_trainable = self.trainable
        if self._name_scope is None and building_for_step.get():
            # Without a mesh, a step is traced in one graph, and creates values
            # in the name scope of this graph.
            with tf_private.outermost_graph().as_default():
                self._name_scope = tf.get_current_name_scope()

    def _host_constant(self, value: Any, dtype: Any) -> Any:
        if tracing.on_mesh(value):
            value = transfer.to_host(value)
        with tf.init_scope():
            return self._convert_to_tensor(value, dtype=dtype)

    def _initialize_with_initializer(
        self, initializer: Callable[..., Any]
    ) -> None:
        self._value = None
        self._wait_for_layout(initializer)

    def _deferred_initialize(self) -> None:
        # Keras calls this method for variables that it created while it
        # inferred shapes. The value is created at the end of the scope or at
        # the first read.
        self._wait_for_layout(self._initializer)

    def _wait_for_layout(self, initializer: Callable[..., Any] | None) -> None:
        """Adds the variable to the variables that `context` initializes.

        If Keras reads the variable to infer shapes, it returns the result of
        `_initializer`. An initializer of user code must not be called for this
        purpose, because it may draw random numbers.
        """
        if self._value is None and self._pending_initializer is None:
            self._pending_initializer = initializer
            self._initializer = keras.initializers.Zeros()
            if self._name_scope is None:
                self._name_scope = tf.get_current_name_scope()
        self._mesh_context.add_variable(self)

    @property
    def pending_initializer(self) -> Callable[..., Any]:
        """The initializer of a variable that has no value yet."""
        initializer = self._pending_initializer or self._initializer
        assert initializer is not None
        return initializer

    @property
    def value(self) -> Any:
        """The DVariable, which is initialized first if necessary.

        In the call of a layer, a variable that is sharded along the batch axis
        is returned as a tensor that is gathered along this axis. The batch then
        stays sharded along the axis. If a layer or function requires the full
        weight, the returned tensor is gathered along all axes. While a program
        exports a model, the stored table can replace the variable.
        """
        placeholder = placeholders.placeholder_of(self)
        if placeholder is not None:
            return placeholder()
        self._initialize_if_pending()
        value = super().value
        if self._value is None:
            if keeping_trace.get():
                raise RuntimeError(
                    "`get_concrete_function` must not be called while Keras "
                    "infers the shapes of a new model on a mesh, because its "
                    "weights have no values yet. Received: a function that "
                    f"reads variable {self.path!r}. Call the tf.function "
                    "itself in the layer, or create the concrete function "
                    "after the model."
                )
            return value
        tracing.require_mesh(
            self._value.layout.mesh,
            self._mesh_context.layout_map.strict,
            self._mesh_context,
        )
        trace = host_loops.active_trace()
        if trace is not None:
            trace.context = self._mesh_context
        if keras_private.calling_layer() is None:
            return value
        if traces.is_fully_replicated():
            return tf.cast(traces.gathered_value(self._value), value.dtype)
        if not tracing.traced_for_mesh() or isinstance(
            self._value, PaddedVariable
        ):
            return value
        divided_by = {*self._value.layout.sharding_specs} - {dtensor.UNSHARDED}
        axes = (
            divided_by
            if self._is_gathered()
            else (divided_by & {self._mesh_context.batch_dim})
        )
        if not axes:
            return value
        # If the variable were not gathered, one mesh axis would shard two
        # dimensions of a product. DTensor then raises an error or pairs the
        # shards incorrectly. The gradient of the gathered weight is sharded
        # again.
        return traces.gathered_along(
            axes, tf.convert_to_tensor(value), self._value.layout
        )

    def _is_gathered(self) -> bool:
        """Returns whether the layer of this variable needs the full value."""
        owner, is_state = assignments.owner_of(self)
        return not is_state and assignments.gathers_weights(owner)

    @property
    def divided_value(self) -> DVariable:
        """The DVariable, which is not gathered even in the call of a layer."""
        return self._concrete_value()

    def set_value_on_mesh(
        self, value: Any, *, trainable: bool, name: str | None = None
    ) -> None:
        """Creates the DVariable.

        Args:
          value: Initial value, a DTensor. May have rows of padding.
          trainable: Whether gradient tapes watch the variable.
          name: Name of the DVariable; None for the name in stock Keras.
        """
        if name is None:
            name = "/".join(filter(None, (self._name_scope, self.name)))
        self._value = initial_values.make_variable(
            value,
            name=name,
            trainable=trainable,
            shape=tuple(self._shape),
            aggregation=self._map_aggregation(self.aggregation),
            synchronization=self._map_synchronization(self.synchronization),
        )
        self._initializer = self._pending_initializer = None

    def _initialize_if_pending(self) -> None:
        if self._value is None and not keras_private.is_abstract():
            self._mesh_context.initialize_pending(self)

    @property
    def layout(self) -> Layout:
        """The `dtensor.Layout` of the value."""
        if self._value is not None:
            return self._value.layout
        return self._mesh_context.planned_layout(self)

    # Keras passes `_layout` of a weight to its slot variables.
    @property
    def _layout(self) -> Layout:
        return self.layout

    @_layout.setter
    def _layout(self, layout: Layout) -> None:
        self._given_layout = layout

    @property
    def mesh(self) -> Mesh:
        """The `dtensor.Mesh` of the value."""
        return self.layout.mesh

    def numpy(self) -> np.ndarray:
        """Returns the full value, gathered on the host."""
        with tf.init_scope():
            return transfer.to_host(self._concrete_value())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __int__(self) -> int:
        return int(self.numpy()) if self.ndim == 0 else super().__int__()

    def __float__(self) -> float:
        return float(self.numpy()) if self.ndim == 0 else super().__float__()

    def assign(self, value: Any) -> Any:
        """Assigns a value, which can be on the host or on the mesh."""
        if not tf.executing_eagerly() or keras_private.is_abstract():
            return super().assign(value)
        with tracing.default_mesh(self.mesh):
            # The host shards a host value. If the value were converted on the
            # mesh, every device would get a full copy.
            if not tracing.on_mesh(value) and not isinstance(
                value, MeshVariable
            ):
                with tf.device("CPU:0"):
                    value = self._convert_to_tensor(value, dtype=self._dtype)
            return super().assign(value)

    def assign_add(self, value: Any) -> Any:
        return self._add(value, 1)

    def assign_sub(self, value: Any) -> Any:
        return self._add(value, -1)

    def _add(self, value: Any, sign: int) -> Any:
        if tf.executing_eagerly() and not keras_private.is_abstract():
            if isinstance(self._concrete_value(), PaddedVariable):
                return self._add_on_host(value, sign)
            value = self._to_own_layout(value)
        return self.assign(
            self.value + value if sign > 0 else self.value - value
        )

    def _add_on_host(self, value: Any, sign: int) -> Any:
        """Adds a value on the host, where the variable has no padding rows."""
        if tracing.on_mesh(value):
            value = transfer.to_host(value)
        return self.assign(self.numpy() + sign * np.asarray(value, self.dtype))

    def _to_own_layout(self, value: Any) -> Any:
        """Returns an eager value on the mesh, with this variable's layout."""
        if isinstance(value, keras.Variable | tf.Variable):
            value = tf.convert_to_tensor(value)
        layout = self.layout
        if tracing.on_mesh(value) and isinstance(self._value, PaddedVariable):
            value = transfer.to_host(value)
        if tracing.on_mesh(value):
            if dtensor.fetch_layout(value) == layout:
                return value
            return dtensor.relayout(value, layout)
        with tf.device("CPU:0"):
            value = tf.broadcast_to(
                tf.cast(self._convert_to_tensor(value), self._dtype), self.shape
            )
        return (
            transfer.padded_to_mesh(value, layout)
            if self.pads_rows
            else transfer.to_mesh(value, layout)
        )

    def _direct_assign(self, value: Any) -> None:
        target = self._concrete_value()
        if tf.executing_eagerly():
            value = self._to_own_layout(value)
        elif isinstance(target, PaddedVariable):
            value = dtensor.relayout(target.with_padding(value), target.layout)
        elif traces.is_fully_replicated():
            value = dtensor.relayout(
                # The value is pinned as replicated. Otherwise DTensor would
                # propagate the layout of the variable to the tensors from which
                # the value is computed.
                tracing.pin_replicated(value, self.mesh),
                target.layout,
            )
        elif (
            tf.is_symbolic_tensor(value)
            and tracing.traced_for_mesh()
            and self._mesh_context.batch_dim in target.layout.sharding_specs
        ):
            # The value is not sharded along the batch axis, because the
            # variable is gathered along this axis when it is read.
            value = dtensor.relayout(value, target.layout)
        target.assign(tf.cast(value, target.dtype))

    def _concrete_value(self) -> Any:
        self._initialize_if_pending()
        return self._value

    # The next two methods replace methods of Keras that cannot save a variable
    # in slices.
    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable]:
        return self.divided_value._gather_saveables_for_checkpoint()

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        value = self.divided_value
        value._copy_trackable_to_cpu(object_map)
        object_map[self] = object_map[value]

    def __repr__(self) -> str:
        axes = (
            ""
            if self._value is None
            else f", layout={axes_of_layout(self._value.layout)}"
        )
        name, separator, rest = super().__repr__().partition(", value=")
        return f"{name.removesuffix('>')}{axes}{separator}{rest or '>'}"

    def __deepcopy__(self, memo: dict) -> Any:
        raise TypeError(
            "deepcopy of a variable on a mesh is not supported. Received: "
            f"variable {self.path!r}. Clone the model under layout_map_scope "
            "and use set_weights."
        )


# Keras names unnamed variables after their class, and layout maps match names.
# The class has the same name as the class of Keras, so that a model has the
# same variable names with and without a mesh.
MeshVariable.__name__ = "Variable"


class _Constant:
    """Initializer that returns a fixed value."""

    def __init__(self, value: Any):
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return tf.cast(self.value, dtype or self.value.dtype)


def merged_lora_weight(
    original: Callable[..., Any], layer: Any, *args: Any
) -> Any:
    """Returns the weight of `layer`, including its LoRA update.

    Keras adds the product of the two LoRA matrices to the weight and writes the
    sum to the file. On a mesh the sum is a sharded tensor, which files do not
    support, so the sum is gathered on the host.
    """
    context = context_of(layer)
    if context is None:
        return original(layer, *args)
    with tracing.default_mesh(context.mesh):
        values = original(layer, *args)
    return keras.tree.map_structure(_on_host, values)


def _on_host(value: Any) -> Any:
    # If the layer has no LoRA matrices, the value is the variable itself, which
    # files support.
    if isinstance(value, keras.Variable | tf.Variable) or (
        not tracing.on_mesh(value)
    ):
        return value
    return transfer.to_host(value)


def init_variable(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> None:
    """Initializes a variable as a `MeshVariable` under a layout map scope."""
    # The replaced method is not `__new__`, because Python does not restore the
    # original behavior of a class when a `__new__` that was added to the class
    # is deleted.
    if type(variable) is keras.Variable:
        context, owner, is_state = context_of_new_variable()
        if context is not None:
            variable.__class__ = MeshVariable
            variable._mesh_context = context
            variable._mesh_owner = owner
            variable._mesh_is_state = is_state
            variable.__init__(*args, **kwargs)
            return
    original(variable, *args, **kwargs)


def new_layer(
    original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any
) -> Any:
    """Creates a layer that belongs to the open scope."""
    layer = original(cls, *args, **kwargs)
    context = active_context()
    if context is not None:
        context.add_layer(layer)
    return layer
