"""A table where a tensor is wanted: operators, and what TensorFlow converts.

All of it joins the shards; indexing and lookups, which do not, are elsewhere.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.sharded.access import indexing


def install(tables: Any) -> None:
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
