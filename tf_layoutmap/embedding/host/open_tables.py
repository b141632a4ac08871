"""What the engine's ops are told of tables with open vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _ops
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs
from tf_layoutmap.embedding.variables import tables
from tf_layoutmap.vocabulary import evicted, key_tensors, state


class OpenTables:
    """The open tables of one embedding, as arguments of ops."""

    def __init__(self, spec: config.EmbeddingSpec,
                 variables: dict[str, dict[str, Any]], *, tells: bool = True):
        """Takes what `tables.create_tables` made of the spec.

        Args:
          spec: Tables and features.
          variables: By table name.
          tells: Whether `on_evict` is told of keys that go.
        """
        self._spec = spec
        found = [(number, table) for number, table in enumerate(spec.tables)
                 if table.vocabulary is not None]
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
                "state": state.in_order_of_ops(by_name), "shards": shards,
                "slots": slots}
        settings = [table.vocabulary.settings for _, table in found]
        values = [table.vocabulary.first_values for _, table in found]
        policies = [one.policy() for one in settings]
        self._attrs = {
            "open_tables": self._numbers,
            "has_unknown_row": [one.unknown == "row" for one in settings],
            "admissions": [one["admission"] for one in policies],
            "evictions": [one["evict"] for one in policies],
            "policies": [number for one in policies for number in
                         one["policy"]],
            "first_values": [one.kind for one in values],
            "first_limits": [limit for one in values for limit in one.limits],
            "first_seeds": [one.seed for one in values],
            "slot_values": slot_values}
        self._dtypes = {number: _row_dtypes(table) for number, table in found}
        # Of those tables that tell which keys go, in their order.
        self._tellers = {
            number: evicted.teller(
                table.vocabulary.settings.on_evict, table.name,
                [slot.name for slot in (
                    table.optimizer.slots if table.optimizer else ())])
            for number, table in found
            if tells and table.vocabulary.settings.on_evict is not None}
        self._attrs.update(
            telling=[self._numbers.index(number) for number in self._tellers],
            Tevicted=[dtype for number in self._tellers
                      for dtype in (tf.int64, *self._dtypes[number])])

    def arguments(
        self, inputs: Sequence[feature_inputs.FeatureIds],
    ) -> dict[str, Any]:
        """Returns the arguments of a step, besides its batch.

        Args:
          inputs: By replica, then by feature.

        Raises:
          ValueError: If features of one table have integers and strings.
        """
        return {"state": _handles(self._state),
                "shards": _handles(self._shards),
                "slots": _handles(self._slots),
                "key_kinds": [kind_of_keys(self._spec, number, inputs)
                              for number in self._numbers],
                **self._attrs}

    def tell(self, values: Sequence[tf.Tensor]) -> None:
        """Passes on what a step says of the keys that went.

        Args:
          values: The output `evicted` of its op.
        """
        first = 0
        for number, teller in self._tellers.items():
            size = 1 + len(self._dtypes[number])
            _call(teller, values[first:first + size])
            first += size

    def tell_table(self, table: int, values: Sequence[Any]) -> None:
        """The same of one table: keys, rows and slot variables."""
        if table in self._tellers:
            self._tellers[table](*values)

    def evict_keys(self, engine: tf.Tensor, table: int, keys: tf.Tensor, *,
                   expired: bool) -> tf.Tensor:
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
        found = _ops.evict_keys(
            engine=engine, keys=keys, expired=expired, table=table,
            Tvalues=self._dtypes[table],
            **{name: _handles(variables) for name, variables
               in self._of_table[table].items()}, **settings.policy())
        if table in self._tellers:
            _call(self._tellers[table], [found.evicted, *found.values])
        return found.evicted



def kind_of_keys(
    spec: config.EmbeddingSpec, table: int,
    inputs: Sequence[feature_inputs.FeatureIds],
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
    kinds = {one.kind: features[number % len(features)].name
             for number, one in enumerate(inputs)
             if features[number % len(features)].table == table}
    if len(kinds) > 1:
        raise ValueError(
            "Features of one open table must all have integers or all "
            f"have strings. Received: {key_tensors.KINDS[1]} of "
            f"{kinds[1]!r}, {key_tensors.KINDS[2]} of {kinds[2]!r} (table "
            f"{spec.tables[table].name!r}).")
    return next(iter(kinds))


def _row_dtypes(table: config.TableSpec) -> list[tf.DType]:
    """Of its rows, and of each slot variable."""
    slots = table.optimizer.slots if table.optimizer else ()
    return [tf.as_dtype(table.dtype), *(tf.float32 for _ in slots)]


def _call(teller: Any, values: Sequence[tf.Tensor]) -> None:
    if tf.executing_eagerly():
        teller(*(value.numpy() for value in values))
        return
    tf.py_function(
        lambda *tensors: teller(*(one.numpy() for one in tensors)),
        values, [])


def _handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]
