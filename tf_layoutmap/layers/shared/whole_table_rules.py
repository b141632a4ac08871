"""What regularizers, constraints and optimizers see of a table in shards."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap import _checks


class WholeTableRegularizer:
    """Of one shard, which stands for all: the loss of the whole table."""

    def __init__(
        self,
        regularizer: Callable[[tf.Tensor], tf.Tensor],
        make_table: Callable[[], Any],
    ):
        """Takes the regularizer; `make_table` returns the table."""
        self._regularizer = regularizer
        self._make_table = make_table

    def __call__(self, shard: Any) -> tf.Tensor:
        del shard
        return self._regularizer(tf.convert_to_tensor(self._make_table()))


class WholeTableConstraint:
    """Of the last shard, for all: an optimizer has written the others by then.

    A norm along axis 0, the default of Keras, is that of a column of the whole
    table.
    """

    def __init__(
        self,
        constraint: Callable[[tf.Tensor], tf.Tensor],
        make_table: Callable[[], Any],
    ):
        """Takes the constraint; `make_table` returns the table."""
        self._constraint = constraint
        self._make_table = make_table

    def __call__(self, shard: Any) -> tf.Tensor:
        del shard
        table = self._make_table()
        values = tf.split(
            self._constraint(tf.convert_to_tensor(table)), table.partition.sizes
        )
        for variable, value in zip(table.variables[:-1], values):
            variable.assign(value)
        return values[-1]


def loss_of_rows(
    regularizer: Callable[[tf.Tensor], tf.Tensor], table: Any, ids: tf.Tensor
) -> tf.Tensor:
    """Returns the loss of the rows of `ids`, each counted once."""
    distinct, _ = tf.unique(tf.reshape(ids, [-1]))
    return regularizer(table.sparse_read(distinct))


def check_by_row(constraint: Any, where: str) -> None:
    """Refuses a constraint of Keras that mixes the rows it is given.

    Raises:
      ValueError: It takes norms along axis 0.
    """
    axis = getattr(constraint, "axis", None)
    axes = axis if isinstance(axis, list | tuple) else [axis]
    if {0, -2} & set(axes):
        raise ValueError(
            "Argument `embeddings_constraint` must treat each row by itself "
            "where the table has an optimizer of its own, which constrains the "
            "rows of a batch only: use axis=1. Received: "
            f"{type(constraint).__name__} with axis={axis!r} ({where})."
        )


def refuse_whole_weights(
    optimizer: Any,
    kinds: type | tuple[type, ...],
    where: str,
    setting: str | None = None,
) -> None:
    """Refuses an optimizer that would take each shard for a whole weight.

    Args:
      optimizer: Of the model, or None.
      kinds: Optimizer classes that compute with a weight as a whole.
      where: The table or weight, for the message.
      setting: What else makes it compute so, or None.

    Raises:
      ValueError: It clips the norm of each weight, or is of such a class.
    """
    clipnorm = getattr(optimizer, "clipnorm", None)
    if clipnorm:
        setting = f"clipnorm={clipnorm}"
    elif isinstance(optimizer, kinds):
        setting = type(optimizer).__name__
    if setting:
        raise ValueError(
            "A model's optimizer that computes with a weight as a whole "
            "trains a table in one shard only; use num_shards=1, "
            "`global_clipnorm`, or an optimizer of the layer's own. Received: "
            f"{setting} ({where})."
        )


def check_callable(argument: str, value: Any, where: str) -> Any:
    """Returns `value`, None or a callable."""
    if value is not None and not callable(value):
        raise TypeError(
            _checks.message(argument, "None or callable", value, where)
        )
    return value
