"""Marks, which stand for the gradients of a lookup in tape and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private


def may_be_recorded(weight: tf.Variable, training: Any) -> bool:
    """Whether a call is one that gradients may follow.

    Args:
      weight: Takes the marks.
      training: Of the call. What counts is whether a tape records, as for any
        other weight; a true value says that one will, where a `tf.function`
        is traced before.
    """
    if training:
        return True
    # `tf.recompute_grad` asks for the gradients of what its first run uses,
    # where no tape records.
    _tf_private.variable_accessed(weight)
    return _tf_private.could_possibly_record() and (
        _tf_private.should_record_backprop([tf.convert_to_tensor(weight)])
    )


def connect(
    follow: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    step: tf.Tensor,
    activations: Sequence[tf.Tensor],
    num_replicas: int,
) -> list[tf.Tensor]:
    """Returns the activations as something that depends on the step.

    Args:
      follow: Takes their gradients, and returns the mark of these, a float32
        tensor of the shape of `step`.
      step: Value of the weight that takes the marks, float32.
      activations: Of one lookup, one per feature.
      num_replicas: Replicas of the strategy.

    Returns:
      The same activations. The gradient of `step` is the mark, or not finite
      where a gradient is not.
    """

    @tf.custom_gradient
    def connected(step, *activations):
        def gradient(*gradients):
            gradients = [tf.convert_to_tensor(one) for one in gradients]
            mark = follow(gradients)
            one_or_nan = _mean_of_replicas(
                1 + tf.add_n([tf.reduce_sum(one * 0) for one in gradients]),
                num_replicas,
            )
            mark = tf.where(mark == 0, 0.0, mark * one_or_nan)
            return mark, *[None] * len(gradients)

        return [tf.identity(one) for one in activations], gradient

    activated: Any = connected(step, *activations)
    return activated


def _mean_of_replicas(value: tf.Tensor, num_replicas: int) -> tf.Tensor:
    """The mean over replicas, so that they take the step or none does.

    Keras looks for overflows in the first replica's gradients only.
    """
    if num_replicas == 1:
        return value
    return (
        tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, value
        )
        / num_replicas
    )
