"""Write methods of a sharded table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap.sharded import indexing
from tf_layoutmap.sharded.routing import checks as routing_checks
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.checks import Shards

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TensorLike


class Writes:
    """Write methods of a table.

    The methods write to the variables of `_shards()` and return the table.
    """

    def _shards(self) -> Shards:
        """Returns the shards that the current graph may use."""
        raise NotImplementedError

    def assign(
        self,
        value: TensorLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Assigns `value` to the full table; returns this table.

        Args:
          value: Value with the shape and dtype of the table.
          use_locking: Same as for `tf.Variable`.
          name: Name of the operations.
          read_value: Ignored. The argument exists for compatibility with
            `tf.Variable`. The method returns the table without reading its
            values.

        Raises:
          ValueError: If `value` and the table have different shapes. No shard
            is written.
        """
        return self._assign("assign", value, use_locking, name, read_value)

    def assign_add(
        self,
        delta: TensorLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Adds `delta` to the full table.

        Arguments are the same as for `assign`.
        """
        return self._assign("assign_add", delta, use_locking, name, read_value)

    def assign_sub(
        self,
        delta: TensorLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Subtracts `delta` from the full table; see `assign`."""
        return self._assign("assign_sub", delta, use_locking, name, read_value)

    def _assign(
        self,
        verb: str,
        value: Any,
        use_locking: bool,
        name: str | None,
        read_value: bool,
    ):
        del read_value
        shards = self._shards()
        with tf.name_scope(name or verb):
            value = tf.convert_to_tensor(value, dtype=shards.dtype)
            value = routing_checks.check_run_time_shape(
                shards, value, shards.shape, shards.shape.as_list()
            )
            for variable, block in zip(shards.variables, shards.split(value)):
                getattr(variable, verb)(
                    block, use_locking=use_locking, read_value=False
                )
        return self

    def batch_scatter_update(
        self,
        sparse_delta: tf.IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
        """Applies `batch_scatter_update` of `tf.Variable`; returns this table.

        Indices of rank 1 are rows. If the rank is `r`, the indices refer to
        axis `r - 1` of the table, and the leading axes of `indices` are the
        leading axes of the table. For example, if the rank is 2, the method
        sets `table[i, indices[i, j]] = values[i, j]`.

        Args:
          sparse_delta: `indices` of rank 1 or more, int32 or int64; `values`
            of shape `indices.shape + shape[indices.rank:]`.
          use_locking: Ignored. The argument exists for compatibility with
            `tf.Variable`.
          name: Name of the operations.
        """
        del use_locking
        shards = self._shards()
        _check_slices(shards, sparse_delta)
        with tf.name_scope(name or "batch_scatter_update"):
            indices = routing_checks.ids_of(shards, sparse_delta.indices)
            rank = indices.shape.rank
            if not rank or rank > shards.shape.rank:
                raise ValueError(
                    "`indices` must have a known rank, from 1 to "
                    f"{shards.shape.rank}. Received: shape {indices.shape} "
                    f"(table {shards.name!r})."
                )
            counted = tf.where(tf.fill(tf.shape(indices), True))[:, :-1]
            tuples = tf.concat(
                [counted, tf.cast(tf.reshape(indices, [-1, 1]), tf.int64)],
                axis=1,
            )
            tuples = tf.reshape(
                tuples, tf.concat([tf.shape(indices), [rank]], axis=0)
            )
            tuples.set_shape([*indices.shape, rank])
            indexing.scatter_nd(shards, "update", tuples, sparse_delta.values)
        return self


def _check_slices(shards: Shards, sparse_delta: Any) -> None:
    _core_checks.check_type(
        "sparse_delta",
        sparse_delta,
        tf.IndexedSlices,
        "a tf.IndexedSlices",
        where=f"table {shards.name!r}",
    )


def _scatter_method(verb: str) -> Callable:
    def scatter(
        self,
        sparse_delta: tf.IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ):
        del use_locking  # The fused op always locks.
        shards = self._shards()
        _check_slices(shards, sparse_delta)
        routing.scatter(
            shards, verb, sparse_delta.indices, sparse_delta.values, name
        )
        return self

    scatter.__name__ = f"scatter_{verb}"
    scatter.__qualname__ = f"Writes.scatter_{verb}"
    scatter.__doc__ = f"""Applies `scatter_{verb}` of `tf.Variable`.

        Args:
          sparse_delta: `indices`: global rows, any shape, int32 or int64;
            `values` of shape `indices.shape + shape[1:]`, or a scalar.
            Repeated indices are all applied, in order.
          use_locking: Ignored; accepted for compatibility with `tf.Variable`.
          name: Name of the operations.

        Returns:
          This table.

        Raises:
          TypeError: If `sparse_delta` is not a `tf.IndexedSlices`, or its
            indices are not int32 or int64.
          ValueError: If `values` have another shape or dtype.
          tf.errors.InvalidArgumentError: If a row is out of range. No shard is
            written.
        """
    return scatter


def _scatter_nd_method(verb: str) -> Callable:
    def scatter_nd(
        self,
        indices: TensorLike,
        updates: TensorLike,
        name: str | None = None,
    ):
        indexing.scatter_nd(self._shards(), verb, indices, updates, name)
        return self

    scatter_nd.__name__ = f"scatter_nd_{verb}"
    scatter_nd.__qualname__ = f"Writes.scatter_nd_{verb}"
    scatter_nd.__doc__ = f"""Applies `scatter_nd_{verb}` of `tf.Variable`.

        Args:
          indices: `[..., k]`, int32 or int64: row, column and so on, with `k`
            from 1 to the rank. Repeated indices are all applied.
          updates: Tensor of shape `indices.shape[:-1] + shape[k:]`.
          name: Name of the operations.

        Returns:
          This table.

        Raises:
          ValueError: If `k` or the shape of `updates` does not fit.
          tf.errors.InvalidArgumentError: If an index is out of range. No shard
            is written.
        """
    return scatter_nd


for _verb in routing.VERBS:
    setattr(Writes, f"scatter_{_verb}", _scatter_method(_verb))
for _verb in indexing.UPDATE_METHODS:
    setattr(Writes, f"scatter_nd_{_verb}", _scatter_nd_method(_verb))
