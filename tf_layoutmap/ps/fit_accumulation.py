"""Accumulation of gradients by optimizers of Keras 3 on parameter servers.

The accumulated gradients and the step counter are variables on the servers. An
optimizer reads and writes them in separate operations, so only one worker may
train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import accumulation, keras_private
from tf_layoutmap.ps import processes


def condition_of(model: Any) -> Callable[[], tf.Tensor] | None:
    """Returns a function that computes whether the next step applies gradients.

    Args:
      model: Compiled model.

    Returns:
      A function without arguments that returns a bool scalar. None if the
      optimizer of the model does not accumulate gradients.

    Raises:
      ValueError: If several workers would accumulate gradients, or if the
        optimizer also scales the loss.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if not steps:
        return None
    num_workers = processes.count_workers()
    if num_workers > 1 or inner is not optimizer:
        reason = (
            "because several workers would read and write the accumulated "
            f"gradients at the same time. Received: {num_workers} workers"
            if inner is optimizer
            else "if the optimizer scales the loss. Received: "
            f"{type(optimizer).__name__}"
        )
        raise ValueError(
            "Argument `gradient_accumulation_steps` of the optimizer must be "
            f"None on parameter servers, {reason} and "
            f"gradient_accumulation_steps={steps}. Use larger batches."
        )
    counter = keras_private.step_counter_of(optimizer)
    return lambda: tf.equal((counter.value + 1) % steps, 0)


def apply_gradients(
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any],
) -> None:
    """Accumulates gradients, or applies the mean of accumulated gradients.

    Keras' method is called if the optimizer does not accumulate gradients, or
    for the mean.
    """
    applies = accumulation.fixed_value()
    if applies is None or not optimizer.gradient_accumulation_steps:
        original(optimizer, grads, trainable_variables)
        return
    sums = keras_private.accumulated_gradients(optimizer, trainable_variables)
    grads = [grad + before for grad, before in zip(grads, sums)]
    if not applies:
        _assign_all(sums, grads)
        keras_private.update_averages(optimizer)
        return
    steps = optimizer.gradient_accumulation_steps
    optimizer.gradient_accumulation_steps = None
    try:
        original(
            optimizer, [grad / steps for grad in grads], trainable_variables
        )
    finally:
        optimizer.gradient_accumulation_steps = steps
    _assign_all(sums, [tf.zeros(total.shape, total.dtype) for total in sums])


def _assign_all(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assigns values in a replica, where Keras' `assign` raises an error."""

    def update(strategy: Any, *values: Any) -> None:
        for variable, value in zip(variables, values):
            strategy.extended.update(
                variable.value,
                lambda stored, new: stored.assign(tf.cast(new, stored.dtype)),
                args=(value,),
                group=False,
            )

    context = tf.distribute.get_replica_context()
    assert context is not None  # Optimizers run in replicas.
    context.merge_call(update, args=tuple(values))
