"""Checks the gradients of a step and asks for its learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf
from absl import logging

from tf_layoutmap.embedding.spec import config


def read_gradient(
    feature: config.FeatureSpec,
    gradient: Any,
    shape: tf.TensorShape,
) -> tf.Tensor:
    """Returns the gradient of one feature as a tensor.

    Args:
      feature: Whose activations it is the gradient of.
      gradient: A float32 tensor, or the `tf.IndexedSlices` that a gather in
        the model gives.
      shape: Static shape of the activations.

    Raises:
      ValueError: If it is no tensor, or of another type or shape.
    """
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
    if not tf.is_tensor(gradient) or not isinstance(gradient, tf.Tensor):
        raise ValueError(
            f"Found {type(gradient)} at path {feature.name!r} of "
            "`gradients`; a gradient must be a tf.Tensor or None."
        )
    if gradient.dtype != tf.float32:
        raise ValueError(
            f"Found gradient of type {gradient.dtype.name} at path "
            f"{feature.name!r}; it must be float32, as the activations."
        )
    if not shape.is_compatible_with(gradient.shape):
        raise ValueError(
            f"Found gradient of shape {gradient.shape} at path "
            f"{feature.name!r}. Expected shape {shape}."
        )
    return gradient


def zero_gradient(feature: config.FeatureSpec, shape: Sequence[Any]):
    """Returns zeros in place of a missing gradient, and says so."""
    logging.warning(
        "No gradient passed for feature %s, sending zero gradient. Its rows "
        "still count as looked up, which moves them under an optimizer with "
        "momentum.",
        feature.name,
    )
    if all(isinstance(size, int) for size in shape):
        return tf.zeros(shape)
    return tf.zeros(tf.stack([tf.cast(size, tf.int64) for size in shape]))


def hyperparameters(tables: Sequence[config.TableSpec]) -> list[tf.Tensor]:
    """Returns each table's float32 vector: learning rate, then constants.

    A callable that several tables share is called once.
    """
    asked: list[tuple[Any, tf.Tensor]] = []
    vectors = []
    for table in tables:
        optimizer = table.optimizer
        if optimizer is None:
            vectors.append(tf.zeros([0]))
            continue
        rate = optimizer.learning_rate
        if optimizer.has_dynamic_rate:
            known = [value for other, value in asked if other == rate]
            if not known:
                known = [ask_learning_rate(rate, table)]
                asked.append((rate, known[0]))
            rate = known[0]
        vectors.append(
            tf.stack(
                [tf.cast(cast("float", rate), tf.float32), *optimizer.constants]
            )
        )
    return vectors


def ask_learning_rate(rate: Any, table: config.TableSpec) -> tf.Tensor:
    """Calls a dynamic learning rate; a float32 scalar.

    Raises:
      ValueError: If it gives no number; `table` is named.
    """
    value = rate()
    if value is None:
        raise ValueError(
            "A dynamic learning rate must give a number. Received: None "
            f"(table {table.name!r})."
        )
    if not tf.executing_eagerly() and not (
        tf.is_tensor(value) or isinstance(value, tf.Variable)
    ):
        logging.warning(
            "The dynamic learning rate of table %s gave the Python value %s "
            "while a tf.function was traced: it stays so in this function. "
            "Return a tensor computed from a tf.Variable.",
            table.name,
            value,
        )
    value = tf.convert_to_tensor(value)
    if value.shape.rank not in (0, None) or not (
        value.dtype.is_floating or value.dtype.is_integer
    ):
        raise ValueError(
            "A dynamic learning rate must give a number. Received: "
            f"{value.dtype.name} of shape {value.shape} (table "
            f"{table.name!r})."
        )
    return tf.cast(value, tf.float32)
