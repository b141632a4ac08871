"""Converts the inputs of a step to ids, splits, sample counts and weights.

A feature can be dense, sparse or ragged. The engine derives the form from
`splits` (see docs/ops.md), so this module does not convert one form to another.
If an error can be detected during tracing, this module raises it, and the
message contains the path of the feature. The engine validates ids and splits
when the step runs.

The engine requires one dimension of samples. Activations of shape `[B, D, dim]`
require `B * D` samples: one sample for each position, in row-major order.
`fill_samples` and `fill_sequences` create these samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import build_shapes
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.vocabulary import key_tensors, stored_keys

# Dtypes whose values all fit into int64.
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
    """Ids and weights of one feature in one step.

    Attributes:
      ids: `[num_ids]`, an integer type.
      splits: int64: row splits `[num_samples + 1]`, indices of a sparse tensor
        `[num_ids, 2]`, or `[0]` for a dense input.
      num_samples: int64 scalar tensor or a Python int.
      weights: `[num_ids]` float32, or `[0]` if all weights are 1.
      inner_shape: Sizes of all sample dimensions except the first one. The
        value is `()` for samples `[B]`, and `(B, C)` for samples `[A, B, C]`. A
        size is None if it is unknown during tracing.
      kind: Type of the input from which keys were read; one of
        `key_tensors.KINDS`. For a packed batch, an int32 scalar tensor, which
        is 0 if the batch has no samples.
      strings: `[num_strings]` strings of the input, if the table keeps strings;
        otherwise None. None also for inputs that contain only hashes.
      string_keys: `[num_strings]` int64, the hashes of `strings`; otherwise
        None. They differ from `ids` if the input is a `StoredKeys`, which has
        strings for some of the ids, or if ids after the last position of a
        sequence were removed.
      counted: None, or three values: `num_samples`; a tensor; and an int.
        `num_samples` is the first size of the tensor minus the int. `combine`
        computes the sizes of all features by one op.
    """

    ids: tf.Tensor
    splits: tf.Tensor
    num_samples: Any
    weights: tf.Tensor
    inner_shape: tuple[int | None, ...] = ()
    kind: int | tf.Tensor = key_tensors.INTEGERS
    strings: tf.Tensor | None = None
    string_keys: tf.Tensor | None = None
    counted: tuple[Any, tf.Tensor, int] | None = None

    @property
    def static_num_samples(self) -> int | None:
        """Number of samples, or None if it is unknown during tracing."""
        return self.num_samples if isinstance(self.num_samples, int) else None


def read_feature(
    feature: config.FeatureSpec,
    value: Any,
    weight: Any,
) -> FeatureIds:
    """Reads the input of one feature.

    Args:
      feature: Spec of the feature.
      value: Ids: a `tf.Tensor` `[num_samples]` or `[..., ids per sample]`, a
        `tf.SparseTensor` `[..., ids per sample]`, or a `tf.RaggedTensor` of
        rank 2.
      weight: None, or the weights of the ids, in the same form as the ids.

    Returns:
      The ids and weights in the form that the engine requires. If each sample
      fills several positions of the activations, the caller must also call
      `fill_samples` or `fill_sequences`.

    Raises:
      TypeError: If ids are not integers or weights are not numbers.
      ValueError: If the type or rank of `value` is not supported, or if
        `weight` does not match `value`.
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
    *,
    keeps_strings: bool = False,
) -> FeatureIds:
    """Reads the input of a feature whose ids are keys.

    The other arguments are the same as for `read_feature`. Strings are hashed.

    Args:
      feature: Spec of the feature.
      value: Ids.
      weight: None, or the weights of the ids.
      keeps_strings: Whether the result contains the strings.
    """
    keys, kind = key_tensors.of_input(value)
    feature_ids = read_feature(feature, keys, weight)
    feature_ids = dataclasses.replace(feature_ids, kind=kind)
    strings = key_tensors.strings_of(value) if keeps_strings else None
    if strings is not None:
        feature_ids.strings = strings
        feature_ids.string_keys = (
            key_tensors.hash_strings(strings)
            if isinstance(value, stored_keys.StoredKeys)
            else feature_ids.ids
        )
    return feature_ids


def combine(
    features: Sequence[FeatureIds], *, of_keys: bool = False
) -> dict[str, Any]:
    """Returns the inputs of an op that reads the ids of all features.

    The function creates few ops per feature, because each op of a step costs
    time: dense features share one tensor of empty splits, features without
    weights share one tensor of empty weights, and one op computes the sizes.

    Args:
      features: The features of a batch.
      of_keys: Whether the ids are always int64. By default, they are int32 if
        the ids of all features are int32.

    Returns:
      The inputs `ids`, `splits`, `num_samples` and `weights` of the op.
    """
    if not of_keys:
        unify_id_types(features)
    return {
        "ids": [
            tf.cast(feature.ids, tf.int64) if of_keys else feature.ids
            for feature in features
        ],
        "splits": _share_empty(
            [tf.cast(feature.splits, tf.int64) for feature in features]
        ),
        "num_samples": _stack_sizes(features),
        "weights": _share_empty([feature.weights for feature in features]),
    }


def _share_empty(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Replaces all empty vectors by the first one."""
    empty = [tensor for tensor in tensors if tensor.shape == [0]]
    return [empty[0] if tensor.shape == [0] else tensor for tensor in tensors]


def _stack_sizes(features: Sequence[FeatureIds]) -> tf.Tensor:
    """Returns the numbers of samples, `[num_features]` int64."""
    static = [
        feature.num_samples
        for feature in features
        if isinstance(feature.num_samples, int)
    ]
    if len(static) == len(features):
        return tf.constant(static, tf.int64)
    counted = [feature.counted for feature in features]
    if len(features) > 1 and all(
        count is not None and count[0] is feature.num_samples
        for count, feature in zip(counted, features)
    ):
        known = [count for count in counted if count is not None]
        tensors = [tensor for _, tensor, _ in known]
        shapes: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            # All inputs of the op have the same dtype.
            indices = [i for i, x in enumerate(tensors) if x.dtype == dtype]
            of_dtype = tf.shape_n([tensors[i] for i in indices], tf.int64)
            for i, shape in zip(indices, of_dtype):
                shapes[i] = shape
        sizes = tf.concat(
            [shape if shape.shape == [1] else shape[:1] for shape in shapes],
            axis=0,
        )
        offsets = [offset for _, _, offset in known]
        return sizes - tf.constant(offsets, tf.int64) if any(offsets) else sizes
    return tf.stack(
        [tf.cast(feature.num_samples, tf.int64) for feature in features]
    )


def unify_id_types(features: Sequence[FeatureIds]) -> None:
    """Casts all ids to int64, unless the ids of all features are int32."""
    if all(feature.ids.dtype == tf.int32 for feature in features):
        return
    for feature in features:
        feature.ids = tf.cast(feature.ids, tf.int64)


def _read_dense(feature, value, weight) -> FeatureIds:
    if weight is not None:
        raise ValueError(
            f"Weight specified for dense input {feature.name!r}; only a "
            "tf.SparseTensor or tf.RaggedTensor has weights."
        )
    check_id_type(feature, value.dtype)
    # The last dimension of a tensor of rank 2 or more contains the ids of one
    # sample. Therefore [B, K] has K ids per sample, and [B, 1] is equivalent to
    # [B].
    if not value.shape.rank:
        raise ValueError(
            f"Dense input {feature.name!r} must be of shape [num_samples] or "
            "[..., ids per sample]. Received: shape "
            f"{value.shape}."
        )
    sizes = [
        _dimension(value, axis) for axis in range(max(value.shape.rank - 1, 1))
    ]
    num_samples = _product(sizes)
    return FeatureIds(
        ids=value if value.shape.rank == 1 else tf.reshape(value, [-1]),
        splits=tf.zeros([0], tf.int64),
        num_samples=num_samples,
        weights=_no_weights(),
        inner_shape=_inner_shape(sizes),
        counted=None
        if isinstance(num_samples, int) or len(sizes) > 1
        else (num_samples, value, 0),
    )


def _read_weighted(feature, value, weight, kind, attribute):
    """Returns the `indices` or `row_splits` of the ids, and the weights."""
    positions = getattr(value, attribute)
    if weight is None:
        return positions, _no_weights()
    check_weight_type(feature, value, weight, kind)
    weights = read_weights(feature, value.values, weight.values)
    return same_positions(
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
    """Flattens the sample axes of indices; returns `[num_ids, 2]` indices."""
    outside = tf.debugging.assert_less(
        indices[:, :-1],
        tf.stack([tf.cast(size, tf.int64) for size in sizes]),
        f"The indices of sparse input {feature.name!r} must be inside its "
        "shape.",
    )
    with tf.control_dependencies(ops_only([outside])):
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
        counted=None
        if isinstance(num_samples, int)
        else (num_samples, row_splits, 1),
    )


def _no_weights() -> tf.Tensor:
    return tf.zeros([0], tf.float32)


def _product(sizes: Sequence[Any]):
    """Returns an int if all sizes are ints, otherwise a scalar tensor."""
    if all(isinstance(size, int) for size in sizes):
        return math.prod(sizes)
    if len(sizes) == 1:
        return sizes[0]
    return tf.reduce_prod(tf.stack([tf.cast(size, tf.int64) for size in sizes]))


def _inner_shape(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in sizes[1:])


def _dimension(tensor: tf.Tensor, axis: int):
    """Returns the static size of an axis as an int, or else a scalar tensor."""
    static = tensor.shape[axis]
    return static if static is not None else tf.shape(tensor, tf.int64)[axis]


def check_id_type(feature: config.FeatureSpec, dtype: tf.DType):
    """Raises a TypeError if int64 cannot represent all ids of this dtype."""
    if dtype in _ID_TYPES:
        return
    advice = ""
    if dtype == tf.string:
        advice = (
            " With "
            "`vocabularies={table: tlm.vocabulary.OpenVocabulary(capacity)}` a "
            "table accepts strings and any integers."
        )
    elif dtype.is_floating:
        advice = " Convert integral values with tf.cast(ids, tf.int64)."
    raise TypeError(
        f"Ids of feature {feature.name!r} must be integers of a type that "
        f"int64 holds. Received: {dtype.name}.{advice}"
    )


def check_weights(feature: config.FeatureSpec, value: Any, weight: Any):
    """Checks that weights match the sparse or ragged ids of their feature.

    Raises:
      TypeError: If the weights are not numbers.
      ValueError: If the weights have another tensor type than the ids, or if
        the numbers of weights and ids differ.
    """
    check_weight_type(feature, value, weight, type(value))
    _check_values(feature, value.values, weight.values)


def check_weight_type(
    feature: config.FeatureSpec, value: Any, weight: Any, expected: type
):
    """Raises a ValueError if the weights have another type than the ids."""
    if not isinstance(weight, expected):
        # TensorFlow's TPUEmbedding raises the same message.
        raise ValueError(
            f"Weight for {feature.name!r} is of type {type(weight)}, which "
            f"does not match type input which is {type(value).__name__}."
        )


def read_weights(
    feature: config.FeatureSpec, ids: tf.Tensor, values: tf.Tensor
) -> tf.Tensor:
    """Checks `values`, and casts them to float32 weights `[num_ids]`."""
    _check_values(feature, ids, values)
    return tf.cast(values, tf.float32)


def _check_values(feature, ids, values):
    dtype = values.dtype
    if not (dtype.is_floating or dtype.is_integer):
        raise TypeError(
            f"Weights of feature {feature.name!r} must be numbers. "
            f"Received: {dtype.name}."
        )
    if not ids.shape.is_compatible_with(values.shape):
        raise ValueError(
            f"Feature {feature.name!r} must have one weight for each id. "
            f"Received: ids of shape {ids.shape}, weights of shape "
            f"{values.shape}."
        )


def same_positions(feature, attribute, positions, weight_positions):
    """Checks that ids and weights have equal positions; returns `positions`.

    Without this check, weights could be applied to the wrong ids without an
    error.

    Args:
      feature: Feature whose name is part of the message.
      attribute: Name of the attribute for the message, such as `"row_splits"`.
      positions: `row_splits` or `indices` of the ids.
      weight_positions: `row_splits` or `indices` of the weights.
    """
    if weight_positions is positions:
        return positions
    checks = [
        tf.debugging.assert_equal(
            tf.shape(positions),
            tf.shape(weight_positions),
            f"Weights of feature {feature.name!r} must have as many "
            f"{attribute} as its ids.",
        ),
    ]
    with tf.control_dependencies(ops_only(checks)):
        checks = [
            tf.debugging.assert_equal(
                tf.cast(positions, tf.int64),
                tf.cast(weight_positions, tf.int64),
                f"Weights of feature {feature.name!r} must have the same "
                f"{attribute} as its ids.",
            )
        ]
    with tf.control_dependencies(ops_only(checks)):
        return tf.identity(positions)


def ops_only(checks):
    """Removes from `checks` the None values that eager assertions return."""
    return [check for check in checks if check is not None]


def flatten_with_paths(structure: Any) -> list[tuple[str, Any]]:
    """Returns `(path, leaf)` pairs in `tf.nest.flatten` order.

    >>> flatten_with_paths({"b": [1, 2], "a": 3})
    [('a', 3), ('b/0', 1), ('b/1', 2)]
    """
    paths = tf.__internal__.nest.yield_flat_paths(structure)
    return [
        ("/".join(str(step) for step in path), leaf)
        for path, leaf in zip(paths, tf.nest.flatten(structure))
    ]


def check_same_structure(
    structure: Any, argument: str, expected: Any, like: str
):
    """Checks that `structure` has the same nesting as `expected`.

    Args:
      structure: Structure to check.
      argument: Name of the argument that holds `structure`, for the message.
      expected: Structure with the required nesting.
      like: Name of `expected`, for the message.

    Raises:
      TypeError: If a sequence or mapping in `structure` has another type.
      ValueError: If a sequence or mapping in `structure` has another size or
        other keys.
    """
    try:
        tf.nest.assert_same_structure(expected, structure)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"Argument `{argument}` must have the structure of `{like}`, "
            f"{_format_structure(expected)}, whose leaves are "
            f"{_paths(expected)}. Received: {_format_structure(structure)}, "
            f"with leaves {_paths(structure)}.{_advice(structure)}"
        ) from None


def flatten_weights(weights: Any | None, expected: Any, *, like: str) -> list:
    """Returns one weight, or None, for each leaf of `expected`."""
    if weights is None:
        return [None] * len(tf.nest.flatten(expected))
    check_same_structure(weights, "weights", expected, like)
    return tf.nest.flatten(weights)


def _advice(structure: Any) -> str:
    """Returns advice for the message if `structure` lists plain values."""
    is_list = tf.nest.is_nested(structure) and any(
        isinstance(leaf, int | float | str)
        for leaf in tf.nest.flatten(structure)
    )
    return (
        " A list is a structure, not a tensor; use tf.constant([...])."
        if is_list
        else ""
    )


def _paths(structure: Any) -> list[str]:
    return [path for path, _ in flatten_with_paths(structure)]


def _format_structure(structure: Any) -> str:
    """Returns a text that shows the types, with `.` for each leaf."""
    if isinstance(structure, Mapping):
        inside = ", ".join(
            f"{key!r}: {_format_structure(value)}"
            for key, value in structure.items()
        )
        text = f"{{{inside}}}"
        plain = dict
    elif isinstance(structure, list | tuple):
        inside = ", ".join(_format_structure(value) for value in structure)
        if isinstance(structure, list):
            text, plain = f"[{inside}]", list
        else:
            text, plain = f"({inside}{',' * (len(structure) == 1)})", tuple
    else:
        return "."
    kind = type(structure)
    return text if kind is plain else f"{kind.__name__}({text})"


def fill_samples(
    feature: config.FeatureSpec,
    feature_ids: FeatureIds,
    shape: tuple[int | None, ...],
) -> FeatureIds:
    """Distributes the samples of a ragged input over the positions of a shape.

    The function uses the rules of TensorFlow. If the numbers of samples and
    positions are equal, each sample fills one position, in order. If there are
    fewer samples than positions, each sample is a sequence. All sequences are
    truncated or padded to the same number of positions.

    Args:
      feature: Spec of the feature.
      feature_ids: A ragged input, which is modified.
      shape: The activation's shape without `dim`.

    Returns:
      The object `feature_ids`, which now has one sample for each position of
      the shape.

    Raises:
      ValueError: If a size is unknown, if the number of positions is not a
        multiple of the number of samples, or if sequences have weights.
    """
    num_samples = feature_ids.static_num_samples
    if not build_shapes.is_known(shape) or num_samples is None:
        raise ValueError(
            f"Ragged input {feature.name!r} with an output_shape of several "
            "dimensions must have static sizes. "
            f"Received: output_shape={shape}, {num_samples} samples."
        )
    positions = math.prod(shape)
    feature_ids.inner_shape = tuple(shape[1:])
    if num_samples == positions:
        return feature_ids
    if num_samples < 1 or positions % num_samples:
        raise ValueError(
            f"Ragged input {feature.name!r} must have a number of samples that "
            f"divides the {positions} positions of output_shape={shape}. "
            f"Received: {num_samples} samples."
        )
    if feature_ids.weights.shape[0] != 0:
        raise ValueError(
            f"Weight specified for feature {feature.name!r}, whose samples are "
            f"sequences of output_shape={shape}: no combiner would use it; "
            "pass None."
        )
    _split_positions(feature, feature_ids, positions // num_samples)
    feature_ids.num_samples = positions
    return feature_ids


def fill_sequences(
    feature: config.FeatureSpec,
    feature_ids: FeatureIds,
    length: int,
) -> FeatureIds:
    """Replaces each sample by `length` samples, one for each position.

    Args:
      feature: Spec of the feature.
      feature_ids: A dense, sparse or ragged input of rank 2 without weights,
        which is modified.
      length: Number of positions per sequence. Ids at later positions are
        dropped.

    Returns:
      The object `feature_ids`, which now has `length` times as many samples,
      each with at most one id.
    """
    num_samples = feature_ids.num_samples
    _split_positions(feature, feature_ids, length)
    feature_ids.num_samples = num_samples * length
    feature_ids.inner_shape = (length,)
    return feature_ids


def _split_positions(feature, feature_ids: FeatureIds, length: int):
    """Keeps the first `length` ids per sample, each as a separate sample."""
    samples, positions, checks = _samples_and_positions(feature, feature_ids)
    # The engine cannot check the original samples, because it receives only the
    # new samples. Therefore the checks run here.
    with tf.control_dependencies(
        [check for check in checks if check is not None]
    ):
        kept = tf.where(positions < length)[:, 0]
    output = tf.gather(samples, kept) * length + tf.gather(positions, kept)
    feature_ids.ids = tf.gather(feature_ids.ids, kept)
    feature_ids.splits = tf.stack([output, tf.zeros_like(output)], axis=1)


def _samples_and_positions(feature, feature_ids):
    """Returns sample indices and positions `[num_ids]` int64, and checks."""
    num_samples = tf.cast(feature_ids.num_samples, tf.int64)
    num_ids = tf.size(feature_ids.ids, tf.int64)
    if feature_ids.splits.shape.rank == 2:
        samples, positions = tf.unstack(feature_ids.splits, 2, axis=1)
        message = (
            f"Feature {feature.name!r}: the indices of a sparse input must be "
            "inside its shape, and ascend; see tf.sparse.reorder."
        )
        ascends = (samples[1:] > samples[:-1]) | (
            (samples[1:] == samples[:-1]) & (positions[1:] > positions[:-1])
        )
        inside = (samples >= 0) & (samples < num_samples) & (positions >= 0)
        return (
            samples,
            positions,
            [
                tf.debugging.Assert(tf.reduce_all(ascends), [message]),
                tf.debugging.Assert(tf.reduce_all(inside), [message]),
            ],
        )
    numbers = tf.range(num_ids)
    if feature_ids.splits.shape[0] == 0:
        per_sample = tf.math.floordiv(num_ids, tf.maximum(num_samples, 1))
        return (
            tf.repeat(tf.range(num_samples), per_sample),
            numbers % tf.maximum(per_sample, 1),
            [],
        )
    samples = tf.repeat(
        tf.range(num_samples), feature_ids.splits[1:] - feature_ids.splits[:-1]
    )
    check = tf.debugging.assert_equal(
        tf.stack([feature_ids.splits[0], tf.size(samples, tf.int64)]),
        tf.stack([tf.constant(0, tf.int64), num_ids]),
        f"Feature {feature.name!r}: row_splits must start with 0 and end with "
        "the number of ids.",
    )
    return samples, numbers - tf.gather(feature_ids.splits, samples), [check]
