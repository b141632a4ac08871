"""Sends tables and slot variables to a TPU, and brings them back.

On a TPU the rows live in its memory; the variables on the hosts hold what was
loaded or retrieved last. All tables of all hosts go in one function: the TPU's
runtime joins these operations into one, which must know them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding.tpu import optimizer_protos
from tf_layoutmap.embedding.tpu.config_proto import TPUSpec
from tf_layoutmap.embedding.variables import tables


class Transfer:
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
                    rule = optimizer_protos.rule_of(optimizer)
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
