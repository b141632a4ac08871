"""Functions that call TensorFlow's TPU embedding ops, one function per op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.tpu.batches import EnqueueLists

# The TPU compiler uses this attribute to match the operations of a step.
_NAME_ATTR = "_tpu_embedding_layer"
_SYSTEM = "/device:TPU_SYSTEM:0"


def is_initialized() -> bool:
    """Returns whether the TPU is already configured for an embedding."""
    return bool(tf.raw_ops.IsTPUEmbeddingInitialized())


def configure(config: bytes):
    """Initializes the TPU for an embedding."""

    def initialize():
        with tf.device(_SYSTEM):
            tf.raw_ops.ConfigureTPUEmbedding(config=config)

    tf.function(initialize, autograph=False)()


def enqueue(
    lists: EnqueueLists,
    *,
    mode: Any,
    ordinal: int,
    combiners: Sequence[str],
    name: str | None,
):
    """Enqueues the ids of one core from its host.

    Args:
      lists: Inputs of all features.
      mode: `"train"` or `"inference"`, as a string or a scalar string tensor.
      ordinal: Index of the core on its host, or -1 in a TPU program.
      combiners: Combiner of each table.
      name: Name that is equal in all operations of a step, or None.
    """
    op = tf.raw_ops.EnqueueTPUEmbeddingArbitraryTensorBatch(
        sample_indices_or_row_splits=lists.splits,
        embedding_indices=lists.ids,
        aggregation_weights=lists.weights,
        mode_override=mode,
        device_ordinal=ordinal,
        combiners=list(combiners),
    )
    _set_name(op, name)


def receive(num_features: int, config: bytes, name: str | None):
    """Returns the activations of the oldest step, one tensor per feature."""
    activations = tf.raw_ops.RecvTPUEmbeddingActivations(
        num_outputs=num_features, config=config
    )
    if not tf.executing_eagerly():
        _set_name(activations[0].op, name)
    return list(activations)


def send(
    gradients: Sequence[tf.Tensor],
    learning_rates: Sequence[tf.Tensor],
    config: bytes,
    name: str | None,
):
    """Sends the gradients of a step, one tensor per feature."""
    op = tf.raw_ops.SendTPUEmbeddingGradients(
        inputs=list(gradients),
        learning_rates=list(learning_rates),
        config=config,
    )
    _set_name(op, name)


def _set_name(op: tf.Operation | None, name: str | None):
    if op is not None and name is not None:
        value = attr_value_pb2.AttrValue(s=tf.compat.as_bytes(name))  # pyright: ignore[reportAttributeAccessIssue] Created at import time.
        tf_private.set_op_attr(op, _NAME_ATTR, value)
