"""`ShardedVariable`, a sharded table that is used like a `tf.Variable`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tf_layoutmap._core import checks, strategies, tf_private
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import arguments, creation_progress, gradient
from tf_layoutmap.sharded import initial_value as _initial_value
from tf_layoutmap.sharded.mixin import ShardedVariableMixin
from tf_layoutmap.sharded.routing import parts
from tf_layoutmap.sharded.routing.checks import Shards, known_size
from tf_layoutmap.sharded.type_spec import ShardedVariableSpec

if TYPE_CHECKING:
    from tf_layoutmap._core.types import (
        DTypeLike,
        ShapeLike,
        ShardCounts,
        StockShardedVariable,
        TensorLike,
    )


class ShardedVariable(ShardedVariableMixin, tf_private.CompositeTensor):
    """A table with rows that are sharded over several `tf.Variable`s.

    Reads and writes use global rows. The results are the same as for one
    `tf.Variable` of the full shape. A lookup returns rows in the order of the
    ids, for all placements. Dense operations, such as `table * 2`,
    `tf.convert_to_tensor(table)`, `value()` and `numpy()`, join the shards;
    other operations do not.

    >>> import numpy as np
    >>> table = ShardedVariable.create(
    ...     np.arange(10, dtype=np.float32).reshape(5, 2), num_shards=2)
    >>> [shard.shape.as_list() for shard in table]
    [[3, 2], [2, 2]]
    >>> tf.nn.embedding_lookup(table, [4, 0]).numpy().tolist()
    [[8.0, 9.0], [0.0, 1.0]]
    >>> table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [4]))[4].numpy()
    array([ 9., 10.], dtype=float32)

    In a checkpoint, the table is one tensor. The tensor can be restored into a
    table with any number of shards, or into one `tf.Variable`. In an exported
    SavedModel, the table is one `tf.Variable`, and only TensorFlow's own
    operations use it.

    An out-of-range row raises `tf.errors.InvalidArgumentError` before anything
    is written. Functions that XLA compiles cannot raise this error. In a
    function that XLA compiles, a read with an out-of-range id returns NaN. If
    an id is out of range, a write sets all rows that the call addresses to NaN.
    If the table has an integer dtype, tracing the function raises an error.
    """

    __composite_gradient__ = gradient.ShardedVariableGradient()

    @classmethod
    def create(
        cls,
        initial_value: TensorLike | Callable[..., object],
        shape: ShapeLike | None = None,
        dtype: DTypeLike | None = None,
        *,
        partitioner: ShardCounts | None = None,
        num_shards: int | None = None,
        devices: Sequence[str] | None = None,
        axis: int = 0,
        placement: arguments.Placement | None = None,
        name: str = "ShardedVariable",
        trainable: bool = True,
    ) -> ShardedVariable:
        """Creates a table and its shards `<name>/part_0`, `<name>/part_1`, ...

        >>> table = ShardedVariable.create(
        ...     tf.random_normal_initializer(), [1000, 8], num_shards=4)
        >>> [shard.shape.as_list() for shard in table]
        [[250, 8], [250, 8], [250, 8], [250, 8]]

        Args:
          initial_value: The full table as an array or a tensor, or a callable.
            Random and constant initializers of TensorFlow and Keras initialize
            one shard at a time. A callable that takes `shard_info`, or
            `partition_shape` and `partition_offset`, also initializes one shard
            at a time. Other callables, with arguments `(shape, dtype)` or
            `(shape)`, are called once for the full table.
          shape: Shape of the full table, rank at least 1. Required if
            `initial_value` is a callable. Otherwise None or the shape of
            `initial_value`.
          dtype: `tf.DType` or its name. None: the dtype of `initial_value`, or
            float32 if `initial_value` is a callable.
          partitioner: Callable that returns the number of shards; see
            `tf_layoutmap.partitioners`.
          num_shards: Number of shards, an alternative to `partitioner`. The
            number is limited to the number of rows. If both arguments are None:
            one shard per element of `devices`, or one shard. In the scope of a
            `ParameterServerStrategy`, its `variable_partitioner` is used, and
            shards are assigned to the servers round-robin.
          devices: Devices of the shards, assigned round-robin. None: the
            current device.
          axis: 0 shards rows, 1 shards columns.
          placement: Same as for the constructor, or a `RowPartition`.
          name: Name of the table.
          trainable: Whether gradient tapes watch the shards.

        Raises:
          TypeError, ValueError: If an argument has an unsupported type, value
            or shape.
        """
        checks.check_type("name", name, str, "a string")
        axis = arguments.check_axis(axis, name)
        devices = arguments.check_devices(devices, name)
        if not callable(initial_value):
            initial_value, shape, dtype = arguments.check_full_value(
                initial_value, shape, dtype, name
            )
        elif shape is None:
            raise ValueError(
                checks.message(
                    "shape",
                    "given when `initial_value` is callable",
                    shape,
                    f"table {name!r}",
                )
            )
        # The stubs of TensorFlow accept fewer types than TensorFlow.
        shape = tf.TensorShape(cast("Any", shape))
        if not shape.is_fully_defined() or shape.rank <= axis:
            raise ValueError(
                checks.message(
                    "shape",
                    "fully defined, with at least "
                    + ("one axis", "two axes")[axis],
                    shape,
                    f"table {name!r}",
                )
            )
        shape = cast("tuple[int, ...]", tuple(shape.as_list()))
        dtype = tf.float32 if dtype is None else tf.as_dtype(cast("Any", dtype))
        if (
            partitioner is None
            and num_shards is None
            and (placement is None and devices is None and axis == 0)
        ):
            partitioner = tf_private.variable_partitioner_of(
                tf.distribute.get_strategy()
            )
        partition = arguments.partition_from_arguments(
            shape,
            dtype,
            axis,
            placement,
            partitioner,
            num_shards,
            devices,
            name,
        )
        initializer = (
            None
            if not callable(initial_value)
            else (
                _initial_value.for_shards(
                    initial_value, shape, dtype, partition.num_shards, name
                )
            )
        )
        variables = []
        strategy = tf.distribute.get_strategy()
        # If the initial value is a callable, TensorFlow calls it on the server
        # that stores the shard. Otherwise the value is computed in this
        # process.
        is_drawn_there = (
            initializer is not None
            and strategies.on_servers(strategy)
            and _initial_value.is_drawn_anywhere(initializer, dtype)
        )
        with creation_progress.show_progress(math.prod(shape) * dtype.size):
            for shard in range(partition.num_shards):
                # Without this context, a parameter server strategy would shard
                # each shard again.
                with (
                    tf_private.undivided_variables(strategy),
                    # `tf.device(None)` would cancel the caller's device scope.
                    tf.device(devices[shard % len(devices)])
                    if devices
                    else contextlib.nullcontext(),
                ):
                    if initializer is not None:
                        value = functools.partial(
                            _initial_value.of_shard,
                            initializer,
                            shape,
                            dtype,
                            partition,
                            shard,
                            name,
                            axis,
                        )
                        value = value if is_drawn_there else value()
                    else:
                        value = _initial_value.shard_of_value(
                            initial_value, partition, shard, axis
                        )
                    variables.append(
                        tf.Variable(
                            value,
                            dtype=dtype,
                            trainable=trainable,
                            name=f"{name}/part_{shard}",
                        )
                    )
        return cls(variables, name=name, axis=axis, placement=partition)

    @classmethod
    def from_tf(cls, sharded: StockShardedVariable) -> ShardedVariable:
        """Returns a table that shares the variables of TensorFlow's own class.

        The variables are not copied. Use this method for the variables that a
        `ParameterServerStrategy` with a `variable_partitioner` creates.

        Args:
          sharded: A `ShardedVariable` of TensorFlow.

        Raises:
          TypeError: If `sharded` is not a `ShardedVariable` of TensorFlow.
        """
        checks.check_type(
            "sharded",
            sharded,
            tf_private.TensorFlowShardedVariable,
            "a ShardedVariable of TensorFlow",
        )
        name = sharded.name
        variables = arguments.check_variables(
            list(sharded._variables), name, 0, may_be_sliced=True
        )
        return cls._from_shards(
            Shards(
                variables,
                RowPartition.from_sizes(
                    [known_size(variable) for variable in variables]
                ),
                name,
            )
        )

    def to_tf(self) -> StockShardedVariable:
        """Returns TensorFlow's own `ShardedVariable` of the same variables.

        Raises:
          ValueError: If the placement of rows is not supported. TensorFlow's
            class assumes another placement, and its lookups would return wrong
            rows.
        """
        shards = self._own_shards
        if shards.axis != 0 or shards.partition.placement != "div":
            raise ValueError(
                "TensorFlow's ShardedVariable requires placement 'div' along "
                "axis 0; with others, its lookups return wrong rows. Received: "
                f"placement {self.placement!r}, axis {self.axis} (table "
                f"{self.name!r}). Call `reshard` first."
            )
        for variable in shards.variables:
            # TensorFlow's class does not accept variables with slice info, and
            # computes the info itself.
            variable._set_save_slice_info(None)
        return tf_private.TensorFlowShardedVariable(
            list(shards.variables), name=self.name
        )

    @property
    def _type_spec(self):
        shards = self._shards()
        partition = shards.partition
        return ShardedVariableSpec(
            *(
                tf_private.VariableSpec(v.shape, v.dtype, v.trainable)
                for v in shards.variables
            ),
            name=self.name,
            axis=shards.axis,
            placement=cast(Any, partition.function or partition.placement),
            devices=None
            if len(set(shards.devices)) == 1
            and parts.is_local_cpu(shards.devices[0])
            else shards.devices,
        )

    def _convert_variables_to_tensors(self) -> tf.Tensor:
        # As for tf.Variable, functions return the value of the table, and loops
        # use the value of the table.
        return tf.convert_to_tensor(self)


ShardedVariableSpec.table_class = ShardedVariable


def to_shards(rows: Any) -> Shards:
    """Returns the shards of a sharded or unsharded variable."""
    if isinstance(rows, ShardedVariable):
        return rows._own_shards
    size = known_size(rows)
    return Shards([rows], RowPartition.div(size, 1), rows.name.split(":")[0])
