"""Creates the DVariable of a weight from its initializer and layout.

The module creates the initial values in one of three ways:

* Each device fills its shard with a constant.
* With `init="sharded"`, each device draws its shard with a random initializer
  of Keras.
* In all other cases, the host computes the initial value and then shards it.
"""

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.layout.mesh import (
    device_mesh,
    shard_shapes,
    tracing,
    transfer,
)
from tf_layoutmap.layout.mesh.device_mesh import (
    Layout,
    axes_of_layout,
    mesh_sizes,
)
from tf_layoutmap.layout.mesh.variable import PaddedVariable, StoredVariable
from tf_layoutmap.layout.ops import random_ops

dtensor = tf.experimental.dtensor

# "sharded": every device draws its own shard, so no device holds a full weight.
# "host": the weight is drawn on the host and then sharded; its values are
# bitwise identical to the values of a model without a mesh.
INITS = ("sharded", "host")

_CONSTANTS = {
    keras.initializers.Zeros: lambda _: 0,
    keras.initializers.Ones: lambda _: 1,
    keras.initializers.Constant: lambda i: i.value,
}

# Maps (initializer, shape, dtype, layout) to a function. All weights that
# differ only in their seed share one function, because the compilation of a
# function takes 50 to 100 ms.
_drawn: dict[tuple, Callable[..., Any]] = {}
_drawn_lock = threading.Lock()


class SeedArgument(keras.random.SeedGenerator):
    """A SeedGenerator that returns a given seed tensor."""

    def __init__(self, seed: Any):
        self._seed = seed

    def next(self, ordered: bool = True) -> Any:
        return self._seed


def initial_value(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: str,
    layout: Layout,
    init: str,
) -> Any:
    """Returns the initial value of a variable, on the mesh of `layout`.

    Args:
      initializer: Callable; `initializer(shape, dtype=dtype)` returns the full
        value.
      shape: Shape of the full variable. Rows of padding are added if `layout`
        does not divide the number of rows evenly.
      dtype: Keras' name of the dtype.
      layout: `dtensor.Layout` of the variable.
      init: One of INITS. If it is "sharded" and DTensor cannot partition the
        initializer, the host computes the value.

    Returns:
      An eager DTensor.
    """
    constant = _CONSTANTS.get(type(initializer))
    if constant is not None and np.ndim(constant(initializer)) == 0:
        return _filled(constant(initializer), shape, dtype, layout)
    if (
        init == "sharded"
        and not layout.is_fully_replicated()
        and (type(initializer).__module__.startswith("keras."))
    ):
        value = _drawn_on_mesh(initializer, shape, dtype, layout)
        if value is not None:
            return value
    return transfer.padded_to_mesh(
        on_host(lambda: initializer(shape, dtype=dtype)), layout
    )


def on_host(make: Callable[[], Any]) -> Any:
    """Calls `make` on the host and returns the result as an eager tensor."""
    with tf.init_scope(), tf.device("CPU:0"):
        value = make()
        if tracing.on_mesh(value):
            return tf.convert_to_tensor(transfer.to_host(value))
        return tf.convert_to_tensor(value)


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


def _drawn_on_mesh(
    initializer: Any, shape: tuple[int, ...], dtype: str, layout: Layout
) -> Any:
    """Draws each shard on its device; returns None if this is not possible."""
    if not isinstance(initializer, keras_private.RandomInitializer) or (
        isinstance(initializer, keras_private.Orthogonal)
    ):
        return None
    padded = shard_shapes.padded_rows(
        axes_of_layout(layout), shape, mesh_sizes(layout.mesh)
    )
    if padded != shape and isinstance(
        initializer, keras.initializers.VarianceScaling
    ):
        # The variance of the initial values depends on the shape, so padding
        # would change it.
        return None
    shape = padded
    seed = initializer.seed
    if isinstance(seed, int):
        seed = np.array([seed, 0])
    else:
        seed = on_host(seed.next).numpy()
    draw = _draw_function(initializer, shape, dtype, layout)
    replicated = dtensor.Layout.replicated(layout.mesh, 1)
    seed = transfer.to_mesh(seed.astype(np.int64), replicated)
    with device_mesh.grappler_disabled():
        return dtensor.call_with_layout(draw, layout, seed)


def _draw_function(
    initializer: Any, shape: tuple[int, ...], dtype: str, layout: Layout
) -> Callable[..., Any]:
    config = {k: v for k, v in initializer.get_config().items() if k != "seed"}
    key = (
        type(initializer),
        json.dumps(config, sort_keys=True, default=repr),
        shape,
        dtype,
        layout.to_string(),
    )
    with _drawn_lock:
        if key not in _drawn:
            template = copy.copy(initializer)
            template.seed = None

            # `call_with_layout` applies the layout to the result of a function,
            # but not to its intermediate tensors. Without the function, the
            # layout would apply to every intermediate tensor.
            @tf.function(autograph=False)
            def draw(seed: Any) -> Any:
                drawing = copy.copy(template)
                drawing.seed = SeedArgument(seed)
                with random_ops.sharded_draws():
                    return tf.cast(drawing(shape, dtype=dtype), dtype)

            _drawn[key] = draw
        return _drawn[key]


def make_variable(
    value: Any,
    *,
    name: str,
    trainable: bool,
    shape: tuple[int, ...] | None = None,
) -> Any:
    """Returns a `dtensor.DVariable` with the initial value `value`.

    Args:
      value: Initial value, a DTensor.
      name: Name of the variable.
      trainable: Whether gradient tapes watch the variable.
      shape: Shape of the variable without padding. If the last rows of `value`
        are padding, the variable has fewer rows than `value`. None selects the
        shape of `value`.
    """
    if shape is not None and shape != tuple(value.shape):
        return PaddedVariable.of(
            value, shape[0], name=name, trainable=trainable
        )
    return StoredVariable(value, name=name, trainable=trainable)
