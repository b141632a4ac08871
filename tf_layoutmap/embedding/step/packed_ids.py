"""A batch of all features as one matrix: what it is, and how it is read.

A row is a sample: a mark, the number of ids of each feature, and the ids of
all features one after the other. Datasets, strategies and Keras carry and
divide it as any batch. The mark says which features were packed, in which
order: ids of others are refused, not looked up. `packing.py` makes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_weights, structure


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


def mark_of(paths: Sequence[str]) -> int:
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


def read(features: Any, weights: Any, feature_config: Any) -> PackedIds:
    """Reads a packed batch, as the engine takes it.

    Raises:
      TypeError: If it is not of int64.
      ValueError: If it cannot be of these features, or `weights` were not
        packed with it.
    """
    paths = [path for path, _ in structure.flatten_with_paths(feature_config)]
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
    return PackedIds(ids, factors, num_samples, mark_of(paths))


def stand_ins(packed: PackedIds, num_features: int) -> list[tf.RaggedTensor]:
    """Returns for each feature a tensor of its kind and number of samples."""
    one = tf.ragged.range(tf.zeros([packed.num_samples], tf.int64))
    if isinstance(packed.num_samples, int):
        one.row_splits.set_shape([packed.num_samples + 1])
    return [one] * num_features


def unpack(
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
    return tf.control_dependencies(feature_weights.ops_only(checks))
