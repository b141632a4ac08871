"""Tables on each runtime: parts and stores.

A `TableStore` creates the variables of tables, and knows which process and
which device hold them. `parts` returns the parts of a table: the rows that one
call of an op can access. `run` calls a function where a part is, and `collect`
returns the results of all parts. Code that uses tables outside of steps is
written once with these methods, and does not depend on the runtime.

`HostStore` is the store of tables in this process. `servers/tables.py` and
`process_sharded/tables.py` contain the stores of tables on servers, and of
tables that are sharded over processes.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import checks, freed_gradients, random_tensors
from tf_layoutmap.embedding import table_variable, tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.processes import Processes
from tf_layoutmap.sharded import ShardedVariable, creation_progress
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import bucket_layout, parts
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.parts import Part

Array = np.ndarray[Any, Any]
Variables = dict[str, dict[str, Any]]
Partitioner = Callable[..., Sequence[int]]
_Result = TypeVar("_Result")


class TableStore(abc.ABC):
    """Creator and owner of the variables of an embedding.

    Attributes:
      spec: Tables and features.
      variables: The variables, by name of the table and of the variable.
      group: The processes that call methods together, or None. If the tables
        are copied, each process has all parts.
      is_sharded: Whether the tables are sharded over processes.
      values_per_read: Maximum number of values that should be read at a time.
    """

    is_sharded = False
    values_per_read = 1 << 24
    # Whether parts of vocabularies consist of complete segments, so that a part
    # contains all possible places of its keys.
    _has_segments = False
    # The index of the only shard that this process creates, or None.
    _only: int | None = None

    def __init__(
        self, partitioner: Partitioner | None, group: Processes | None = None
    ):
        """Stores how tables are sharded.

        Args:
          partitioner: None, or a callable like
            `tf.distribute.experimental.partitioners`. The callable takes
            `shape` and `dtype`, and returns the number of shards of each axis.
            A `partition.PartitionerByName` also gets the name of the table.
          group: The processes that call methods together, or None.
        """
        self.partitioner = partitioner
        self.group = group
        self.spec = config.EmbeddingSpec((), ())
        self.variables: Variables = {}

    def with_tables(
        self, spec: config.EmbeddingSpec, variables: Variables
    ) -> Self:
        """Returns a store of the same runtime with variables of tables."""
        other = copy.copy(self)
        other.spec, other.variables = spec, variables
        return other

    # Access to the parts.

    def parts(self, table: int) -> list[Part]:
        """Returns the parts of a table, in the order of their rows."""
        spec = self.spec.tables[table]
        by_name = self.variables[spec.name]
        owner = tables.owner_of(self.spec, spec)
        vocabulary = {
            name: variable
            for name, variable in self.variables[owner.name].items()
            if name in parts.NAMES
        }
        return [
            Part(
                table,
                index,
                rows,
                device,
                rank,
                *(
                    {
                        name: self._shards_of_part(variable, index)
                        for name, variable in group.items()
                    }
                    if self._is_here(rank)
                    else {}
                    for group in (by_name, vocabulary)
                ),
            )
            for index, (rows, device, rank) in enumerate(
                self._places(by_name[tables.PARAMETERS])
            )
        ]

    @abc.abstractmethod
    def _places(self, rows: Any) -> list[tuple[range, str, int]]:
        """Returns rows, device and owner of each part of a variable."""

    @abc.abstractmethod
    def _shards_of_part(self, variable: Any, index: int) -> list[Any]:
        """Returns the shards of a variable that belong to a part."""

    def _is_here(self, rank: int) -> bool:
        """Whether this process holds the variables of a process."""
        del rank
        return True

    def run(
        self, part: Part, function: Callable[[Part], _Result]
    ) -> _Result | None:
        """Calls a function on the device of a part, in the owner of the part.

        Returns:
          The result for `collect`, or None in other processes.
        """
        if not self._is_here(part.owner):
            return None
        with tf.device(part.device):
            return function(part)

    def collect(self, results: Sequence[Any]) -> list[Any]:
        """Returns the results of all parts, in all processes.

        If tables are sharded over processes, all processes must call the method
        together, outside of `tf.function`, and a result is a list of arrays.

        Args:
          results: Results of `run`, in the order of the parts.
        """
        return list(results)

    def send(self, part: Part, result: Any) -> Any:
        """Returns the result of one part, in all processes; see `collect`."""
        del part
        return result

    def check_can_read(self, call: str) -> None:
        """Checks that `collect` is possible here.

        Args:
          call: Name of the call, for the message.

        Raises:
          RuntimeError: If tables are sharded over processes, and the call is
            inside a `tf.function`.
        """
        del call

    def ask(
        self,
        table: int,
        arguments: tf.Tensor,
        function: Callable[[Part, tf.Tensor], list[tf.Tensor]],
        num_results: int,
    ) -> list[list[tf.Tensor]]:
        """Calls a function for each part, with the arguments of this process.

        If tables are sharded over processes, all processes must call the method
        together: outside of `tf.function`, or inside a `tf.function` in a
        replica. The owner of a part calls the function once for the arguments
        of each process.

        Args:
          table: Index of the table.
          arguments: int64 vector, whose values and size can differ between
            processes.
          function: Function of a part and of arguments, which returns int64
            vectors.
          num_results: Number of vectors that `function` returns.

        Returns:
          The results of `function` for each part.
        """
        del num_results
        results = []
        for part in self.parts(table):
            with tf.device(part.device):
                results.append(function(part, arguments))
        return results

    def each(self, table: int, function: Callable[[Part], Any]) -> list[Any]:
        """Calls a function for each part of a table; see `run`, `collect`."""
        return self.collect(
            [self.run(part, function) for part in self.parts(table)]
        )

    def local_parts(self, table: int) -> list[Part]:
        """Returns the parts of this process, at least one.

        If the process has no rows of the table, the variables of the part have
        one row that is never read, and the part has no vocabulary.
        """
        return self.parts(table)

    def rows_by_process(self, table: int) -> list[range]:
        """Returns the rows that each process holds; one range without a group.

        Each range contains the rows of all parts of a process.
        """
        rows = self.variables[self.spec.tables[table].name][tables.PARAMETERS]
        return [range(known_size(rows))]

    @property
    def _rank(self) -> int:
        """Index of this process in `rows_by_process`."""
        return 0

    def local_rows(self, table: int) -> range:
        """Returns the rows that this process holds."""
        return self.rows_by_process(table)[self._rank]

    def read_together(
        self, variables: Mapping[str, Any], call: str
    ) -> dict[str, Array]:
        """Returns the full values of variables, in all processes.

        Args:
          variables: Variables of a vocabulary, by name.
          call: Name of the call, for messages.
        """
        del call
        return {name: variable.numpy() for name, variable in variables.items()}

    def assign_local(self, variable: Any, values: Array) -> None:
        """Assigns the rows of this process."""
        variable.assign(values)

    def discard(self, variables: Mapping[str, Any]) -> None:
        """Frees the memory of a table that a resize has replaced.

        A function that was traced before the resize still uses the variables.
        Because the variables are empty, lookups in this function raise errors
        instead of returning outdated rows.

        Args:
          variables: Variables of the table by name.
        """
        for variable in variables.values():
            for shard in table_variable.shards_of(variable):
                with tf.device(shard.device):
                    tf.raw_ops.AssignVariableOp(
                        resource=shard.handle,
                        validate_shape=False,
                        value=tf.zeros([0, *shard.shape[1:]], shard.dtype),
                    )

    # Creation.

    def create(self, spec: config.EmbeddingSpec) -> Variables:
        """Creates the variables of all tables.

        Returns:
          A dict `{table name: {"parameters": rows, slot name: slot variable}}`.
          Each variable is a `tf.Variable`, or an object with the attribute
          `variables`, which are the variables of this process. A table with
          16-bit rows and an optimizer also has an int64 scalar
          `"rounding_steps"`. A table that owns an open vocabulary also has all
          variables of the vocabulary.

        Raises:
          TypeError: If a variable creator does not return a variable.
          ValueError: If an initializer returns another shape, or values that
            exceed the range of the table's dtype. The method also raises this
            error if the partitioner splits columns, or if the engine cannot
            train a variable that a variable creator returned. The message names
            the table.
        """
        variables = {}
        with (
            tf.device(tables.HOST),
            tf.name_scope(""),
            creation_progress.show_progress(sum(map(_num_bytes, spec.tables))),
        ):
            for table in spec.tables:
                variables[table.name] = self._create_table(spec, table)
        freed_gradients.free_with_variables(
            shard
            for by_name in variables.values()
            for variable in by_name.values()
            for shard in table_variable.shards_of(variable)
        )
        return variables

    def _create_table(
        self, spec: config.EmbeddingSpec, table: config.TableSpec
    ) -> dict[str, Any]:
        num_shards = self._num_shards(tables.owner_of(spec, table))
        settings = table.vocabulary and table.vocabulary.settings
        buckets = None
        if settings is None:
            cut = partition.RowPartition.div(table.num_rows, num_shards)
        else:
            buckets = (
                bucket_layout.segment_partition
                if self._has_segments
                else bucket_layout.bucket_partition
            )(settings.num_buckets, num_shards)
            cut = bucket_layout.row_partition(buckets)
        devices = self._devices_of(spec, table, cut)
        # If a table has an optimizer, the engine trains the table. In this
        # case, the table must not be a trainable variable, because a gradient
        # tape and another optimizer would also use the variable.
        rows = table_variable.create(
            table,
            table.name,
            # The engine initializes a row of an open table when it admits the
            # key of the row.
            table.initializer if settings is None else tf.zeros_initializer(),
            cut,
            dim=table.dim,
            trainable=table.optimizer is None,
            dtype=table.dtype,
            devices=devices,
            only=self._only,
        )
        variables = {tables.PARAMETERS: self._joined(table.name, rows, cut)}
        for slot in table.slots:
            name = f"{table.name}/{slot.name}"
            values = table_variable.create(
                table,
                name,
                tf.constant_initializer(slot.initial_value),
                cut,
                dim=slot.dim(table.dim),
                trainable=False,
                devices=devices,
                only=self._only,
            )
            table_variable.check_same_cut(table, rows, values)
            variables[slot.name] = self._joined(name, values, cut)
        if table.is_half and table.optimizer is not None:
            variables[tables.ROUNDING_STEPS] = self._create_rounding_steps(
                f"{table.name}/{tables.ROUNDING_STEPS}", devices
            )
        if settings is not None and buckets and table.vocabulary.owner is None:
            variables.update(
                self._create_vocabulary(settings, table.name, buckets, devices)
            )
        return variables

    def _num_shards(self, table: config.TableSpec) -> int:
        if self.partitioner is None:
            return 1
        checks.check_partitioner(self.partitioner, f"table {table.name!r}")
        arguments: dict[str, Any] = {
            "shape": tf.TensorShape([table.num_rows, table.dim]),
            "dtype": tf.float32,
        }
        if isinstance(self.partitioner, partition.PartitionerByName):
            arguments["name"] = table.name
        counts = [int(count) for count in self.partitioner(**arguments)]
        if len(counts) != 2 or counts[1] != 1 or counts[0] < 1:
            raise ValueError(
                "Argument `partitioner` must split a table along its rows "
                "only, [num_shards, 1]. Received: "
                f"{counts} (table {table.name!r})."
            )
        # Each shard must have at least one row.
        if table.vocabulary is None:
            return min(counts[0], table.num_rows)
        num_buckets = table.vocabulary.settings.num_buckets
        return min(
            counts[0],
            bucket_layout.num_segments(num_buckets)
            if self._has_segments
            else num_buckets,
        )

    def _devices_of(
        self,
        spec: config.EmbeddingSpec,
        table: config.TableSpec,
        cut: partition.RowPartition,
    ) -> Sequence[str] | None:
        """Returns the device of each shard, or None for the host.

        If devices are returned, variable creators are not called.
        """
        del spec, table, cut
        return None

    def _joined(
        self, name: str, variable: Any, cut: partition.RowPartition
    ) -> Any:
        """Returns the object with all shards of a variable.

        Args:
          name: Name of the object.
          variable: Variable with the shards of this process.
          cut: Partition of the rows into shards.
        """
        del name, cut
        return variable

    def _joined_numbers(self, name: str, copies: list[Any]) -> Any:
        """Returns the object with the statistics of a vocabulary."""
        del name
        return copies[0]

    def _create_rounding_steps(
        self, name: str, devices: Sequence[str] | None
    ) -> Any:
        """Creates the counter of updates of a table with 16-bit rows."""
        del devices
        return tables.create_variable(tf.constant(0, tf.int64), name)

    def _create_vocabulary(
        self,
        vocabulary: OpenVocabulary,
        table: str,
        buckets: partition.RowPartition,
        devices: Sequence[str] | None,
    ) -> dict[str, Any]:
        """Creates the variables of an empty vocabulary.

        Args:
          vocabulary: Settings of the vocabulary.
          table: Name of the table.
          buckets: Partition of the buckets into shards.
          devices: Device of each shard, or None for the host.

        Returns:
          The variables by name. The shape of the keys, steps and counts is
          `[num_buckets, 8]`.
        """
        num_segments = bucket_layout.num_segments(vocabulary.num_buckets)
        # Tables on a host have one sketch, because any shard can contain any
        # segment.
        segments = partition.RowPartition.div(
            num_segments, buckets.num_shards if self._has_segments else 1
        )
        numbers = partition.RowPartition.from_sizes(
            [len(parts.NUMBERS_HELD)] * segments.num_shards
        )

        def shards(
            name: str,
            cut: partition.RowPartition,
            row_shape: Sequence[int],
            value: int,
            dtype: tf.DType,
            no_shard: int = 1,
        ) -> list[Any]:
            created = []
            for shard in (
                range(cut.num_shards) if self._only is None else [self._only]
            ):
                # A process without a shard creates one row by default, which
                # no process reads.
                size = cut.sizes[shard] if shard < cut.num_shards else no_shard
                suffix = (
                    f"/part_{shard}"
                    if cut.num_shards > 1 or self._only is not None
                    else ""
                )
                # The device of the shard also computes the initial value, so
                # the value is not sent over the network.
                with tf.device(devices[shard] if devices else tables.HOST):
                    created.append(
                        tables.create_variable(
                            self._fill([size, *row_shape], value, dtype),
                            f"{table}/{name}{suffix}",
                        )
                    )
            return created

        def joined(
            name: str,
            cut: partition.RowPartition,
            row_shape: Sequence[int],
            value: int,
            dtype: tf.DType,
        ) -> Any:
            created = shards(name, cut, row_shape, value, dtype)
            full_name = f"{table}/{name}"
            variable = (
                created[0]
                if len(created) == 1
                else ShardedVariable(created, name=full_name)
            )
            return self._joined(full_name, variable, cut)

        lanes = [bucket_layout.KEYS_PER_BUCKET]
        variables = {
            name: joined(name, buckets, lanes, value, dtype)
            for name, value, dtype in (
                (parts.KEYS, bucket_layout.EMPTY_KEY, tf.int64),
                (parts.LAST_STEPS, 0, tf.int32),
                (parts.COUNTS, 0, tf.int32),
            )
        }
        if vocabulary.has_sketch:
            shape = bucket_layout.sketch_shape(vocabulary.num_buckets)
            variables[parts.SKETCH] = joined(
                parts.SKETCH, segments, shape[1:], 0, tf.uint8
            )
            variables[parts.SKETCH_SUMS] = joined(
                parts.SKETCH_SUMS, segments, [], 0, tf.int64
            )
        variables[parts.NUMBERS] = self._joined_numbers(
            f"{table}/{parts.NUMBERS}",
            shards(parts.NUMBERS, numbers, [], 0, tf.int64, numbers.sizes[0]),
        )
        return variables

    def _fill(
        self, shape: Sequence[int], value: int, dtype: tf.DType
    ) -> tf.Tensor:
        return tf.fill(shape, tf.constant(value, dtype))


class HostStore(TableStore):
    """The store of tables in the memory of this process.

    A table has one part, whose shards one op can access. If there are several
    processes, each process has a copy of the tables.
    """

    def create(self, spec: config.EmbeddingSpec) -> Variables:
        """Creates the variables of all tables; see `TableStore.create`."""
        if isinstance(self.partitioner, partition.PartitionerByName):
            self.partitioner.check_servers(0)
        return super().create(spec)

    def _places(self, rows: Any) -> list[tuple[range, str, int]]:
        (shard, *_) = table_variable.shards_of(rows)
        return [(range(known_size(rows)), shard.device, 0)]

    def _shards_of_part(self, variable: Any, index: int) -> list[Any]:
        del index
        return table_variable.shards_of(variable)

    def _fill(
        self, shape: Sequence[int], value: int, dtype: tf.DType
    ) -> tf.Tensor:
        # Buckets are accessed in random order, like rows.
        return (
            random_tensors.fill(tuple(shape), value, dtype)
            if list(shape[1:]) == [bucket_layout.KEYS_PER_BUCKET]
            else super()._fill(shape, value, dtype)
        )


def _num_bytes(table: config.TableSpec) -> int:
    """Returns the size of the float32 initial values in bytes."""
    slots = table.slots
    return (
        4
        * table.num_rows
        * (table.dim + sum(slot.dim(table.dim) for slot in slots))
    )
