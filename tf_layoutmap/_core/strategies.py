"""Checks and warnings about TensorFlow's distribution strategies.

The module also defines the host, the device of the tables and of the kernels of
this package.
"""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import tensorflow as tf

# The first CPU of the process whose device is in scope.
HOST = "/device:CPU:0"

P = ParamSpec("P")
T = TypeVar("T")

_with_our_ops: "weakref.WeakSet[Any]" = weakref.WeakSet()
_warned: "weakref.WeakSet[Any]" = weakref.WeakSet()


class WrongSumsWarning(UserWarning):
    """Warning that sums of a strategy omit the values of some replicas."""


def on_host(function: Callable[P, T]) -> Callable[P, T]:
    """Returns a function whose operations run on the host.

    TensorFlow places stock operations on a GPU by default, and copies their
    inputs to it. Operations whose inputs and results are on the host must
    therefore be created on the host.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with tf.device(HOST):
            return function(*args, **kwargs)

    return wrapped


def on_servers(strategy: Any = None) -> bool:
    """Returns whether a strategy places variables on parameter servers.

    Args:
      strategy: Strategy to check; None for the strategy in scope.
    """
    return isinstance(
        tf.distribute.get_strategy() if strategy is None else strategy,
        (
            tf.distribute.ParameterServerStrategy,
            tf.distribute.experimental.ParameterServerStrategy,
        ),
    )


def has_processes(strategy: Any) -> bool:
    """Returns whether the replicas of a strategy are in several processes.

    The result is False for a `MultiWorkerMirroredStrategy` with one process.

    Args:
      strategy: Strategy to check, or None.
    """
    return isinstance(
        strategy, tf.distribute.MultiWorkerMirroredStrategy
    ) and strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)


def register_our_ops(strategy: Any) -> None:
    """Records that the servers of a strategy have the ops of this package."""
    _with_our_ops.add(strategy)


def servers_know_our_ops() -> bool:
    """Returns whether the servers have the ops of this package.

    The result is True after `register_our_ops` was called for the strategy in
    scope.
    """
    return tf.distribute.get_strategy() in _with_our_ops


def check_no_replicas(user: str) -> None:
    """Checks that the strategy in scope does not split batches over replicas.

    Args:
      user: What requires unsplit batches, for the message.

    Raises:
      RuntimeError: If the strategy in scope has several replicas.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise RuntimeError(
            "A mesh must be used outside of the scope of a tf.distribute "
            "strategy with several replicas, because an axis of the mesh "
            f"shards batches. Received: {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas ({user}). Remove "
            "`strategy.scope()`, or create and compile the model before it."
        )


def handle_of(variable: Any) -> tf.Tensor:
    """Returns the handle of a variable, in any context of its strategy.

    Args:
      variable: A `tf.Variable`, or a distributed variable. Outside of replicas,
        TensorFlow returns no handle of a distributed variable, also if the
        strategy has only one replica.
    """
    if isinstance(variable, tf.distribute.DistributedValues):
        copies = cast("Any", variable).values
        if len(copies) == 1:
            return copies[0].handle
    return variable.handle


def warn_of_wrong_sums(strategy: Any = None) -> None:
    """Warns once if a strategy uses HierarchicalCopyAllReduce.

    In TensorFlow 2.21, this algorithm computes a wrong sum over 3, 5 or 7
    replicas without an error, because it omits the last replica. For example,
    the sum of 1, 2 and 3 is 3.

    Args:
      strategy: Strategy to check; None for the strategy in scope.
    """
    if strategy is None:
        strategy = tf.distribute.get_strategy()
    count = strategy.num_replicas_in_sync
    # Only a MirroredStrategy has this attribute.
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
        "TensorFlow's HierarchicalCopyAllReduce omits the last replica, and "
        f"the gradients of its samples, from sums over {count} replicas "
        "without an error. Create the MirroredStrategy with "
        "cross_device_ops=tf.distribute.ReductionToOneDevice(), or without "
        "that argument.",
        WrongSumsWarning,
        stacklevel=3,
    )
