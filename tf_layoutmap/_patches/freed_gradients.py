"""Gradients of `tf.custom_gradient`, freed with the graph that they are in."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private


def record(original: Callable[..., Any], f: Callable[..., Any], args: Any,
           kwargs: Any) -> Any:
    """What `tf.custom_gradient(f)` does while a graph is traced.

    TensorFlow keeps the gradient for as long as the process lives; with it the
    graph, and the memory of all variables that this reads. The training step
    of every Keras model has such a gradient, as sums over replicas are made
    with one: no such model would ever be freed, nor its tables.
    """
    results = original(f, args, kwargs)
    for one in tf.nest.flatten(results, expand_composites=True):
        # All that have gradients are results of one operation.
        if tf.is_symbolic_tensor(one) and (
                _tf_private.leave_gradient_to_graph(one.op)):
            break
    return results
