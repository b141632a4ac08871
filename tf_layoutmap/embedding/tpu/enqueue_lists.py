"""Turns the inputs of a step into the parallel lists of the enqueue op.

It tells dense, sparse and ragged inputs apart by the rank and length of the
first list. Ids go in as 64 bits and are looked up as 32, sample numbers as
32: what is known to be too big is refused here, the rest by `id_checks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs, feature_weights

_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass
class EnqueueLists:
    """Inputs of the enqueue op, one entry per feature.

    Attributes:
      splits: int32: `[num_ids, rank]` indices of a sparse input,
        `[num_samples + 1]` row_splits of a ragged one, `[0]` of a dense one.
      ids: `[num_ids]` int64.
      weights: `[num_ids]` float32, or `[0]` for 1 each.
    """

    splits: list[tf.Tensor] = dataclasses.field(default_factory=list)
    ids: list[tf.Tensor] = dataclasses.field(default_factory=list)
    weights: list[tf.Tensor] = dataclasses.field(default_factory=list)


def convert(feature: config.FeatureSpec, value: Any) -> Any:
    """Returns an input as one of the three kinds of tensor.

    Raises:
      TypeError: If its ids are not integers that int64 holds.
      ValueError: If it is something else.
    """
    if not isinstance(value, (tf.SparseTensor, tf.RaggedTensor, tf.Tensor)):
        if not (isinstance(value, tf.Variable) or hasattr(value, "__array__")):
            raise ValueError(
                f"Input {feature.name!r} is of unknown type {type(value)}; "
                "pass a tf.Tensor, tf.SparseTensor or tf.RaggedTensor."
            )
        value = tf.convert_to_tensor(value)
    feature_inputs.check_id_type(feature, value.dtype)
    return value


def check_weight(feature: config.FeatureSpec, value: Any, weight: Any):
    """Refuses weights that do not go with their ids.

    Raises:
      TypeError: If they are not numbers.
      ValueError: If they are of another kind or number, or there can be none.
    """
    if weight is None:
        return
    if feature.is_sequence:
        raise ValueError(
            f"Weight specified for sequence feature {feature.name!r}, which "
            "has no combiner to use it; pass None."
        )
    if isinstance(value, tf.Tensor):
        raise ValueError(
            f"Weight specified for dense input {feature.name!r}; only a "
            "tf.SparseTensor or tf.RaggedTensor has weights."
        )
    feature_weights.check(feature, value, weight)


def read_lists(
    features: Sequence[config.FeatureSpec],
    values: Sequence[Any],
    weights: Sequence[Any],
) -> EnqueueLists:
    """Reads the checked inputs of one core."""
    found = EnqueueLists()
    # Shared by all features that have nothing to say.
    no_splits = tf.zeros([0], tf.int32)
    no_weights = tf.zeros([0], tf.float32)
    for feature, value, weight in zip(features, values, weights):
        if isinstance(value, tf.SparseTensor):
            splits, ids = _sparse_indices(feature, value), value.values
        elif isinstance(value, tf.RaggedTensor):
            splits, ids = value.row_splits, value.values
        else:
            splits, ids = no_splits, tf.reshape(value, [-1])
        found.splits.append(tf.cast(splits, tf.int32))
        found.ids.append(tf.cast(ids, tf.int64))
        found.weights.append(
            no_weights if weight is None else tf.cast(weight.values, tf.float32)
        )
    return found


def _sparse_indices(feature, value: tf.SparseTensor) -> tf.Tensor:
    for axis, size in enumerate(value.shape.as_list()):
        if size is not None and size > _MAX_INT32:
            raise ValueError(
                "A TPU holds the indices of a sparse tensor in 32 bits. "
                f"Received: shape {value.shape}, axis {axis} (input "
                f"{feature.name!r})."
            )
    indices = tf.cast(value.indices, tf.int32)
    if value.shape.rank == 2:
        if feature.is_sequence:
            # The position is a dimension of the output, and one id is
            # combined at each.
            indices = tf.pad(indices, [[0, 0], [0, 1]])
    elif feature.is_sequence:
        logging.warning(
            "`max_sequence_length` of feature %s is ignored: its input is of "
            "rank %d, and sequences are of rank 2.",
            feature.name,
            value.shape.rank,
        )
    return indices
