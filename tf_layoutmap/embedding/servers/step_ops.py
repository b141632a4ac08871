"""The ops of a step on servers, as methods (see docs/ops.md).

A step calls each server twice, regardless of the number of tables. The first
call reads rows from all shards of the server, and the second call updates these
rows. If a closure runs several steps, one call can update the rows of a step
and then read the rows of a later step. The worker plans the requests, combines
the rows, and sums the gradients of each row. The worker does not store state
between steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import changes
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import engine
from tf_layoutmap.embedding.servers import (
    bundles,
    closures,
    prefetching,
    resource_order,
)
from tf_layoutmap.embedding.table_store import TableStore
from tf_layoutmap.sharded.routing.checks import known_size


@dataclasses.dataclass
class Server:
    """The shards of one server, ordered by table and then by shard index.

    Attributes:
      device: Device of the server.
      applied: Variable that records applied closures.
      shards: Variable of each shard.
      slots: Slot variables of each shard.
      rounding_steps: Update counters of the shards of 16-bit tables.
      tables: For each shard, the index of its table.
      numbers: For each shard, the index of the shard within the table.
      first_rows: For each shard, the index of its first row in the unsharded
        table.
      handle: Handle of the resource on the server that contains all variables
        of the server. `StepOps.create_handles` sets it.
    """

    device: str
    applied: Any
    shards: list[Any] = dataclasses.field(default_factory=list)
    slots: list[Any] = dataclasses.field(default_factory=list)
    rounding_steps: list[Any] = dataclasses.field(default_factory=list)
    tables: list[int] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)
    first_rows: list[int] = dataclasses.field(default_factory=list)
    handle: Any = None


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counters of one server.

    The staleness of an update is the number of other updates that the server
    applied after it sent the rows and before it received the gradients.

    Attributes:
      num_updates: Number of updates so far.
      staleness_sum: Sum of the staleness of all updates.
      staleness_max: Maximum staleness of an update.
      num_repeated: Number of closures that a worker sent again after the server
        had applied them.
    """

    num_updates: int
    staleness_sum: int
    staleness_max: int
    num_repeated: int


class StepOps:
    """The ops of the steps of an embedding on servers."""

    # Whether an update can be joined with the read of a later step.
    _JOINS = True
    # Whether each lookup pins rows on the servers until its step ends.
    pins_rows = False

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        *,
        out_of_range: str,
        rounding_seed: int,
        wire_dtype: str,
    ):
        """Groups the variables by server.

        Args:
          spec: Tables and features.
          variables: Variables that `ServerStore.create` created for `spec`.
          out_of_range: How out-of-range ids are handled.
          rounding_seed: Seed for rounding the rows of 16-bit tables.
          wire_dtype: Dtype of rows and gradients in messages.
        """
        self.spec = spec
        self._rounding_seed = rounding_seed
        self._order = prefetching.StepOrder(self._apply)
        self.servers: list[Server] = []
        shard_servers = []
        for number, table in enumerate(spec.tables):
            shards = embedding_tables.shards_of(
                variables[table.name][embedding_tables.PARAMETERS]
            )
            first_row = 0
            for shard, variable in enumerate(shards):
                index = self._index_of(variable.device)
                shard_servers.append(index)
                self._add(
                    self.servers[index],
                    number,
                    shard,
                    first_row,
                    variables[table.name],
                )
                first_row += known_size(variable)
        self._plan_attrs = {
            "num_servers": len(self.servers),
            "shard_servers": shard_servers,
            "wire_dtype": tf.as_dtype(wire_dtype),
            **engine.config_attrs(
                spec,
                variables,
                out_of_range=out_of_range,
                rounding_seed=rounding_seed,
            ),
        }

    @property
    def devices(self) -> list[str]:
        """Devices of the servers that have shards."""
        return [server.device for server in self.servers]

    @functools.cached_property
    def applied_closures(self) -> closures.AppliedClosures:
        """The records of applied closures on all servers."""
        return closures.AppliedClosures(
            [server.applied for server in self.servers],
            [
                variable
                for server in self.servers
                for variable in self.fetched_steps(server)
            ],
        )

    def _index_of(self, device: str) -> int:
        if device not in self.devices:
            with tf.device(device):
                applied = tf_private.ResourceVariable(
                    tf.zeros([closures.NUM_APPLIED], tf.int64),
                    trainable=False,
                    name="closures_applied",
                )
            self.servers.append(Server(device, applied))
        return self.devices.index(device)

    def _add(
        self,
        server: Server,
        number: int,
        shard: int,
        first_row: int,
        variables: dict[str, Any],
    ):
        table = self.spec.tables[number]
        server.tables.append(number)
        server.numbers.append(shard)
        server.first_rows.append(first_row)
        server.shards.append(
            embedding_tables.shards_of(variables[embedding_tables.PARAMETERS])[
                shard
            ]
        )
        for slot in table.slots:
            server.slots.append(
                embedding_tables.shards_of(variables[slot.name])[shard]
            )
        if embedding_tables.ROUNDING_STEPS in variables:
            server.rounding_steps.append(
                variables[embedding_tables.ROUNDING_STEPS].variables[shard]
            )

    def create_handles(self) -> None:
        """Creates a resource on each server that contains its variables.

        A step passes this resource instead of the variables. The time of a step
        therefore does not depend on the number of variables. A restored
        checkpoint assigns values to the same variables, so the resource stays
        valid. If a server is lost, the coordinator restarts, and creates new
        variables and a new resource.
        """
        for server in self.servers:
            with tf.device(server.device):
                described = self._describe(server)
                server.handle = ops.create_server(**described)
            resource_order.register(
                server.handle,
                [handle for name in _VARIABLES for handle in described[name]],
            )

    @contextlib.contextmanager
    def retired(self) -> Iterator[None]:
        """Lets ops with the handles of the servers fail, from now on.

        If the block raises an error, the ops succeed again.
        """

        def set_retired(is_retired: bool) -> None:
            for server in self.servers:
                with tf.device(server.device):
                    ops.retire_server(server=server.handle, retired=is_retired)

        set_retired(True)
        try:
            yield
        except BaseException:
            set_retired(False)
            raise

    def recorder(self, server: Server, store: TableStore) -> changes.Recorder:
        """Starts to record the rows that a server writes."""

        def take(**arguments: Any) -> Sequence[tf.Tensor]:
            return ops.take_server_rows(server=server.handle, **arguments)

        return changes.Recorder(
            lambda: ops.watch_server_rows(server=server.handle),
            take,
            [
                store.parts(table)[shard]
                for table, shard in zip(server.tables, server.numbers)
            ],
            server.device,
            is_server=True,
        )

    def plan(
        self,
        features: engine.StepInputs,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Checks a batch, and returns its plan and a request per server."""
        return ops.plan_step(
            **engine.batch_inputs(features), **self._plan_attrs
        )

    def begin(
        self,
        features: engine.StepInputs,
        training: bool | None,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Plans a step, and returns the plan and the request to each server.

        Args:
          features: The batch.
          training: Whether the step receives gradients. None if the caller may
            still call `train` in the same trace.
        """
        del training  # The plan is the same.
        return self.plan(features)

    def begin_call(
        self, features: engine.StepInputs, earlier: Sequence[Any]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Plans one of several training lookups of a step.

        Args:
          features: The batch.
          earlier: Earlier lookups of the step.
        """
        del earlier
        return self.begin(features, True)

    def join(
        self, features: engine.StepInputs, joined: Sequence[Any]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns the plan and the replies for a batch of several lookups.

        The number of updates in the replies, from which the servers compute the
        staleness of the step, is the number before the first lookup. Keys have
        the rows that they had in their lookups.

        Args:
          features: The joined batch; see `lookups.joined`.
          joined: The lookups of the batch.
        """
        plan, _ = self.plan(features)
        # The update requires only the number of updates, not the rows.
        return plan, [reply[: tf.int64.size] for reply in joined[0].fetched]

    def train(self, begun: tf.Tensor) -> None:
        """Marks the step in the traced function as a training step.

        Args:
          begun: Plan that `begin` returned.
        """

    def placed(
        self,
        plan: tf.Tensor,
        fetched: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Returns the plan for `combine` and `apply`.

        Args:
          plan: Plan that `begin` returned.
          fetched: Replies that `fetch` returned.
        """
        del fetched
        return plan

    def forget(self, fetched: Sequence[tf.Tensor]) -> None:
        """Releases the rows of a step that receives no gradients."""

    def fetch(self, requests: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Reads the rows of a step, with one call per server."""
        update = self._order.take_for_read()
        if update is None:
            return self._read(ops.fetch_server_rows, requests)
        bundles.create_pending()
        fetched, applied = [], []
        for server, request in zip(self.servers, self._fold(update, requests)):
            with tf.device(server.device):
                reply = ops.apply_and_fetch_rows(
                    server=server.handle, request=request
                )
            applied.append(resource_order.end_on_server(reply.is_new))
            fetched.append(reply.fetched)
        self._order.record(applied)
        return fetched

    def _read(
        self, op: Callable[..., tf.Tensor], requests: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Calls an op with the resource and the request of each server."""
        bundles.create_pending()
        fetched = []
        for index, (server, request) in enumerate(zip(self.servers, requests)):
            with (
                tf.device(server.device),
                self._order.reading(index, server.handle) as handle,
            ):
                fetched.append(
                    resource_order.end_on_server(
                        op(server=handle, request=request)
                    )
                )
        return fetched

    def combine(
        self,
        plan: tf.Tensor,
        fetched: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns the activations, one per feature."""
        return ops.combine_rows(
            plan=plan,
            fetched=list(fetched),
            **engine.activation_attrs(self.spec),
        )

    def apply(
        self,
        plan: tf.Tensor,
        fetched: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
        token: tf.Tensor,
    ):
        """Updates the rows of a step, with one call per server.

        Args:
          plan: Plan that `placed` returned.
          fetched: Replies that `fetch` returned.
          gradients: One gradient per feature, with the shape of its
            activations.
          hyperparameters: One float32 vector per table.
          token: int64 `[3]` token of the closure.
        """
        self._order.add(
            prefetching.Update(
                plan, fetched, gradients, hyperparameters, token
            ),
            may_join=self._JOINS,
        )

    def _apply(self, update: prefetching.Update) -> list[tf.Tensor]:
        """Creates the ops of an update now or later; see `bundles.apply`."""
        return bundles.apply(
            [
                bundles.Update(server.device, server.handle, request)
                for server, request in zip(self.servers, self._fold(update, []))
            ]
        )

    def _fold(
        self, update: prefetching.Update, following: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the message to each server for an update.

        Args:
          update: The update.
          following: For each server, the request for rows that the server reads
            after the update; or empty.
        """
        return ops.fold_gradients(
            plan=update.plan,
            fetched=list(update.fetched),
            gradients=list(update.gradients),
            hyperparameters=list(update.hyperparameters),
            token=update.token,
            next=list(following),
            num_servers=len(self.servers),
        )

    def count(self) -> dict[str, Counts]:
        """Returns the counters of all servers, by device."""
        counts = {}
        for server in self.servers:
            head = server.applied.numpy()[2:6].tolist()
            counts[server.device] = Counts(*head)
        return counts

    def count_in_flight(self) -> list[int]:
        """Returns counters that change when a step begins or ends."""
        return [count.num_updates for count in self.count().values()]

    def fetched_steps(self, server: Server) -> list[Any]:
        """Returns the variables that record the fetched steps of a server."""
        del server
        return []

    def _describe(self, server: Server) -> dict[str, Any]:
        """Returns the arguments of `create_server` for the shards."""
        specs = [self.spec.tables[table] for table in server.tables]
        return {
            "shards": embedding_tables.handles(server.shards),
            "slots": embedding_tables.handles(server.slots),
            "rounding_steps": embedding_tables.handles(server.rounding_steps),
            "state": [],
            "fetched_steps": embedding_tables.handles(
                self.fetched_steps(server)
            ),
            "applied": server.applied.handle,
            "tables": [spec.name for spec in specs],
            "table_numbers": server.tables,
            "first_rows": server.first_rows,
            "dims": [spec.dim for spec in specs],
            "dtypes": [tf.as_dtype(spec.dtype) for spec in specs],
            "optimizers": [
                spec.optimizer.name if spec.optimizer else "none"
                for spec in specs
            ],
            "num_hyperparameters": [
                1 + len(spec.optimizer.constants) if spec.optimizer else 0
                for spec in specs
            ],
            "rounding_seed": self._rounding_seed,
        }


# The inputs of `create_server` that are lists of variables.
_VARIABLES = ("shards", "slots", "rounding_steps", "state", "fetched_steps")
