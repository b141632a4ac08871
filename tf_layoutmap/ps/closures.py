"""A step of a run, as the function that a coordinator schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tf_layoutmap.embedding.servers import closures

_APPLY = "LayoutMap>ApplyRows"


def make_closure(body: Callable[[Any], Any]) -> Any:
    """Returns a `tf.function` of an iterator and the numbers of a closure.

    Args:
      body: Takes the iterator of a worker; what it calls is traced anew: a
        trace of elsewhere knows of no closure.
    """
    @tf.function
    def closure(iterator, numbers):
        state = closures.begin(numbers)
        result = body(iterator)
        _check_tokens(state)
        return result

    return closure


def step_of_batch(strategy: Any, step_fn: Callable[..., Any]) -> Callable:
    """Returns the body of a closure that takes a step with the next batch.

    Args:
      strategy: A ParameterServerStrategy.
      step_fn: Takes a batch; may be a `tf.function`.
    """
    traced = getattr(step_fn, "python_function", step_fn)
    return lambda iterator: strategy.run(traced, args=(next(iterator),))


@tf.autograph.experimental.do_not_convert
def _check_tokens(state: closures.Closure):
    """Refuses a step whose updates would not be told from their repetition.

    Warns of one that has none.

    Raises:
      ValueError: If gradients are applied by a function that was traced
        before, outside of this closure.
    """
    if state.num_applied:
        return
    graph = tf.compat.v1.get_default_graph().as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function
                            for node in function.node_def)]
    if any(node.op == _APPLY for node in nodes):
        raise ValueError(
            "Argument `step_fn` must apply the gradients of a TPUEmbedding in "
            "functions that were not traced before; call it, and what it "
            "calls, without tf.function. Received: a step that calls a "
            "function with a trace from elsewhere.")
    if state.num_enqueued:
        logging.warning(
            "The step enqueues for training and applies no gradients: closures "
            "will count, and the tables of the TPUEmbedding stay as they are. "
            "Call `apply_gradients`, or `enqueue(..., training=False)`.")
