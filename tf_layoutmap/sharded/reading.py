"""The methods of a table that read it."""

# DOC-MERGE: A table where a tensor is wanted: operators, and what TensorFlow converts.
#
# All of it joins the shards; indexing and lookups, which do not, are elsewhere.
#
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import tf_private
from tf_layoutmap.sharded import indexing
from tf_layoutmap.sharded import summary as _summary
from tf_layoutmap.sharded.routing import checks as routing_checks
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.checks import Shards, known_size


class Reads:
    """Reads of `_shards()`; arrays are made of `_own_shards`."""

    _own_shards: Shards

    def _shards(self) -> Shards:
        """The table as the current graph may see it."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tf.Variable]:
        """Iterates over the shards (a `tf.Variable` gives its rows)."""
        return iter(self._shards().variables)

    def __len__(self) -> int:
        """Rows of the table."""
        return self._own_shards.num_rows

    def __getitem__(self, index: Any) -> tf.Tensor:
        """Returns rows, like indexing a numpy array or a tensor.

        The tensor has methods that write to where it came from, as for
        `tf.Variable`: `table[2:5].assign(value)`, `assign_add` and
        `assign_sub`. They return the table.

        >>> import tf_layoutmap as tlm
        >>> table = tlm.ShardedVariable.create(np.zeros((4, 2)), num_shards=2)
        >>> table[1:3, 0].assign([5., 7.]).numpy().tolist()
        [[0.0, 0.0], [5.0, 0.0], [7.0, 0.0], [0.0, 0.0]]

        Args:
          index: Ints, slices (bounds may be tensors), `...` and `None`. What
            indexes axis 0 may also be an int or bool array, list or tensor.

        Returns:
          A tensor. Only shards that own a wanted row are read.

        Raises:
          IndexError, TypeError: The index does not fit the shape.
          tf.errors.InvalidArgumentError: A tensor holds a row outside.
        """
        found = indexing.read(self._shards(), index)
        for method, verb in (
            ("assign", "update"),
            ("assign_add", "add"),
            ("assign_sub", "sub"),
        ):
            setattr(found, method, self._writer(verb, index))
        return found

    def _writer(self, verb: str, index: Any):
        def assign(value: Any, name: str | None = None):
            with tf.name_scope(name or f"strided_slice_{verb}"):
                indexing.write(self._shards(), verb, index, value)
            return self

        return assign

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns the rows of `indices`, in their order.

        Args:
          indices: Any shape, int32 or int64: global rows.
          name: Name of the operations.

        Returns:
          Shape `indices.shape + shape[1:]`.

        Raises:
          TypeError: `indices` are not int32 or int64.
          tf.errors.InvalidArgumentError: A row is outside the table.
        """
        return routing.gather(self._shards(), indices, name)

    def gather_rows(
        self, ids: Any, *, unique: bool = False, name: str | None = None
    ) -> tf.Tensor:
        """Returns the rows of `ids`, in their order, as `sparse_read`.

        Args:
          ids: Any shape, int32 or int64: global rows.
          unique: Whether to read each row once and repeat it here. Worth it
            where shards are on other machines and ids repeat; gradients of
            one row then come summed.
          name: Name of the operations.

        Returns:
          Shape `ids.shape + shape[1:]`.
        """
        shards = self._shards()
        if not unique:
            return routing.gather(shards, ids, name)
        with tf.name_scope(name or "gather_rows"):
            ids = routing_checks.ids_of(shards, ids)
            distinct, positions = tf.unique(tf.reshape(ids, [-1]))
            rows = tf.gather(
                routing.gather(shards, distinct),
                tf.reshape(positions, tf.shape(ids)),
            )
            rows.set_shape(ids.shape.concatenate(shards.row_shape))
            return rows

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns `tf.gather_nd` of the table.

        Args:
          indices: `[..., k]`, int32 or int64: row, column and so on; `k` at
            least 1 and at most the rank.
          name: Name of the operations.

        Returns:
          Shape `indices.shape[:-1] + shape[k:]`.

        Raises:
          ValueError: `k` does not fit the table.
          tf.errors.InvalidArgumentError: An index is outside.
        """
        return indexing.gather_nd(self._shards(), indices, name)

    def value(self) -> tf.Tensor:
        """Returns the whole table as one tensor, rows in order."""
        return indexing.dense(self._shards())

    def read_value(self) -> tf.Tensor:
        """Returns the whole table as one tensor, rows in order."""
        return self.value()

    def numpy(self, *, chunk_rows: int | None = None) -> np.ndarray:
        """Returns a copy of the whole table. Only outside `tf.function`.

        Args:
          chunk_rows: How many rows of a shard to read at a time, so that no
            more than these are in memory in addition to table and result.
            None: a shard.
        """
        shards = self._own_shards
        if not tf.executing_eagerly():
            raise NotImplementedError(
                "`numpy()` must be called outside of tf.function (table "
                f"{shards.name!r})."
            )
        if chunk_rows is not None:
            _core_checks.check_int(
                "chunk_rows",
                chunk_rows,
                lowest=1,
                where=f"table {shards.name!r}",
            )
        whole = np.empty(shards.sizes, shards.dtype.as_numpy_dtype)
        for number, variable in enumerate(shards.variables):
            rows = (
                shards.partition.global_rows(number)
                if not shards.partition.is_contiguous
                else slice(*shards.partition.offsets[number:][:2])
            )
            # An index array makes a copy, not a view.
            target = (
                whole[:, rows]
                if shards.axis == 1
                else whole[rows]
                if isinstance(rows, slice)
                else None
            )
            size = known_size(variable)
            for start in range(0, size, chunk_rows or max(size, 1)):
                stop = min(start + (chunk_rows or size), size)
                block = (
                    variable.numpy()
                    if chunk_rows is None
                    else routing.gather_checked(
                        shards.alone(number), tf.range(start, stop)
                    ).numpy()
                )
                if target is not None:
                    target[start:stop] = block
                elif not isinstance(rows, slice):
                    whole[rows[start:stop]] = block
        return whole

    def __array__(
        self, dtype: Any = None, copy: bool | None = None
    ) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "A table in shards must be copied to become one array. "
                f"Received: copy=False (table {self._own_shards.name!r})."
            )
        whole = self.numpy()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def ref(self) -> Any:
        """Returns a hashable reference to this table; `deref()` undoes it."""
        return tf_private.Reference(self)

    def summary(self) -> _summary.Summary:
        """Returns rows, bytes and device of each shard; `print` shows it.

        >>> import tf_layoutmap as tlm
        >>> table = tlm.ShardedVariable.create(np.zeros((5, 2)), num_shards=2)
        >>> [(shard.rows, shard.num_bytes) for shard in table.summary().shards]
        [(3, 48), (2, 32)]
        """
        return _summary.summarize(self._own_shards)


def install_operators(tables: Any) -> None:
    """Gives a class of tables the operators of `tf.Tensor`.

    Args:
      tables: The class. It has `name`, `dtype` and `_shards()`.
    """
    known = tf.Tensor.OVERLOADABLE_OPERATORS  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
    for operator in known - {"__getitem__"}:
        setattr(tables, operator, _operator_method(tables, operator))
    # Tables are keys of TensorFlow's dictionaries; `==` compares values.
    tables.__hash__ = object.__hash__
    tf.register_tensor_conversion_function(tables, _to_tensor)


def _operator_method(tables: type, operator: str) -> Callable:
    of_tensor = getattr(tf.Tensor, operator)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return of_tensor(tf.convert_to_tensor(self), *args, **kwargs)

    apply.__name__ = operator
    apply.__qualname__ = f"{tables.__name__}.{operator}"
    apply.__doc__ = of_tensor.__doc__
    return apply


def _to_tensor(
    table: Any,
    dtype: tf.DType | None = None,
    name: str | None = None,
    as_ref: bool = False,
) -> tf.Tensor:
    del name
    if as_ref:
        raise NotImplementedError(
            f"Table {table.name!r} cannot become a reference."
        )
    if dtype is not None and not dtype.is_compatible_with(table.dtype):
        raise ValueError(
            f"Argument `dtype` must be {table.dtype.name}, the table's. "
            f"Received: {dtype.name} (table {table.name!r})."
        )
    return indexing.dense(table._shards())
