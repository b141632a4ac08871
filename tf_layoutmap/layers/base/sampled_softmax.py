"""Sampled softmax over the keys of an open vocabulary.

The functions implement the estimator of Blanc and Rendle, "Adaptive Sampled
Softmax with Kernel Based Sampling" (ICML 2018, arXiv:1712.00527), which is the
importance sampling of Bengio and Senecal (2003, 2008) with the label itself in
the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.layers.base.sharded_embedding import EmbeddingCore
from tf_layoutmap.vocabulary import key_tensors, sampling

if TYPE_CHECKING:
    from tf_layoutmap._core import literals
    from tf_layoutmap._core.types import TensorLike


def sampled_softmax_loss(
    table: EmbeddingCore,
    labels: TensorLike,
    inputs: TensorLike,
    num_sampled: int | tf.Tensor,
    *,
    distribution: literals.SampleDistribution = "count",
    seed: TensorLike | None = None,
    transform_fn: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tf.Tensor:
    """Returns the sampled softmax loss of each sample over the keys of a table.

    The loss approximates the cross entropy of a softmax over all keys of the
    table, and computes the logits of the labels and of `num_sampled` negatives.
    The function is similar to `tf.nn.sampled_softmax_loss`, for keys instead of
    row indices.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> items = tlm.layers.ShardedEmbedding(
    ...     tlm.vocabulary.OpenVocabulary(100), 2,
    ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
    >>> _ = items(np.array(["hat"]))
    >>> _ = items.vocabulary.write(["hat", "bag"], [[1., 0.], [0., 1.]])
    >>> loss = tlm.ops.sampled_softmax_loss(
    ...     items, tf.constant(["hat"]), [[1., 0.]], 1000, seed=[1, 2])
    >>> full = np.log(np.exp(1.) + np.exp(0.)) - 1.
    >>> bool(abs(loss[0] - full) < 0.05)
    True

    The function samples keys by `tlm.ops.sample_keys`, looks up the labels and
    the samples in one call of the layer, and calls
    `tlm.ops.sampled_softmax_from_vectors`, which documents the formula. Inside
    a training step, the call is a training step of the vocabulary: labels can
    get rows, and the lookups of sampled keys also count as uses.

    The loss is 0 for a label that has no row after the lookup, for example
    because it was not admitted.

    Args:
      table: A built `tlm.layers.ShardedEmbedding` with an open vocabulary.
      labels: `[batch_size]` integers or strings, one label per sample.
      inputs: `[batch_size, dim]` floats, for example the outputs of a user
        tower.
      num_sampled: Number of keys to sample for the batch, at least 1.
      distribution: Same as for `tlm.ops.sample_keys`.
      seed: Same as for `tlm.ops.sample_keys`.
      transform_fn: Function from rows `[num_keys, output_dim]` to vectors
        `[num_keys, dim]`, for example an item tower. None: the rows are the
        vectors.

    Returns:
      `[batch_size]` losses, in the dtype of the vectors.

    Raises:
      TypeError, ValueError: If an argument is invalid, or the layer has no open
        vocabulary.
      AttributeError: If the layer is not built.
    """
    if not isinstance(table, EmbeddingCore):
        raise TypeError(
            checks.message(
                "table",
                "a tlm.layers.ShardedEmbedding; with a tlm.TPUEmbedding, use "
                "`tlm.ops.sampled_softmax_from_vectors`",
                table,
            )
        )
    vocabulary = table.vocabulary
    if vocabulary is None:
        raise ValueError(
            checks.message(
                "table",
                "a layer with a tlm.vocabulary.OpenVocabulary; with row "
                "indices, use `tf.nn.sampled_softmax_loss`",
                f"layer {table.name!r} with input_dim={table.input_dim}",
            )
        )
    label_ids = _as_tensor(labels)
    _check_rank("labels", label_ids, 1)
    sampled = sampling.sample_keys(
        vocabulary, num_sampled, distribution=distribution, seed=seed
    )
    layer: Any = table
    vectors = layer(sampled.ids(label_ids))
    # The lookup decides which labels have a row.
    with tf.control_dependencies([vectors]):
        has_row = vocabulary.contains(label_ids)
    if transform_fn is not None:
        vectors = transform_fn(vectors)
    num_labels = tf.shape(label_ids)[0]
    losses = sampled_softmax_from_vectors(
        label_ids, inputs, vectors[:num_labels], vectors[num_labels:], sampled
    )
    return tf.where(has_row, losses, tf.zeros_like(losses))


def sampled_softmax_from_vectors(
    labels: TensorLike,
    inputs: TensorLike,
    label_vectors: TensorLike,
    sampled_vectors: TensorLike,
    sampled: sampling.SampledKeys,
) -> tf.Tensor:
    """Returns the sampled softmax loss of each sample, from looked up vectors.

    Use this function if a `tlm.TPUEmbedding` looks up the labels and the
    samples, for example with several replicas, processes or servers.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> every_key = tlm.ops.SampledKeys(
    ...     keys=tf.constant([5, 7], tf.int64),
    ...     rows=tf.constant([0, 1], tf.int64),
    ...     expected_counts=tf.ones([2]))
    >>> vectors = tf.constant([[1., 0.], [0., 1.]])
    >>> loss = tlm.ops.sampled_softmax_from_vectors(
    ...     [5], [[1., 0.]], vectors[:1], vectors, every_key)
    >>> bool(abs(loss[0] - (np.log(np.exp(1.) + np.exp(0.)) - 1.)) < 1e-6)
    True

    Let o[k] be the logit of key k, the dot product of its vector and the input.
    For the label y and the samples s, the loss is `log(Z) - o[y]`, with

        Z = exp(o[y]) + sum over i with s[i] != y of
            exp(o[s[i]] - log(expected_counts[i])).

    Subtracting the log of the expected count is the logQ correction. The
    expectation of Z is the denominator of the full softmax, for any
    probabilities of the samples, because samples that equal the label
    (accidental hits) are left out and the logit of the label is not corrected.
    Because of the logarithm, the loss and its gradients are unbiased in the
    limit of many samples. For a finite number of samples, the expected loss is
    at most the full softmax loss (Jensen's inequality), and its bias decreases
    with the number of samples. The formula is in Blanc and Rendle, "Adaptive
    Sampled Softmax with Kernel Based Sampling" (arXiv:1712.00527).

    `tf.nn.sampled_softmax_loss` also corrects the logit of the label, and
    therefore requires the probability of the label, which is 0 for a label that
    does not have a row yet.

    Args:
      labels: `[batch_size]` integers or strings, one label per sample.
      inputs: `[batch_size, dim]` floats.
      label_vectors: `[batch_size, dim]`, the vectors of the labels.
      sampled_vectors: `[num_sampled, dim]`, the vectors of the sampled keys.
      sampled: The result of `tlm.ops.sample_keys`.

    Returns:
      `[batch_size]` losses, in the dtype of the vectors.

    Raises:
      TypeError: If `sampled` is not a `SampledKeys`, or `labels` are neither
        integers nor strings.
      ValueError: If a tensor has the wrong rank.
    """
    checks.check_type(
        "sampled",
        sampled,
        sampling.SampledKeys,
        "the result of tlm.ops.sample_keys",
    )
    keys, _ = key_tensors.read_keys(labels, "labels of a sampled softmax")
    label_vectors = _as_tensor(label_vectors)
    sampled_vectors = _as_tensor(sampled_vectors)
    inputs = _as_tensor(inputs, label_vectors.dtype)
    _check_rank("labels", keys, 1)
    _check_rank("inputs", inputs, 2)
    _check_rank("label_vectors", label_vectors, 2)
    _check_rank("sampled_vectors", sampled_vectors, 2)
    label_logits = tf.reduce_sum(inputs * label_vectors, axis=1)
    log_q = tf.cast(tf.math.log(sampled.expected_counts), inputs.dtype)
    logits = tf.matmul(inputs, sampled_vectors, transpose_b=True) - log_q
    is_label = keys[:, tf.newaxis] == sampled.keys[tf.newaxis, :]
    logits = tf.where(
        is_label, tf.constant(-float("inf"), logits.dtype), logits
    )
    every = tf.concat([label_logits[:, tf.newaxis], logits], axis=1)
    return tf.reduce_logsumexp(every, axis=1) - label_logits


def _as_tensor(value: Any, dtype: tf.DType | None = None) -> tf.Tensor:
    return tf.convert_to_tensor(value, dtype)


def _check_rank(argument: str, value: tf.Tensor, rank: int) -> None:
    if value.shape.rank not in (None, rank):
        raise ValueError(
            checks.message(argument, f"of rank {rank}", value.shape)
        )
