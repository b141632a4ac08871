"""Creates one variable of a table, with one or several shards.

User code can create an embedding inside `tf.variable_creator_scope`, for
example to record or shard its variables. This module calls the creators in
scope with the same arguments as for a `tf.Variable`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import tf_private
from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded import initial_value as sharded_initial_value
from tf_layoutmap.sharded.routing import routing
from tf_layoutmap.sharded.routing.checks import Shards, known_size
from tf_layoutmap.vocabulary.parts import shards_of

# Bytes of the float32 values that are cast to the storage dtype at a time.
_BLOCK_BYTES = 1 << 22


def create(
    table: config.TableSpec,
    name: str,
    initializer: Callable[..., Any],
    cut: partition.RowPartition,
    *,
    dim: int,
    trainable: bool,
    dtype: str = "float32",
    devices: Sequence[str] | None = None,
    only: int | None = None,
) -> Any:
    """Creates a variable of a table: its rows, or one of its slot variables.

    Args:
      table: Spec of the table.
      name: Name of the variable.
      initializer: Initializer of the rows. See `initial_value.of_shard`.
      cut: Partition of the rows. If the partition has only one shard, a
        variable creator can split the rows into several shards.
      dim: Number of columns.
      trainable: Whether gradient tapes watch the variable.
      dtype: Storage dtype of the rows. Variable creators always receive
        float32.
      devices: Device of each shard, or None for the device of the caller. If
        devices are passed, variable creators are not called, and initial values
        that are equal in all processes are computed on these devices.
      only: Index of the only shard to create, or None for all shards. If an
        index is passed, variable creators are not called. The values of the
        shard do not depend on whether other shards are created, for any seed.
        If the table has no shard with this index, the variable has one row of
        zeros.

    Returns:
      A `tf.Variable`, or a `ShardedVariable` of contiguous blocks of rows.

    Raises:
      TypeError, ValueError: See `tables.create_tables`.
    """
    shape = (table.num_rows, dim)
    bound = sharded_initial_value.for_shards(
        bind_shape(initializer, shape),
        shape,
        tf.float32,
        cut.num_shards,
        table.name,
    )
    creators = _user_creators() if devices is None and only is None else []
    if only is not None:
        return _create_one_shard(
            table,
            name,
            bound,
            cut,
            only,
            dim=dim,
            trainable=trainable,
            dtype=dtype,
        )

    is_drawn_there = (
        devices is not None
        and sharded_initial_value.is_drawn_anywhere(initializer, tf.float32)
    )
    drawn = []
    if devices is not None and is_drawn_there:
        # `tf.experimental.async_scope` is not used, because TensorFlow can
        # block forever if a server is lost while the scope is active.
        for shard, device in enumerate(devices):
            with tf.device(device):
                drawn.append(
                    sharded_initial_value.of_shard(
                        bound, shape, tf.float32, cut, shard, table.name
                    )
                )
    shards = []
    for shard, shard_name in enumerate(_shard_names(name, cut.num_shards)):
        value = _ShardValue(bound, shape, cut, shard, table.name)
        if is_drawn_there:
            value = functools.partial(drawn.__getitem__, shard)
        initial_value = (
            value
            if cut.num_shards > 1
            else _bind_shape_and_dtype(initializer, shape)
        )
        created = shards_of(
            _chain(
                creators,
                functools.partial(
                    _create_variable,
                    table,
                    dtype,
                    {id(initial_value): value},
                    None if devices is None else devices[shard],
                    is_drawn_there,
                ),
            )(
                initial_value=initial_value,
                trainable=trainable,
                name=shard_name,
                dtype=tf.float32,
                shape=tf.TensorShape([cut.sizes[shard], dim]),
            )
        )
        if cut.num_shards > 1 and len(created) > 1:
            raise ValueError(
                "A variable creator must not shard a table that a "
                f"partitioner shards. Received: {len(created)} shards of "
                f"{shard_name!r} (table {table.name!r})."
            )
        shards.extend(created)
    if creators:
        _check_created(table, shards, shape, dtype)
    return shards[0] if len(shards) == 1 else ShardedVariable(shards, name=name)


@dataclasses.dataclass(frozen=True)
class _ShardValue:
    """Function that returns the initial value of a shard, in float32."""

    initializer: Any
    shape: tuple[int, int]
    cut: partition.RowPartition
    shard: int
    table: str

    def __call__(self, *_: Any) -> tf.Tensor:
        # A variable creator may pass the shape of the shard.
        return sharded_initial_value.of_shard(
            self.initializer,
            self.shape,
            tf.float32,
            self.cut,
            self.shard,
            self.table,
        )

    def block(self, start: int, stop: int) -> tf.Tensor | None:
        """Returns rows of the shard, or None if only all rows can be drawn."""
        return sharded_initial_value.block_of_shard(
            self.initializer, self.shape, self.cut, self.shard, start, stop
        )


def _create_one_shard(
    table: config.TableSpec,
    name: str,
    initializer,
    cut,
    only: int,
    *,
    dim: int,
    trainable: bool,
    dtype: str,
) -> Any:
    """Creates one shard, or one row if the shard does not exist."""
    own_value = None
    for shard in range(cut.num_shards):
        value = _ShardValue(
            initializer, (table.num_rows, dim), cut, shard, table.name
        )
        if not sharded_initial_value.skip_shard(initializer):
            # The value of a shard depends on the order of these calls.
            value = value()
        if shard == only:
            own_value = value
    return _create_variable(
        table,
        dtype,
        {},
        None,
        False,
        tf.zeros([1, dim]) if own_value is None else own_value,
        name=f"{name}/part_{only}",
        trainable=trainable,
    )


def check_same_cut(table: config.TableSpec, rows: Any, slot: Any):
    """Checks that a slot variable has the same shards as its table.

    Raises:
      ValueError: If a variable creator sharded the table and the slot variable
        in different ways.
    """
    cuts = [
        [known_size(shard) for shard in shards_of(variable)]
        for variable in (rows, slot)
    ]
    if cuts[0] != cuts[1]:
        raise ValueError(
            "Variable creators must shard a slot variable like its table, in "
            f"shards of {cuts[0]} rows. Received: {cuts[1]} "
            f"(table {table.name!r})."
        )


def strategy_in_scope() -> tf.distribute.Strategy | None:
    """Returns the strategy in scope, to which new variables belong.

    tf_keras compiles a model under a strategy only if all variables of the
    model belong to this strategy.
    """
    if not tf.distribute.has_strategy():
        return None
    return tf.distribute.get_strategy()


def bind_shape(initializer: Callable[..., Any], shape):
    """Binds the full shape to an initializer with an argument `shard_info`.

    TensorFlow also passes the full shape to these initializers. All other
    initializers are returned unchanged.
    """
    if "shard_info" not in inspect.signature(initializer).parameters:
        return initializer
    return _bind_shape_and_dtype(initializer, shape)


def _bind_shape_and_dtype(initializer: Callable[..., Any], shape):
    """Returns the `initial_value` that variable creators receive."""
    keywords = {}
    if "dtype" in inspect.signature(initializer).parameters:
        keywords["dtype"] = tf.float32
    return functools.partial(initializer, shape, **keywords)


def _shard_names(name: str, num_shards: int) -> list[str]:
    if num_shards == 1:
        return [name]
    return [f"{name}/part_{shard}" for shard in range(num_shards)]


def _user_creators() -> list[Callable[..., Any]]:
    """Returns the user's creators in scope, from outermost to innermost.

    TensorFlow's own creators are excluded. The creator of a strategy would
    create copies for replicas, or place a table on another device. The creator
    of a `tf.function` would create an uninitialized variable.
    """
    stack = tf_private.variable_creators_of(tf.compat.v1.get_default_graph())
    return [
        creator
        for _, creator in stack
        if not getattr(creator, "__module__", "").startswith(
            tf_private.OWN_CREATORS
        )
    ]


def _chain(creators, create):
    for creator in creators:
        create = functools.partial(creator, create)
    return create


def _create_variable(
    table,
    storage_dtype,
    values: dict[int, Any],
    device: str | None,
    is_drawn_there: bool,
    initial_value: Any = None,
    shape=None,
    name=None,
    trainable=None,
    **unused,
):
    """Creates a variable, at the end of the chain of variable creators.

    Args:
      table: Spec of the table.
      storage_dtype: Storage dtype of the rows.
      values: Functions that compute initial values. The keys are Python ids of
        the `initial_value` objects that were passed to the first creator.
      device: Device of the variable, or None for the device of the caller.
      is_drawn_there: Whether `device` also computes the initial value.
      initial_value: Initial value, or a callable that returns the initial
        value.
      shape: Shape that the initial value must have, or None for any shape.
      name: Name of the variable.
      trainable: Whether gradient tapes watch the variable.
      **unused: Further arguments of variable creators, which are ignored.
    """
    del unused
    value = values.get(id(initial_value), initial_value)
    if (
        storage_dtype != "float32"
        and isinstance(value, _ShardValue)
        and device is None
        and tf.executing_eagerly()
    ):
        return _create_in_blocks(table, storage_dtype, value, name, trainable)
    with _device(device if is_drawn_there else None):
        if callable(value):
            value: Any = value()
        rows = tf.convert_to_tensor(value, tf.float32)
        if shape is not None and not rows.shape.is_compatible_with(shape):
            raise ValueError(
                "A variable creator must pass an initial value of the shape "
                f"that it passes, {tuple(shape)}. Received: "
                f"{tuple(rows.shape)} (table {table.name!r})."
            )
        rows = _cast_rows(table, rows, storage_dtype)
    with _device(device):
        return tf_private.ResourceVariable(
            rows,
            trainable=trainable,
            name=name,
            distribute_strategy=strategy_in_scope(),
        )


def _create_in_blocks(
    table: config.TableSpec,
    dtype: str,
    value: _ShardValue,
    name: str | None,
    trainable: bool | None,
) -> Any:
    """Creates a variable of 16-bit rows without a float32 copy of all rows.

    An initializer that computes only all rows needs this copy, but no other.
    """
    num_rows, dim = value.cut.sizes[value.shard], value.shape[1]
    full = value() if value.block(0, 1) is None else None
    variable = tf_private.ResourceVariable(
        tf.zeros([num_rows, dim], dtype),
        trainable=trainable,
        name=name,
        distribute_strategy=strategy_in_scope(),
    )
    shards = Shards(
        [variable], partition.RowPartition.div(num_rows, 1), table.name
    )
    step = max(_BLOCK_BYTES // (4 * dim), 1)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows: Any = (
            value.block(start, stop) if full is None else full[start:stop]
        )
        routing.scatter(
            shards,
            "update",
            tf.range(start, stop, dtype=tf.int64),
            _cast_rows(table, rows, dtype),
        )
    return variable


def _device(device: str | None):
    # `tf.device(None)` would remove the device scope of the caller.
    return tf.device(device) if device else contextlib.nullcontext()


def _cast_rows(
    table: config.TableSpec,
    rows: tf.Tensor,
    dtype: str,
) -> tf.Tensor:
    """Casts initial rows to the storage dtype, with rounding to nearest."""
    if dtype == "float32":
        return rows
    cast = tf.cast(rows, dtype)
    if bool(tf.reduce_any(tf.math.is_finite(rows) & ~tf.math.is_finite(cast))):
        raise ValueError(
            f"The initial rows of a table in {dtype} must be at most "
            f"{tf.as_dtype(dtype).max} in magnitude. Received: "
            f"{float(tf.reduce_max(tf.abs(rows)))} (table {table.name!r})."
        )
    return cast


def _check_created(
    table: config.TableSpec,
    shards: Sequence[Any],
    shape: tuple[int, ...],
    dtype: str,
):
    """Checks that the engine supports the variables from user creators."""
    where = f"(table {table.name!r})"
    for shard in shards:
        if not isinstance(shard, tf_private.ResourceVariable):
            raise TypeError(
                "Variable creators must return a tf.Variable that the next "
                "creator returned, or an object with a list of such shards as "
                f"its attribute `variables`. Received: {shard!r} {where}."
            )
    with tf.device(HOST):
        host = tf.constant(0).device
    devices = {shard.device for shard in shards}
    if devices != {host}:
        raise ValueError(
            "Variable creators must place a table on the device of the host "
            f"engine, {host}. Received: {sorted(devices)} {where}."
        )
    shapes = [tuple(shard.shape) for shard in shards]
    if sum(rows for rows, *_ in shapes) != shape[0] or any(
        other[1:] != shape[1:] for other in shapes
    ):
        raise ValueError(
            "Variable creators must return contiguous rows of total shape "
            f"{shape}. Received: {shapes} {where}."
        )
    if any(shard.dtype != tf.as_dtype(dtype) for shard in shards):
        raise ValueError(
            f"Variable creators must return variables of dtype {dtype}. "
            f"Received: {[shard.dtype.name for shard in shards]} {where}."
        )
