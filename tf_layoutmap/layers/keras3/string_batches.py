"""Batches of strings in the steps of a Keras 3 model on several replicas.

Before the first step, Keras builds a model with the batches of the replicas.
Keras computes their mean, which TensorFlow does not support for strings. Only
the shapes and the dtypes of the batch matter, so `build_with_first_replica`
builds the model with the batch of one replica instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def build_with_first_replica(
    original: Any, model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Builds a model, also if its batches contain strings.

    The function replaces `_maybe_symbolic_build` of Keras' trainer.

    Args:
      original: The function of Keras.
      model: The model.
      iterator: Epoch iterator of Keras, or None.
      data_batch: Batch with which the model is built if `iterator` is None.
    """
    # Keras reads the iterator only if the model was created in the scope of a
    # strategy.
    if iterator is not None and model.distribute_strategy is not None:
        iterator = _Epochs(iterator, model.distribute_strategy)
    original(model, iterator=iterator, data_batch=data_batch)


class _Epochs:
    """An epoch iterator whose string batches are batches of one replica."""

    def __init__(self, iterator: Any, strategy: tf.distribute.Strategy):
        self._iterator = iterator
        self._strategy = strategy

    def __iter__(self) -> Iterator[tuple[Any, Any, Iterator[Any]]]:
        for begin, end, batches in self._iterator:
            yield begin, end, self._without_replicas(batches)

    def _without_replicas(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            first = tf.nest.map_structure(self._of_first_replica, batch)
            yield first if _has_strings(first) else batch

    def _of_first_replica(self, value: Any) -> Any:
        return self._strategy.experimental_local_results(value)[0]


def _has_strings(batch: Any) -> bool:
    return any(
        getattr(value, "dtype", None) == tf.string
        for value in tf.nest.flatten(batch)
    )
