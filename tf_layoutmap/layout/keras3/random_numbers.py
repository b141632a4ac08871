"""Random numbers of a step on a mesh: the same as without one.

DTensor gives each part of a divided random tensor a seed of its own, so the
draw would change with the mesh. Here every device draws the whole of it from
the same seed, and uses its part.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.mesh import pinning, trace_context


def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draws as `original` does, on a mesh the same numbers everywhere."""
    mesh = trace_context.mesh_of_trace()
    numbers = original(*args, **kwargs)
    # The first values of weights are drawn in pieces on purpose.
    if mesh is None or isinstance(
            kwargs.get("seed"), initial_values.SeedArgument):
        return numbers
    return pinning.whole(numbers, mesh)


def dropout(original: Callable[..., Any], inputs: Any, rate: float,
            noise_shape: Any = None, seed: Any = None) -> Any:
    """Sets a part `rate` of the inputs to zero and scales up the others.

    On a mesh from numbers of our own `draw`: TensorFlow's function makes
    numbers and mask in one, and DTensor would divide the numbers like the
    inputs.
    """
    if trace_context.mesh_of_trace() is None or not 0.0 < rate < 1.0 or (
            not tf.is_symbolic_tensor(inputs) or
            not inputs.shape.is_fully_defined()):
        return original(inputs, rate, noise_shape, seed)
    shape = tuple(
        size if wanted is None else wanted for size, wanted in zip(
            inputs.shape, noise_shape or (None,) * inputs.shape.rank))
    numbers: Any = keras.random.uniform(shape, dtype=inputs.dtype, seed=seed)
    return tf.where(
        numbers >= tf.cast(rate, inputs.dtype),
        inputs * tf.cast(1 / (1 - rate), inputs.dtype),
        tf.zeros([], inputs.dtype))
