"""`pack`: stores the ids of all features of a batch in one matrix.

Each row of the matrix contains one sample: a mark, the number of ids of each
feature, and the ids of all features, concatenated. If the ids of a feature are
strings, the matrix contains their hashes, and the bitwise complement of the
number of ids, which is negative. Datasets, strategies and Keras can split the
matrix like any batch. The mark identifies the packed features and their order.
If the features do not match the embedding, the lookup raises an error.
`read_packed` reads the matrix, and `unpack_ids` converts it to ragged tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.sharded.routing import assertions
from tf_layoutmap.vocabulary import key_tensors

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Features


@dataclasses.dataclass(frozen=True)
class PackedIds:
    """A packed batch in the form that the engine requires.

    Attributes:
      ids: `[num_samples, num_columns]` int64.
      weights: `[num_samples, num_columns]` float32, or `[0]` if all weights
        are 1.
      num_samples: int64 scalar tensor or a Python int.
      mark: Mark with which each sample must start.
    """

    ids: tf.Tensor
    weights: tf.Tensor
    num_samples: Any
    mark: int

    @property
    def given(self) -> list[tf.Tensor]:
        """A list with the ids, and with the weights if weights were passed."""
        return [self.ids] + [self.weights] * self.is_weighted

    @property
    def is_weighted(self) -> bool:
        """Whether weights were passed with the ids."""
        return self.weights.shape.rank == 2


def packed_mark_of(paths: Sequence[str]) -> int:
    """Returns the mark for a packed batch of the features at `paths`."""
    digest = hashlib.blake2b("\n".join(paths).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big", signed=True)


def is_packed(value: Any, feature_config: Any) -> bool:
    """Whether `value` is a single tensor and the config is a structure."""
    if not tf.nest.is_nested(feature_config) or tf.nest.is_nested(value):
        return False
    return isinstance(value, (tf.Tensor, tf.Variable)) or (
        hasattr(value, "__array__")
    )


def read_packed(features: Any, weights: Any, feature_config: Any) -> PackedIds:
    """Reads a packed batch.

    Raises:
      TypeError: If `features` is not int64.
      ValueError: If the shape of `features` does not match `feature_config`, or
        if the shape of `weights` does not match `features`.
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
            f"whose leaves are {paths}, or be a batch that `tlm.pack` "
            f"returned for them: [num_samples, {1 + len(paths)} or more]. "
            f"Received: a tensor of shape {ids.shape}."
        )
    if ids.dtype != tf.int64:
        raise TypeError(
            "A packed batch must have dtype int64, as `tlm.pack` returns it. "
            f"Received: {ids.dtype.name}."
        )
    factors = tf.zeros([0], tf.float32)
    if weights is not None:
        if tf.nest.is_nested(weights) or not ids.shape.is_compatible_with(
            getattr(weights, "shape", tf.TensorShape([]))
        ):
            raise ValueError(
                "Argument `weights` of a packed batch must be the weights "
                "that `tlm.pack` returned with it, of shape "
                f"{ids.shape}. Received: {weights!r}."
            )
        factors = tf.ensure_shape(tf.cast(weights, tf.float32), [None, None])
    num_samples = ids.shape[0] if ids.shape.rank == 2 else None
    if num_samples is None:
        num_samples = tf.shape(ids, tf.int64)[0]
    return PackedIds(ids, factors, num_samples, packed_mark_of(paths))


def packed_placeholders(
    packed: PackedIds, num_features: int
) -> list[tf.RaggedTensor]:
    """Returns a ragged tensor with `num_samples` empty rows per feature."""
    empty = tf.ragged.range(tf.zeros([packed.num_samples], tf.int64))
    if isinstance(packed.num_samples, int):
        empty.row_splits.set_shape([packed.num_samples + 1])
    return [empty] * num_features


def unpack_ids(
    specs: Sequence[config.FeatureSpec],
    packed: PackedIds,
    has_keys: Sequence[bool] | None = None,
) -> tuple[
    list[tf.RaggedTensor | key_tensors.PackedKeys],
    list[tf.RaggedTensor | None],
]:
    """Unpacks ids and weights with TensorFlow's own operations only.

    If the batch was packed from other features, or if it has strings for a
    table without an open vocabulary, the operations raise an
    `InvalidArgumentError` when they run.

    Args:
      specs: Features, in the order of the packed batch.
      packed: Packed batch.
      has_keys: For each feature, whether its table has an open vocabulary. The
        result contains `PackedKeys` for these features. None: no feature has
        keys.

    Returns:
      Ids and weights of each feature.
    """
    num_samples, num_columns = tf.unstack(tf.shape(packed.ids, tf.int64))
    stored = packed.ids[:, 1 : 1 + len(specs)]
    is_string = stored < 0
    sizes = tf.where(is_string, tf.bitwise.invert(stored), stored)
    is_open = tf.constant(list(has_keys or [False] * len(specs)))
    ends = 1 + len(specs) + tf.cumsum(sizes, axis=1)
    names = [spec.name for spec in specs]
    with _after_checks(
        [
            tf.debugging.assert_equal(
                packed.ids[:, 0],
                tf.constant(packed.mark, tf.int64),
                "A packed batch must have been packed from a structure with "
                "the paths of this embedding's feature_config, whose features "
                f"are {names}.",
            ),
            *assertions.require(
                tf.reduce_all(is_open | tf.logical_not(is_string)),
                "A packed batch must hold numbers of ids that are at least 0. "
                "A negative number marks strings, which only a table with an "
                "open vocabulary accepts. Features whose tables have no open "
                "vocabulary: ",
                ", ".join(
                    repr(spec.name)
                    for spec, is_key in zip(
                        specs, has_keys or [False] * len(specs)
                    )
                    if not is_key
                )
                or "none",
                ".",
            ),
            *assertions.require(
                tf.reduce_all(is_string == is_string[:1]),
                "A packed batch must hold, for each feature, either integers "
                "in all samples or strings in all samples.",
            ),
            tf.debugging.assert_less_equal(
                ends,
                num_columns,
                "A packed batch must hold all ids inside its columns.",
            ),
        ]
    ):
        ends += tf.range(num_samples)[:, tf.newaxis] * num_columns
        starts = ends - sizes
        kinds = tf.where(
            num_samples == 0,
            0,
            tf.where(
                tf.reduce_any(is_string, axis=0),
                key_tensors.STRINGS,
                key_tensors.INTEGERS,
            ),
        )
    ids, weights = [], []
    for column, spec in enumerate(specs):
        places = tf.ragged.range(starts[:, column], ends[:, column])
        # Sets the static number of samples if it is known.
        if isinstance(packed.num_samples, int):
            places.row_splits.set_shape([packed.num_samples + 1])
        values = places.with_values(
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
            with _after_checks(
                [
                    tf.debugging.assert_equal(
                        factors.values,
                        1.0,
                        f"Feature {spec.name!r}: a sequence feature does not "
                        "support weights.",
                    )
                ]
            ):
                values = values.with_values(tf.identity(values.values))
            factors = None
        if has_keys is not None and has_keys[column]:
            ids.append(key_tensors.PackedKeys(values, kinds[column]))
        else:
            ids.append(values)
        weights.append(factors)
    return ids, weights


def _after_checks(checks: list[Any]) -> Any:
    """Returns a scope whose operations run only if the checks pass."""
    return tf.control_dependencies(embedding_inputs.ops_only(checks))


@overload
def pack(
    features: Features, weights: None = None, *, num_columns: int | None = None
) -> tf.Tensor: ...


@overload
def pack(
    features: Features, weights: Features, *, num_columns: int | None = None
) -> tuple[tf.Tensor, tf.Tensor]: ...


def pack(
    features: Features,
    weights: Features | None = None,
    *,
    num_columns: int | None = None,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Packs the ids of all features of a batch into one tensor.

    `enqueue` of `tlm.TPUEmbedding` and the layer `tlm.layers.TPUEmbedding`
    accept the packed tensor in place of the structure. A packed batch is a
    single dense tensor, which a dataset stores and copies in less time than
    many ragged or sparse tensors. `fit` can split this tensor over the replicas
    of a strategy. Call `pack` in the input pipeline:

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> batches = tf.data.Dataset.from_tensor_slices(
    ...     {"item": [3, 1], "words": [[7, 8], [9, 9]]}).batch(2)
    >>> packed = next(iter(batches.map(tlm.pack)))
    >>> packed[:, 1:].numpy().tolist()
    [[1, 2, 3, 7, 8], [1, 2, 1, 9, 9]]

    Args:
      features: Ids in the structure of the feature config: integers, or strings
        for tables with open vocabularies. Strings are hashed, and the packed
        batch contains the hashes. Each leaf is a `tf.Tensor` `[num_samples]` or
        `[num_samples, ids per sample]`, or a `tf.SparseTensor` or
        `tf.RaggedTensor` of rank 2. In a sparse tensor, the ids of a sample
        must be in consecutive columns, from column 0.
      weights: None, or the same structure in which each leaf is None or the
        weights of the ids. The weights have the same sparse or ragged form as
        the ids.
      num_columns: Number of columns of the packed tensor, which must be
        sufficient for all batches. If None, each batch has the number of
        columns that it requires. On a TPU, `num_columns` must be set, because a
        TPU requires static shapes.

    Returns:
      The packed ids, `[num_samples, num_columns]` int64. Each sample contains a
      mark that identifies the features, the number of ids of each feature (its
      bitwise complement if the ids are strings), the ids of all features, and
      zeros. If `weights` are passed, a tuple of the
      packed ids and the packed weights, `[num_samples, num_columns]` float32.
      Programs can split and concatenate packed batches along the first axis,
      but must not change their values.

    Raises:
      TypeError: If ids are neither strings nor integers that int64 holds, or
        if weights are not numbers.
      ValueError: If `features` is not a structure, if the type or rank of a
        leaf is not supported, or if `weights` do not match `features`.
      tf.errors.InvalidArgumentError: If the features have different numbers of
        samples, or if a sample requires more columns than `num_columns`.
    """
    if not tf.nest.is_nested(features) or not tf.nest.flatten(features):
        raise ValueError(
            "Argument `features` must be a structure of at least one feature; "
            "pass a single tensor to `enqueue` without packing. Received: "
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
    packed_ids = ops.pack_ids(
        ids=[tf.cast(ids.ids, tf.int64) for ids in inputs],
        splits=[ids.splits for ids in inputs],
        num_samples=tf.stack(
            [tf.cast(ids.num_samples, tf.int64) for ids in inputs]
        ),
        weights=[ids.weights for ids in inputs],
        names=paths,
        mark=packed_mark_of(paths),
        num_columns=num_columns or _known_columns(inputs) or 0,
        weighted=weights is not None,
    )
    known = [
        ids.static_num_samples
        for ids in inputs
        if ids.static_num_samples is not None
    ]
    # Sets the static number of samples if it is known.
    packed = tf.ensure_shape(
        _with_kinds(
            packed_ids.packed,
            [bool(ids.kind == key_tensors.STRINGS) for ids in inputs],
        ),
        [known[0] if known else None, None],
    )
    if weights is None:
        return packed
    return packed, tf.ensure_shape(packed_ids.packed_weights, packed.shape)


def _with_kinds(packed: tf.Tensor, are_strings: Sequence[bool]) -> tf.Tensor:
    """Marks the features whose ids are strings, by complements of their sizes.

    A reader that does not support strings rejects the negative sizes.
    """
    if not any(are_strings):
        return packed
    masks = tf.constant(
        [-1 if is_string else 0 for is_string in are_strings], tf.int64
    )
    end = 1 + len(are_strings)
    return tf.concat(
        [
            packed[:, :1],
            tf.bitwise.bitwise_xor(packed[:, 1:end], masks),
            packed[:, end:],
        ],
        axis=1,
    )


def _known_columns(inputs: list[embedding_inputs.FeatureIds]) -> int | None:
    """Returns the required number of columns, or None if it is unknown."""
    columns = 1 + len(inputs)
    for ids in inputs:
        size = ids.ids.shape[0]
        if (
            ids.splits.shape != [0]
            or size is None
            or (not ids.static_num_samples)
        ):
            return None
        columns += size // ids.static_num_samples
    return columns


def _read(path: str, value: Any, weight: Any) -> embedding_inputs.FeatureIds:
    """Reads one feature. Sparse ids are converted to ragged ids."""
    feature = config.FeatureSpec(path, 0, 0)
    value, kind = key_tensors.of_input(value)
    if isinstance(value, tf.SparseTensor):
        if value.shape.rank not in (None, 2):
            raise _wrong_rank(path, value)
        if isinstance(weight, tf.SparseTensor):
            # This call checks that the ids and the weights match. The check
            # must precede the conversion of both tensors to ragged tensors.
            embedding_inputs.read_feature(feature, value, weight)
            weight = tf.RaggedTensor.from_sparse(weight)
        value = tf.RaggedTensor.from_sparse(value)
    inputs = embedding_inputs.read_feature(feature, value, weight)
    if inputs.inner_shape:
        raise _wrong_rank(path, value)
    return dataclasses.replace(inputs, kind=kind)


def _wrong_rank(path: str, value: Any) -> ValueError:
    return ValueError(
        f"Feature {path!r} of a packed batch must be of shape [num_samples] "
        f"or [num_samples, ids per sample]. Received: shape {value.shape}."
    )
