"""Checks and warnings about TensorFlow's distribution strategies."""

import warnings
import weakref
from typing import Any

import tensorflow as tf

_knowing: "weakref.WeakSet[Any]" = weakref.WeakSet()
_warned: "weakref.WeakSet[Any]" = weakref.WeakSet()


class WrongSumsWarning(UserWarning):
    """A strategy whose sums leave replicas out."""


def on_servers(strategy: Any = None) -> bool:
    """Whether variables of a strategy are on parameter servers.

    Args:
      strategy: None for the one in scope.
    """
    return isinstance(
        tf.distribute.get_strategy() if strategy is None else strategy,
        (
            tf.distribute.ParameterServerStrategy,
            tf.distribute.experimental.ParameterServerStrategy,
        ),
    )


def register_our_ops(strategy: Any) -> None:
    """Notes that the servers of a strategy know the ops of this package."""
    _knowing.add(strategy)


def servers_know_our_ops() -> bool:
    """Whether those of the strategy in scope do, as far as is known."""
    return tf.distribute.get_strategy() in _knowing


def warn_of_wrong_sums(strategy: Any = None) -> None:
    """Warns, once, of a strategy that sums with HierarchicalCopyAllReduce.

    In TensorFlow 2.21 the sum of 3, 5 or 7 replicas lacks the last of them,
    without an error: 1 + 2 + 3 is 3.

    Args:
      strategy: None for the one in scope.
    """
    if strategy is None:
        strategy = tf.distribute.get_strategy()
    count = strategy.num_replicas_in_sync
    # Of a MirroredStrategy; others have none.
    ops = getattr(strategy.extended, "_cross_device_ops", None)
    if (
        count < 3
        or count % 2 == 0
        or strategy in _warned
        or not isinstance(ops, tf.distribute.HierarchicalCopyAllReduce)
    ):
        return
    _warned.add(strategy)
    warnings.warn(
        "TensorFlow's HierarchicalCopyAllReduce leaves the last replica out "
        f"of sums over {count} replicas, without an error, and with it the "
        "gradients of its samples. Make the MirroredStrategy with "
        "cross_device_ops=tf.distribute.ReductionToOneDevice(), or without "
        "that argument.",
        WrongSumsWarning,
        stacklevel=3,
    )
