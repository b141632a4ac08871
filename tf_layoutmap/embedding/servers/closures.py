"""The token of the closure that is being traced.

A coordinator runs a closure again whose worker has died. Its token tells the
servers that it is the same one, and they apply what they have not applied.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.servers.applied_closures import AppliedClosures

# Of a step without a closure: epoch, number, attempt.
_NONE = (0, -1, 0)


@dataclasses.dataclass
class Closure:
    """What is known of a closure while it is traced.

    Attributes:
      token: int64 `[3]`: epoch, number, and an attempt that no other run of
        the closure has.
      applied: What the servers of each embedding record that the closure has
        applied gradients of; one for each call of `apply_gradients` so far.
      num_enqueued: Calls of `enqueue` for training so far.
    """

    token: tf.Tensor
    applied: list[AppliedClosures] = dataclasses.field(default_factory=list)
    num_enqueued: int = 0


# Of the graph of the function that is the closure. Threads of replicas and
# functions inside of it are in graphs below.
_ATTRIBUTE = "_tf_layoutmap_closure"


def begin(numbers: tf.Tensor) -> Closure:
    """Makes the function being traced a closure.

    Args:
      numbers: int64 `[2]`: epoch, from 1 on, and number of the closure.
    """
    # Each run of the function asks for the time once.
    attempt = tf.bitcast(tf.timestamp(), tf.int64)
    closure = Closure(
        tf.concat(
            [tf.cast(numbers, tf.int64), tf.reshape(attempt, [1])], axis=0
        )
    )
    setattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, closure)
    return closure


def token_to_apply(applied: AppliedClosures) -> tf.Tensor:
    """Returns the token of the closure around, of number -1 if there is none.

    Args:
      applied: What the servers of the embedding record.
    """
    closure = _closure_around()
    if closure is None:
        return tf.constant(_NONE, tf.int64)
    closure.applied.append(applied)
    return closure.token


def note_enqueued() -> None:
    """Counts a batch that the closure around enqueues for training."""
    closure = _closure_around()
    if closure is not None:
        closure.num_enqueued += 1


def token_to_fetch() -> tf.Tensor:
    """Returns the token that a closure looks keys up with, as above."""
    closure = _closure_around()
    return tf.constant(_NONE, tf.int64) if closure is None else closure.token


def _closure_around() -> Closure | None:
    for graph in _tf_private.graphs_around():
        closure = getattr(graph, _ATTRIBUTE, None)
        if closure is not None:
            return closure
    return None
