"""`ShardedVariableMixin`, which has the methods and properties of tables."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import tensorflow as tf

from tf_layoutmap._core import checks, freed_gradients, patches, tf_private
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import (
    arguments,
    reading,
    resharding,
    trackable,
    writing,
)
from tf_layoutmap.sharded.routing.checks import Shards, known_size

if TYPE_CHECKING:
    from tf_layoutmap._core.types import ShardCounts


def table_of(variable: Any) -> Any:
    """Returns the table to which a shard belongs, or None."""
    return getattr(variable, "_sharded_container", lambda: None)()


class ShardedVariableMixin(
    reading.Reads, writing.Writes, trackable.LogicalVariable
):
    """Implementation of `ShardedVariable` for other base classes.

    Use this mixin for a class that cannot be a composite tensor. An instance of
    this class supports the same operations as a `ShardedVariable`, with two
    exceptions: it cannot be an argument of a `tf.function` or a source of
    `tape.gradient`.

    >>> import tf_layoutmap as tlm
    >>> class TPUShardedVariable(tlm.ShardedVariableMixin):
    ...     pass
    >>> table = TPUShardedVariable([tf.Variable([1., 2.]), tf.Variable([3.])])
    >>> tf.gather(table, [2, 0]).numpy().tolist()
    [3.0, 1.0]
    """

    # With this priority, numpy calls the operator of the table for an
    # expression such as `array * table`. Otherwise numpy would read the table
    # element by element.
    __array_priority__ = 100

    @arguments.rejects_create_arguments
    def __init__(
        self,
        variables: Sequence[tf.Variable],
        name: str = "ShardedVariable",
        *,
        axis: int = 0,
        placement: arguments.Placement | None = None,
    ):
        """Creates a table with existing variables as its shards.

        Args:
          variables: List of at least one `tf.Variable`. All variables must have
            the same dtype, the same `trainable` and, except for `axis`, the
            same shape. The variables must not be shards of another table.
          name: Name of the table, used in messages and checkpoints.
          axis: Axis that is sharded. 0: each shard holds some rows. 1: each
            shard holds some columns of all rows.
          placement: Assignment of rows to shards. None: each variable holds
            contiguous rows, in the order of `variables`. `"div"`: like None,
            and the sizes must be as even as possible. `"mod"`: row `r` is local
            row `r // num_shards` of shard `r % num_shards`. A list of offsets:
            the first row of each shard, followed by the number of rows of the
            table. A callable: a function of global rows that returns owners and
            local rows. The function must use only operators that both numpy
            arrays and tensors support. If `axis` is 1, the placement must be
            contiguous.

        Raises:
          TypeError: If `variables` is not a list of `tf.Variable`s, or another
            argument has an unsupported type.
          ValueError: If the variables do not match each other, a variable
            occurs twice, or their sizes do not fit `placement`.
        """
        checks.check_type("name", name, str, "a string")
        axis = arguments.check_axis(axis, name)
        variables = arguments.check_variables(variables, name, axis)
        sizes = [known_size(variable, axis) for variable in variables]
        if tf_private.has_dtensor_device():
            # This patch is required if the DTensor device writes a checkpoint.
            patches.ensure("checkpoints")
        self._set_shards(
            Shards(
                variables,
                arguments.partition_of(sizes, placement, axis, name),
                name,
                axis,
            )
        )

    @classmethod
    def _from_shards(cls, shards: Shards):
        """Returns a table of shards without checking the shards."""
        table = cls.__new__(cls)
        table._set_shards(shards)
        return table

    def _set_shards(self, shards: Shards) -> None:
        patches.ensure("table_gradients")
        freed_gradients.free_with_variables(shards.variables)
        self._own_shards = shards
        self._is_component = False
        self._saving_variable = None
        # Optimizers identify a weight by this id.
        self._unique_id = f"{shards.name}_{id(self)}"
        self._mark_shards()

    def _mark_shards(self) -> None:
        """Marks the variables as shards, for tf_keras' optimizers.

        tf_keras' optimizers save the slot variables of marked shards as one
        variable, which can be restored into any number of shards. The
        optimizers join the slot variables in order, and read the number of a
        shard from its name. This method therefore marks the variables only if
        the rows are contiguous and the names contain the numbers.
        """
        shards = self._own_shards
        if (
            shards.axis != 0
            or not shards.partition.is_contiguous
            or any(
                not variable.name.split(":")[0].endswith(f"part_{number}")
                for number, variable in enumerate(shards.variables)
            )
        ):
            return
        for variable in shards.variables:
            if table_of(variable) is None:
                variable._sharded_container = weakref.ref(self)  # pyright: ignore[reportAttributeAccessIssue] Missing in the stubs.

    # Properties of the table.

    @property
    def constraint(self) -> None:
        """None. Optimizers apply the constraint of each variable they train."""
        return None

    @property
    def variables(self) -> list[tf.Variable]:
        """The shards.

        In the trace of a SavedModel, the list has one full variable.
        """
        return list(self._shards().variables)

    @property
    def partition(self) -> RowPartition:
        """The assignment of rows (if `axis` is 1: of columns) to variables."""
        return self._shards().partition

    @property
    def axis(self) -> int:
        """The axis along which the table is sharded: 0 or 1."""
        return self._own_shards.axis

    @property
    def placement(self) -> str:
        """The placement: `"div"`, `"mod"`, `"offsets"` or `"callable"`."""
        return self._own_shards.partition.placement

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._own_shards.name

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the full table."""
        return self._own_shards.shape

    @property
    def dtype(self) -> tf.DType:
        """Dtype of the table."""
        return self._own_shards.dtype

    @property
    def trainable(self) -> bool:
        """Whether gradient tapes watch the shards."""
        return self._own_shards.variables[0].trainable

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each shard."""
        return self._own_shards.devices

    @property
    def device(self) -> str:
        """The device of all shards, or "" if shards have several devices."""
        devices = set(self.devices)
        return devices.pop() if len(devices) == 1 else ""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} "
            f"shape={tuple(self.shape.as_list())} "
            f"dtype={self.dtype.name} axis={self.axis} "
            f"placement={self.placement!r} "
            f"sizes={self._own_shards.partition.sizes}>"
        )

    def __bool__(self) -> bool:
        """Returns the truth value of a table with one element.

        Raises:
          ValueError: If the table does not have exactly one element.
        """
        if self.shape.num_elements() != 1:
            raise ValueError(
                "A table must have exactly one element to be used as a bool; "
                "compare `len(table)`, or use `tf.reduce_any`. Received: shape "
                f"{self.shape} (table {self.name!r})."
            )
        return bool(tf.reshape(tf.convert_to_tensor(self), []))

    # Copies and resharding.

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles do not include the attributes by which TensorFlow
        # identifies this object, because each object must have different
        # values.
        excluded = ("_unique_id", "_saving_variable", "_restoring")
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in excluded
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_shards(state["_own_shards"])
        self.__dict__.update(state)

    def reshard(
        self,
        num_shards: int | None = None,
        *,
        partitioner: ShardCounts | None = None,
        placement: arguments.Placement | None = None,
        devices: Sequence[str] | None = None,
    ) -> Self:
        """Replaces the shards of this table by new shards, in place.

        At most one shard, old or new, is in memory twice. The method releases
        the memory of the old variables. A `tf.function` that was traced with
        the old variables fails afterwards and must be traced again. If an
        object refers to the old variables, for example an optimizer or a layer,
        pass the new variables to it.

        >>> table = ShardedVariableMixin([tf.Variable(tf.range(5.))])
        >>> [shard.numpy().tolist() for shard in table.reshard(
        ...     2, placement="mod")]
        [[0.0, 2.0, 4.0], [1.0, 3.0]]

        Args:
          num_shards: Number of new shards. None: the current number of shards.
          partitioner: Partitioner that returns the number of shards; an
            alternative to `num_shards`.
          placement: Same as for the constructor, or a `RowPartition`. None:
            contiguous rows, with sizes that are as even as possible.
          devices: Devices of the shards, assigned round-robin. None: the
            device of the first old shard.

        Returns:
          This table.

        Raises:
          RuntimeError: If the method is called inside a `tf.function`.
          TypeError, ValueError: Same as for the constructor. The table is
            unchanged.
        """
        shards = self._own_shards
        if not tf.executing_eagerly():
            raise RuntimeError(
                "`reshard` must be called outside of tf.function, because it "
                f"creates variables (table {shards.name!r})."
            )
        devices = arguments.check_devices(devices, shards.name)
        partition = arguments.partition_from_arguments(
            tuple(shards.shape.as_list()),
            shards.dtype,
            shards.axis,
            placement,
            partitioner,
            num_shards,
            devices,
            shards.name,
            default_num_shards=len(shards.variables),
        )
        if devices is not None:
            devices = [
                devices[shard % len(devices)]
                for shard in range(partition.num_shards)
            ]
        self._own_shards = dataclasses.replace(
            shards,
            partition=partition,
            variables=resharding.reshard(shards, partition, devices),
        )
        self._mark_shards()
        return self

    # Internal methods.

    def _shards(self) -> Shards:
        """Returns the shards that the current graph may use."""
        if self._is_component:
            return self._own_shards
        if tf_private.in_save_context():
            return Shards(
                [self._exported_variable()],
                RowPartition.div(self._own_shards.num_rows, 1),
                self.name,
                is_exported=True,
            )
        self._keep_out_of_exports()
        return self._own_shards


reading.install_operators(ShardedVariableMixin)
