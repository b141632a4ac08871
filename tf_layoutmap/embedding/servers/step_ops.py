"""The ops of a step over servers as methods (docs/ops.md).

A step is two calls of each server, whatever the number of tables: one reads
the rows of all its shards, one updates them. The worker does the rest, and
keeps nothing.
"""

# DOC-MERGE: The lookup of a layer over servers, from its call to the optimizer.
#
# A layer does not know whether gradients will follow, nor whether they will be
# applied. Here a step is traced, or run eagerly, by one thread: so what it has
# looked up last is what its gradients are of.
#
from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import tables as embedding_tables
from tf_layoutmap.embedding.host import engine
from tf_layoutmap.embedding.servers import closures
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.sharded.routing.checks import known_size


@dataclasses.dataclass
class Server:
    """The shards of one server, by table and then by shard."""

    device: str
    applied: Any
    shards: list[Any] = dataclasses.field(default_factory=list)
    slots: list[Any] = dataclasses.field(default_factory=list)
    rounding_steps: list[Any] = dataclasses.field(default_factory=list)
    tables: list[int] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)
    first_rows: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one server has counted.

    Attributes:
      num_updates: Updates so far.
      staleness_sum: Of all of them, the updates between fetch and apply.
      staleness_max: The most of them.
      num_repeated: Closures that came again after they were applied.
    """

    num_updates: int
    staleness_sum: int
    staleness_max: int
    num_repeated: int


class StepOps:
    """The steps of one embedding over its servers."""

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        devices: list[list[str]],
        *,
        out_of_range: str,
        rounding_seed: int,
        wire_dtype: str,
    ):
        """Groups the variables by server.

        Args:
          spec: Tables and features.
          variables: What `ServerTables.create` made of the spec.
          devices: By table, the device of each shard.
          out_of_range: What becomes of ids that are no row of their table.
          rounding_seed: Of tables with 16-bit rows.
          wire_dtype: How rows and gradients travel.
        """
        self.spec = spec
        self._rounding_seed = rounding_seed
        self.servers: list[Server] = []
        shard_servers = []
        for number, table in enumerate(spec.tables):
            shards = embedding_tables.shards_of(
                variables[table.name][embedding_tables.PARAMETERS]
            )
            first_row = 0
            for shard, device in enumerate(devices[number]):
                index = self._index_of(device)
                shard_servers.append(index)
                self._add(
                    self.servers[index],
                    number,
                    shard,
                    first_row,
                    variables[table.name],
                )
                first_row += known_size(shards[shard])
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
        """Of the servers that have shards."""
        return [one.device for one in self.servers]

    @functools.cached_property
    def applied_closures(self) -> closures.AppliedClosures:
        """The records of the servers."""
        return closures.AppliedClosures(
            [one.applied for one in self.servers],
            [
                variable
                for one in self.servers
                for variable in self._fetched_steps(one)
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
        for slot in table.optimizer.slots if table.optimizer else ():
            server.slots.append(
                embedding_tables.shards_of(variables[slot.name])[shard]
            )
        if embedding_tables.ROUNDING_STEPS in variables:
            server.rounding_steps.append(
                variables[embedding_tables.ROUNDING_STEPS].copies[shard]
            )

    def plan(
        self,
        features: engine.StepInputs,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Checks a batch; returns its plan, and what to ask each server."""
        return ops.plan_step(
            **engine.batch_inputs(features), **self._plan_attrs
        )

    def begin(
        self,
        features: engine.StepInputs,
        training: bool | None,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns the plan of a step, and what to ask each server.

        Args:
          features: The batch.
          training: Whether gradients follow; None while a function is traced,
            where `train` says so if they do.
        """
        del training  # Of rows, it is the same.
        return self.plan(features)

    def train(self, begun: tf.Tensor) -> None:
        """Makes a step of the function being traced one that trains.

        Args:
          begun: The plan, of `begin`.
        """

    def placed(
        self,
        plan: tf.Tensor,
        fetched: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Returns the plan for `combine` and `apply`.

        Args:
          plan: Of `begin`.
          fetched: Of `fetch`.
        """
        del fetched
        return plan

    def forget(self, fetched: Sequence[tf.Tensor]) -> None:
        """Lets servers know, if they must, that a step gets no gradients."""

    def fetch(self, requests: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Reads the rows of a step, in one call of each server."""
        fetched = []
        for server, request in zip(self.servers, requests):
            with tf.device(server.device):
                fetched.append(
                    ops.fetch_rows(
                        shards=handles(server.shards),
                        applied=server.applied.handle,
                        request=request,
                        **self._describe(server),
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
        """Updates the rows of a step, in one call of each server.

        Args:
          plan: Of `plan`.
          fetched: Of `fetch`.
          gradients: Shaped as the activations, one per feature.
          hyperparameters: One float32 vector per table.
          token: int64 `[3]` of the closure.
        """
        requests = ops.fold_gradients(
            plan=plan,
            fetched=list(fetched),
            gradients=list(gradients),
            hyperparameters=list(hyperparameters),
            token=token,
        )
        for server, request in zip(self.servers, requests):
            specs = [self.spec.tables[one] for one in server.tables]
            with tf.device(server.device):
                ops.apply_rows(
                    shards=handles(server.shards),
                    slots=handles(server.slots),
                    rounding_steps=handles(server.rounding_steps),
                    fetched_steps=handles(self._fetched_steps(server)),
                    applied=server.applied.handle,
                    request=request,
                    table_numbers=server.tables,
                    first_rows=server.first_rows,
                    optimizers=[
                        one.optimizer.name if one.optimizer else "none"
                        for one in specs
                    ],
                    num_hyperparameters=[
                        1 + len(one.optimizer.constants) if one.optimizer else 0
                        for one in specs
                    ],
                    rounding_seed=self._rounding_seed,
                    **self._describe(server),
                )

    def count(self) -> dict[str, Counts]:
        """Returns what each server has counted, by its device."""
        found = {}
        for server in self.servers:
            head = server.applied.numpy()[2:6].tolist()
            found[server.device] = Counts(*head)
        return found

    def _fetched_steps(self, server: Server) -> list[Any]:
        """What a server knows of steps whose rows it has sent."""
        del server
        return []

    def _describe(self, server: Server) -> dict[str, Any]:
        specs = [self.spec.tables[one] for one in server.tables]
        return {
            "tables": [one.name for one in specs],
            "dims": [one.dim for one in specs],
            "dtypes": [tf.as_dtype(one.dtype) for one in specs],
        }


def handles(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns what ops take of variables."""
    return [variable.handle for variable in variables]


@dataclasses.dataclass(eq=False)
class Lookup:
    """A call of a layer.

    Attributes:
      plan: Of `StepOps.plan`.
      fetched: What the servers sent.
      gradients: Of the activations, flat; empty before they are known.
    """

    plan: Any
    fetched: Any
    gradients: Sequence[tf.Tensor] = ()


class Lookups:
    """The last lookup of each thread."""

    def __init__(self):
        """Starts without one."""
        self._of_thread = threading.local()

    def open(self, plan: Any, fetched: Any) -> Lookup:
        """Notes a lookup; one that was not applied is forgotten."""
        self._of_thread.lookup = Lookup(plan, fetched)
        return self._of_thread.lookup

    def follow(self, lookup: Lookup, gradients: Sequence[tf.Tensor]):
        """Keeps the gradients of a lookup.

        Raises:
          NotImplementedError: It is not the last one.
        """
        if getattr(self._of_thread, "lookup", None) is not lookup:
            raise NotImplementedError(
                "A layer with tables on parameter servers must be called once "
                "in a training step: give it the features of both calls under "
                "names of their own."
            )
        lookup.gradients = gradients

    def take(self) -> Lookup:
        """Returns the lookup whose gradients are applied now.

        Raises:
          RuntimeError: There are none, or they are of another function.
        """
        lookup = getattr(self._of_thread, "lookup", None)
        self._of_thread.lookup = None
        if lookup is None or not lookup.gradients:
            raise RuntimeError(
                "There are no gradients of tables on parameter servers to "
                "apply; call the layer inside the tape, once per step."
            )
        if not all(map(_is_known_here, (lookup.plan, *lookup.gradients))):
            raise RuntimeError(
                "A layer with tables on parameter servers must be called in "
                "the function that applies its gradients: its lookup is a part "
                "of the step. Received: a call inside of a tf.function of its "
                "own; remove `@tf.function` from what calls the layer, such as "
                "`call` of the model, in a training step."
            )
        return lookup


def _is_known_here(tensor: tf.Tensor) -> bool:
    """Whether a tensor is of the function being traced, or one around it."""
    return not tf.is_symbolic_tensor(tensor) or any(
        graph is tensor.graph for graph in tf_private.graphs_around()
    )
