"""The ops of a step on servers whose tables have open vocabularies.

Each key belongs to one server. In the call that reads rows, the worker sends
the key to this server. The server looks up the key, assigns a row to the key if
it is new, and returns the values of the row. All other parts of the step are
the same as for tables without open vocabularies (see docs/ops.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.embedding.host import engine, open_tables
from tf_layoutmap.embedding.servers import closure_trace, lookups, step_ops
from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import bucket_layout, parts

# Size and layout of the variable `fetched_steps`. See
# cc/core/served_keys/fetched_steps.h.
FETCHED_SIZE = 8963
_NUM_COUNTS, _RECORD = 3, 7
_NUM_STEPS = 1
# Position of the attempt in a request of `PlanKeys`. See
# cc/core/served_keys/key_messages.h.
_ATTEMPT_BYTES = (16, 24)


@dataclasses.dataclass
class _KeyServer:
    """The shards of open tables on one server.

    Attributes:
      fetched_steps: Variable that records the steps that wait for gradients.
      state: Variables of each vocabulary, such as the keys, the last steps and
        the counts.
      attrs: Attributes of the op `CreateServer` about open tables.
    """

    fetched_steps: Any
    state: list[Any] = dataclasses.field(default_factory=list)
    attrs: dict[str, list[Any]] = dataclasses.field(
        default_factory=lambda: {
            name: []
            for name in (
                "open_pieces",
                "first_buckets",
                "vocabulary_buckets",
                "has_unknown_row",
                "admissions",
                "evictions",
                "policies",
                "first_values",
                "first_limits",
                "first_seeds",
                "slot_values",
                "vocabulary_of",
            )
        }
    )


class KeyStepOps(step_ops.StepOps):
    """The ops of the steps of an embedding with open tables on servers."""

    pins_rows = True
    _JOINS = False  # `ApplyAndFetchRows` does not look up keys.

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        **options: Any,
    ):
        """Groups the variables by server.

        Args:
          spec: Tables and features.
          variables: Variables that `ServerStore.create` created for `spec`.
          **options: Options of `StepOps`.
        """
        super().__init__(spec, variables, **options)
        self._open = [
            number
            for number, table in enumerate(spec.tables)
            if table.vocabulary is not None
        ]
        self._variables = variables
        self._key_servers = []
        for server in self.servers:
            with tf.device(server.device):
                keys = _KeyServer(
                    tf_private.ResourceVariable(
                        tf.zeros([FETCHED_SIZE], tf.int64),
                        trainable=False,
                        name="steps_fetched",
                    )
                )
            self._key_servers.append(keys)
            for place, (number, shard) in enumerate(
                zip(server.tables, server.numbers)
            ):
                if number in self._open:
                    self._add_keys(keys, place, number, shard)
            keys.attrs["vocabulary_of"] = self._owners(server, keys)

    def _add_keys(
        self, server: _KeyServer, place: int, number: int, shard: int
    ) -> None:
        table = self.spec.tables[number]
        by_name = self._variables[table.name]
        settings = table.vocabulary.settings
        if open_specs.owner_of(self.spec, number) == number:
            server.state.extend(
                parts.in_order_of_ops(
                    {
                        name: [tables.shards_of(variable)[shard]]
                        for name, variable in by_name.items()
                    }
                )
            )
        num_shards = len(tables.shards_of(by_name[tables.PARAMETERS]))
        for name, attr_values in {
            **open_tables.vocabulary_attrs([table]),
            "open_pieces": [place],
            "first_buckets": [_first_bucket(by_name, shard)],
            "vocabulary_buckets": [settings.num_buckets],
            "has_unknown_row": [
                settings.oov_embedding == "trainable"
                and shard + 1 == num_shards
            ],
        }.items():
            server.attrs[name].extend(attr_values)

    def _owners(self, server: step_ops.Server, keys: _KeyServer) -> list[int]:
        """Returns the owner of the vocabulary of each open shard.

        Tables that share a vocabulary have the same shards on the same servers.

        Args:
          server: The server.
          keys: The open shards of the server.

        Returns:
          Indices into the attribute `open_pieces`.
        """
        shards = [
            (server.tables[place], server.numbers[place])
            for place in keys.attrs["open_pieces"]
        ]
        return [
            shards.index((open_specs.owner_of(self.spec, number), shard))
            for number, shard in shards
        ]

    def begin(
        self,
        features: engine.StepInputs,
        training: bool | None,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Plans a step, and returns the plan and the request to each server.

        Args:
          features: The batch, which must not be packed.
          training: Whether the step counts keys and assigns rows to new keys.
            None if the caller may still call `train` in the same trace.

        Raises:
          ValueError: If one feature of a table has integers and another feature
            has strings.
        """
        return self._plan_keys(
            features, self._kinds(features), bool(training), call=0
        )

    def begin_call(
        self, features: engine.StepInputs, earlier: Sequence[lookups.Lookup]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Plans one of several training lookups of a step.

        Args:
          features: The batch, which must not be packed.
          earlier: Earlier lookups of the step. All of these lookups pin the
            rows of their keys until the step ends.

        Raises:
          ValueError: Same as for `begin`.
        """
        call = earlier[-1].call + 1 if earlier else 0
        plan, requests = self._plan_keys(
            features, self._kinds(features), True, call
        )
        if call and closure_trace.enclosing_step() is None:
            # The ticket of the first lookup identifies the step on each server.
            first, last = _ATTEMPT_BYTES
            requests = [
                tf.concat(
                    [request[:first], fetched[: last - first], request[last:]],
                    axis=0,
                )
                for request, fetched in zip(requests, earlier[-1].fetched)
            ]
        return plan, requests

    def join(
        self,
        features: engine.StepInputs,
        joined: Sequence[lookups.Lookup | lookups.Followed],
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns the plan and the replies for a batch of several lookups.

        Args:
          features: The joined batch; see `lookups.joined`.
          joined: The lookups of the batch.
        """
        plan, _ = self._plan_keys(features, [0] * len(self._open), False, 0)
        return ops.join_keys(
            plan=plan,
            lookups=[lookup.begun for lookup in joined],
            fetched=[reply for lookup in joined for reply in lookup.fetched],
            num_servers=len(self.servers),
        )

    def _kinds(self, features: Any) -> list[Any]:
        return [
            open_tables.kind_of_keys(self.spec, number, features)
            for number in self._open
        ]

    def _plan_keys(
        self, features: Any, kinds: Sequence[Any], training: bool, call: int
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        return ops.plan_keys(
            **engine.batch_inputs(features, of_keys=True),
            token=closure_trace.token_to_fetch(call),
            training=training,
            open_tables=self._open,
            key_kinds=kinds,
            has_unknown_row=[
                self.spec.tables[number].vocabulary.settings.oov_embedding
                == "trainable"
                for number in self._open
            ],
            **self._plan_attrs,
        )

    def train(self, begun: tf.Tensor) -> None:
        """Marks the step in the traced function as a training step.

        Only a training step can admit keys. For an eager step, the method does
        nothing.

        Args:
          begun: Plan that `begin` returned.
        """
        if not tf.executing_eagerly():
            tf_private.set_op_attr(
                begun.op, "training", tf.compat.v1.AttrValue(b=True)
            )

    def fetch(self, requests: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Looks up keys and reads rows, with one call per server."""
        return self._read(ops.fetch_keys, requests)

    def placed(
        self,
        plan: tf.Tensor,
        fetched: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Adds the rows in the replies of the servers to the plan."""
        return ops.place_keys(plan=plan, fetched=list(fetched))

    def forget(self, fetched: Sequence[tf.Tensor]) -> None:
        """Releases the rows of an eager step that receives no gradients."""
        for keys, reply in zip(self._key_servers, fetched):
            ticket = int(
                np.frombuffer(reply.numpy().tobytes()[:8], np.int64)[0]
            )
            records = keys.fetched_steps.numpy()[_NUM_COUNTS:]
            for place in np.flatnonzero(records[::_RECORD] == ticket):
                if ticket:
                    keys.fetched_steps.scatter_nd_update(
                        [[_NUM_COUNTS + _RECORD * int(place)]], [0]
                    )

    def count_in_flight(self) -> list[int]:
        """Returns counters that change when a step begins or ends."""
        return [
            *super().count_in_flight(),
            *(
                int(server.fetched_steps.numpy()[_NUM_STEPS])
                for server in self._key_servers
            ),
        ]

    def _describe(self, server: step_ops.Server) -> dict[str, Any]:
        keys = self._key_servers[self.servers.index(server)]
        return {
            **super()._describe(server),
            "state": tables.handles(keys.state),
            **keys.attrs,
        }

    def fetched_steps(self, server: step_ops.Server) -> list[Any]:
        return [self._key_servers[self.servers.index(server)].fetched_steps]


def _first_bucket(by_name: dict[str, Any], shard: int) -> int:
    shards = tables.shards_of(by_name[tables.PARAMETERS])
    return sum(known_size(shard) for shard in shards[:shard]) // (
        bucket_layout.KEYS_PER_BUCKET
    )
