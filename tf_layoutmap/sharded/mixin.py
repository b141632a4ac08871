"""Everything a table in shards does, for any class of tables."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks, tf_private
from tf_layoutmap._patches import engine, freed_gradients
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import (
    arguments,
    reading,
    resharding,
    trackable,
    writing,
)
from tf_layoutmap.sharded.routing.checks import Shards, known_size


def table_of(variable: Any) -> Any:
    """Returns the table that a variable is a shard of, or None."""
    return getattr(variable, "_sharded_container", lambda: None)()


class ShardedVariableMixin(
    reading.Reads, writing.Writes, trackable.LogicalVariable
):
    """All of `ShardedVariable`, for a class that cannot be a composite tensor.

    Such a class is not an argument of `tf.function`, and no tape takes it as
    a whole; the rest is the same.

    >>> import tf_layoutmap as tlm
    >>> class TPUShardedVariable(tlm.ShardedVariableMixin):
    ...     pass
    >>> table = TPUShardedVariable([tf.Variable([1., 2.]), tf.Variable([3.])])
    >>> tf.gather(table, [2, 0]).numpy().tolist()
    [3.0, 1.0]
    """

    # np.ndarray * table must ask the table, not read it element by element.
    __array_priority__ = 100

    @arguments.refuses_arguments_of_create
    def __init__(
        self,
        variables: Sequence[tf.Variable],
        name: str = "ShardedVariable",
        *,
        axis: int = 0,
        placement: Any = None,
    ):
        """Takes existing variables as shards.

        Args:
          variables: At least one `tf.Variable`; equal dtype, `trainable`, and
            shape but for `axis`. They must not belong to another table.
          name: Name of the whole table, in messages and checkpoints.
          axis: 0: shards hold rows. 1: shards hold columns of all rows.
          placement: Which rows are whose. None: neighbours, in order of
            shards, as many as each variable has. `"div"`: the same, refused
            unless it is as even as whole rows allow. `"mod"`: row `r` is local
            row `r // num_shards` of shard `r % num_shards`. Offsets: the
            first row of each shard and the end. A callable: given global
            rows, returns owners and local rows, both made by operators that
            numpy arrays and tensors share. Along axis 1: neighbours only.

        Raises:
          TypeError: `variables` is not a list of `tf.Variable`s, or another
            argument is of the wrong kind.
          ValueError: They differ, one stands there twice, or their sizes do
            not fit `placement`.
        """
        checks.check_type("name", name, str, "a string")
        axis = arguments.check_axis(axis, name)
        variables = arguments.check_variables(variables, name, axis)
        sizes = [known_size(variable, axis) for variable in variables]
        if tf_private.has_dtensor_device():
            # It may be the device that checkpoints are written by.
            engine.ensure("checkpoints")
        self._hold(
            Shards(
                variables,
                arguments.partition_of(sizes, placement, axis, name),
                name,
                axis,
            )
        )

    @classmethod
    def _of(cls, shards: Shards):
        """A table of what has been checked."""
        table = cls.__new__(cls)
        table._hold(shards)
        return table

    def _hold(self, shards: Shards) -> None:
        freed_gradients.free_with_variables(shards.variables)
        self._own_shards = shards
        self._is_component = False
        self._saving_variable = None
        # By this optimizers tell weights from each other.
        self._unique_id = f"{shards.name}_{id(self)}"
        self._mark_shards()

    def _mark_shards(self) -> None:
        """Tells tf_keras' optimizers whose shards the variables are.

        They then save the slot variables of all shards as one, and restore
        them into any other shards. They join them in the order of shards, so
        it must be that of the rows, and know a shard's number by its name.
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
                variable._sharded_container = weakref.ref(self)  # pyright: ignore[reportAttributeAccessIssue] No stub has it.

    # What it is.

    @property
    def variables(self) -> list[tf.Variable]:
        """The shards; while a SavedModel is traced, one for all of them."""
        return list(self._shards().variables)

    @property
    def partition(self) -> RowPartition:
        """Which rows (columns, along axis 1) belong to which variable."""
        return self._shards().partition

    @property
    def axis(self) -> int:
        """The axis along which the table is cut: 0 or 1."""
        return self._own_shards.axis

    @property
    def placement(self) -> str:
        """`"div"`, `"mod"`, `"offsets"` or `"callable"`."""
        return self._own_shards.partition.placement

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._own_shards.name

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the whole table."""
        return self._own_shards.shape

    @property
    def dtype(self) -> tf.DType:
        """Dtype of the table."""
        return self._own_shards.dtype

    @property
    def trainable(self) -> bool:
        """Whether tapes watch the shards."""
        return self._own_shards.variables[0].trainable

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each shard."""
        return self._own_shards.devices

    @property
    def device(self) -> str:
        """The device that all shards share, or "" when they do not."""
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
        """The one number's, as for `tf.Variable`; not whether rows are there.

        Raises:
          ValueError: The table holds several numbers.
        """
        if self.shape.num_elements() != 1:
            raise ValueError(
                "Only a table of one element is true or false; compare "
                "`len(table)`, or use `tf.reduce_any`. Received: shape "
                f"{self.shape} (table {self.name!r})."
            )
        return bool(tf.reshape(tf.convert_to_tensor(self), []))

    # Becoming another.

    def __getstate__(self) -> dict[str, Any]:
        # For copies and pickles: what TensorFlow knows this very object by is
        # not for another one.
        own = ("_unique_id", "_saving_variable", "_restoring")
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in own
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._hold(state["_own_shards"])
        self.__dict__.update(state)

    def reshard(
        self,
        num_shards: int | None = None,
        *,
        partitioner: Callable | None = None,
        placement: Any = None,
        devices: Sequence[str] | None = None,
    ):
        """Cuts this table into other shards, in place.

        Never more than one shard, old or new, is in memory twice. The old
        variables are emptied: a `tf.function` that was traced with them fails
        afterwards and must be traced anew, and whoever holds them (an
        optimizer, a layer) must be given the new ones.

        >>> table = ShardedVariableMixin([tf.Variable(tf.range(5.))])
        >>> [shard.numpy().tolist() for shard in table.reshard(
        ...     2, placement="mod")]
        [[0.0, 2.0, 4.0], [1.0, 3.0]]

        Args:
          num_shards: How many; None: as many as now.
          partitioner: Or what says how many.
          placement: As for the constructor, or a `RowPartition`. None:
            neighbours, as evenly as whole rows allow.
          devices: The device of each shard, repeated in turn; None: where the
            first one is.

        Returns:
          This table.

        Raises:
          RuntimeError: Inside of a `tf.function`.
          TypeError, ValueError: As the constructor. Nothing has moved then.
        """
        shards = self._own_shards
        if not tf.executing_eagerly():
            raise RuntimeError(
                "`reshard` must be called outside of tf.function, because it "
                f"makes variables (table {shards.name!r})."
            )
        devices = arguments.check_devices(devices, shards.name)
        partition = arguments.partition_to_make(
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

    # Inside.

    def _shards(self) -> Shards:
        """The table as the current graph may see it."""
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
