"""The type of a `ShardedVariable` as an argument of a `tf.function`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tf_layoutmap.sharded import arguments, indexing
from tf_layoutmap.sharded.routing.checks import Shards

if TYPE_CHECKING:
    from tf_layoutmap._core.types import VariableSpec

# Maps ids to callable placements. The serialization of a TypeSpec contains the
# id, because TensorFlow cannot hash functions in a serialization.
_FUNCTIONS: dict[int, Callable] = {}


class ShardedVariableSpec(tf.TypeSpec):
    """The type of a `ShardedVariable`: shards, placement, name and devices.

    The name is part of the type because error messages of a function that takes
    a table as an argument contain the name. The devices are part of the type
    because a traced function contains separate operations for each device.
    """

    # The class `ShardedVariable`. The module of this class imports this module,
    # and sets the attribute.
    table_class: type

    __slots__ = ["_variable_specs", "_name", "_axis", "_placement", "_devices"]

    def __init__(
        self,
        *variable_specs: VariableSpec,
        name: str = "ShardedVariable",
        axis: int = 0,
        placement: arguments.Placement = "offsets",
        devices: Sequence[str] | None = None,
    ):
        """Creates the spec.

        Args:
          *variable_specs: One spec of a `tf.Variable` per shard.
          name: Name of the table.
          axis: The axis along which the table is sharded.
          placement: `"offsets"`: contiguous shards. `"div"`, `"mod"` or a
            callable: same as for `ShardedVariable`.
          devices: The device of each shard. None: all shards are on one CPU of
            this process.
        """
        self._devices = None if devices is None else tuple(devices)
        self._variable_specs = tuple(variable_specs)
        self._name = name
        self._axis = axis
        self._placement = placement

    @property
    def value_type(self) -> type:
        return self.table_class

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._name

    @property
    def axis(self) -> int:
        """The axis along which the table is sharded."""
        return self._axis

    @property
    def placement(self) -> Any:
        """The placement of rows, as for `ShardedVariable`."""
        return self._placement

    @property
    def devices(self) -> tuple[str, ...] | None:
        """The device of each shard.

        None: all shards are on one CPU of this process.
        """
        return self._devices

    def _serialize(self):
        placement = self._placement
        if callable(placement):
            _FUNCTIONS[id(placement)] = placement
            placement = id(placement)
        return (
            self._name,
            self._axis,
            placement,
            self._devices,
            *self._variable_specs,
        )

    @classmethod
    def _deserialize(cls, serialization):
        name, axis, placement, devices, *variable_specs = serialization
        placement = _FUNCTIONS.get(placement, placement)
        return cls(
            *variable_specs,
            name=name,
            axis=axis,
            placement=cast(arguments.Placement, placement),
            devices=devices,
        )

    def __reduce__(self):
        # The method of TypeSpec would pass the serialization to __init__, which
        # has other arguments. A pickle contains a callable placement itself,
        # because its id is valid only in this process.
        return functools.partial(
            type(self),
            *self._variable_specs,
            name=self._name,
            axis=self._axis,
            placement=self._placement,
            devices=self._devices,
        ), ()

    @property
    def _component_specs(self):
        return self._variable_specs

    def _to_components(self, value):
        return tuple(value.variables)

    def _from_components(self, components):
        partition = arguments.partition_of(
            [
                int(cast(int, spec.shape[self._axis]))
                for spec in self._variable_specs
            ],
            self._placement,
            self._axis,
            self._name,
        )
        shards = Shards(
            list(components),
            partition,
            self._name,
            self._axis,
            argument_devices=self._devices,
        )
        if all(isinstance(v, tf.Variable) for v in components):
            table = self.table_class._from_shards(shards)
            table._is_component = True
            return table
        if all(tf.is_tensor(v) and v.dtype != tf.resource for v in components):
            # TensorFlow has replaced the variables by their values, so this
            # method replaces the table by its value.
            return indexing.dense(shards)
        return tuple(components)  # tf.nest can pack any objects.
