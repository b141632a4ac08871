"""Creates the DVariable of a weight from its initializer and layout.

Initial values do not depend on the mesh, and are bitwise identical to the
values that the initializer returns on one device. Constants and the random
initializers of Keras, tf_keras and TensorFlow compute each shard on its device
(`random_tensors`), so no device holds a full sharded weight. All other initial
values are computed in full on the host and then sharded.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import random_tensors
from tf_layoutmap.layout.mesh import shard_shapes, tracing, transfer
from tf_layoutmap.layout.mesh.device_mesh import (
    Layout,
    axes_of_layout,
    mesh_sizes,
    prepare_process,
)
from tf_layoutmap.layout.mesh.variable import PaddedVariable, StoredVariable

dtensor = tf.experimental.dtensor

_CONSTANTS = {
    keras.initializers.Zeros: lambda _: 0,
    keras.initializers.Ones: lambda _: 1,
    keras.initializers.Constant: lambda i: i.value,
}


def initial_value(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: str,
    layout: Layout,
    *,
    name: str,
) -> Any:
    """Returns the initial value of a variable, on the mesh of `layout`.

    Args:
      initializer: Callable; `initializer(shape, dtype=dtype)` returns the full
        value.
      shape: Shape of the full variable. If `layout` does not divide the number
        of rows evenly, rows of zeros are appended.
      dtype: Keras' name of the dtype.
      layout: `dtensor.Layout` of the variable.
      name: Name of the variable, for errors.

    Returns:
      An eager DTensor.

    Raises:
      ValueError: If `initializer` returns a value with another shape, or a
        tensor with another dtype. Arrays are converted, as in `tf.Variable`.
    """
    constant = _CONSTANTS.get(type(initializer))
    if constant is not None and np.ndim(constant(initializer)) == 0:
        return _filled(constant(initializer), shape, dtype, layout)
    if not layout.is_fully_replicated():
        with tf.init_scope():
            values = random_tensors.random_tensor(
                initializer, shape, tf.as_dtype(dtype)
            )
        if values is not None:
            return _drawn(values, layout)
    return transfer.padded_to_mesh(
        _on_host(initializer, shape, dtype, name), layout
    )


def is_computed_in_full(initializer: Callable[..., Any], dtype: str) -> bool:
    """Returns whether the host computes the full value of a sharded weight."""
    constant = _CONSTANTS.get(type(initializer))
    return not (
        (constant is not None and np.ndim(constant(initializer)) == 0)
        or random_tensors.is_known(initializer, tf.as_dtype(dtype))
    )


def _on_host(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: str,
    name: str,
) -> tf.Tensor:
    """Returns the result of an initializer, computed on the host."""
    with tf.init_scope(), tf.device("CPU:0"):
        value = initializer(shape, dtype=dtype)
        if tracing.on_mesh(value):
            value = tf.constant(transfer.to_host(value))
        value_dtype = (
            tf.as_dtype(value.dtype).name if tf.is_tensor(value) else dtype
        )
        value = tf.convert_to_tensor(
            value, None if tf.is_tensor(value) else dtype
        )
    if value_dtype != dtype or tuple(value.shape) != shape:
        raise ValueError(
            f"The initializer of variable {name!r} must return a {dtype} "
            f"tensor of shape {shape}. Received: a {value_dtype} tensor of "
            f"shape {tuple(value.shape)} from {initializer!r}. Cast and "
            "reshape the value in the initializer."
        )
    return value


def _filled(
    value: Any, shape: tuple[int, ...], dtype: str, layout: Layout
) -> Any:
    local = shard_shapes.local_shape(
        axes_of_layout(layout), shape, mesh_sizes(layout.mesh)
    )
    with tf.device("CPU:0"):
        value = tf.cast(value, dtype)
    components = []
    for device in layout.mesh.local_devices():
        with tf.device(device):
            components.append(tf.fill(local, value))
    return dtensor.pack(components, layout)


def _drawn(values: random_tensors.RandomTensor, layout: Layout) -> Any:
    """Computes each shard on its device."""
    prepare_process(layout.mesh)
    local = shard_shapes.local_shape(
        axes_of_layout(layout), values.shape, mesh_sizes(layout.mesh)
    )
    devices = layout.mesh.local_devices()
    # The op that draws the values runs on CPUs only. On a mesh of other
    # devices, the host computes one shard at a time.
    is_cpu = layout.mesh.device_type() == "CPU"
    components = [None] * len(devices)
    for shard in transfer.unique_shards(values.shape, layout):
        start = [slice_.start for slice_ in shard.slices]
        with tf.device(devices[shard.devices[0]] if is_cpu else "CPU:0"):
            block = values.block(start, local)
        for device in shard.devices:
            with tf.device(devices[device]):
                components[device] = tf.identity(block)
    return dtensor.pack(components, layout)


def make_variable(
    value: Any,
    *,
    name: str,
    trainable: bool,
    shape: tuple[int, ...] | None = None,
    **options: Any,
) -> Any:
    """Returns a `dtensor.DVariable` with the initial value `value`.

    Args:
      value: Initial value, a DTensor.
      name: Full name of the variable, including name scopes.
      trainable: Whether gradient tapes watch the variable.
      shape: Shape of the variable without padding. If the last rows of `value`
        are padding, the variable has fewer rows than `value`. None selects the
        shape of `value`.
      **options: `aggregation` and `synchronization`, as for `tf.Variable`.
    """
    # A name that ends with a slash is not added to the current name scope.
    options.update(name=f"{name}/", trainable=trainable)
    if shape is not None and shape != tuple(value.shape):
        return PaddedVariable.of(value, shape[0], **options)
    return StoredVariable(value, **options)
