"""`ShardedVariable`: one table in many shards, used like one `tf.Variable`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap import _checks, _tf_private
from tf_layoutmap.partition import (
    Partitioner,
    RowPartition,
)
from tf_layoutmap.sharded import (
    arguments,
    gradient,
    indexing,
    routing,
    trackable,
)
from tf_layoutmap.sharded import initial_value as _initial_value


class ShardedVariableSpec(tf.TypeSpec):
    """The type of a `ShardedVariable`: that of each shard, and the name.

    The name belongs to it because messages of a function that takes a table
    as argument must say which table it was.
    """

    __slots__ = ["_variable_specs", "_name"]

    def __init__(self, *variable_specs: Any, name: str = "ShardedVariable"):
        """Makes the spec.

        Args:
          *variable_specs: One spec of a `tf.Variable` per shard.
          name: Name of the table.
        """
        self._variable_specs = tuple(variable_specs)
        self._name = name

    @property
    def value_type(self) -> type:
        return ShardedVariable

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._name

    def _serialize(self):
        return (self._name, *self._variable_specs)

    @classmethod
    def _deserialize(cls, serialization):
        name, *variable_specs = serialization
        return cls(*variable_specs, name=name)

    @property
    def _component_specs(self):
        return self._variable_specs

    def _to_components(self, value):
        return tuple(value.variables)

    def _from_components(self, components):
        if all(isinstance(v, tf.Variable) for v in components):
            return ShardedVariable._from_components(components, self._name)
        if all(tf.is_tensor(v) and v.dtype != tf.resource
               for v in components):
            # What tf.function returns: a variable leaves it as its value.
            return tf.concat(components, axis=0)
        return tuple(components)  # Anything tf.nest was asked to put there.


class ShardedVariable(trackable.LogicalVariable,
                      _tf_private.CompositeTensor):
    """A table whose rows are divided among several `tf.Variable`s.

    Shards hold neighbouring rows, in order. Reads and writes use global rows
    and give what one `tf.Variable` of the whole shape would give; rows always
    come back in the order of the ids. Nothing but a dense use (`table * 2`,
    `tf.convert_to_tensor(table)`, `numpy()`) ever joins the shards.

    >>> table = ShardedVariable.create(
    ...     np.arange(10, dtype=np.float32).reshape(5, 2), num_shards=2)
    >>> [shard.shape.as_list() for shard in table]
    [[3, 2], [2, 2]]
    >>> tf.nn.embedding_lookup(table, [4, 0]).numpy().tolist()
    [[8.0, 9.0], [0.0, 1.0]]
    >>> table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [4]))[4].numpy()
    array([ 9., 10.], dtype=float32)

    In a checkpoint it is one tensor, which restores into any number of shards
    and into one `tf.Variable`. In an exported SavedModel it is one
    `tf.Variable`, used by TensorFlow's own operations only.

    A row outside the table is refused with
    `tf.errors.InvalidArgumentError` before anything is written. Functions
    that XLA compiles are the exception: XLA drops run-time checks.
    """

    # np.ndarray * table must ask the table, not read it element by element.
    __array_priority__ = 100
    __composite_gradient__ = gradient.ShardedVariableGradient()

    def __init__(self, variables: Sequence[tf.Variable],
                 name: str = "ShardedVariable"):
        """Takes existing variables as shards, in order of their rows.

        Args:
          variables: At least one `tf.Variable`; equal dtype, `trainable`, and
            shape but for the first axis. They must not belong to another
            table.
          name: Name of the whole table, in messages and checkpoints.

        Raises:
          TypeError: `variables` is not a list of `tf.Variable`s, or `name`
            not a string.
          ValueError: They differ, or one stands there twice.
        """
        self._name = _checks.check_type("name", name, str, "a string")
        self._variables = arguments.check_variables(variables, name)
        self._partition = RowPartition.from_sizes(
            [int(variable.shape[0]) for variable in variables])
        self._is_component = False
        self._saving_variable = None

    @classmethod
    def create(cls, initial_value: Any, shape: Any = None, dtype: Any = None,
               *, partitioner: Partitioner | Callable | None = None,
               num_shards: int | None = None, name: str = "ShardedVariable",
               trainable: bool = True) -> "ShardedVariable":
        """Makes the shards, named `<name>/part_0` and so on.

        >>> table = ShardedVariable.create(
        ...     tf.random_normal_initializer(), [1000, 8], num_shards=4)
        >>> [shard.shape.as_list() for shard in table]
        [[250, 8], [250, 8], [250, 8], [250, 8]]

        Args:
          initial_value: The whole table, as array or tensor; or a callable
            that makes one shard at a time (initializers of TensorFlow and
            Keras, or `(shape, dtype)`, `(shape)`, `(shard_info)`). A callable
            never makes the whole table.
          shape: Shape of the whole table, rank at least 1. Needed with a
            callable, else None or that of `initial_value`.
          dtype: `tf.DType` or its name. None: that of `initial_value`, or
            float32 with a callable.
          partitioner: Says how many shards; see `tf_layoutmap.partitioners`.
          num_shards: Or the number itself; at most the number of rows is
            used. None and no partitioner: 1.
          name: Name of the table.
          trainable: Whether tapes watch its shards.

        Raises:
          TypeError, ValueError: An argument is of the wrong kind, value or
            shape.
        """
        _checks.check_type("name", name, str, "a string")
        if not callable(initial_value):
            initial_value, shape, dtype = arguments.check_whole_value(
                initial_value, shape, dtype, name)
        elif shape is None:
            raise ValueError(_checks.message(
                "shape", "given when `initial_value` is callable", shape,
                f"table {name!r}"))
        shape = tf.TensorShape(shape)
        if not shape.is_fully_defined() or not shape.rank:
            raise ValueError(_checks.message(
                "shape", "fully defined, with at least one axis", shape,
                f"table {name!r}"))
        shape = tuple(shape.as_list())
        dtype = tf.float32 if dtype is None else tf.as_dtype(dtype)
        partition = RowPartition.div(shape[0], arguments.number_of_shards(
            partitioner, num_shards, shape, dtype, name))
        variables = []
        for shard in range(partition.num_shards):
            if callable(initial_value):
                value = _initial_value.of_shard(
                    initial_value, shape, dtype, partition, shard, name)
            else:
                value = initial_value[slice(*partition.offsets[shard:][:2])]
            variables.append(tf.Variable(
                value, dtype=dtype, trainable=trainable,
                name=f"{name}/part_{shard}"))
        return cls(variables, name=name)

    @classmethod
    def _from_components(cls, variables: Sequence[tf.Variable],
                         name: str) -> "ShardedVariable":
        table = cls(list(variables), name=name)
        table._is_component = True
        return table

    # What it is.

    @property
    def variables(self) -> list[tf.Variable]:
        """The shards; while a SavedModel is traced, one for all of them."""
        return list(self._shards().variables)

    @property
    def partition(self) -> RowPartition:
        """Which rows belong to which of `variables`."""
        return self._shards().partition

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._name

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the whole table."""
        return tf.TensorShape([self._partition.num_rows]).concatenate(
            self._variables[0].shape[1:])

    @property
    def dtype(self) -> tf.DType:
        """Dtype of the table."""
        return self._variables[0].dtype

    @property
    def trainable(self) -> bool:
        """Whether tapes watch the shards."""
        return self._variables[0].trainable

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each shard."""
        return tuple(variable.device for variable in self._variables)

    @property
    def device(self) -> str:
        """The device that all shards share, or "" when they do not."""
        devices = set(self.devices)
        return devices.pop() if len(devices) == 1 else ""

    @property
    def _type_spec(self):
        return ShardedVariableSpec(
            *(_tf_private.VariableSpec(v.shape, v.dtype, v.trainable)
              for v in self._shards().variables), name=self._name)

    def __repr__(self) -> str:
        return (f"<ShardedVariable {self._name!r} "
                f"shape={tuple(self.shape.as_list())} "
                f"dtype={self.dtype.name} sizes={self._partition.sizes}>")

    # Reading.

    def __iter__(self) -> Iterator[tf.Variable]:
        """Iterates over the shards (a `tf.Variable` gives its rows)."""
        return iter(self.variables)

    def __getitem__(self, index: Any) -> tf.Tensor:
        """Returns rows, like indexing a numpy array or a tensor.

        Args:
          index: Ints, slices (bounds may be tensors), `...` and `None`. What
            indexes axis 0 may also be an int or bool array, list or tensor.

        Returns:
          A tensor. Only shards that own a wanted row are read.

        Raises:
          IndexError, TypeError: The index does not fit the shape.
          tf.errors.InvalidArgumentError: A tensor holds a row outside.
        """
        return indexing.read(self._shards(), index)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns the rows of `indices`, in their order.

        Args:
          indices: Any shape, int32 or int64: global rows.
          name: Name of the operations.

        Returns:
          Shape `indices.shape + shape[1:]`.

        Raises:
          TypeError: `indices` are not int32 or int64.
          tf.errors.InvalidArgumentError: A row is outside the table.
        """
        return routing.gather(self._shards(), indices, name)

    def numpy(self) -> np.ndarray:
        """Returns a copy of the whole table. Only outside `tf.function`."""
        if not tf.executing_eagerly():
            raise NotImplementedError(
                "`numpy()` must be called outside of tf.function (table "
                f"{self._name!r}).")
        whole = np.empty(self.shape.as_list(), self.dtype.as_numpy_dtype)
        for variable, start, stop in zip(
                self._variables, self._partition.offsets,
                self._partition.offsets[1:]):
            whole[start:stop] = variable.numpy()
        return whole

    def __array__(self, dtype: Any = None,
                  copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "A table in shards must be copied to become one array. "
                f"Received: copy=False (table {self._name!r}).")
        whole = self.numpy()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    # Writing.

    def assign(self, value: Any, use_locking: bool = False,
               name: str | None = None,
               read_value: bool = True) -> "ShardedVariable":
        """Sets the whole table; returns this table.

        Args:
          value: Shape and dtype of the table.
          use_locking: As for `tf.Variable`.
          name: Name of the operations.
          read_value: Accepted for `tf.Variable`'s sake; the table is
            returned and not read.

        Raises:
          ValueError: `value` has another shape. No shard is written.
        """
        return self._assign("assign", value, use_locking, name, read_value)

    def assign_add(self, delta: Any, use_locking: bool = False,
                   name: str | None = None,
                   read_value: bool = True) -> "ShardedVariable":
        """Adds to the whole table; as `assign`."""
        return self._assign("assign_add", delta, use_locking, name, read_value)

    def assign_sub(self, delta: Any, use_locking: bool = False,
                   name: str | None = None,
                   read_value: bool = True) -> "ShardedVariable":
        """Subtracts from the whole table; as `assign`."""
        return self._assign("assign_sub", delta, use_locking, name, read_value)

    def _assign(self, verb: str, value: Any, use_locking: bool,
                name: str | None, read_value: bool) -> "ShardedVariable":
        del read_value
        shards = self._shards()
        with tf.name_scope(name or verb):
            value = tf.convert_to_tensor(value, dtype=self.dtype)
            value = routing.check_shape(
                shards, value, self.shape, self.shape.as_list())
            blocks = tf.split(value, shards.partition.sizes, axis=0)
            for variable, block in zip(shards.variables, blocks):
                getattr(variable, verb)(
                    block, use_locking=use_locking, read_value=False)
        return self

    # Inside.

    def _shards(self) -> routing.Shards:
        """The table as the current graph may see it."""
        if self._is_component:
            return routing.Shards(
                self._variables, self._partition, self._name)
        if _tf_private.in_save_context():
            return routing.Shards(
                [self._exported_variable()],
                RowPartition.div(self._partition.num_rows, 1), self._name)
        self._keep_out_of_exports()
        return routing.Shards(self._variables, self._partition, self._name)


def _scatter_method(verb: str) -> Callable:
    def scatter(self, sparse_delta: tf.IndexedSlices,
                use_locking: bool = False,
                name: str | None = None) -> ShardedVariable:
        del use_locking  # As in tf.Variable: scatters of a resource lock.
        _checks.check_type("sparse_delta", sparse_delta, tf.IndexedSlices,
                           "a tf.IndexedSlices",
                           where=f"table {self.name!r}")
        routing.scatter(self._shards(), verb, sparse_delta.indices,
                        sparse_delta.values, name)
        return self

    scatter.__name__ = verb
    scatter.__qualname__ = f"ShardedVariable.{verb}"
    scatter.__doc__ = f"""Does `{verb}` of `tf.Variable`; returns this table.

        Args:
          sparse_delta: `indices` of any shape, int32 or int64: global rows;
            `values` of shape `indices.shape + shape[1:]`, or one scalar.
          use_locking: Accepted for `tf.Variable`'s sake.
          name: Name of the operations.

        Raises:
          TypeError: `sparse_delta` is not a `tf.IndexedSlices`, or its
            indices are not int32 or int64.
          ValueError: `values` have another shape or dtype.
          tf.errors.InvalidArgumentError: A row is outside the table. No shard
            is written.
        """
    return scatter


def _operator_method(operator: str) -> Callable:
    of_tensor = getattr(tf.Tensor, operator)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return of_tensor(tf.convert_to_tensor(self), *args, **kwargs)

    apply.__name__ = operator
    apply.__qualname__ = f"ShardedVariable.{operator}"
    apply.__doc__ = of_tensor.__doc__
    return apply


for _verb in routing.SCATTER_VERBS:
    setattr(ShardedVariable, _verb, _scatter_method(_verb))
for _operator in tf.Tensor.OVERLOADABLE_OPERATORS - {"__getitem__"}:
    setattr(ShardedVariable, _operator, _operator_method(_operator))


def _to_tensor(table: ShardedVariable, dtype: tf.DType | None = None,
               name: str | None = None, as_ref: bool = False) -> tf.Tensor:
    del name
    if as_ref:
        raise NotImplementedError(
            f"Table {table.name!r} cannot become a reference.")
    if dtype is not None and not dtype.is_compatible_with(table.dtype):
        raise ValueError(
            f"Argument `dtype` must be {table.dtype.name}, the table's. "
            f"Received: {dtype.name} (table {table.name!r}).")
    return indexing.dense(table._shards())


tf.register_tensor_conversion_function(ShardedVariable, _to_tensor)
