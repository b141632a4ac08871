"""What the engine's ops are told of tables with open vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import feature_inputs
from tf_layoutmap.embedding.variables import tables
from tf_layoutmap.vocabulary import key_tensors, state


class OpenTables:
    """The open tables of one embedding, as arguments of ops."""

    def __init__(self, spec: config.EmbeddingSpec,
                 variables: dict[str, dict[str, Any]]):
        """Takes what `tables.create_tables` made of the spec."""
        self._spec = spec
        found = [(number, table) for number, table in enumerate(spec.tables)
                 if table.vocabulary is not None]
        self._numbers = [number for number, _ in found]
        self._state, self._shards, self._slots = [], [], []
        slot_values = []
        for _, table in found:
            by_name = variables[table.name]
            self._state.extend(state.in_order_of_ops(by_name))
            self._shards.extend(tables.shards_of(by_name[tables.PARAMETERS]))
            for slot in table.optimizer.slots if table.optimizer else ():
                self._slots.extend(tables.shards_of(by_name[slot.name]))
                slot_values.append(slot.initial_value)
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
                "key_kinds": [self._kind_of(number, inputs)
                              for number in self._numbers],
                **self._attrs}

    def _kind_of(self, table: int, inputs) -> int:
        features = self._spec.features
        kinds = {one.kind: features[number % len(features)].name
                 for number, one in enumerate(inputs)
                 if features[number % len(features)].table == table}
        if len(kinds) > 1:
            raise ValueError(
                "Features of one open table must all have integers or all "
                f"have strings. Received: {key_tensors.KINDS[1]} of "
                f"{kinds[1]!r}, {key_tensors.KINDS[2]} of {kinds[2]!r} (table "
                f"{self._spec.tables[table].name!r}).")
        return next(iter(kinds))


def _handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.handle for variable in variables]
