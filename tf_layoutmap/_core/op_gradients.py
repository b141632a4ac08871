"""Gradients of the C++ ops, and stock operations that equal these ops.

`_core.ops` imports this module when it loads the library, so that all ops have
gradients. Compositions of stock operations are used where the C++ ops have no
kernel: in XLA, on a mesh, for dtypes other than float32, and in exported
models.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap._core.strategies import on_host


def register(ops: Any) -> None:
    """Registers all gradients; the argument is the module `_core.ops`."""

    @tf.RegisterGradient("LayoutMap>LookupRows")
    @on_host
    def _lookup_rows_gradient(
        op: tf.Operation,
        gradient: tf.Tensor,
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Returns gradients of shards, offsets, ids, row_splits and gains.

        The gradient of a shard has one slice per id that the shard owns, in the
        order of ids. Repeated ids give repeated slices, as in the gradient of
        `tf.gather`.
        """
        num_shards = op.get_attr("num_shards")
        shards = op.inputs[:num_shards]
        offsets, ids, row_splits, gains = op.inputs[num_shards:]
        attrs = {
            "offsets": offsets,
            "placement": op.get_attr("placement").decode(),
        }
        # `of_ids` contains the gradient of the sample of each id, [num_ids,
        # dim].
        of_ids = tf.gather(
            gradient, tf.ragged.row_splits_to_segment_ids(row_splits)
        )

        routed = ops.route_ids(
            ids=ids, table=op.get_attr("table").decode(), **attrs
        )
        slices = _by_shard(
            routed,
            tf.gather(of_ids * gains[:, tf.newaxis], routed.permutation),
            _shard_sizes(offsets, num_shards),
        )

        of_gains = None
        # `skip_input_indices` lists the gradients that the tape does not use.
        # If the gradient of `gains` is not used, the second lookup is omitted.
        skipped = getattr(op, "skip_input_indices", None) or ()
        if num_shards + 3 not in skipped:
            rows = ops.lookup_rows(
                shards=shards,
                ids=ids,
                row_splits=tf.range(tf.size(ids, tf.int64) + 1),
                gains=tf.ones_like(gains),
                dim=op.get_attr("dim"),
                feature=op.get_attr("feature"),
                table=op.get_attr("table"),
                **attrs,
            )
            of_gains = tf.reduce_sum(rows * of_ids, axis=1)
        return [*slices, None, None, None, of_gains]

    @tf.RegisterGradient("LayoutMap>GatherRows")
    @on_host
    def _gather_rows_gradient(
        op: tf.Operation,
        gradient: tf.Tensor,
    ) -> list[tf.IndexedSlices | None]:
        """Returns gradients of shards, offsets and ids, as for `tf.gather`."""
        num_shards = op.get_attr("num_shards")
        offsets, ids = op.inputs[num_shards:]
        placement = op.get_attr("placement").decode()
        flat_ids = tf.reshape(ids, [-1])
        row_shape = tf.shape(gradient)[tf.rank(ids) :]
        values = tf.reshape(
            gradient, tf.concat([tf.shape(flat_ids), row_shape], axis=0)
        )
        if num_shards == 1:
            # The rows of a single shard are the ids, so the gradients are not
            # routed and copied.
            (size,) = _shard_sizes(offsets, 1)
            return [
                tf.IndexedSlices(
                    values,
                    flat_ids,
                    dense_shape=tf.concat(
                        [[tf.cast(size, tf.int32)], row_shape], axis=0
                    ),
                ),
                None,
                None,
            ]
        if _in_loop_body():
            return [
                *_masked_by_shard(
                    flat_ids, values, offsets, num_shards, placement
                ),
                None,
                None,
            ]
        routed = ops.route_ids(
            ids=flat_ids,
            offsets=offsets,
            placement=placement,
            table=op.get_attr("table").decode(),
        )
        return [
            *_by_shard(
                routed,
                tf.gather(values, routed.permutation),
                _shard_sizes(offsets, num_shards),
            ),
            None,
            None,
        ]

    @tf.RegisterGradient("LayoutMap>ReadOpenRows")
    @on_host
    def _read_open_rows_gradient(
        op: tf.Operation,
        gradient: tf.Tensor,
    ) -> list[tf.IndexedSlices | None]:
        """Returns gradients of engine, token, rows, shards and offsets.

        Keys without a row have no gradient. The engine keeps the rows assigned
        to their keys until the gradient is applied or discarded.
        """
        num_shards = op.get_attr("num_shards")
        engine, token, rows = op.inputs[:3]
        offsets = op.inputs[-1]
        with_row = tf.where(rows >= 0)[:, 0]
        routed = ops.route_ids(
            ids=ops.mark_rows(
                engine=engine, token=token, rows=tf.gather(rows, with_row)
            ),
            offsets=offsets,
            placement=op.get_attr("placement").decode(),
            table=op.get_attr("table").decode(),
        )
        values = tf.gather(gradient, tf.gather(with_row, routed.permutation))
        return [
            *[None] * 3,
            *_by_shard(routed, values, _shard_sizes(offsets, num_shards)),
            None,
        ]

    @tf.RegisterGradient("LayoutMap>LookupShard")
    def _lookup_shard_gradient(
        op: tf.Operation,
        gradient: tf.Tensor,
    ) -> list[tf.IndexedSlices | None]:
        """Returns gradients of shard_index, shard and ids for tf.dtensor.

        In DTensor, the shards of all devices are one variable. Therefore, the
        gradient has one slice per id, and its indices are global row indices.
        The values of a slice come from the device that owns the row.
        """
        shard_index, _, ids = op.inputs
        num_rows, dim = op.get_attr("num_rows"), op.get_attr("dim")
        # Shard sizes are rounded up, so the last shard can contain padding.
        owners = tf.cast(ids, tf.int64) // -(-num_rows // gradient.shape[0])
        from_owner = tf.equal(
            tf.cast(shard_index, tf.int64), owners[tf.newaxis, :, tf.newaxis]
        )
        values = tf.reduce_sum(
            tf.where(from_owner, gradient, tf.zeros_like(gradient)), axis=0
        )
        return [
            None,
            tf.IndexedSlices(
                values,
                # A function for gradients must not return a tensor of the
                # forward pass itself.
                tf.identity(ids),
                tf.constant([num_rows, dim], tf.int64),
            ),
            None,
        ]

    @tf.RegisterGradient("LayoutMap>DotInteraction")
    def _dot_interaction_gradient(
        op: tf.Operation,
        gradient: tf.Tensor,
    ) -> list[tf.Tensor]:
        return ops.dot_interaction_grad(
            features=op.inputs, gradients=gradient, **_interaction_attrs(op)
        )

    @tf.RegisterGradient("LayoutMap>DotInteractionGrad")
    def _dot_interaction_grad_gradient(
        op: tf.Operation,
        *of_gradients: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the gradients of the features and of the product gradients.

        The op is linear in both. Its result for the features x is M x, where M
        is the symmetric matrix of the product gradients.
        """
        *features, gradients = op.inputs
        attrs = _interaction_attrs(op)
        products = tf.matmul(
            tf.stack(of_gradients, axis=1),
            tf.stack(features, axis=1),
            transpose_b=True,
        )
        return [
            *ops.dot_interaction_grad(
                features=of_gradients, gradients=gradients, **attrs
            ),
            lower_triangle(
                products + tf.transpose(products, [0, 2, 1]),
                len(features),
                **attrs,
            ),
        ]


def _interaction_attrs(op: tf.Operation) -> dict[str, bool]:
    names = ("self_interaction", "skip_gather")
    return {name: op.get_attr(name) for name in names}


def gather_rows_tangent(
    attributes: Sequence[Any],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    tangents: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Returns the tangents of gathered rows, for `ForwardAccumulator`."""
    (rows,) = outputs
    by_name = dict(zip(attributes[::2], attributes[1::2]))
    num_shards = by_name["num_shards"]
    offsets, ids = inputs[num_shards:]
    row_shape = tf.shape(rows)[tf.rank(ids) :]
    # If a shard is not watched, its tangent is a handle and must be replaced by
    # zeros.
    of_shards = [
        tangent
        if tangent is not None and tangent.dtype == rows.dtype
        else tf.zeros(
            tf.concat([[tf.cast(size, tf.int32)], row_shape], 0), rows.dtype
        )
        for tangent, size in zip(tangents, _shard_sizes(offsets, num_shards))
    ]
    ids = tf.cast(ids, tf.int64)
    if by_name["placement"] in ("mod", b"mod"):
        ids = tf.gather(offsets, ids % num_shards) + ids // num_shards
    return [tf.gather(tf.concat(of_shards, axis=0), ids)]


def _in_loop_body() -> bool:
    """Returns whether a gradient is computed in the body of a vectorized map.

    TensorFlow computes the gradient of an operation in the name scope of the
    operation. The body has the scope "loop_body". For a tape outside of the
    map, the scope of a converted operation also contains "pfor".
    """
    return any(
        _count("loop_body", scopes) > _count("pfor", scopes)
        for scopes in (
            graph.get_name_scope().split("/")
            for graph in tf_private.graphs_around()
        )
    )


def _count(name: str, scopes: Sequence[str]) -> int:
    """Returns the number of scopes with a name; TensorFlow adds suffixes."""
    return sum(scope.startswith(name) for scope in scopes)


def _shard_sizes(offsets: tf.Tensor, num_shards: int) -> list[tf.Tensor]:
    return tf.unstack(offsets[1:] - offsets[:-1], num=num_shards)


def _by_shard(
    routed: Any,
    values: tf.Tensor,
    shard_sizes: Sequence[tf.Tensor],
) -> list[tf.IndexedSlices]:
    """Splits gradients of routed ids into one `tf.IndexedSlices` per shard."""
    slices = []
    # Shapes are int32, as in TensorFlow's own gradients. The reason is that
    # dtypes must be equal in all branches of tf.cond and tf.switch_case, even
    # in a branch that looks up no rows.
    row_shape = tf.shape(values)[1:]
    for shard, size in enumerate(shard_sizes):
        start, end = routed.splits[shard], routed.splits[shard + 1]
        slices.append(
            tf.IndexedSlices(
                values[start:end],
                routed.local_rows[start:end],
                dense_shape=tf.concat(
                    [[tf.cast(size, tf.int32)], row_shape], axis=0
                ),
            )
        )
    return slices


def _masked_by_shard(
    ids: tf.Tensor,
    values: tf.Tensor,
    offsets: tf.Tensor,
    num_shards: int,
    placement: str,
) -> list[tf.IndexedSlices]:
    """Returns one `tf.IndexedSlices` per shard, in shapes independent of ids.

    `tf.vectorized_map` stacks the tensors of its iterations, which must
    therefore have equal shapes. Each shard gets one slice per id. If another
    shard owns the id, the slice adds zeros to the first row.

    Args:
      ids: `[num_ids]`, global rows.
      values: `[num_ids, ...]`, gradients of the rows.
      offsets: `[num_shards + 1]` int64, first row of each shard.
      num_shards: Number of shards.
      placement: "div" or "mod".
    """
    ids = tf.cast(ids, tf.int64)
    known_offsets = tf.get_static_value(offsets)
    row_shape = tf.shape(values)[1:]
    ones = tf.ones_like(row_shape)
    slices = []
    for shard, size in enumerate(_shard_sizes(offsets, num_shards)):
        if placement == "mod":
            is_here = tf.equal(tf.math.floormod(ids, num_shards), shard)
            rows = ids // num_shards
        else:
            is_here = (ids >= offsets[shard]) & (ids < offsets[shard + 1])
            rows = ids - offsets[shard]
        masked = tf.where(
            tf.reshape(is_here, tf.concat([tf.shape(ids), ones], axis=0)),
            values,
            tf.zeros_like(values),
        )
        rows = tf.where(is_here, rows, tf.zeros_like(rows))
        if known_offsets is not None and (
            known_offsets[shard] == known_offsets[shard + 1]
        ):
            # A shard without rows has no first row.
            masked, rows = masked[:0], rows[:0]
        slices.append(
            tf.IndexedSlices(
                masked,
                rows,
                dense_shape=tf.concat(
                    [[tf.cast(size, tf.int32)], row_shape], axis=0
                ),
            )
        )
    return slices


def dot_interaction(
    features: Sequence[Any],
    *,
    self_interaction: bool,
    skip_gather: bool,
    api: Any = tf,
) -> Any:
    """Returns the dot products of all pairs of features.

    Args:
      features: Tensors of equal shapes, `[num_samples, dim]`.
      self_interaction: As for `tlm.ops.dot_interaction`.
      skip_gather: As for `tlm.ops.dot_interaction`.
      api: `tf`, or `keras.ops` for symbolic tensors of Keras 3.
    """
    rows = api.stack(list(features), axis=1)
    if api is tf:
        products = tf.matmul(rows, rows, transpose_b=True)
    else:
        products = api.matmul(rows, api.transpose(rows, [0, 2, 1]))
    return lower_triangle(
        products,
        len(features),
        self_interaction=self_interaction,
        skip_gather=skip_gather,
        api=api,
    )


def lower_triangle(
    products: Any,
    num_features: int,
    *,
    self_interaction: bool,
    skip_gather: bool,
    api: Any = tf,
) -> Any:
    """Returns the lower triangle of each matrix, row by row.

    Args:
      products: Matrices, `[num_samples, num_features, num_features]`.
      num_features: Size of the matrices.
      self_interaction: Whether the triangle contains the diagonal.
      skip_gather: Whether to return full matrices with zeros above the
        triangle.
      api: As in `dot_interaction`.
    """
    triangle = np.tri(num_features, k=0 if self_interaction else -1, dtype=bool)
    flat = api.reshape(products, [-1, num_features * num_features])
    if skip_gather:
        zero = np.zeros([], tf.as_dtype(products.dtype).as_numpy_dtype)
        return api.where(triangle.reshape(1, -1), flat, zero)
    indices = np.flatnonzero(triangle).astype(np.int32)
    select = tf.gather if api is tf else api.take
    return select(flat, indices, axis=1)


def dot_interaction_grad(
    features: Sequence[Any],
    gradients: Any,
    *,
    self_interaction: bool,
    skip_gather: bool,
) -> list[Any]:
    """Returns the gradients of the features of `dot_interaction`."""
    size = len(features)
    triangle = np.tri(size, k=0 if self_interaction else -1, dtype=bool)
    if skip_gather:
        square = tf.where(
            triangle,
            tf.reshape(gradients, [-1, size, size]),
            tf.zeros([], gradients.dtype),
        )
    else:
        # The last column of zeros is the value above the triangle.
        padded = tf.pad(gradients, [[0, 0], [0, 1]])
        indices = np.full([size * size], triangle.sum(), np.int32)
        indices[triangle.reshape(-1)] = np.arange(triangle.sum())
        square = tf.reshape(
            tf.gather(padded, indices, axis=1), [-1, size, size]
        )
    symmetric = square + tf.transpose(square, [0, 2, 1])
    feature_gradients = tf.matmul(symmetric, tf.stack(list(features), axis=1))
    return tf.unstack(feature_gradients, num=size, axis=1)
