"""`pack`: makes one matrix of the ids of all features of a batch."""

# DOC-MERGE: A batch of all features as one matrix: what it is, and how it is read.
#
# A row is a sample: a mark, the number of ids of each feature, and the ids of
# all features one after the other. Datasets, strategies and Keras carry and
# divide it as any batch. The mark says which features were packed, in which
# order: ids of others are refused, not looked up. `packing.py` makes it.
#
from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding.spec import config


@dataclasses.dataclass(frozen=True)
class PackedIds:
    """A packed batch as the engine takes it.

    Attributes:
      ids: `[num_samples, num_columns]` int64.
      weights: The same of float32, or `[0]` for 1 each.
      num_samples: int64 scalar tensor or a Python int.
      mark: What each sample must begin with.
    """

    ids: tf.Tensor
    weights: tf.Tensor
    num_samples: Any
    mark: int

    @property
    def given(self) -> list[tf.Tensor]:
        """The tensors that came: ids, and weights if there are any."""
        return [self.ids] + [self.weights] * self.is_weighted

    @property
    def is_weighted(self) -> bool:
        """Whether weights came with the ids."""
        return self.weights.shape.rank == 2


def packed_mark_of(paths: Sequence[str]) -> int:
    """Returns what marks a batch of the features at these paths."""
    digest = hashlib.blake2b("\n".join(paths).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big", signed=True)


def is_packed(value: Any, feature_config: Any) -> bool:
    """Whether `value` stands for all features: one tensor for a structure."""
    if not tf.nest.is_nested(feature_config) or tf.nest.is_nested(value):
        return False
    return isinstance(value, (tf.Tensor, tf.Variable)) or (
        hasattr(value, "__array__")
    )


def read_packed(features: Any, weights: Any, feature_config: Any) -> PackedIds:
    """Reads a packed batch, as the engine takes it.

    Raises:
      TypeError: If it is not of int64.
      ValueError: If it cannot be of these features, or `weights` were not
        packed with it.
    """
    paths = [
        path for path, _ in embedding_inputs.flatten_with_paths(feature_config)
    ]
    ids = tf.convert_to_tensor(features)
    columns = None if ids.shape.rank != 2 else ids.shape[1]
    if ids.shape.rank not in (None, 2) or (
        columns is not None and columns < 1 + len(paths)
    ):
        raise ValueError(
            "Argument `features` must have the structure of `feature_config`, "
            f"whose leaves are {paths}, or be a batch that `tlm.pack` made of "
            f"them: [num_samples, {1 + len(paths)} or more]. Received: a "
            f"tensor of shape {ids.shape}."
        )
    if ids.dtype != tf.int64:
        raise TypeError(
            "A packed batch must be of int64, as `tlm.pack` makes it. "
            f"Received: {ids.dtype.name}."
        )
    factors = tf.zeros([0], tf.float32)
    if weights is not None:
        if tf.nest.is_nested(weights) or not ids.shape.is_compatible_with(
            getattr(weights, "shape", tf.TensorShape([]))
        ):
            raise ValueError(
                "Argument `weights` of a packed batch must be what `tlm.pack` "
                f"returned with it, of shape {ids.shape}. Received: "
                f"{weights!r}."
            )
        factors = tf.ensure_shape(tf.cast(weights, tf.float32), [None, None])
    num_samples = ids.shape[0] if ids.shape.rank == 2 else None
    if num_samples is None:
        num_samples = tf.shape(ids, tf.int64)[0]
    return PackedIds(ids, factors, num_samples, packed_mark_of(paths))


def packed_placeholders(
    packed: PackedIds, num_features: int
) -> list[tf.RaggedTensor]:
    """Returns for each feature a tensor of its kind and number of samples."""
    one = tf.ragged.range(tf.zeros([packed.num_samples], tf.int64))
    if isinstance(packed.num_samples, int):
        one.row_splits.set_shape([packed.num_samples + 1])
    return [one] * num_features


def unpack_ids(
    specs: Sequence[config.FeatureSpec],
    packed: PackedIds,
) -> tuple[list[tf.RaggedTensor], list[tf.RaggedTensor | None]]:
    """Returns ids and weights of each feature, by stock operations only.

    A packed batch of other features is an `InvalidArgumentError` when it runs.
    """
    num_samples, num_columns = tf.unstack(tf.shape(packed.ids, tf.int64))
    sizes = packed.ids[:, 1 : 1 + len(specs)]
    ends = 1 + len(specs) + tf.cumsum(sizes, axis=1)
    names = [one.name for one in specs]
    with _held_to(
        [
            tf.debugging.assert_equal(
                packed.ids[:, 0],
                tf.constant(packed.mark, tf.int64),
                "A packed batch must have been packed from a structure with "
                "the paths of this embedding's feature_config, whose features "
                f"are {names}.",
            ),
            tf.debugging.assert_non_negative(
                sizes,
                "A packed batch: the numbers of ids of its features "
                "must be at least 0.",
            ),
            tf.debugging.assert_less_equal(
                ends,
                num_columns,
                "A packed batch: all ids must be in its columns.",
            ),
        ]
    ):
        ends += tf.range(num_samples)[:, tf.newaxis] * num_columns
        starts = ends - sizes
    ids, weights = [], []
    for column, spec in enumerate(specs):
        places = tf.ragged.range(starts[:, column], ends[:, column])
        # Samples that are known while tracing stay known.
        if isinstance(packed.num_samples, int):
            places.row_splits.set_shape([packed.num_samples + 1])
        found = places.with_values(
            tf.gather(tf.reshape(packed.ids, [-1]), places.values)
        )
        factors = (
            places.with_values(
                tf.gather(tf.reshape(packed.weights, [-1]), places.values)
            )
            if packed.is_weighted
            else None
        )
        if factors is not None and spec.is_sequence:
            with _held_to(
                [
                    tf.debugging.assert_equal(
                        factors.values,
                        1.0,
                        f"Feature {spec.name!r}: a sequence "
                        "feature takes no weights.",
                    )
                ]
            ):
                found = found.with_values(tf.identity(found.values))
            factors = None
        ids.append(found)
        weights.append(factors)
    return ids, weights


def _held_to(checks: list[Any]) -> Any:
    """A scope whose operations run only where the checks pass."""
    return tf.control_dependencies(embedding_inputs.ops_only(checks))


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
    named = embedding_inputs.flatten_with_paths(features)
    paths = [path for path, _ in named]
    inputs = [
        _read(path, value, weight)
        for (path, value), weight in zip(
            named,
            embedding_inputs.flatten_weights(
                weights, features, like="features"
            ),
        )
    ]
    found = ops.pack_ids(
        ids=[tf.cast(one.ids, tf.int64) for one in inputs],
        splits=[one.splits for one in inputs],
        num_samples=tf.stack(
            [tf.cast(one.num_samples, tf.int64) for one in inputs]
        ),
        weights=[one.weights for one in inputs],
        names=paths,
        mark=packed_mark_of(paths),
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


def _known_columns(inputs: list[embedding_inputs.FeatureIds]) -> int | None:
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


def _read(path: str, value: Any, weight: Any) -> embedding_inputs.FeatureIds:
    """One feature as `feature_inputs` reads it, sparse ones as ragged."""
    feature = config.FeatureSpec(path, 0, 0)
    if isinstance(value, tf.SparseTensor):
        if value.shape.rank not in (None, 2):
            raise _wrong_rank(path, value)
        if isinstance(weight, tf.SparseTensor):
            # The checks of sparse weights, before both become ragged.
            embedding_inputs.read_feature(feature, value, weight)
            weight = tf.RaggedTensor.from_sparse(weight)
        value = tf.RaggedTensor.from_sparse(value)
    inputs = embedding_inputs.read_feature(feature, value, weight)
    if inputs.inner_shape:
        raise _wrong_rank(path, value)
    return inputs


def _wrong_rank(path: str, value: Any) -> ValueError:
    return ValueError(
        f"Feature {path!r} of a packed batch must be of shape [num_samples] "
        f"or [num_samples, ids per sample]. Received: shape {value.shape}."
    )
