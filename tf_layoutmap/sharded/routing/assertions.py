"""Checks of tensors whose errors are plain sentences.

`tf.debugging.Assert` called eagerly puts "Expected 'tf.Tensor(False, shape=(),
dtype=bool)' to be true. Summarized data:" before its words.
"""

from typing import Any

import tensorflow as tf


def require(
    condition: Any,
    *words: Any,
    summarize: int = 3,
) -> list[tf.Operation]:
    """Raises an error when `condition` is false, now or when it runs.

    >>> with tf.control_dependencies(require(True, "Ids must be positive.")):
    ...     ids = tf.constant([1])
    >>> require(False, "Ids must be positive. Received: ", tf.constant([-1]))
    Traceback (most recent call last):
    ...
    tensorflow.python.framework.errors_impl.InvalidArgumentError: Ids must be \
    positive. Received: [-1]

    Args:
      condition: Bool scalar.
      words: Strings, and tensors whose values belong between them.
      summarize: How many values of each tensor are shown.

    Returns:
      The control inputs for what needs the condition; none eagerly.

    Raises:
      tf.errors.InvalidArgumentError: Eagerly, if it is false.
    """
    if not tf.executing_eagerly():
        return [tf.debugging.Assert(condition, list(words), summarize)]
    if not condition:
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            "".join(
                one if isinstance(one, str) else _summary(one, summarize)
                for one in words
            ),
        )
    return []


def _summary(tensor: Any, summarize: int) -> str:
    values = tf.reshape(tensor, [-1])
    shown = ", ".join(str(one) for one in values[:summarize].numpy().tolist())
    if not tf.convert_to_tensor(tensor).shape.rank:
        return shown
    return f"[{shown}{', ...' * (int(tf.size(values)) > summarize)}]"
