"""Layers on a mesh, called with tensors from the host."""

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.layout import (
    einsum_axes,
    host_values,
    mesh_ops,
    pinning,
    unsupported,
)
from tf_layoutmap.layout.layout_map import axes_of_layout
from tf_layoutmap.layout.mesh_home import home_of
from tf_layoutmap.layout.mesh_variable import MeshVariable

dtensor = tf.experimental.dtensor

_inside = threading.local()


def call(original: Callable[..., Any], layer: Any, *args: Any,
         **kwargs: Any) -> Any:
    """Calls `layer`, first bringing what comes from the host to its mesh.

    With any input from the host, the outputs are replicated, so that they
    can be read like any tensor; with inputs on the mesh they stay as they
    are.
    """
    home = home_of(layer)
    if home is None or _keras_private.is_abstract():
        return original(layer, *args, **kwargs)
    if not tf.executing_eagerly():
        return _traced(original, layer, args, kwargs)
    if getattr(_inside, "call", False):
        return original(layer, *args, **kwargs)
    flat = keras.tree.flatten((args, kwargs))
    if any(isinstance(x, keras.KerasTensor) for x in flat):
        return original(layer, *args, **kwargs)
    from_host = any(_is_host_value(x) for x in flat)
    _inside.call = True
    try:
        with host_values.default_mesh(home.mesh):
            if from_host:
                args, kwargs = keras.tree.map_structure(
                    lambda x: replicated(x, home.mesh), (args, kwargs))
            outputs = original(layer, *args, **kwargs)
            if from_host:
                outputs = keras.tree.map_structure(readable, outputs)
            return outputs
    finally:
        _inside.call = False


def _traced(original: Callable[..., Any], layer: Any, args: Any,
            kwargs: Any) -> Any:
    """Calls `layer` in a function; keeps some layers batch-parallel.

    DTensor convolves whole kernels over whole images, and unrolls time over
    whole features. Layouts flow back from the layers behind, so what goes in
    and what comes out is pinned.
    """
    # Outside of it, the graph may be an export, which serves anywhere.
    if not isinstance(layer, unsupported.BATCH_PARALLEL) or (
            not host_values.traced_for_mesh()):
        return original(layer, *args, **kwargs)
    mesh = home_of(layer).mesh
    # TimeDistributed works with time in front, where the batch axis is lost.
    pin = (pinning.whole if isinstance(layer, keras.layers.TimeDistributed)
           else pinning.whole_samples)
    args, kwargs = keras.tree.map_structure(
        lambda x: pin(x, mesh), (args, kwargs))
    outputs = original(layer, *args, **kwargs)
    return keras.tree.map_structure(lambda x: pin(x, mesh), outputs)


def einsum(original: Callable[..., Any], subscripts: str, *operands: Any,
           **options: Any) -> Any:
    """`keras.ops.einsum`; in layers on a mesh, TensorFlow's own.

    Keras makes most of them matrix products of reshaped operands. DTensor
    divides the reshaped gradients otherwise than the weights, and then cannot
    bring one to the other. And where a weight has several labels in common
    with what it is multiplied with, that is divided as the weight is.
    """
    layer = _keras_private.calling_layer()
    home = None if layer is None else home_of(layer)
    if home is None:
        return original(subscripts, *operands, **options)
    # Any option keeps Keras from its matrix products; this is the default.
    options = {"optimize": "greedy", **options}
    subscripts = einsum_axes.spelled_out(
        subscripts, [len(x.shape) for x in operands])
    divided = None
    if host_values.traced_for_mesh() and len(operands) == 2:
        divided = _axes_of_product(subscripts, operands, home)
    if divided is None:
        return original(subscripts, *operands, **options)
    *of_operands, of_result = divided
    pinned = [
        x if isinstance(x, MeshVariable) and axes == _axes_in_layers(x, home)
        else pinning.divided(tf.convert_to_tensor(x), home.mesh, axes)
        for x, axes in zip(operands, of_operands)]
    with tf.name_scope(mesh_ops.DIVIDED_ALIKE):
        result = original(subscripts, *pinned, **options)
    return pinning.divided(result, home.mesh, of_result)


def _axes_of_product(subscripts: str, operands: tuple[Any, ...],
                     home: Any) -> tuple[Any, ...] | None:
    """Returns the axes of both operands and the result, for a weight."""
    number = int(isinstance(operands[1], MeshVariable))
    weight, other = operands[number], operands[1 - number]
    if not isinstance(weight, MeshVariable):
        return None
    size = other.shape[0] if len(other.shape) else None
    is_cut = home.batch_dim is not None and size is not None and (
        size % home.mesh.dim_size(home.batch_dim) == 0)
    return einsum_axes.axes_of_product(
        subscripts, number, _axes_in_layers(weight, home),
        home.batch_dim if is_cut else None)


def _axes_in_layers(weight: MeshVariable, home: Any) -> tuple[str | None, ...]:
    """Returns what divides what a layer reads: see `MeshVariable.value`."""
    return tuple(None if axis == home.batch_dim else axis
                 for axis in axes_of_layout(weight.layout))


def add(original: Callable[..., Any], x1: Any, x2: Any) -> Any:
    """`keras.ops.add`, for a mesh not as a BiasAdd of squeezed tensors.

    Keras takes a second summand for a bias that has one long dimension. In
    another place than the last DTensor cannot divide it.
    """
    shape = getattr(x2, "shape", ())
    if host_values.traced_for_mesh() and len(shape) > 1 and (
            len(shape) - list(shape).count(1) == 1):
        x1, x2 = x2, x1
    return original(x1, x2)


def repeat(original: Callable[..., Any], x: Any, repeats: Any,
           axis: int | None = None) -> Any:
    """`keras.ops.repeat`, for a mesh of whole samples.

    DTensor does not tile what it divides: GroupQueryAttention's heads, say.
    """
    mesh = host_values.mesh_of_trace()
    if mesh is None:
        return original(x, repeats, axis)
    x = tf.convert_to_tensor(x)
    result = original(_by_samples(x, mesh, axis), repeats, axis)
    return _by_samples(result, mesh, axis)


def _by_samples(x: Any, mesh: Any, axis: int | None) -> Any:
    """Returns `x` divided as batches are, unless that divides `axis`."""
    batch_dim = host_values.batch_dim_of_trace()
    is_cut = (batch_dim is not None and axis not in (None, 0, -x.shape.rank)
              and (x.shape[0] or 1) % mesh.dim_size(batch_dim) == 0)
    return pinning.divided(x, mesh, [
        batch_dim if is_cut and dim == 0 else None
        for dim in range(x.shape.rank)])


def eye(original: Callable[..., Any], N: Any, M: Any = None,  # noqa: N803
        k: Any = 0, dtype: str | None = None) -> Any:
    """`keras.ops.eye`; for a mesh, by comparing numbers of rows and columns.

    DTensor has no MatrixDiagV3. `keras.ops.image.extract_patches` needs it.
    """
    mesh = host_values.mesh_of_trace()
    if mesh is None:
        return original(N, M, k, dtype)
    rows = tf.range(N)[:, tf.newaxis]
    columns = tf.range(N if M is None else M)[tf.newaxis, :]
    return pinning.whole(
        tf.cast(columns - rows == k, dtype or keras.config.floatx()), mesh)


def _is_host_value(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return True
    return (tf.is_tensor(x) and isinstance(x, tf.Tensor) and
            not isinstance(x, keras.Variable) and not host_values.on_mesh(x))


def replicated(x: Any, mesh: Any) -> Any:
    """Returns a host value as a tensor on `mesh`, whole everywhere."""
    if not _is_host_value(x):
        return x
    # copy_to_mesh and not pack: gradients flow through it. From the host to
    # a replicated layout is the case it copies whole.
    with tf.device("CPU:0"):
        tensor = tf.convert_to_tensor(x)
    moved = dtensor.copy_to_mesh(
        tensor, dtensor.Layout.replicated(mesh, tensor.shape.rank))
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        moved._keras_mask = replicated(mask, mesh)
    return moved


def readable(x: Any) -> Any:
    """Returns a tensor on a mesh so that `numpy()` can read it."""
    if not host_values.on_mesh(x):
        return x
    layout = dtensor.fetch_layout(x)
    if layout.is_fully_replicated():
        return x
    return dtensor.relayout(
        x, dtensor.Layout.replicated(layout.mesh, layout.rank))
