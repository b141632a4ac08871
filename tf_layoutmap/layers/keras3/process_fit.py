"""`fit`, `evaluate` and `predict` of Keras 3 in several processes.

Under `MultiWorkerMirroredStrategy`, two functions of Keras 3.15 raise an error.
Before the first step, Keras computes the mean of the batches of all replicas
outside of a `tf.function`, and after each step, Keras reduces axis 0 of the
metrics, which are scalars. The functions of this module replace both. All other
strategies use the functions of Keras.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._patches import engine


def enable_in_processes() -> None:
    """Installs the patches if the current strategy has several processes."""
    if _has_processes(tf.distribute.get_strategy()):
        engine.ensure("keras3_processes")


def build_with_local_batch(
    original: Any, model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Builds a model with the batch of the first replica of this process.

    The function replaces `_maybe_symbolic_build` of Keras' trainer. Keras uses
    only the shapes and the dtypes of the batch.

    Args:
      original: The function of Keras.
      model: The model.
      iterator: Epoch iterator of Keras, or None.
      data_batch: Batch with which the model is built if `iterator` is None.
    """
    if iterator is not None and _has_processes(model.distribute_strategy):
        iterator = _local_batches(iterator, model.distribute_strategy)
    original(model, iterator=iterator, data_batch=data_batch)


def reduce_metrics(
    original: Any, values: Any, strategy: Any, reduction: Any
) -> Any:
    """Returns the mean of the metrics over the replicas of all processes.

    The function replaces `reduce_per_replica` of Keras' trainer. Keras averages
    axis 0 of each metric in addition to the replicas.

    Args:
      original: The function of Keras.
      values: Nested structure of tensors or values per replica.
      strategy: Strategy of the model.
      reduction: Reduction of Keras. `"auto"` and `"mean"` are means over the
        replicas; other reductions call `original`.
    """
    if not _has_processes(strategy) or reduction not in ("auto", "mean"):
        return original(values, strategy, reduction)
    return keras.tree.map_structure(
        lambda value: strategy.reduce("MEAN", value, axis=None), values
    )


def _has_processes(strategy: Any) -> bool:
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def _local_batches(
    epoch: Any, strategy: tf.distribute.Strategy
) -> Iterator[tuple[Any, Any, Iterator[Any]]]:
    """Yields the steps of an epoch with the batches of one local replica."""

    def first(value: Any) -> Any:
        return strategy.experimental_local_results(value)[0]

    for begin, end, batches in epoch:
        yield begin, end, (tf.nest.map_structure(first, one) for one in batches)
