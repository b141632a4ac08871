"""Assertions about tensors with readable error messages.

In eager code, the message of `tf.debugging.Assert` begins with "Expected
'tf.Tensor(False, shape=(), dtype=bool)' to be true. Summarized data:".
"""

from typing import Any

import tensorflow as tf


def require(
    condition: Any,
    *words: Any,
    summarize: int = 3,
) -> list[tf.Operation]:
    """Raises an error if `condition` is false, in eager code or in a graph.

    >>> with tf.control_dependencies(require(True, "Ids must be positive.")):
    ...     ids = tf.constant([1])
    >>> require(False, "Ids must be positive. Received: ", tf.constant([-1]))
    Traceback (most recent call last):
    ...
    tensorflow.python.framework.errors_impl.InvalidArgumentError: Ids must be \
    positive. Received: [-1]

    Args:
      condition: Bool scalar.
      words: Parts of the message: strings, and tensors, whose values are
        inserted.
      summarize: Maximum number of values of each tensor in the message.

    Returns:
      The control inputs of all ops that require the condition. The list is
      empty in eager code.

    Raises:
      tf.errors.InvalidArgumentError: If `condition` is false, in eager code.
    """
    if not tf.executing_eagerly():
        return [tf.debugging.Assert(condition, list(words), summarize)]
    if not condition:
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            "".join(
                word if isinstance(word, str) else _summary(word, summarize)
                for word in words
            ),
        )
    return []


def _summary(tensor: Any, summarize: int) -> str:
    values = tf.reshape(tensor, [-1])
    shown = ", ".join(
        str(value) for value in values[:summarize].numpy().tolist()
    )
    if not tf.convert_to_tensor(tensor).shape.rank:
        return shown
    return f"[{shown}{', ...' * (int(tf.size(values)) > summarize)}]"
