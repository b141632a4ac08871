"""Creates the host copies of a TPU's tables, one shard on each host."""

# DOC-MERGE: Keeps the host copies and the TPU's tables equal around checkpoints.
# DOC-MERGE: Sends tables and slot variables to a TPU, and brings them back.
#
# On a TPU the rows live in its memory; the variables on the hosts hold what was
# loaded or retrieved last. All tables of all hosts go in one function: the TPU's
# runtime joins these operations into one, which must know them all.
#
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from tf_layoutmap import partition
from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.spec import config as spec_config
from tf_layoutmap.embedding.table_variable import bind_shape
from tf_layoutmap.embedding.tables import PARAMETERS
from tf_layoutmap.embedding.tpu import config_proto
from tf_layoutmap.embedding.tpu.config_proto import TPUSpec
from tf_layoutmap.sharded import ShardedVariable, initial_value


class HostCopy(ShardedVariable):
    """What is on the hosts of a table whose rows are on a TPU.

    To a checkpoint and an export it is one tensor, as any table in shards. It
    is brought up to date before it is saved, and sent to the TPU after it was
    restored, by its watcher.
    """

    _watcher: Any = None

    def watch(self, watcher: Any) -> None:
        """Lets `watcher` know when a checkpoint reads and writes the rows."""
        self._watcher = watcher

    def _gather_saveables_for_checkpoint(self):
        factories = super()._gather_saveables_for_checkpoint()

        def watched(factory, *arguments, **keywords):
            found = factory(*arguments, **keywords)
            for saveable in found:
                saveable.watch(self._watcher)
            return found

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
      `{table name: {"parameters": rows, slot name: slot variable}}`, each a
      `HostCopy` in contiguous blocks of rows, the first ones with one row
      more. A table with fewer rows than hosts has as many shards as rows.

    Raises:
      ValueError: If an initializer gives another shape, or
        `slot_variable_creation_fn` other slots; both name the table.
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

    The variables created under it are divided over `hosts`.

    >>> creator = sharded_variable_creator(["/cpu:0", "/cpu:0"])
    >>> with tf.variable_creator_scope(creator):
    ...     table = tf.Variable(functools.partial(tf.ones, [3, 2]), name="t")
    >>> [shard.shape.as_list() for shard in table.variables]
    [[2, 2], [1, 2]]

    Args:
      hosts: A device for each shard.
    """

    def create(next_creator, **keywords):
        name, shape, dtype, initializer = extract_variable_info(keywords)
        cut = partition.RowPartition.div(shape[0], min(len(hosts), shape[0]))
        initializer = initial_value.for_shards(
            initializer, shape, dtype, cut.num_shards, name
        )
        shards = []
        for shard in range(cut.num_shards):
            with tf.device(hosts[shard]):
                shards.append(
                    next_creator(
                        **{
                            **keywords,
                            # Strategies must not copy it for their replicas.
                            "skip_mirrored_creator": True,
                            "name": f"{name}_{shard}",
                            "shape": (cut.sizes[shard], *shape[1:]),
                            "dtype": dtype,
                            "initial_value": functools.partial(
                                initial_value.of_shard,
                                initializer,
                                shape,
                                dtype,
                                cut,
                                shard,
                                name,
                            ),
                        }
                    )
                )
        return HostCopy(shards, name=name)

    return create


def extract_variable_info(
    keywords: dict[str, Any],
) -> tuple[str, tuple[int, ...], tf.DType, Callable[..., Any]]:
    """Returns what a variable creator was asked for.

    Args:
      keywords: Those of a variable creator: `name`, `shape`, `dtype` and
        `initial_value`, a callable; a `functools.partial` may bring the shape
        and the dtype.

    Returns:
      Name, shape as a tuple of ints, dtype, and a callable for
      `initial_value.of_shard`.

    Raises:
      ValueError: If there is no callable or no shape.
    """
    found = keywords.get("initial_value")
    shape, dtype = keywords.get("shape"), keywords.get("dtype")
    if isinstance(found, functools.partial) and (
        "shape" in found.keywords or found.args
    ):
        bound = dict(found.keywords)
        dtype = bound.pop("dtype", dtype)
        shape = bound.pop("shape", None)
        args = found.args
        if shape is None:
            shape, args = args[0], args[1:]
        if args:
            raise ValueError(
                "Unable to extract initializer function and shape from "
                f"{found}; give it the shape as its only positional argument."
            )
        found = functools.partial(found.func, **bound) if bound else found.func
    if not callable(found) or shape is None:
        raise ValueError(
            "Unable to extract initializer function and shape from "
            f"{keywords.get('initial_value')}; a table that is divided over "
            "hosts needs a callable of a shape as its initial value, or a "
            "functools.partial with `shape` and `dtype`, so that each shard "
            "can be made on its own."
        )
    shape = tuple(cast("list[int]", tf.TensorShape(shape).as_list()))
    return (
        keywords.get("name") or "Variable",
        shape,
        tf.as_dtype(dtype or tf.float32),
        bind_shape(found, shape),
    )


def _create_table(
    table: spec_config.TableSpec, optimizer: Any
) -> dict[str, Any]:
    shape = (table.num_rows, table.dim)
    rule = config_proto.rule_of(optimizer)
    assert table.optimizer is not None  # As `rule_of` found one.
    initializers = [
        tf.constant_initializer(slot.initial_value)
        for slot in table.optimizer.slots
    ]

    def create(name: str, initializer: Callable[..., Any]):
        # The TPU trains it; no tape and no other optimizer may find it.
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
    for name, one in slots.items():
        if (
            not isinstance(one, HostCopy)
            or one.shape != parameters.shape
            or (len(one.variables) != len(parameters.variables))
        ):
            raise ValueError(
                "`slot_variable_creation_fn` must create each slot variable "
                "by tf.Variable with a callable of a shape, so that it is "
                f"divided as its table. Received: {one!r} for {name!r} "
                f"(table {table.name!r})."
            )


class TableTransfer:
    """Copies between the variables on the hosts and the TPU."""

    def __init__(
        self,
        tpu: TPUSpec,
        config: bytes,
        hosts: Sequence[str],
        variables: Mapping[str, Mapping[str, Any]],
    ):
        """Takes what `tpu_engine.tables.create_tables` created.

        Args:
          tpu: Tables and optimizers.
          config: The serialized configuration proto.
          hosts: The CPU device of each host.
          variables: `{table name: {"parameters" or slot name: variable}}`.
        """
        self._tpu = tpu
        self._config = config
        self._hosts = list(hosts)
        self._variables = variables
        self.load = tf.function(self._load, autograph=False)
        self.retrieve = tf.function(self._retrieve, autograph=False)

    def _each_shard(self):
        """Per host and table: rule, variables in order of the op, attrs."""
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
                    # A long string: the first operation alone carries it.
                    config = ""

    def _load(self):
        for rule, number, shards, attrs in self._each_shard():
            rule.load(
                **attrs,
                **{
                    name: _read_shard(one, number)
                    for name, one in shards.items()
                },
            )

    def _retrieve(self):
        for rule, number, shards, attrs in self._each_shard():
            found = rule.retrieve(**attrs)
            # Of an optimizer without slots it is one tensor.
            found = list(found) if rule.slots else [found]
            for one, value in zip(shards.values(), found):
                if number < len(one):
                    one[number].assign(value)


def _read_shard(shards: Sequence[tf.Variable], number: int) -> Any:
    # A table with fewer rows than hosts has no rows for the last ones, which
    # are sent zeros anyway.
    if number < len(shards):
        return shards[number].read_value()
    return tf.zeros_like(shards[0])


class TableSync:
    """Retrieves before a save and loads after a restore, once each.

    It watches all variables of an embedding (`HostCopy.watch`): whoever saves
    or restores them, by whatever class the file was written.
    """

    def __init__(self):
        self._transfer: TableTransfer | None = None
        self._is_stale = False
        # What a restore is about to write.
        self._expected: set[int] = set()

    def start(self, transfer: TableTransfer):
        """Sends the first values, and keeps up from now on."""
        self._transfer = transfer
        self.load()

    def load(self):
        """Sends the host copies to the TPU."""
        if transfer := self._usable():
            transfer.load()

    def retrieve(self):
        """Brings the host copies up to date."""
        if transfer := self._usable():
            transfer.retrieve()

    def note_walk(self):
        """A save, or a restore, begins: what is retrieved is old by now."""
        self._is_stale = True

    def note_restore(self):
        """A restore begins; another one may have failed half-way."""
        self._expected.clear()

    def before_save(self):
        """Of the variables of one save, the first to be read retrieves."""
        if self._is_stale and (transfer := self._usable()):
            self._is_stale = False
            transfer.retrieve()

    def before_restore(self, saveable: Any):
        """Notes what will be written."""
        self._expected.add(id(saveable))

    def after_restore(self, saveable: Any):
        """The last one to be written loads."""
        self._expected.discard(id(saveable))
        if not self._expected:
            self.load()

    def _usable(self) -> TableTransfer | None:
        # A graph that is exported restores where there is no TPU.
        if tf.executing_eagerly() or not tf_private.in_save_context():
            return self._transfer
        return None
