"""`pack`: makes one matrix of the ids of all features of a batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs, packed_ids, structure


def pack(
    features: Any, weights: Any = None, *, num_columns: int | None = None
) -> Any:
    """Packs the ids of all features of a batch into one tensor.

    `enqueue` of `tlm.TPUEmbedding` and the layer `tlm.layers.TPUEmbedding`
    take it in place of the structure it was made of. To call a function with
    many ragged or sparse tensors can take TensorFlow longer than to look them
    up; packed they are one dense tensor, which `fit` divides among the
    replicas of a strategy, too. Best done where batches are made:

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> batches = tf.data.Dataset.from_tensor_slices(
    ...     {"item": [3, 1], "words": [[7, 8], [9, 9]]}).batch(2)
    >>> packed = next(iter(batches.map(tlm.pack)))
    >>> packed[:, 1:].numpy().tolist()
    [[1, 2, 3, 7, 8], [1, 2, 1, 9, 9]]

    Args:
      features: Structure of the feature config. Each leaf is a batch of
        integer ids: a `tf.Tensor` `[num_samples]` or `[num_samples, ids per
        sample]`, or a `tf.SparseTensor` or `tf.RaggedTensor` of rank 2. A
        sparse one has the ids of a sample in its first places.
      weights: None, or the same structure with None or the factors of the
        ids, in the sparse or ragged form of the ids.
      num_columns: None for as many as the batch needs; or a number that fits
        all batches, where shapes must be known: on a TPU.

    Returns:
      `[num_samples, num_columns]` int64, of each sample: a mark of which
      features these are, the number of ids of each feature, the ids of all
      features, and zeros. With weights two tensors, the ids and `[num_samples,
      num_columns]` float32. Batches may be divided and joined along their
      samples; nothing else in them may be changed.

    Raises:
      TypeError: If ids are not integers that int64 holds, or weights not
        numbers.
      ValueError: If `features` is no structure, or a leaf of it is of another
        kind or rank, or `weights` do not go with them.
      tf.errors.InvalidArgumentError: If features differ in their number of
        samples, or a sample needs more columns than `num_columns`.
    """
    if not tf.nest.is_nested(features) or not tf.nest.flatten(features):
        raise ValueError(
            "Argument `features` must be a structure of at least one feature; "
            "a single tensor needs no packing. Received: "
            f"{features!r}."
        )
    named = structure.flatten_with_paths(features)
    paths = [path for path, _ in named]
    inputs = [
        _read(path, value, weight)
        for (path, value), weight in zip(
            named, structure.flatten_weights(weights, features, like="features")
        )
    ]
    found = _ops.pack_ids(
        ids=[tf.cast(one.ids, tf.int64) for one in inputs],
        splits=[one.splits for one in inputs],
        num_samples=tf.stack(
            [tf.cast(one.num_samples, tf.int64) for one in inputs]
        ),
        weights=[one.weights for one in inputs],
        names=paths,
        mark=packed_ids.mark_of(paths),
        num_columns=num_columns or _known_columns(inputs) or 0,
        weighted=weights is not None,
    )
    known = [
        one.static_num_samples
        for one in inputs
        if one.static_num_samples is not None
    ]
    # Of a batch whose size is known while tracing, it stays known.
    packed = tf.ensure_shape(found.packed, [known[0] if known else None, None])
    if weights is None:
        return packed
    return packed, tf.ensure_shape(found.packed_weights, packed.shape)


def _known_columns(inputs: list[feature_inputs.FeatureIds]) -> int | None:
    """How many columns dense features need, whatever their ids."""
    columns = 1 + len(inputs)
    for one in inputs:
        size = one.ids.shape[0]
        if (
            one.splits.shape != [0]
            or size is None
            or (not one.static_num_samples)
        ):
            return None
        columns += size // one.static_num_samples
    return columns


def _read(path: str, value: Any, weight: Any) -> feature_inputs.FeatureIds:
    """One feature as `feature_inputs` reads it, sparse ones as ragged."""
    feature = config.FeatureSpec(path, 0, 0)
    if isinstance(value, tf.SparseTensor):
        if value.shape.rank not in (None, 2):
            raise _wrong_rank(path, value)
        if isinstance(weight, tf.SparseTensor):
            # The checks of sparse weights, before both become ragged.
            feature_inputs.read_feature(feature, value, weight)
            weight = tf.RaggedTensor.from_sparse(weight)
        value = tf.RaggedTensor.from_sparse(value)
    inputs = feature_inputs.read_feature(feature, value, weight)
    if inputs.inner_shape:
        raise _wrong_rank(path, value)
    return inputs


def _wrong_rank(path: str, value: Any) -> ValueError:
    return ValueError(
        f"Feature {path!r} of a packed batch must be of shape [num_samples] "
        f"or [num_samples, ids per sample]. Received: shape {value.shape}."
    )
