"""Host copies of a TPU's tables, and their synchronization with the TPU.

The rows of a table are in the memory of the TPU. Variables on the hosts, with
one shard per host, contain the values that were last sent to the TPU or
retrieved from it. `TableTransfer` loads or retrieves the tables of all hosts in
one function, because the TPU runtime merges these operations into a single
operation. `TableSync` retrieves the tables before a save, and loads them after
a restore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config as spec_config
from tf_layoutmap.embedding.table_variable import bind_shape
from tf_layoutmap.embedding.tables import PARAMETERS
from tf_layoutmap.embedding.tpu import config_proto
from tf_layoutmap.embedding.tpu.config_proto import TPUSpec
from tf_layoutmap.sharded import ShardedVariable, initial_value


class HostCopy(ShardedVariable):
    """A copy on the hosts of a table whose rows are on a TPU.

    Like other sharded tables, a host copy is a single tensor in checkpoints and
    exports. The watcher of a host copy retrieves the rows from the TPU before a
    save, and sends the rows to the TPU after a restore.
    """

    _watcher: Any = None

    def watch(self, watcher: Any) -> None:
        """Registers a watcher of checkpoint reads and writes."""
        self._watcher = watcher

    def _gather_saveables_for_checkpoint(self):
        factories = super()._gather_saveables_for_checkpoint()

        def watched(factory, *arguments, **keywords):
            saveables = factory(*arguments, **keywords)
            for saveable in saveables:
                saveable.watch(self._watcher)
            return saveables

        return {
            key: functools.partial(watched, factory)
            for key, factory in factories.items()
        }


def create_tables(
    tpu: TPUSpec,
    hosts: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Creates the variables of all tables.

    Args:
      tpu: Tables and optimizers.
      hosts: The CPU device of each host.

    Returns:
      A dict `{table name: {"parameters": rows, slot name: slot
      variable}}`. Each variable is a `HostCopy` with contiguous blocks of rows.
      The first blocks can have one row more than the other blocks. If a table
      has fewer rows than there are hosts, each shard has one row.

    Raises:
      ValueError: If an initializer returns another shape, or if
        `slot_variable_creation_fn` returns other slot variables. The message
        names the table.
    """
    with (
        tf.variable_creator_scope(sharded_variable_creator(hosts)),
        tf.name_scope(""),
    ):
        return {
            table.name: _create_table(table, optimizer)
            for table, optimizer in zip(tpu.spec.tables, tpu.optimizers)
        }


def sharded_variable_creator(hosts: Sequence[str]) -> Callable[..., Any]:
    """Returns a creator for `tf.variable_creator_scope`.

    All variables that are created in the scope of this creator are sharded over
    `hosts`.

    >>> creator = sharded_variable_creator(["/cpu:0", "/cpu:0"])
    >>> with tf.variable_creator_scope(creator):
    ...     table = tf.Variable(functools.partial(tf.ones, [3, 2]), name="t")
    >>> [shard.shape.as_list() for shard in table.variables]
    [[2, 2], [1, 2]]

    Args:
      hosts: Device of each shard.
    """

    def create(next_creator, **keywords):
        name, shape, dtype, initializer = extract_variable_info(keywords)
        rows = partition.RowPartition.div(shape[0], min(len(hosts), shape[0]))
        # As in TensorFlow's class, each host calls the initializer with the
        # shape of its shard.
        shards = []
        for shard in range(rows.num_shards):
            with tf.device(hosts[shard]):
                shards.append(
                    next_creator(
                        **{
                            **keywords,
                            # The strategy must not create a copy of the shard
                            # for each replica.
                            "skip_mirrored_creator": True,
                            "name": f"{name}_{shard}",
                            "shape": (rows.sizes[shard], *shape[1:]),
                            "dtype": dtype,
                            "initial_value": functools.partial(
                                _value_on_host,
                                initializer,
                                shape,
                                dtype,
                                rows,
                                shard,
                                name,
                                hosts[shard],
                            ),
                        }
                    )
                )
        return HostCopy(shards, name=name)

    return create


def _value_on_host(
    initializer: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: tf.DType,
    rows: partition.RowPartition,
    shard: int,
    name: str,
    host: str,
) -> tf.Tensor:
    """Returns the initial value of one shard; errors name table and host."""
    try:
        return initial_value.of_shard(
            initializer, shape, dtype, rows, shard, name
        )
    except (TypeError, ValueError) as error:
        if rows.num_shards == 1 or f"table {name!r}" in str(error):
            raise
        raise ValueError(
            f"The initializer of table {name!r} must accept the shape of a "
            f"shard, because each of {rows.num_shards} hosts creates its own "
            f"rows. Received: {error} (shape {(rows.sizes[shard], *shape[1:])} "
            f"on host {host}). To pass all rows, use a function that returns "
            f"a tensor of shape {shape} for any shape, such as `lambda shape, "
            "dtype=None: tf.constant(rows)`."
        ) from error


def extract_variable_info(
    keywords: dict[str, Any],
) -> tuple[str, tuple[int, ...], tf.DType, Callable[..., Any]]:
    """Returns name, shape, dtype and initializer of a new variable.

    Args:
      keywords: Keyword arguments of a variable creator: `name`, `shape`,
        `dtype` and a callable `initial_value`. If the callable is a
        `functools.partial`, the partial can also bind the shape and the dtype.

    Returns:
      A tuple of the name, the shape as a tuple of ints, the dtype, and a
      callable for `initial_value.of_shard`.

    Raises:
      ValueError: If `keywords` does not contain a callable or a shape.
    """
    initializer = keywords.get("initial_value")
    shape, dtype = keywords.get("shape"), keywords.get("dtype")
    if isinstance(initializer, functools.partial) and (
        "shape" in initializer.keywords or initializer.args
    ):
        bound = dict(initializer.keywords)
        dtype = bound.pop("dtype", dtype)
        shape = bound.pop("shape", None)
        args = initializer.args
        if shape is None:
            shape, args = args[0], args[1:]
        if args:
            raise ValueError(
                "Unable to extract initializer function and shape from "
                f"{initializer}; bind the shape as its only positional "
                "argument."
            )
        initializer = (
            functools.partial(initializer.func, **bound)
            if bound
            else initializer.func
        )
    if not callable(initializer) or shape is None:
        raise ValueError(
            "Unable to extract initializer function and shape from "
            f"{keywords.get('initial_value')}; the initial value of a table "
            "that is sharded over hosts must be a callable that takes a "
            "shape, or a functools.partial with `shape` and `dtype`, so that "
            "each shard can be initialized separately."
        )
    shape = tuple(cast("list[int]", tf.TensorShape(shape).as_list()))
    return (
        keywords.get("name") or "Variable",
        shape,
        tf.as_dtype(dtype or tf.float32),
        bind_shape(initializer, shape),
    )


def _create_table(
    table: spec_config.TableSpec, optimizer: Any
) -> dict[str, Any]:
    shape = (table.num_rows, table.dim)
    rule = config_proto.rule_of(optimizer)
    # `rule_of` raises an error if the table has no optimizer.
    assert table.optimizer is not None
    initializers = [
        tf.constant_initializer(slot.initial_value)
        for slot in table.optimizer.slots
    ]

    def create(name: str, initializer: Callable[..., Any]):
        # The variable is not trainable, because the TPU trains the table.
        # Gradient tapes and other optimizers must not use the variable.
        return tf.Variable(
            functools.partial(initializer, shape),
            shape=shape,
            dtype=tf.float32,
            trainable=False,
            name=name,
        )

    parameters = create(table.name, table.initializer)
    by_user = getattr(optimizer, "slot_variable_creation_fn", None)
    if by_user is None:
        slots = {
            name: create(f"{table.name}/{name}", initializer)
            for name, initializer in zip(rule.slots, initializers)
        }
    else:
        slots = by_user(parameters, list(rule.slots), initializers)
        _check_slots(slots, rule.slots, parameters, table)
    return {
        PARAMETERS: parameters,
        **{name: slots[name] for name in rule.slots},
    }


def _check_slots(slots, names, parameters, table):
    if not isinstance(slots, dict) or set(slots) != set(names):
        raise ValueError(
            "`slot_variable_creation_fn` must return a dict of the slot "
            f"variables {list(names)}. Received: {slots!r} (table "
            f"{table.name!r})."
        )
    for name, slot in slots.items():
        if (
            not isinstance(slot, HostCopy)
            or slot.shape != parameters.shape
            or (len(slot.variables) != len(parameters.variables))
        ):
            raise ValueError(
                "`slot_variable_creation_fn` must create each slot variable "
                "as a tf.Variable whose initial value is a callable that "
                "takes a shape, so that it is sharded like its table. "
                f"Received: {slot!r} for {name!r} (table {table.name!r})."
            )


class TableTransfer:
    """Copy operations between the variables on the hosts and the TPU."""

    def __init__(
        self,
        tpu: TPUSpec,
        config: bytes,
        hosts: Sequence[str],
        variables: Mapping[str, Mapping[str, Any]],
    ):
        """Creates the functions that load and retrieve all variables.

        Args:
          tpu: Tables and optimizers.
          config: The serialized configuration proto.
          hosts: The CPU device of each host.
          variables: Return value of `create_tables`.
        """
        self._tpu = tpu
        self._config = config
        self._hosts = list(hosts)
        self._variables = variables
        self.load = tf.function(self._load, autograph=False)
        self.retrieve = tf.function(self._retrieve, autograph=False)

    def _each_shard(self):
        """Yields rule, host index, variables and op attributes per shard.

        The variables are in the order in which the op takes them.
        """
        config = self._config
        for number, host in enumerate(self._hosts):
            with tf.device(host):
                for table, optimizer in zip(
                    self._tpu.spec.tables, self._tpu.optimizers
                ):
                    rule = config_proto.rule_of(optimizer)
                    by_name = self._variables[table.name]
                    names = [tables.PARAMETERS, *rule.slots]
                    yield (
                        rule,
                        number,
                        {
                            name: tables.shards_of(by_name[name])
                            for name in names
                        },
                        {
                            "table_name": table.name,
                            "num_shards": len(self._hosts),
                            "shard_id": number,
                            "config": config,
                        },
                    )
                    # The configuration is a long string, so only the first
                    # operation receives it.
                    config = ""

    def _load(self):
        for rule, number, shards, attrs in self._each_shard():
            rule.load(
                **attrs,
                **{
                    name: _read_shard(variables, number)
                    for name, variables in shards.items()
                },
            )

    def _retrieve(self):
        for rule, number, shards, attrs in self._each_shard():
            values = rule.retrieve(**attrs)
            # If an optimizer has no slot variables, the op returns a single
            # tensor.
            values = list(values) if rule.slots else [values]
            for variables, value in zip(shards.values(), values):
                if number < len(variables):
                    variables[number].assign(value)


def _read_shard(shards: Sequence[tf.Variable], number: int) -> Any:
    # If a table has fewer rows than there are hosts, the last hosts have no
    # rows. The op requires a tensor for each host, so these hosts send zeros.
    if number < len(shards):
        return shards[number].read_value()
    return tf.zeros_like(shards[0])


class TableSync:
    """A watcher that synchronizes tables with the TPU in saves and restores.

    The watcher retrieves all tables once per save, and loads all tables once
    per restore. A `TableSync` watches all variables of an embedding (see
    `HostCopy.watch`). Therefore all classes that save or restore checkpoints
    are supported.
    """

    def __init__(self):
        self._transfer: TableTransfer | None = None
        self._is_stale = False
        # Python ids of the saveables to which the current restore has not
        # written yet.
        self._expected: set[int] = set()

    def start(self, transfer: TableTransfer):
        """Sends the initial values to the TPU, and enables transfers."""
        self._transfer = transfer
        self.load()

    def load(self):
        """Sends the host copies to the TPU."""
        if transfer := self._usable():
            transfer.load()

    def retrieve(self):
        """Updates the host copies from the TPU."""
        if transfer := self._usable():
            transfer.retrieve()

    def mark_stale(self):
        """Marks the host copies as stale at the start of a save or restore."""
        self._is_stale = True

    def begin_restore(self):
        """Clears the state of an earlier restore, which may have failed."""
        self._expected.clear()

    def before_save(self):
        """Retrieves all tables before a save reads the first variable."""
        if self._is_stale and (transfer := self._usable()):
            self._is_stale = False
            transfer.retrieve()

    def before_restore(self, saveable: Any):
        """Records a saveable to which the restore will write."""
        self._expected.add(id(saveable))

    def after_restore(self, saveable: Any):
        """Loads all tables after the restore has written the last saveable."""
        self._expected.discard(id(saveable))
        if not self._expected:
            self.load()

    def _usable(self) -> TableTransfer | None:
        # An exported graph must not contain transfers, because it can be loaded
        # on a machine without a TPU.
        if tf.executing_eagerly() or not tf_private.in_save_context():
            return self._transfer
        return None
