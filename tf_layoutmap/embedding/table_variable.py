"""One variable of a table, in one shard or several, as its creators want it.

A program may put `tf.variable_creator_scope` around the making of an
embedding, to see its variables or to divide them: the creators are asked as
`tf.Variable` would ask them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded import initial_value as sharded_initial_value
from tf_layoutmap.sharded.routing.checks import known_size

HOST = "/device:CPU:0"


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
    """Returns a variable of a table: its rows, or one of its slots.

    Args:
      table: The table.
      name: Name of the variable.
      initializer: Of its first rows; see `initial_value.of_shard`.
      cut: How the rows are divided; in one shard, a creator may divide them.
      dim: Columns.
      trainable: Whether tapes watch it.
      dtype: How rows are stored. Creators are asked for float32.
      devices: None for that of the caller, or of each shard, and no creators
        are asked. First values that any process draws are drawn there.
      only: None, or the one shard that is made, and no creators are asked. It
        has its own values whatever the seed, as if those of the others had
        been made. Without such a shard it is one row of zeros.

    Returns:
      A `tf.Variable`, or a `ShardedVariable` of contiguous blocks of rows.

    Raises:
      TypeError, ValueError: As of `tables.create_tables`.
    """
    shape = (table.num_rows, dim)
    bound = sharded_initial_value.for_shards(
        bind_shape(initializer, shape),
        shape,
        tf.float32,
        cut.num_shards,
        table.name,
    )
    creators = _users_creators() if devices is None and only is None else []
    if only is not None:
        return _make_only(
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
        # All servers at the same time: asked one by one, each would be waited
        # for.
        with tf.experimental.async_scope():
            for shard, device in enumerate(devices):
                with tf.device(device):
                    drawn.append(
                        sharded_initial_value.of_shard(
                            bound, shape, tf.float32, cut, shard, table.name
                        )
                    )
    found = []
    for shard, part in enumerate(_names(name, cut.num_shards)):
        value = functools.partial(
            sharded_initial_value.of_shard,
            bound,
            shape,
            tf.float32,
            cut,
            shard,
            table.name,
        )
        if is_drawn_there:
            value = functools.partial(drawn.__getitem__, shard)
        asked = (
            value
            if cut.num_shards > 1
            else _as_tensorflow_asks(initializer, shape)
        )
        made = shards_of(
            _chain(
                creators,
                functools.partial(
                    _make,
                    table,
                    dtype,
                    {id(asked): value},
                    None if devices is None else devices[shard],
                    is_drawn_there,
                ),
            )(
                initial_value=asked,
                trainable=trainable,
                name=part,
                dtype=tf.float32,
                shape=tf.TensorShape([cut.sizes[shard], dim]),
            )
        )
        if cut.num_shards > 1 and len(made) > 1:
            raise ValueError(
                "A variable creator must not divide a table that a "
                f"partitioner divides. Received: {len(made)} shards of "
                f"{part!r} (table {table.name!r})."
            )
        found.extend(made)
    if creators:
        _check(table, found, shape, dtype)
    return found[0] if len(found) == 1 else ShardedVariable(found, name=name)


def _make_only(
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
    """One shard of a table, or a row that stands for none."""
    own = None
    for shard in range(cut.num_shards):
        if shard != only and sharded_initial_value.skip_shard(
            initializer, tf.float32
        ):
            continue
        value = sharded_initial_value.of_shard(
            initializer,
            (table.num_rows, dim),
            tf.float32,
            cut,
            shard,
            table.name,
        )
        if shard == only:
            own = value
    return _make(
        table,
        dtype,
        {},
        None,
        False,
        tf.zeros([1, dim]) if own is None else own,
        name=f"{name}/part_{only}",
        trainable=trainable,
    )


def check_same_cut(table: config.TableSpec, rows: Any, slot: Any):
    """Refuses a slot variable whose shards are not those of its table.

    Raises:
      ValueError: If a variable creator divided them differently.
    """
    cuts = [
        [known_size(one) for one in shards_of(variable)]
        for variable in (rows, slot)
    ]
    if cuts[0] != cuts[1]:
        raise ValueError(
            "Variable creators must divide a slot variable as they divide its "
            f"table, in shards of {cuts[0]} rows. Received: {cuts[1]} "
            f"(table {table.name!r})."
        )


def shards_of(variable: Any) -> list[tf.Variable]:
    """Returns the shards of a table, in order; one if it is not cut."""
    return list(getattr(variable, "variables", None) or [variable])


def strategy_in_scope() -> tf.distribute.Strategy | None:
    """Returns what a variable gives for the strategy that it belongs to.

    tf_keras compiles a model under a strategy only if all variables do.
    """
    if not tf.distribute.has_strategy():
        return None
    return tf.distribute.get_strategy()


def bind_shape(initializer: Callable[..., Any], shape):
    """Gives an initializer that knows shards the whole shape, as TF does.

    Others are returned as they are.
    """
    if "shard_info" not in inspect.signature(initializer).parameters:
        return initializer
    return _as_tensorflow_asks(initializer, shape)


def _as_tensorflow_asks(initializer: Callable[..., Any], shape):
    """What creators find as the initial value: shape and dtype are bound."""
    keywords = {}
    if "dtype" in inspect.signature(initializer).parameters:
        keywords["dtype"] = tf.float32
    return functools.partial(initializer, shape, **keywords)


def _names(name: str, num_shards: int) -> list[str]:
    if num_shards == 1:
        return [name]
    return [f"{name}/part_{shard}" for shard in range(num_shards)]


def _users_creators() -> list[Callable[..., Any]]:
    """The creators in scope, the innermost last, but TensorFlow's own.

    A strategy's makes copies for its replicas, or puts a table elsewhere; a
    function's makes a variable that waits for its value.
    """
    stack = tf_private.variable_creators_of(tf.compat.v1.get_default_graph())
    return [
        creator
        for _, creator in stack
        if not getattr(creator, "__module__", "").startswith(
            tf_private.OWN_CREATORS
        )
    ]


def _chain(creators, make):
    for creator in creators:
        make = functools.partial(creator, make)
    return make


def _make(
    table,
    stored_as,
    values: dict[int, Any],
    device: str | None,
    is_drawn_there: bool,
    initial_value: Any = None,
    shape=None,
    name=None,
    trainable=None,
    **unused,
):
    """Makes a variable; what the first of all creators has for the next."""
    del unused
    found = values.get(id(initial_value), initial_value)
    with _device(device if is_drawn_there else None):
        if callable(found):
            found: Any = found()
        rows = tf.convert_to_tensor(found, tf.float32)
        if shape is not None and not rows.shape.is_compatible_with(shape):
            raise ValueError(
                "A variable creator must give an initial value of the shape "
                f"it asks for, {tuple(shape)}. Received: {tuple(rows.shape)} "
                f"(table {table.name!r})."
            )
        rows = _in_dtype(table, rows, stored_as)
    with _device(device):
        return tf_private.ResourceVariable(
            rows,
            trainable=trainable,
            name=name,
            distribute_strategy=strategy_in_scope(),
        )


def _device(device: str | None):
    # A device scope of None would undo that of the caller.
    return tf.device(device) if device else contextlib.nullcontext()


def _in_dtype(
    table: config.TableSpec,
    rows: tf.Tensor,
    dtype: str,
) -> tf.Tensor:
    """Returns initial rows, rounded to nearest for 16-bit tables."""
    if dtype == "float32":
        return rows
    found = tf.cast(rows, dtype)
    if bool(tf.reduce_any(tf.math.is_finite(rows) & ~tf.math.is_finite(found))):
        raise ValueError(
            f"The first rows of a table in {dtype} must be at most "
            f"{tf.as_dtype(dtype).max} in magnitude. Received: "
            f"{float(tf.reduce_max(tf.abs(rows)))} (table {table.name!r})."
        )
    return found


def _check(
    table: config.TableSpec,
    shards: Sequence[Any],
    shape: tuple[int, ...],
    dtype: str,
):
    """Refuses what creators gave and the engine cannot work with."""
    where = f"(table {table.name!r})"
    for one in shards:
        if not isinstance(one, tf_private.ResourceVariable):
            raise TypeError(
                "Variable creators must give a tf.Variable, or what has its "
                "shards as `variables`, made by the creator they are given. "
                f"Received: {one!r} {where}."
            )
    with tf.device(HOST):
        host = tf.constant(0).device
    devices = {one.device for one in shards}
    if devices != {host}:
        raise ValueError(
            "Variable creators must leave a table on the device of the host "
            f"engine, {host}. Received: {sorted(devices)} {where}."
        )
    shapes = [tuple(one.shape) for one in shards]
    if sum(rows for rows, *_ in shapes) != shape[0] or any(
        one[1:] != shape[1:] for one in shapes
    ):
        raise ValueError(
            "Variable creators must give contiguous rows that make up the "
            f"shape {shape}. Received: {shapes} {where}."
        )
    if any(one.dtype != tf.as_dtype(dtype) for one in shards):
        raise ValueError(
            f"Variable creators must give variables of dtype {dtype}. "
            f"Received: {[one.dtype.name for one in shards]} {where}."
        )
