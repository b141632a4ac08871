"""Turns the inputs of a step into the four lists the engine takes.

A feature may come dense, sparse or ragged. The engine tells them apart by
its `splits` (docs/ops.md), so that no form is converted into another. What
can be refused while tracing is refused here, with the feature's path; ids
and splits are validated by the engine, which is the one that does so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_weights
from tf_layoutmap.vocabulary import key_tensors

# Types that int64 holds without loss.
_ID_TYPES = (
    tf.int64,
    tf.int32,
    tf.int16,
    tf.int8,
    tf.uint32,
    tf.uint16,
    tf.uint8,
)


@dataclasses.dataclass
class FeatureIds:
    """One feature of one step.

    Attributes:
      ids: `[num_ids]`, an integer type.
      splits: int64: `[num_samples + 1]` row_splits, `[num_ids, 2]` indices of
        a sparse tensor, or `[0]` for a dense input.
      num_samples: int64 scalar tensor or a Python int.
      weights: `[num_ids]` float32, or `[0]` for 1 each.
      inner_shape: Into which sizes samples are divided after the first
        dimension: `[B]` samples have none, those of `[A, B, C]` have
        `(B, C)`. None in it where the size is only known at run time.
      kind: What ids that are keys were made of, of `key_tensors.KINDS`.
    """

    ids: tf.Tensor
    splits: tf.Tensor
    num_samples: Any
    weights: tf.Tensor
    inner_shape: tuple[int | None, ...] = ()
    kind: int = key_tensors.INTEGERS

    @property
    def static_num_samples(self) -> int | None:
        """The number of samples where it is known while tracing."""
        return self.num_samples if isinstance(self.num_samples, int) else None


def read_feature(
    feature: config.FeatureSpec,
    value: Any,
    weight: Any,
) -> FeatureIds:
    """Reads the input of one feature.

    Args:
      feature: Whose input it is.
      value: Ids: a `tf.Tensor` `[num_samples]` or `[..., ids per sample]`, a
        `tf.SparseTensor` of rank 2 or more, whose last dimension is combined
        too, or a `tf.RaggedTensor` of rank 2.
      weight: None, or the factors of the ids in the same form.

    Returns:
      The feature as the engine takes it; where its activations have other
      positions than samples, `sample_positions` lays them out.

    Raises:
      TypeError: If ids are not integers or weights not numbers.
      ValueError: If `value` is of no known type or rank, or `weight` does not
        go with it.
    """
    if weight is not None and feature.is_sequence:
        raise ValueError(
            f"Weight specified for sequence feature {feature.name!r}, which "
            "has no combiner to use it; pass None."
        )
    if isinstance(value, tf.SparseTensor):
        return _read_sparse(feature, value, weight)
    if isinstance(value, tf.RaggedTensor):
        return _read_ragged(feature, value, weight)
    if (
        tf.is_tensor(value)
        or isinstance(value, tf.Variable)
        or (hasattr(value, "__array__"))
    ):
        return _read_dense(feature, tf.convert_to_tensor(value), weight)
    raise ValueError(
        f"Input {feature.name!r} is of unknown type {type(value)}; pass a "
        "tf.Tensor, tf.SparseTensor or tf.RaggedTensor."
    )


def read_keys(
    feature: config.FeatureSpec,
    value: Any,
    weight: Any,
) -> FeatureIds:
    """Reads the input of a feature whose ids are keys, as `read_feature`.

    Strings are hashed.
    """
    keys, kind = key_tensors.of_input(value)
    found = read_feature(feature, keys, weight)
    return dataclasses.replace(found, kind=kind)


def unify_id_types(features: Sequence[FeatureIds]) -> None:
    """Gives the ids of all features one type: int32 if all have it."""
    if all(one.ids.dtype == tf.int32 for one in features):
        return
    for one in features:
        one.ids = tf.cast(one.ids, tf.int64)


def _read_dense(feature, value, weight) -> FeatureIds:
    if weight is not None:
        raise ValueError(
            f"Weight specified for dense input {feature.name!r}; only a "
            "tf.SparseTensor or tf.RaggedTensor has weights."
        )
    check_id_type(feature, value.dtype)
    # The last dimension is always the one that is reduced, so [B, K] has K
    # ids per sample and [B, 1] is the same as [B].
    if not value.shape.rank:
        raise ValueError(
            f"Dense input {feature.name!r} must be of shape [num_samples] or "
            "[..., ids per sample]. Received: shape "
            f"{value.shape}."
        )
    sizes = [
        _dimension(value, axis) for axis in range(max(value.shape.rank - 1, 1))
    ]
    return FeatureIds(
        ids=tf.reshape(value, [-1]),
        splits=tf.zeros([0], tf.int64),
        num_samples=_product(sizes),
        weights=_no_weights(),
        inner_shape=_inner_shape(sizes),
    )


def _read_weighted(feature, value, weight, kind, attribute):
    """Positions of the ids, by the name of `attribute`, and their weights."""
    positions = getattr(value, attribute)
    if weight is None:
        return positions, _no_weights()
    feature_weights.check_type(feature, value, weight, kind)
    weights = feature_weights.read_values(feature, value.values, weight.values)
    return feature_weights.same_positions(
        feature, attribute, positions, getattr(weight, attribute)
    ), weights


def _read_sparse(feature, value, weight) -> FeatureIds:
    check_id_type(feature, value.dtype)
    rank = value.shape.rank or 2
    if rank < 2:
        raise ValueError(
            f"Sparse input {feature.name!r} must be of rank 2 or more, [..., "
            f"ids per sample]. Received: shape {value.shape}."
        )
    indices, weights = _read_weighted(
        feature, value, weight, tf.SparseTensor, "indices"
    )
    sizes = [
        value.dense_shape[axis]
        if value.shape.rank is None or value.shape[axis] is None
        else value.shape[axis]
        for axis in range(rank - 1)
    ]
    if rank > 2:
        indices = _flat_samples(feature, indices, sizes)
    return FeatureIds(
        ids=value.values,
        splits=indices,
        num_samples=_product(sizes),
        weights=weights,
        inner_shape=_inner_shape(sizes),
    )


def _flat_samples(feature, indices, sizes):
    """Indices `[num_ids, 2]` of the samples numbered through all axes."""
    outside = tf.debugging.assert_less(
        indices[:, :-1],
        tf.stack([tf.cast(size, tf.int64) for size in sizes]),
        f"The indices of sparse input {feature.name!r} must be inside its "
        "shape.",
    )
    with tf.control_dependencies(feature_weights.ops_only([outside])):
        samples = indices[:, 0]
    for axis, size in enumerate(sizes[1:], 1):
        samples = samples * tf.cast(size, tf.int64) + indices[:, axis]
    return tf.stack([samples, indices[:, -1]], axis=1)


def _read_ragged(feature, value, weight) -> FeatureIds:
    check_id_type(feature, value.dtype)
    if value.ragged_rank != 1 or value.values.shape.rank != 1:
        raise ValueError(
            f"Ragged input {feature.name!r} must be of rank 2, [num_samples, "
            f"(ids)]. Received: shape {value.shape}."
        )
    row_splits, weights = _read_weighted(
        feature, value, weight, tf.RaggedTensor, "row_splits"
    )
    row_splits = tf.cast(row_splits, tf.int64)
    num_samples = _dimension(row_splits, 0) - 1
    return FeatureIds(
        ids=value.values,
        splits=row_splits,
        num_samples=num_samples,
        weights=weights,
    )


def _no_weights() -> tf.Tensor:
    return tf.zeros([0], tf.float32)


def _product(sizes: Sequence[Any]):
    """The product of sizes: an int if all are, else a scalar tensor."""
    if all(isinstance(size, int) for size in sizes):
        return math.prod(sizes)
    return tf.reduce_prod(tf.stack([tf.cast(one, tf.int64) for one in sizes]))


def _inner_shape(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in sizes[1:])


def _dimension(tensor: tf.Tensor, axis: int):
    """One dimension: an int where it is known, else a scalar tensor."""
    static = tensor.shape[axis]
    return static if static is not None else tf.shape(tensor, tf.int64)[axis]


def check_id_type(feature: config.FeatureSpec, dtype: tf.DType):
    """Raises a TypeError unless int64 holds all ids of this type."""
    if dtype in _ID_TYPES:
        return
    advice = ""
    if dtype == tf.string:
        advice = (
            " With `vocabularies={table: tlm.OpenVocabulary(capacity)}` "
            "a table takes strings, and any integers."
        )
    elif dtype.is_floating:
        advice = " Convert whole numbers by tf.cast(ids, tf.int64)."
    raise TypeError(
        f"Ids of feature {feature.name!r} must be integers of a type that "
        f"int64 holds. Received: {dtype.name}.{advice}"
    )
