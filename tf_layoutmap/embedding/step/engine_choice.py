"""Which engine carries an embedding out."""

from __future__ import annotations

import tensorflow as tf

from tf_layoutmap import _strategies

ENGINES = ("auto", "tpu", "host")

# How tables are kept in several processes.
OVER_PROCESSES = ("copied", "divided")
# How the gradients of a row are summed where tables are divided.
ORDERS = ("exact", "folded")


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
            f"Received: engine={engine!r}."
        )
    on_tpu = is_tpu(strategy)
    if engine == "host" and on_tpu:
        raise ValueError(
            'Argument `engine` must be "auto" or "tpu" under TPUStrategy: '
            "a TPU's program cannot call the host engine. Received: "
            f"engine={engine!r}."
        )
    if _strategies.on_servers(strategy):
        if engine != "auto":
            raise ValueError(
                'Argument `engine` must be "auto" under '
                "ParameterServerStrategy, where the tables are on its servers."
                f" Received: engine={engine!r}."
            )
        return "servers"
    if engine == "auto":
        return "tpu" if on_tpu else "host"
    return engine


def check_over_processes(over_processes: str, order: str, has_processes: bool):
    """Refuses what is none of `OVER_PROCESSES` or `ORDERS`, or needs processes.

    Raises:
      ValueError: If so.
    """
    if over_processes not in OVER_PROCESSES:
        raise ValueError(
            f"Argument `over_processes` must be one of {OVER_PROCESSES}. "
            f"Received: over_processes={over_processes!r}."
        )
    if order not in ORDERS:
        raise ValueError(
            f"Argument `order` must be one of {ORDERS}. "
            f"Received: order={order!r}."
        )
    if order != "exact" and over_processes != "divided":
        raise ValueError(
            'Argument `order` must be "exact" unless over_processes='
            f'"divided". Received: order={order!r}.'
        )
    if over_processes != "copied" and not has_processes:
        raise ValueError(
            'Argument `over_processes` must be "copied" unless under '
            "MultiWorkerMirroredStrategy, whose processes tables are divided "
            f"among. Received: over_processes={over_processes!r} under "
            f"{type(tf.distribute.get_strategy()).__name__}."
        )


def is_tpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy is a TPUStrategy, of the new or the old class."""
    return isinstance(
        strategy,
        (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
    )
