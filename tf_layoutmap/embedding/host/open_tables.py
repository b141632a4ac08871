"""What the engine's ops are told of tables with open vocabularies."""

# DOC-MERGE: A table with an open vocabulary, made anew for another capacity.
from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.sharded.routing import checks
from tf_layoutmap.vocabulary import conversion as vocabulary_conversion
from tf_layoutmap.vocabulary import evicted, key_tensors, state


class OpenTables:
    """The open tables of one embedding, as arguments of ops."""

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        *,
        tells: bool = True,
        in_processes: bool = False,
    ):
        """Takes what `tables.create_tables` made of the spec.

        Args:
          spec: Tables and features.
          variables: By table name.
          tells: Whether `on_evict` is called with keys that go.
          in_processes: Whether other processes take the same steps.
        """
        self._spec = spec
        self._in_processes = in_processes
        found = [
            (number, table)
            for number, table in enumerate(spec.tables)
            if table.vocabulary is not None
        ]
        self._numbers = [number for number, _ in found]
        self._state, self._shards, self._slots = [], [], []
        slot_values = []
        self._of_table: dict[int, dict[str, Any]] = {}
        for number, table in found:
            by_name = variables[table.name]
            self._state.extend(state.in_order_of_ops(by_name))
            shards = tables.shards_of(by_name[tables.PARAMETERS])
            self._shards.extend(shards)
            slots = []
            for slot in table.optimizer.slots if table.optimizer else ():
                slots.extend(tables.shards_of(by_name[slot.name]))
                slot_values.append(slot.initial_value)
            self._slots.extend(slots)
            self._of_table[number] = {
                "state": state.in_order_of_ops(by_name),
                "shards": shards,
                "slots": slots,
            }
        settings = [table.vocabulary.settings for _, table in found]
        values = [table.vocabulary.first_values for _, table in found]
        policies = [one.policy() for one in settings]
        self._attrs = {
            "open_tables": self._numbers,
            "has_unknown_row": [one.unknown == "row" for one in settings],
            "admissions": [one["admission"] for one in policies],
            "evictions": [one["evict"] for one in policies],
            "policies": [
                number for one in policies for number in one["policy"]
            ],
            "first_values": [one.kind for one in values],
            "first_limits": [limit for one in values for limit in one.limits],
            "first_seeds": [one.seed for one in values],
            "slot_values": slot_values,
        }
        self._dtypes = {number: _row_dtypes(table) for number, table in found}
        # Of those tables that tell which keys go, in their order.
        self._tellers = {
            number: evicted.teller(
                table.vocabulary.settings.on_evict,
                table.name,
                [
                    slot.name
                    for slot in (
                        table.optimizer.slots if table.optimizer else ()
                    )
                ],
            )
            for number, table in found
            if tells and table.vocabulary.settings.on_evict is not None
        }
        self._attrs.update(
            telling=[self._numbers.index(number) for number in self._tellers],
            Tevicted=[
                dtype
                for number in self._tellers
                for dtype in (tf.int64, *self._dtypes[number])
            ],
        )

    def arguments(
        self,
        inputs: Sequence[embedding_inputs.FeatureIds],
    ) -> dict[str, Any]:
        """Returns the arguments of a step, besides its batch.

        Args:
          inputs: By replica, then by feature.

        Raises:
          ValueError: If features of one table have integers and strings.
        """
        return {
            "state": _handles(self._state),
            "shards": _handles(self._shards),
            "slots": _handles(self._slots),
            "key_kinds": [
                kind_of_keys(self._spec, number, inputs)
                for number in self._numbers
            ],
            **self._attrs,
        }

    def tell(self, engine: tf.Tensor, values: Sequence[tf.Tensor]) -> None:
        """Calls `on_evict` with the keys that a step has evicted.

        If it raises, the step is undone: it leaves the engine, and keys get
        their rows back.

        Args:
          engine: The handle of the engine.
          values: The output `evicted` of the step's op.
        """
        if not self._tellers:
            return

        def tell_all(*arrays: Any) -> None:
            first = 0
            for number, teller in self._tellers.items():
                size = 1 + len(self._dtypes[number])
                teller(*arrays[first : first + size])
                first += size

        self._tell_or_take_back(
            tell_all,
            values,
            engine,
            "The step was not enqueued",
            state=self._state,
            shards=self._shards,
            slots=self._slots,
        )

    def _tell_or_take_back(
        self,
        tell: Callable[..., None],
        values: Sequence[tf.Tensor],
        engine: tf.Tensor,
        outcome: str,
        **variables: Sequence[tf.Variable],
    ) -> None:
        """Calls `tell` with arrays; if it raises, undoes the engine's last op.

        Args:
          tell: What is called.
          values: Its arguments, as tensors.
          engine: The handle of the engine.
          outcome: What to say of the op that is undone.
          **variables: As the op got them: `state`, `shards`, `slots`.
        """

        def take_back(why: Any, *, raises: bool) -> None:
            ops.take_back_keys(
                engine=engine,
                why=why,
                raises=raises,
                in_processes=self._in_processes,
                **{name: _handles(each) for name, each in variables.items()},
            )

        if tf.executing_eagerly():
            try:
                tell(*(value.numpy() for value in values))
            except BaseException as error:
                take_back(_failed(error), raises=False)
                raise
            return

        def why_not(*tensors: tf.Tensor) -> str:
            try:
                tell(*(one.numpy() for one in tensors))
            except BaseException as error:
                return f"{_failed(error)}. {outcome}.\n" + "".join(
                    traceback.format_exception(error)
                )
            return ""

        # Ordered by the engine: a dequeue that follows sees a step that stays.
        take_back(
            tf.py_function(
                tf_private.kept_by_graphs(why_not), values, tf.string
            ),
            raises=True,
        )

    def tell_table(self, table: int, values: Sequence[Any]) -> None:
        """The same of one table: keys, rows and slot variables."""
        if table in self._tellers:
            self._tellers[table](*values)

    def evict_keys(
        self, engine: tf.Tensor, table: int, keys: tf.Tensor, *, expired: bool
    ) -> tf.Tensor:
        """Takes the rows of keys of one table away; see `Vocabulary`.

        Args:
          engine: Its handle.
          table: Its number.
          keys: Which keys, int64.
          expired: Whether all keys whose time is over go instead.

        Returns:
          Those that had a row, `[num_evicted]` int64.
        """
        settings = self._spec.tables[table].vocabulary.settings
        found = ops.evict_keys(
            engine=engine,
            keys=keys,
            expired=expired,
            table=table,
            Tvalues=self._dtypes[table],
            **{
                name: _handles(variables)
                for name, variables in self._of_table[table].items()
            },
            **settings.policy(),
        )
        if table in self._tellers:
            self._tell_or_take_back(
                self._tellers[table],
                [found.evicted, *found.values],
                engine,
                "No key was evicted",
                **self._of_table[table],
            )
        return found.evicted


def kind_of_keys(
    spec: config.EmbeddingSpec,
    table: int,
    inputs: Sequence[embedding_inputs.FeatureIds],
) -> int:
    """Returns what the keys of a table are made of, in a batch.

    Args:
      spec: Tables and features.
      table: The number of the table.
      inputs: By replica, then by feature.

    Raises:
      ValueError: If features of it have integers and strings.
    """
    features = spec.features
    kinds = {
        one.kind: features[number % len(features)].name
        for number, one in enumerate(inputs)
        if features[number % len(features)].table == table
    }
    if len(kinds) > 1:
        raise ValueError(
            "Features of one open table must all have integers or all "
            f"have strings. Received: {key_tensors.KINDS[1]} of "
            f"{kinds[1]!r}, {key_tensors.KINDS[2]} of {kinds[2]!r} (table "
            f"{spec.tables[table].name!r})."
        )
    return next(iter(kinds))


def _row_dtypes(table: config.TableSpec) -> list[tf.DType]:
    """Of its rows, and of each slot variable."""
    slots = table.optimizer.slots if table.optimizer else ()
    return [tf.as_dtype(table.dtype), *(tf.float32 for _ in slots)]


def _failed(error: BaseException) -> str:
    return f"`on_evict` raised {type(error).__name__}: {error}"


def _handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]


Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
    """A table after it was resized.

    Attributes:
      spec: Of the embedding, with the new capacity.
      variables: Of the table, by name.
      conversion: What became of its keys.
      dropped: Keys that found no place, their rows and slot variables.
    """

    spec: config.EmbeddingSpec
    variables: dict[str, Any]
    conversion: state.Conversion
    dropped: list[Array]


def spec_with_capacity(
    spec: config.EmbeddingSpec,
    table: int,
    capacity: int,
) -> config.EmbeddingSpec:
    """Returns the spec with another capacity of one vocabulary.

    Raises:
      TypeError, ValueError: As of `OpenVocabulary`.
    """
    old = spec.tables[table]
    settings = dataclasses.replace(old.vocabulary.settings, capacity=capacity)
    found = list(spec.tables)
    found[table] = dataclasses.replace(
        old,
        num_rows=settings.num_rows,
        vocabulary=dataclasses.replace(old.vocabulary, settings=settings),
    )
    return dataclasses.replace(spec, tables=tuple(found))


def resize(
    spec: config.EmbeddingSpec,
    table: int,
    old: Mapping[str, Any],
    partitioner: tables.Partitioner | None,
) -> Resized:
    """Makes the variables of a table for the capacity of a spec.

    The old ones stay as they are. Both are in memory, and one variable once
    more.

    Args:
      spec: With the new capacity.
      table: The number of the table.
      old: Its variables.
      partitioner: What divides it.
    """
    one = spec.tables[table]
    keys = _whole(old[state.KEYS])
    moved = vocabulary_conversion.move_rows(
        keys,
        _whole(old[state.LAST_STEPS]),
        _whole(old[state.COUNTS]),
        _whole(old[state.NUMBERS]),
        one.vocabulary.settings,
    )
    variables = tables.create_table(one, partitioner)
    dropped = [keys.ravel()[moved.dropped]]
    for name, variable in variables.items():
        value = moved.vocabulary.get(name)
        if value is None:
            value = _whole(old[name])
            if name != tables.ROUNDING_STEPS:
                dropped.append(value[moved.dropped])
                value = moved.of(value)
        first = 0
        for shard in tables.shards_of(variable):
            if not value.ndim:  # What counts the updates of 16-bit rows.
                shard.assign(value)
                continue
            size = checks.known_size(shard)
            shard.assign(value[first : first + size])
            first += size
    return Resized(spec, variables, moved.conversion, dropped)


def empty_variables(old: Mapping[str, Any]) -> None:
    """Takes the memory of variables that nobody may use any more.

    A function that was traced before still has them: what it looks up is an
    error then, not a row of another time.
    """
    for variable in old.values():
        for shard in tables.shards_of(variable):
            tf.raw_ops.AssignVariableOp(
                resource=shard.handle,
                validate_shape=False,
                value=tf.zeros([0, *shard.shape[1:]], shard.dtype),
            )


def resize_scope(variables: Mapping[str, Any]) -> Any:
    """Returns the scope that variables were created in."""
    shard = tables.shards_of(variables[tables.PARAMETERS])[0]
    strategy = getattr(shard, "_distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _whole(variable: Any) -> Array:
    shards = [shard.numpy() for shard in tables.shards_of(variable)]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)
