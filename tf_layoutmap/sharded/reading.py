"""Read methods, operators and tensor conversion of a sharded table.

Indexing and lookups read only the shards that contain a selected row. Operators
and the conversion to a tensor join all shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks as _core_checks
from tf_layoutmap._core import placeholders, tf_private
from tf_layoutmap.sharded import indexing
from tf_layoutmap.sharded import summary as _summary
from tf_layoutmap.sharded.routing import checks as routing_checks
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.checks import Shards, known_size

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Reference, TensorLike


class Reads:
    """Read methods of a table.

    The methods read the variables of `_shards()`. Methods that return numpy
    arrays read the variables of `_own_shards`.
    """

    _own_shards: Shards

    def _shards(self) -> Shards:
        """Returns the shards that the current graph may use."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tf.Variable]:
        """Iterates over the shards, not over rows as for `tf.Variable`."""
        return iter(self._shards().variables)

    def __len__(self) -> int:
        """Returns the number of rows of the table."""
        return self._own_shards.num_rows

    def __getitem__(self, index: Any) -> tf.Tensor:
        """Returns elements of the table, with the index rules of numpy.

        The returned tensor has methods that write to the indexed elements, as
        for `tf.Variable`: `table[2:5].assign(value)`, `assign_add` and
        `assign_sub`. These methods return the table.

        >>> import tf_layoutmap as tlm
        >>> table = tlm.ShardedVariable.create(np.zeros((4, 2)), num_shards=2)
        >>> table[1:3, 0].assign([5., 7.]).numpy().tolist()
        [[0.0, 0.0], [5.0, 0.0], [7.0, 0.0], [0.0, 0.0]]

        Args:
          index: Ints, slices (bounds may be tensors), `...` and `None`. The
            item for axis 0 may also be an int or bool array, list or tensor.

        Returns:
          A tensor. Only shards that own a selected row are read.

        Raises:
          IndexError, TypeError: If the index does not fit the shape.
          tf.errors.InvalidArgumentError: If a tensor contains a row that is out
            of range.
        """
        read = placeholders.placeholder_of(self)
        value = (
            indexing.read(self._shards(), index)
            if read is None
            else read()[index]
        )
        for method, verb in (
            ("assign", "update"),
            ("assign_add", "add"),
            ("assign_sub", "sub"),
        ):
            setattr(value, method, self._writer(verb, index))
        return value

    def _writer(self, verb: str, index: Any):
        def assign(value: Any, name: str | None = None):
            with tf.name_scope(name or f"strided_slice_{verb}"):
                indexing.write(self._shards(), verb, index, value)
            return self

        return assign

    def sparse_read(
        self, indices: TensorLike, name: str | None = None
    ) -> tf.Tensor:
        """Returns the rows of `indices`, in the order of `indices`.

        Args:
          indices: Global rows: any shape, int32 or int64.
          name: Name of the operations.

        Returns:
          Shape `indices.shape + shape[1:]`.

        Raises:
          TypeError: If `indices` are not int32 or int64.
          tf.errors.InvalidArgumentError: If a row is out of range.
        """
        read = placeholders.placeholder_of(self)
        if read is not None:
            return tf.gather(read(), indices, name=name)
        return routing.gather(self._shards(), indices, name)

    def gather_rows(
        self, ids: TensorLike, *, unique: bool = False, name: str | None = None
    ) -> tf.Tensor:
        """Returns the rows of `ids` in the order of `ids`, like `sparse_read`.

        Args:
          ids: Global rows: any shape, int32 or int64.
          unique: Whether to read each row only once, and to repeat the row
            locally for repeated ids. The option saves time if the shards are on
            other machines. Gradients of repeated rows are summed.
          name: Name of the operations.

        Returns:
          Shape `ids.shape + shape[1:]`.
        """
        if not unique or placeholders.placeholder_of(self) is not None:
            return self.sparse_read(ids, name)
        shards = self._shards()
        with tf.name_scope(name or "gather_rows"):
            ids = routing_checks.ids_of(shards, ids)
            distinct, positions = tf.unique(tf.reshape(ids, [-1]))
            rows = tf.gather(
                routing.gather(shards, distinct),
                tf.reshape(positions, tf.shape(ids)),
            )
            rows.set_shape(ids.shape.concatenate(shards.row_shape))
            return rows

    def gather_nd(
        self, indices: TensorLike, name: str | None = None
    ) -> tf.Tensor:
        """Returns `tf.gather_nd` of the table.

        Args:
          indices: `[..., k]`, int32 or int64: row, column and so on, with `k`
            from 1 to the rank of the table.
          name: Name of the operations.

        Returns:
          Shape `indices.shape[:-1] + shape[k:]`.

        Raises:
          ValueError: If `k` is not in the range from 1 to the rank of the
            table.
          tf.errors.InvalidArgumentError: If an index is out of range.
        """
        read = placeholders.placeholder_of(self)
        if read is not None:
            rows: Any = tf.convert_to_tensor(cast("Any", indices))
            return tf.gather_nd(read(), rows, name=name)
        return indexing.gather_nd(self._shards(), indices, name)

    def value(self) -> tf.Tensor:
        """Returns the full table as one tensor, with its rows in order."""
        return _dense(self)

    def read_value(self) -> tf.Tensor:
        """Returns the full table as one tensor, with its rows in order."""
        return self.value()

    def numpy(self, *, chunk_rows: int | None = None) -> np.ndarray:
        """Returns a copy of the full table as an array.

        Args:
          chunk_rows: Number of rows of a shard to read at a time. Only these
            rows are in memory in addition to the table and the result. None:
            all rows of a shard.

        Raises:
          NotImplementedError: If the method is called inside a `tf.function`.
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
        result = np.empty(shards.sizes, shards.dtype.as_numpy_dtype)
        for number, variable in enumerate(shards.variables):
            rows = (
                shards.partition.global_rows(number)
                if not shards.partition.is_contiguous
                else slice(*shards.partition.offsets[number:][:2])
            )
            # `target` is None if `rows` is an array, because indexing with an
            # array returns a copy.
            target = (
                result[:, rows]
                if shards.axis == 1
                else result[rows]
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
                        shards.single_shard(number), tf.range(start, stop)
                    ).numpy()
                )
                if target is not None:
                    target[start:stop] = block
                elif not isinstance(rows, slice):
                    result[rows[start:stop]] = block
        return result

    def __array__(
        self, dtype: Any = None, copy: bool | None = None
    ) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "A sharded table must be copied to convert it to an array. "
                f"Received: copy=False (table {self._own_shards.name!r})."
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def ref(self) -> Reference[Self]:
        """Returns a hashable reference; its `deref()` returns this table."""
        return tf_private.Reference(self)

    def summary(self) -> _summary.TableSummary:
        """Returns rows, bytes and device of each shard, in printable form.

        >>> import tf_layoutmap as tlm
        >>> table = tlm.ShardedVariable.create(np.zeros((5, 2)), num_shards=2)
        >>> [(shard.rows, shard.num_bytes) for shard in table.summary().shards]
        [(3, 48), (2, 32)]
        """
        return _summary.summarize(self._own_shards)


def install_operators(tables: Any) -> None:
    """Adds the operators of `tf.Tensor` to a class of tables.

    Args:
      tables: The class. Objects of the class must have `name`, `dtype` and
        `_shards()`.
    """
    known = tf.Tensor.OVERLOADABLE_OPERATORS  # pyright: ignore[reportAttributeAccessIssue] Missing in the stubs.
    for operator in known - {"__getitem__"}:
        setattr(tables, operator, _operator_method(tables, operator))
    # TensorFlow uses tables as keys of dictionaries. Tables are therefore
    # hashed by identity, although `==` compares their values.
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
            f"Table {table.name!r} does not support conversion to a reference. "
            "If an optimizer creates its variables in a tf.function, call "
            "`optimizer.build([table])` before the function."
        )
    if dtype is not None and not dtype.is_compatible_with(table.dtype):
        raise ValueError(
            f"Argument `dtype` must be {table.dtype.name}, the dtype of the "
            f"table. Received: {dtype.name} (table {table.name!r})."
        )
    return _dense(table)


def _dense(table: Any) -> tf.Tensor:
    """Returns the full table. While it is exported, it is read elsewhere."""
    read = placeholders.placeholder_of(table)
    return indexing.dense(table._shards()) if read is None else read()
