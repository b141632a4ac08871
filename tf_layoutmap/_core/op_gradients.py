"""Gradients of the C++ ops of this package.

`_core.ops` imports this module when it loads the library, so that all ops have
gradients.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import op_compositions


def register(ops: Any) -> None:
    """Registers all gradients; the argument is the module `_core.ops`."""

    @tf.RegisterGradient("LayoutMap>LookupRows")
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
    def _gather_rows_gradient(
        op: tf.Operation,
        gradient: tf.Tensor,
    ) -> list[tf.IndexedSlices | None]:
        """Returns gradients of shards, offsets and ids, as for `tf.gather`."""
        num_shards = op.get_attr("num_shards")
        offsets, ids = op.inputs[num_shards:]
        flat_ids = tf.reshape(ids, [-1])
        row_shape = tf.shape(gradient)[tf.rank(ids) :]
        values = tf.reshape(
            gradient, tf.concat([tf.shape(flat_ids), row_shape], axis=0)
        )
        routed = ops.route_ids(
            ids=flat_ids,
            offsets=offsets,
            placement=op.get_attr("placement").decode(),
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
                values, ids, tf.constant([num_rows, dim], tf.int64)
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
            op_compositions.lower_triangle(
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
