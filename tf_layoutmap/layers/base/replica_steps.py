"""Steps in which several replicas train one table together.

The replicas of a process share the table of a `ShardedEmbedding`, which is on
the host. Each process of a `MultiWorkerMirroredStrategy` has a copy of the
table. A step concatenates the gradients of all replicas in the order of the
replicas, and each process applies them once. Replicas process consecutive parts
of the global batch. The gradients of a row are therefore summed in the order of
the samples in the global batch, as with one replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import strategies, tf_private
from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.embedding import replicas, tables


def has_replicas() -> bool:
    """Returns whether the strategy in scope splits batches over replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


@contextlib.contextmanager
def shared_variables() -> Iterator[None]:
    """Context in which the replicas of a process share new variables.

    Without this context, a strategy creates one copy per replica.
    """
    if not has_replicas():
        yield
        return
    with tf.variable_creator_scope(_create_shared):
        yield


def _create_shared(
    next_creator: Any,
    *,
    initial_value: Any,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: Any = None,
    shape: Any = None,
    **unused: Any,
) -> tf.Variable:
    """Creates a variable without the creator of a strategy."""
    del next_creator, unused
    return tf_private.ResourceVariable(
        initial_value,
        trainable=trainable,
        name=name,
        dtype=dtype,
        shape=shape,
    )


def use_rows_of_first_process(table: Any) -> None:
    """Assigns the rows of the first process to the copies of all processes.

    Without this assignment, an initializer without a seed would give the
    processes different rows.

    Args:
      table: A new table, a `ShardedVariable`.
    """
    strategy = tf.distribute.get_strategy()
    if strategies.has_processes(strategy):
        from tf_layoutmap.embedding.host import multi_process

        multi_process.broadcast_initial_values(
            {table.name: {tables.PARAMETERS: table}}, strategy
        )


def apply_once(
    apply: Callable[[tf.Tensor, tf.Tensor], Any],
    ids: tf.Tensor,
    values: tf.Tensor,
    table: str,
    *,
    is_summed: bool = False,
) -> None:
    """Calls `apply` once, with the gradients of all replicas.

    Each replica calls this function with the gradients of its samples. Outside
    of replicas, the gradients already contain the global batch.

    Args:
      apply: Function of `ids` and `values`, which is called outside of replicas
        if there are several replicas.
      ids: `[num_ids]`, ids of rows, int32 or int64.
      values: `[num_ids, dim]` float32, gradients of the rows.
      table: Name of the table, for messages.
      is_summed: Whether each replica passes the gradients of the global batch.

    Raises:
      RuntimeError: If a replica calls this function in a `tf.function`, a loop
        or a branch, or eagerly if there are several processes.
    """
    if not _is_in_replica():
        apply(ids, values)
        return
    _merge(
        lambda gathered: apply(*gathered),
        [ids, values],
        table,
        is_equal=is_summed,
    )


def loss_of_rows(
    loss_of: Callable[[tf.Tensor], tf.Tensor], ids: tf.Tensor, table: str
) -> tf.Tensor:
    """Returns the loss of the rows that all replicas look up.

    Keras divides the loss of each replica by the number of replicas, and sums
    the gradients. The last replica therefore returns the loss times the number
    of replicas, and all other replicas return zero. The gradients of this loss
    are then added after the gradients of all lookups, as with one replica.

    Args:
      loss_of: Function that returns the loss of the rows of `ids`, each counted
        once.
      ids: Ids that the calling replica looks up, of any shape.
      table: Name of the table, for messages.

    Raises:
      RuntimeError: As for `apply_once`.
    """
    ids = tf.reshape(ids, [-1])
    if not _is_in_replica():
        return loss_of(ids)
    (ids,) = _merge(lambda gathered: gathered, [ids], table)
    loss = loss_of(ids)
    context = tf.distribute.get_replica_context()
    count = context.num_replicas_in_sync
    is_last = tf.equal(context.replica_id_in_sync_group, count - 1)
    return loss * tf.cast(tf.where(is_last, count, 0), loss.dtype)


def is_true_in_all(condition: tf.Tensor) -> tf.Tensor:
    """Returns whether a condition is true in all replicas.

    Args:
      condition: `[]` bool tensor of the calling replica.
    """
    if not _is_in_replica():
        return condition
    number = tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, tf.cast(condition, tf.float32)
    )
    return tf.equal(number, tf.distribute.get_strategy().num_replicas_in_sync)


def _is_in_replica() -> bool:
    """Returns whether the caller is one of several replicas."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def _merge(
    function: Callable[[list[tf.Tensor]], Any],
    tensors: list[tf.Tensor],
    table: str,
    *,
    is_equal: bool = False,
) -> Any:
    """Returns the result of a function of the tensors of all replicas.

    Args:
      function: Function of a list with the concatenation of each tensor over
        all replicas. It is called once in each process, outside of replicas.
      tensors: Int64, int32 or float32 tensors of the calling replica, which
        have the same number of rows.
      table: Name of the table, for messages.
      is_equal: Whether all replicas pass the same tensors, which are then not
        concatenated.
    """
    context = tf.distribute.get_replica_context()
    in_processes = strategies.has_processes(context.strategy)
    if in_processes and tf.executing_eagerly():
        raise RuntimeError(
            "Under MultiWorkerMirroredStrategy, a ShardedEmbedding must be "
            "trained in a tf.function: the processes exchange ids and "
            "gradients by operations that do not run eagerly. Compile the "
            f"model with run_eagerly=False. Received: table {table!r}."
        )

    def merge(strategy: Any, *tensors: Any) -> Any:
        parts = [replicas.values_of(strategy, tensor) for tensor in tensors]
        with tf.device(HOST):
            # After `_gather`, each replica has the tensors of all replicas.
            joined = [
                part[0] if in_processes or is_equal else tf.concat(part, axis=0)
                for part in parts
            ]
        return function(joined)

    try:
        if in_processes and not is_equal:
            tensors = _gather(tensors)
        return context.merge_call(merge, args=tuple(tensors))
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "Replicas must not train a ShardedEmbedding, or compute the loss "
            "of its regularizer, in a `tf.function`, a loop or a branch inside "
            "`strategy.run`, because all replicas do it together, which "
            "TensorFlow does not support there. Call `strategy.run` inside the "
            "only `tf.function`, and inside loops over steps. Received: table "
            f"{table!r}."
        ) from error


def _gather(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the concatenation of each tensor over all processes.

    One message contains all tensors, as int32. It has an additional row,
    because TensorFlow's op ends the process if the tensors of all replicas are
    empty.
    """
    with tf.device(HOST):
        columns = [tf.ones([tf.shape(tensors[0])[0], 1], tf.int32)]
        for tensor in tensors:
            bits = tf.bitcast(tensor, tf.int32)
            columns.append(
                bits if bits.shape.rank == 2 else bits[:, tf.newaxis]
            )
        message = tf.pad(tf.concat(columns, axis=1), [[0, 1], [0, 0]])
    gathered = tf.distribute.get_replica_context().all_gather(message, axis=0)
    with tf.device(HOST):
        rows = tf.boolean_mask(gathered, tf.cast(gathered[:, 0], tf.bool))
        sizes = [int(column.shape[1] or 0) for column in columns]
        _, *parts = tf.split(rows, sizes, axis=1)
        return [
            tf.bitcast(
                part
                if tensor.dtype.size == 8 or tensor.shape.rank == 2
                else part[:, 0],
                tensor.dtype,
            )
            for part, tensor in zip(parts, tensors)
        ]
