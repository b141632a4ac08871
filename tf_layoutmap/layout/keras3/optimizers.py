"""Optimizers and other state of Keras 3 models on a mesh.

Optimizer variables are placed on the mesh of the weights. Sparse gradients are
applied to sharded tables without gathering the tables.

`move_model_state` moves metrics, seeds and optimizer variables that were
created outside a scope to the mesh of the model. `move_model_state` raises
`ValueError` if a weight was created outside the scope.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap.layout.keras3 import (
    embedding_rows,
    host_layers,
    sharded_rows,
)
from tf_layoutmap.layout.keras3.context import MeshContext, context_of
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import atomic_step, tracing, transfer
from tf_layoutmap.layout.mesh.variable import PaddedVariable
from tf_layoutmap.layout.ops import host_loops

dtensor = tf.experimental.dtensor


def move_variable(variable: Any, context: MeshContext) -> None:
    """Moves a state variable to the mesh of `context`, where it is replicated.

    The Keras variable object stays the same; only its value is replaced. A
    variable that is already on a mesh is not changed.
    """
    if isinstance(variable, MeshVariable) or type(variable) is not (
        keras.Variable
    ):
        return
    variable.__class__ = MeshVariable
    variable._mesh_context = context
    variable._mesh_owner = None
    variable._mesh_is_state = True
    variable._given_layout = None
    value = variable._value
    if value is None:
        context.add_variable(variable)
        return
    with tf.init_scope():
        layout = dtensor.Layout.replicated(context.mesh, variable.ndim)
        name = value.name.removesuffix(":0")
        with tf.device(value.device):
            value = value.read_value()
        variable.set_value_on_mesh(
            transfer.to_mesh(value, layout),
            trainable=variable.trainable,
            name=name,
        )


def assign_host_variable(
    original: Callable[..., Any], variable: Any, value: Any
) -> None:
    """Writes a host variable; moves it to the mesh of the traced function.

    The sampler of a language model is often created outside the scope. The
    function is traced again, because its trace already reads the host variable.

    Raises:
      TraceAgain: If the variable was moved.
    """
    trace = host_loops.active_trace()
    if (
        trace is not None
        and trace.context is not None
        and not isinstance(variable, MeshVariable)
        and not variable.trainable
        and not tf.executing_eagerly()
    ):
        move_variable(variable, trace.context)
        if isinstance(variable, MeshVariable):
            raise tracing.TraceAgain(
                trace.context.mesh,
                trace.context.layout_map.strict,
                context=trace.context,
            )
    original(variable, value)


def move_model_state(model: Any, context: MeshContext) -> None:
    """Replicates seeds, metrics and other state of `model` on its mesh.

    Weights of layers that run on the host stay on the host.

    Raises:
      ValueError: If a weight was built outside the scope.
    """
    on_host = {id(weight) for weight in host_layers.host_weights_of(model)}
    for variable in model.variables:
        if isinstance(variable, MeshVariable) or id(variable) in on_host:
            continue
        if variable.trainable or any(variable is w for w in model.weights):
            raise ValueError(
                "All weights of a model must be placed on one mesh. Received: "
                f"variable {variable.path!r}, which was built outside "
                "layout_map_scope, while others are on a mesh. Create its "
                "layer under the scope."
            )
        move_variable(variable, context)
    for variable in model.metrics_variables:
        move_variable(variable, context)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        for variable in optimizer.variables:
            move_variable(variable, context)


def build(
    original: Callable[..., Any], optimizer: Any, variables: Iterable[Any]
) -> Any:
    """Builds an optimizer whose variables are on a mesh.

    First, the counters and the learning rate are moved to the mesh.

    The original method then creates the slot variables. Keras passes the layout
    of the weight to each slot variable. The attribute `_mesh_context` places
    all other variables of the optimizer on the mesh.
    """
    variables = list(variables)
    context = next(
        (context_of(v) for v in variables if isinstance(v, MeshVariable)), None
    )
    if context is not None:
        vars(optimizer)["_mesh_context"] = context
        for variable in optimizer._variables:
            move_variable(variable, context)
    return original(optimizer, variables)


def apply(
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    """Applies gradients; in eager mode, runs on the mesh of the variables."""
    variables = (
        optimizer._trainable_variables
        if trainable_variables is None
        else list(trainable_variables)
    )
    context = next(
        (context_of(v) for v in variables if isinstance(v, MeshVariable)), None
    )
    scope = (
        tracing.default_mesh(context.mesh)
        if context is not None and tf.executing_eagerly()
        else nullcontext()
    )
    if context is not None:
        grads = [_with_static_shape(g, v) for g, v in zip(grads, variables)]
        if optimizer.gradient_accumulation_steps:
            # Keras adds each gradient to a dense accumulator in a branch of a
            # conditional. The size of the table is not a constant there, so a
            # sparse gradient would become a dense tensor of the full size.
            # A table with a separate optimizer accumulates its rows itself.
            grads = [
                g
                if getattr(v, "overwrite_with_gradient", False)
                else _dense_for_mesh(v, g)
                for g, v in zip(grads, variables)
            ]
        grads = [_with_layout_of_weight(g, v) for g, v in zip(grads, variables)]
    mesh = None if context is None else context.mesh
    with (
        scope,
        _apply_scope(context, variables),
        atomic_step.applying(mesh, grads) as grads,
    ):
        return original(
            optimizer, grads, None if trainable_variables is None else variables
        )


def _apply_scope(
    context: Any,
    variables: Iterable[Any],
) -> AbstractContextManager[None]:
    # Slot variables have the layout and shape of their weight.
    return sharded_rows.updating(
        None
        if context is None
        else {
            tuple(v.shape): layout
            for v in variables
            if (layout := _layout_of_table(v)) is not None
        }
    )


def _layout_of_table(variable: Any) -> Any:
    """Returns the layout of a matrix that is sharded, or None."""
    if (
        not _on_mesh(variable)
        or len(variable.shape) != 2
        or getattr(variable, "pads_rows", False)
        or isinstance(variable, PaddedVariable)
        or variable.layout.is_fully_replicated()
    ):
        return None
    return variable.layout


def divide(original: Callable[..., Any], dividend: Any, divisor: Any) -> Any:
    """Divides; on a mesh, divides only the rows that a sparse update contains.

    Keras also searches for rows in which the divisor is zero. This function
    omits the search, because the number of such rows is known only at run time
    and DTensor requires static sizes. The search is not necessary for
    optimizers, because their divisors are positive.
    """
    if not isinstance(dividend, tf.IndexedSlices) or not _has_rows(divisor):
        return original(dividend, divisor)
    return tf.IndexedSlices(
        original(dividend.values, _rows_at(divisor, dividend.indices)),
        dividend.indices,
        dividend.dense_shape,
    )


def multiply(original: Callable[..., Any], x1: Any, x2: Any) -> Any:
    """Multiplies; on a mesh, reads only the rows that a sparse update contains.

    Keras computes the same product, but DTensor would gather the dense factor.
    """
    for sparse, dense in ((x1, x2), (x2, x1)):
        if isinstance(sparse, tf.IndexedSlices) and _has_rows(dense):
            return tf.IndexedSlices(
                original(sparse.values, _rows_at(dense, sparse.indices)),
                sparse.indices,
                sparse.dense_shape,
            )
    return original(x1, x2)


def _has_rows(x: Any) -> bool:
    """Returns whether `x` is dense and has the shape of a weight on a mesh."""
    return (
        sharded_rows.is_updating()
        and not isinstance(x, tf.IndexedSlices)
        and len(getattr(x, "shape", ())) > 0
    )


def _rows_at(x: Any, ids: tf.Tensor) -> tf.Tensor:
    x = tf.convert_to_tensor(x)
    layout = sharded_rows.layout_of_update(tuple(x.shape))
    return (
        tf.gather(x, ids)
        if layout is None
        else sharded_rows.lookup(x, ids, layout)
    )


def adagrad_step(
    original: Callable[..., Any],
    optimizer: Any,
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> Any:
    """Runs one Adagrad step; reads only the updated rows of sharded tables.

    Keras computes the square root of the full accumulator, and then gathers the
    rows of the gradient. This function gathers the rows first. The result is
    the same.
    """
    if not _is_sparse_update_of_sharded(variable, gradient):
        return original(optimizer, gradient, variable, learning_rate)
    rows = tf.cast(gradient.values, variable.dtype)
    ids = gradient.indices
    sums = optimizer._accumulators[optimizer._get_variable_index(variable)]
    embedding_rows.add(sums, tf.IndexedSlices(tf.square(rows), ids), 1)
    steps = (
        tf.cast(learning_rate, rows.dtype)
        * rows
        / tf.sqrt(embedding_rows.lookup(sums, ids) + optimizer.epsilon)
    )
    return embedding_rows.add(variable, tf.IndexedSlices(steps, ids), -1)


# DTensor does not support scatter updates of a variable. Therefore, adding rows
# to a variable is computed as a dense addition on a mesh. All other operations
# on a sparse gradient are unchanged, so results match Keras without a mesh,
# even if rows are repeated.


def assign_add(
    original: Callable[..., Any], optimizer: Any, variable: Any, value: Any
) -> Any:
    """Adds a dense value, or the rows of a sparse value, to a variable."""
    if _is_sparse_update_of_sharded(variable, value):
        return embedding_rows.add(variable, value, 1)
    return original(optimizer, variable, _dense_for_mesh(variable, value))


def assign_sub(
    original: Callable[..., Any], optimizer: Any, variable: Any, value: Any
) -> Any:
    """Subtracts a dense or sparse value from a variable."""
    if _is_sparse_update_of_sharded(variable, value):
        return embedding_rows.add(variable, value, -1)
    return original(optimizer, variable, _dense_for_mesh(variable, value))


def assign(
    original: Callable[..., Any], optimizer: Any, variable: Any, value: Any
) -> Any:
    """Assigns a dense value to a variable; rejects a sparse value."""
    if isinstance(value, tf.IndexedSlices) and _on_mesh(variable):
        raise ValueError(
            f"Optimizer {optimizer.name!r} overwrites single rows of variable "
            f"{variable.name!r}. DTensor does not support this for a variable "
            "on a mesh. Use an optimizer that adds its updates, such as Adam, "
            "Adagrad or SGD."
        )
    return original(optimizer, variable, value)


def _on_mesh(variable: Any) -> bool:
    return isinstance(variable, MeshVariable | dtensor.DVariable)


def _is_sparse_update_of_sharded(variable: Any, value: Any) -> bool:
    return (
        isinstance(value, tf.IndexedSlices)
        and embedding_rows.axis_of(variable) is not None
    )


def _dense_for_mesh(variable: Any, value: Any) -> Any:
    if not isinstance(value, tf.IndexedSlices) or not _on_mesh(variable):
        return value
    layout = _layout_of_table(variable)
    if layout is None:
        return tf.math.unsorted_segment_sum(
            value.values, value.indices, variable.shape[0]
        )
    return sharded_rows.segment_sum(
        value.values, value.indices, variable.shape[0], layout
    )


def _with_static_shape(gradient: Any, variable: Any) -> Any:
    """Returns a gradient with a static shape.

    DTensor can partition a tensor only if its size is known when the function
    is compiled.
    """
    if not isinstance(gradient, tf.IndexedSlices) or not _on_mesh(variable):
        return gradient
    rows, indices = gradient.values, gradient.indices
    count = rows.shape[0] or indices.shape[0] or _static_num_rows(rows)
    if count is not None:
        rows = tf.reshape(rows, [count, *variable.shape[1:]])
        indices = tf.reshape(indices, [count])
    return tf.IndexedSlices(
        rows, indices, tf.constant(variable.shape.as_list(), tf.int64)
    )


def _with_layout_of_weight(gradient: Any, variable: Any) -> Any:
    """Returns a gradient that has the same layout as its weight.

    Without this function, DTensor propagates layouts from the optimizer back to
    the operations that compute the gradient. Some of these operations do not
    support the layouts.
    """
    if not isinstance(variable, MeshVariable) or not isinstance(
        gradient, tf.Tensor
    ):
        return gradient
    return dtensor.relayout(gradient, variable.layout)


def _static_num_rows(rows: Any) -> int | None:
    """Returns the static number of rows of a reshaped tensor, or None.

    TensorFlow reshapes the gradient of a lookup to a dynamic number of rows.
    This function computes the number from the shape before the reshape.
    """
    if not tf.is_symbolic_tensor(rows) or rows.op.type != "Reshape":
        return None
    num_elements = rows.op.inputs[0].shape.num_elements()
    row = rows.shape[1:].num_elements()
    return num_elements // row if num_elements is not None and row else None
