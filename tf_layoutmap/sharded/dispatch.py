"""Dispatchers that let TensorFlow's lookups accept a `ShardedVariable`.

The dispatchers are registered with `tf.experimental.dispatch_for_api`.
TensorFlow calls the dispatchers in eager code, in functions and in any name
scope.
"""

from typing import Any, Union

import tensorflow as tf

from tf_layoutmap.sharded import indexing
from tf_layoutmap.sharded.routing import checks, routing
from tf_layoutmap.sharded.sharded_variable import ShardedVariable

# A list is included, because code for partitioned variables passes a list with
# one table. TensorFlow's dispatcher supports only classes of composite tensors,
# and supports typing.Union instead of `|`.
_Table = Union[ShardedVariable, list[ShardedVariable]]  # noqa: UP007

_registered = False


def register() -> None:
    """Registers the dispatchers. A second call has no effect."""
    global _registered
    if _registered:
        return
    dispatch = tf.experimental.dispatch_for_api
    dispatch(tf.gather, {"params": ShardedVariable})(_gather)
    dispatch(tf.gather_nd, {"params": ShardedVariable})(_gather_nd)
    dispatch(tf.nn.embedding_lookup, {"params": _Table})(_embedding_lookup)
    # The type of `ids` is restricted, because TensorFlow raises an error if two
    # dispatchers match a call. Ragged ids match TensorFlow's ragged dispatcher,
    # which calls this function with flat ids.
    dispatch(
        tf.compat.v1.nn.embedding_lookup,
        {"params": _Table, "ids": tf.types.experimental.TensorLike},
    )(_embedding_lookup_v1)
    dispatch(tf.nn.embedding_lookup_sparse, {"params": _Table})(
        _embedding_lookup_sparse
    )
    dispatch(tf.nn.safe_embedding_lookup_sparse, {"embedding_weights": _Table})(
        _safe_embedding_lookup_sparse
    )
    _registered = True


def _gather(
    params, indices, validate_indices=None, axis=None, batch_dims=0, name=None
):
    if batch_dims == 0 and _is_first_axis(params, axis):
        if isinstance(indices, tf.RaggedTensor):
            return indices.with_flat_values(
                routing.gather(params._shards(), indices.flat_values, name)
            )
        return routing.gather(params._shards(), indices, name)
    return tf.gather(
        tf.convert_to_tensor(params),
        indices,
        validate_indices=validate_indices,
        axis=axis,
        batch_dims=batch_dims,
        name=name,
    )


def _gather_nd(
    params, indices, batch_dims=0, name=None, bad_indices_policy: Any = ""
):
    if batch_dims == 0 and bad_indices_policy in ("", "DEFAULT", "ERROR"):
        return indexing.gather_nd(params._shards(), indices, name)
    return tf.gather_nd(
        tf.convert_to_tensor(params),
        indices,
        batch_dims=batch_dims,
        name=name,
        bad_indices_policy=bad_indices_policy,
    )


def _embedding_lookup_v1(
    params,
    ids,
    partition_strategy="mod",
    name=None,
    validate_indices=True,
    max_norm=None,
):
    # `partition_strategy` is ignored, because the table defines the placement
    # of its rows.
    del partition_strategy, validate_indices
    return _embedding_lookup(params, ids, max_norm, name)


def _embedding_lookup(params, ids, max_norm=None, name=None):
    table = _one_table(params)
    with tf.name_scope(name or "embedding_lookup"):
        if isinstance(ids, tf.RaggedTensor):
            return tf.ragged.map_flat_values(
                lambda flat_ids: _embedding_lookup(table, flat_ids, max_norm),
                ids,
            )
        shards = table._shards()
        ids = checks.ids_of(shards, ids)
        rows = routing.gather(shards, ids)
        return _clip(rows, max_norm, ids.shape.rank)


def _embedding_lookup_sparse(
    params,
    sp_ids,
    sp_weights,
    combiner=None,
    max_norm=None,
    name=None,
    allow_fast_lookup=False,
):
    table = _one_table(params)
    with tf.name_scope(name or "embedding_lookup_sparse"):
        _check_sparse("sp_ids", sp_ids)
        unique_ids, positions = tf.unique(_flat_values(sp_ids))
        rows = routing.gather(table._shards(), unique_ids)
        return tf.nn.embedding_lookup_sparse(
            rows,
            _with_flat_values(sp_ids, positions),
            sp_weights,
            combiner=combiner,
            max_norm=max_norm,
            allow_fast_lookup=allow_fast_lookup,
        )


def _safe_embedding_lookup_sparse(
    embedding_weights,
    sparse_ids,
    sparse_weights=None,
    combiner="mean",
    default_id=None,
    max_norm=None,
    name=None,
    allow_fast_lookup=False,
):
    table = _one_table(embedding_weights)
    with tf.name_scope(name or "safe_embedding_lookup_sparse"):
        _check_sparse("sparse_ids", sparse_ids)
        ids = _flat_values(sparse_ids)
        # TensorFlow drops negative ids. For samples without ids, it uses the
        # default row, or row 0, whose values it replaces by zeros later. This
        # function therefore passes the default row as row 0, and negative ids
        # as -1.
        default_row = tf.cast(
            0 if default_id is None else default_id, ids.dtype
        )
        unique_ids, positions = tf.unique(tf.where(ids < 0, default_row, ids))
        rows = routing.gather(
            table._shards(),
            tf.concat([tf.reshape(default_row, [1]), unique_ids], axis=0),
        )
        positions = tf.where(ids < 0, -1, positions + 1)
        return tf.nn.safe_embedding_lookup_sparse(
            rows,
            _with_flat_values(sparse_ids, tf.cast(positions, tf.int64)),
            sparse_weights,
            combiner=combiner,
            default_id=None if default_id is None else 0,
            max_norm=max_norm,
            allow_fast_lookup=allow_fast_lookup,
        )


def _is_first_axis(params: ShardedVariable, axis: Any) -> bool:
    axis = 0 if axis is None else tf.get_static_value(axis)
    return axis is not None and int(axis) in (0, -params.shape.rank)


def _one_table(params: Any) -> ShardedVariable:
    if not isinstance(params, list):
        return params
    if len(params) != 1:
        raise ValueError(
            "Argument `params` must be one table, or a list with one table. "
            f"Received: {len(params)} tables "
            f"({[table.name for table in params]})."
        )
    return params[0]


def _clip(rows: tf.Tensor, max_norm: Any, num_id_axes: int) -> tf.Tensor:
    if max_norm is None:
        return rows
    return tf.clip_by_norm(
        rows, max_norm, axes=list(range(num_id_axes, rows.shape.rank))
    )


def _check_sparse(argument: str, ids: Any) -> None:
    if not isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        raise TypeError(
            f"Argument `{argument}` must be a tf.SparseTensor or a "
            f"tf.RaggedTensor. Received: {type(ids).__name__}."
        )


def _flat_values(ids: Any) -> tf.Tensor:
    return ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids.values


def _with_flat_values(ids: Any, values: tf.Tensor) -> Any:
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(values)
    return tf.SparseTensor(ids.indices, values, ids.dense_shape)
