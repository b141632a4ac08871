"""Which engine carries an embedding out."""

from __future__ import annotations

import tensorflow as tf

from tf_layoutmap import _strategies

ENGINES = ("auto", "tpu", "host")


def choose(engine: str, strategy: tf.distribute.Strategy) -> str:
    """Returns `"tpu"`, `"servers"` or `"host"`.

    Args:
      engine: `"auto"`: the TPU under TPUStrategy, the servers under
        ParameterServerStrategy, else the host.
      strategy: The one in scope.

    Raises:
      ValueError: If `engine` is none of `ENGINES`, or cannot run under the
        strategy.
    """
    if engine not in ENGINES:
        raise ValueError(
            f"Argument `engine` must be one of {ENGINES}. "
            f"Received: engine={engine!r}.")
    on_tpu = is_tpu(strategy)
    if engine == "host" and on_tpu:
        raise ValueError(
            "Argument `engine` must be \"auto\" or \"tpu\" under TPUStrategy: "
            "a TPU's program cannot call the host engine. Received: "
            f"engine={engine!r}.")
    if _strategies.on_servers(strategy):
        if engine != "auto":
            raise ValueError(
                "Argument `engine` must be \"auto\" under "
                "ParameterServerStrategy, where the tables are on its servers."
                f" Received: engine={engine!r}.")
        return "servers"
    if engine == "auto":
        return "tpu" if on_tpu else "host"
    return engine


def is_tpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy is a TPUStrategy, of the new or the old class."""
    return isinstance(strategy, (
        tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy))
