"""The TPU's embedding operations, one function each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.tpu.batches import EnqueueLists

# By which the TPU's compiler pairs the operations of a step.
_NAME_ATTR = "_tpu_embedding_layer"
_SYSTEM = "/device:TPU_SYSTEM:0"


def is_initialized() -> bool:
    """Whether the TPU has been configured for some embedding already."""
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
    """Hands the ids of one core over, from its host.

    Args:
      lists: Of all features.
      mode: String, or scalar string tensor: `"train"` or `"inference"`.
      ordinal: Number of the core on its host; -1 in a TPU's program.
      combiners: One per table.
      name: Which operations belong together.
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
    found = tf.raw_ops.RecvTPUEmbeddingActivations(
        num_outputs=num_features, config=config
    )
    if not tf.executing_eagerly():
        _set_name(found[0].op, name)
    return list(found)


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
        value = attr_value_pb2.AttrValue(s=tf.compat.as_bytes(name))  # pyright: ignore[reportAttributeAccessIssue] Made when it is imported.
        tf_private.set_op_attr(op, _NAME_ATTR, value)
