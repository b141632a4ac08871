"""Turns the inputs of a step into the four lists the engine takes.

A feature may come dense, sparse or ragged. The engine tells them apart by
its `splits` (docs/ops.md), so that no form is converted into another. What
can be refused while tracing is refused here, with the feature's path; ids
and splits are validated by the engine, which is the one that does so.
"""

# DOC-MERGE: Refuses weights that do not go with the ids of their feature.
# DOC-MERGE: Nested structures of features: their paths, and what must match them.
# DOC-MERGE: Lays samples out over the positions of an activation's shape.
#
# What the engine takes has one dimension of samples. An activation of shape
# `[B, D, dim]` has `B * D` of them, its positions, in row-major order.
#
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import build_shapes
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.vocabulary import key_tensors


def check_weights(feature: config.FeatureSpec, value: Any, weight: Any):
    """Refuses weights of another kind or number than sparse or ragged ids.

    Raises:
      TypeError: If they are not numbers.
      ValueError: If they are of another kind or number.
    """
    check_weight_type(feature, value, weight, type(value))
    _check_values(feature, value.values, weight.values)


def check_weight_type(
    feature: config.FeatureSpec, value: Any, weight: Any, expected: type
):
    """Raises a ValueError unless weights are of the kind of the ids."""
    if not isinstance(weight, expected):
        raise ValueError(
            f"Weight for {feature.name!r} is of type {type(weight)}, which "
            f"does not match type input which is {type(value).__name__}."
        )


def read_weights(
    feature: config.FeatureSpec, ids: tf.Tensor, values: tf.Tensor
) -> tf.Tensor:
    """Returns weights `[num_ids]` of numbers as float32."""
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
            f"Weights of feature {feature.name!r} must be one for each id. "
            f"Received: ids of shape {ids.shape}, weights of shape "
            f"{values.shape}."
        )


def same_positions(feature, what, positions, weight_positions):
    """Returns `positions`, once those of the weights are known to equal them.

    Args:
      feature: Whose name is in the message.
      what: What the positions are, for the message.
      positions: Of the ids: row_splits, or indices.
      weight_positions: Those of the weights.

    Weights that belong to other ids would train wrong values without an
    error.
    """
    if weight_positions is positions:
        return positions
    checks = [
        tf.debugging.assert_equal(
            tf.shape(positions),
            tf.shape(weight_positions),
            f"Weights of feature {feature.name!r} must have as many {what} "
            "as its ids.",
        ),
    ]
    with tf.control_dependencies(ops_only(checks)):
        checks = [
            tf.debugging.assert_equal(
                tf.cast(positions, tf.int64),
                tf.cast(weight_positions, tf.int64),
                f"Weights of feature {feature.name!r} must have the {what} of "
                "its ids.",
            )
        ]
    with tf.control_dependencies(ops_only(checks)):
        return tf.identity(positions)


def ops_only(checks):
    """Drops the None that eager assertions return."""
    return [check for check in checks if check is not None]


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
    """Indices `[num_ids, 2]` of the samples numbered through all axes."""
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
    """Raises unless `structure` nests as `expected` does.

    Raises:
      TypeError: If a sequence or mapping is of another type.
      ValueError: If one has another size or other keys.
    """
    try:
        tf.nest.assert_same_structure(expected, structure)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"Argument `{argument}` must have the structure of `{like}`, "
            f"{_drawn(expected)}, whose leaves are {_paths(expected)}. "
            f"Received: {_drawn(structure)}, with leaves "
            f"{_paths(structure)}.{_advice(structure)}"
        ) from None


def flatten_weights(weights: Any | None, expected: Any, *, like: str) -> list:
    """Returns one weight, or None, for each leaf of `expected`."""
    if weights is None:
        return [None] * len(tf.nest.flatten(expected))
    check_same_structure(weights, "weights", expected, like)
    return tf.nest.flatten(weights)


def _advice(structure: Any) -> str:
    """What to do about a list of numbers, which is a structure, too."""
    is_list = tf.nest.is_nested(structure) and any(
        isinstance(one, int | float | str) for one in tf.nest.flatten(structure)
    )
    return (
        " A list is a structure, not a tensor: write tf.constant([...])."
        if is_list
        else ""
    )


def _paths(structure: Any) -> list[str]:
    return [path for path, _ in flatten_with_paths(structure)]


def _drawn(structure: Any) -> str:
    """The structure with its types, and `.` for each leaf."""
    if isinstance(structure, Mapping):
        inside = ", ".join(
            f"{key!r}: {_drawn(one)}" for key, one in structure.items()
        )
        text = f"{{{inside}}}"
        plain = dict
    elif isinstance(structure, list | tuple):
        inside = ", ".join(_drawn(one) for one in structure)
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
    found: FeatureIds,
    shape: tuple[int | None, ...],
) -> FeatureIds:
    """Lays ragged samples out over a shape.

    As TensorFlow has it: as many samples as the shape has positions fill them,
    in order; fewer samples are sequences, cut or filled to the positions that
    there are for each.

    Args:
      feature: Whose input it is.
      found: A ragged input. It is changed.
      shape: The activation's shape without `dim`.

    Returns:
      `found`, with the samples of the shape.

    Raises:
      ValueError: If sizes are unknown, the samples do not divide the positions,
        or sequences have weights.
    """
    given = found.static_num_samples
    if not build_shapes.is_known(shape) or given is None:
        raise ValueError(
            f"Ragged input {feature.name!r} with an output_shape of several "
            "dimensions must have sizes that are known while tracing. "
            f"Received: output_shape={shape}, {given} samples."
        )
    positions = math.prod(shape)
    found.inner_shape = tuple(shape[1:])
    if given == positions:
        return found
    if given < 1 or positions % given:
        raise ValueError(
            f"Ragged input {feature.name!r} must have a number of samples that "
            f"divides the {positions} positions of output_shape={shape}. "
            f"Received: {given} samples."
        )
    if found.weights.shape[0] != 0:
        raise ValueError(
            f"Weight specified for feature {feature.name!r}, whose samples are "
            f"sequences of output_shape={shape}: no combiner would use it; "
            "pass None."
        )
    _cut(feature, found, positions // given)
    found.num_samples = positions
    return found


def fill_sequences(
    feature: config.FeatureSpec,
    found: FeatureIds,
    length: int,
) -> FeatureIds:
    """Makes `length` samples of each, one for each position.

    Args:
      feature: Whose input it is.
      found: An input of rank 2 without weights, of any form. It is changed.
      length: Positions that are kept; the others are dropped.

    Returns:
      `found` with `length` times as many samples, each of one id at most.
    """
    num_samples = found.num_samples
    _cut(feature, found, length)
    found.num_samples = num_samples * length
    found.inner_shape = (length,)
    return found


def _cut(feature, found: FeatureIds, length: int):
    """Ids and splits of at most `length` positions for each sample."""
    samples, positions, checks = _samples_and_positions(feature, found)
    # Checked here, because the engine sees the new samples only.
    with tf.control_dependencies([one for one in checks if one is not None]):
        kept = tf.where(positions < length)[:, 0]
    output = tf.gather(samples, kept) * length + tf.gather(positions, kept)
    found.ids = tf.gather(found.ids, kept)
    found.splits = tf.stack([output, tf.zeros_like(output)], axis=1)


def _samples_and_positions(feature, found):
    """Of each id, both `[num_ids]` int64, and what must hold of them."""
    num_samples = tf.cast(found.num_samples, tf.int64)
    num_ids = tf.size(found.ids, tf.int64)
    if found.splits.shape.rank == 2:
        samples, positions = tf.unstack(found.splits, 2, axis=1)
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
    if found.splits.shape[0] == 0:
        per_sample = tf.math.floordiv(num_ids, tf.maximum(num_samples, 1))
        return (
            tf.repeat(tf.range(num_samples), per_sample),
            numbers % tf.maximum(per_sample, 1),
            [],
        )
    samples = tf.repeat(
        tf.range(num_samples), found.splits[1:] - found.splits[:-1]
    )
    check = tf.debugging.assert_equal(
        tf.stack([found.splits[0], tf.size(samples, tf.int64)]),
        tf.stack([tf.constant(0, tf.int64), num_ids]),
        f"Feature {feature.name!r}: row_splits must start with 0 and end with "
        "the number of ids.",
    )
    return samples, numbers - tf.gather(found.splits, samples), [check]
