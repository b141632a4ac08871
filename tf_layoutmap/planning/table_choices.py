"""Items of the tables of an `EmbeddingSpec`, with exact bytes and times.

The bytes are the sizes of the variables that `embedding.tables` and
`embedding.servers.tables` create, and of the arrays of one step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from tf_layoutmap import partition
from tf_layoutmap.embedding.configs import config, optimizer_specs
from tf_layoutmap.planning import search
from tf_layoutmap.planning.costs import MachineCosts
from tf_layoutmap.planning.problem import Choice, Item, Problem
from tf_layoutmap.vocabulary import bucket_layout

QUANTITY = "unique rows per batch"

# Bytes per key of an open vocabulary: the key (int64), its last step (int32)
# and its count (int32).
_BYTES_PER_KEY = 16
# Number of int64 counters of an open vocabulary.
_NUM_COUNTERS = 10
# Share of the time of a message that the server needs to read or write it. The
# worker needs the rest, for any plan.
_SERVER_SHARE = 0.5
# Bytes of the variable of each server that records applied closures.
_APPLIED_BYTES = 8 * 2054


@dataclasses.dataclass(frozen=True)
class Lookups:
    """Workload of one table in one step of one worker or process.

    Attributes:
      unique: Number of distinct rows in a batch.
      ids: Number of ids in a batch.
      activations: Number of activations, which are vectors of size `dim`.
    """

    unique: float
    ids: float
    activations: float


@dataclasses.dataclass(frozen=True)
class TableShard:
    """Exact bytes of the largest shard of a table.

    Attributes:
      num_shards: Number of shards. It can be smaller than the requested number,
        because a shard has at least one row.
      weights: Bytes of the rows.
      slots: Bytes of the slot variables.
      keys: Bytes of the open vocabulary.
    """

    num_shards: int
    weights: int
    slots: int
    keys: int

    @property
    def total(self) -> int:
        """Bytes of all variables."""
        return self.weights + self.slots + self.keys


def largest_shard(
    table: config.TableSpec, num_shards: int, *, by_segment: bool
) -> TableShard:
    """Returns the bytes of the largest shard of a table.

    Args:
      table: The table.
      num_shards: Requested number of shards.
      by_segment: Whether shards of an open vocabulary consist of complete
        segments, as on servers and in processes that share a table.
    """
    slots = table.slots
    slot_row = 4 * sum(slot.dim(table.dim) for slot in slots)
    row = (2 if table.is_half else 4) * table.dim
    # The number of updates of a table with 16-bit rows, an int64.
    counter = 8 if table.is_half and table.optimizer is not None else 0
    if table.vocabulary is None:
        num_shards = min(num_shards, table.num_rows)
        rows = partition.RowPartition.div(table.num_rows, num_shards).sizes[0]
        return TableShard(num_shards, rows * row, rows * slot_row + counter, 0)
    settings = table.vocabulary.settings
    segments = bucket_layout.num_segments(settings.num_buckets)
    num_shards = min(
        num_shards, segments if by_segment else settings.num_buckets
    )
    cut = (
        bucket_layout.segment_partition
        if by_segment
        else bucket_layout.bucket_partition
    )(settings.num_buckets, num_shards)
    rows = max(bucket_layout.row_partition(cut).sizes)
    if table.vocabulary.owner is not None:
        # The table that owns the vocabulary stores the keys.
        return TableShard(num_shards, rows * row, rows * slot_row + counter, 0)
    keys = (
        max(cut.sizes) * bucket_layout.KEYS_PER_BUCKET * _BYTES_PER_KEY
        + 8 * _NUM_COUNTERS
    )
    if settings.has_sketch:
        _, depth, cells = bucket_layout.sketch_shape(settings.num_buckets)
        own_segments = segments
        if by_segment:
            own_segments = partition.RowPartition.div(
                segments, num_shards
            ).sizes[0]
        keys += own_segments * (depth * cells + 8)
    return TableShard(num_shards, rows * row, rows * slot_row + counter, keys)


def problem_for_servers(
    spec: config.EmbeddingSpec,
    lookups: Sequence[Lookups],
    costs: MachineCosts,
    budgets: Sequence[int],
    wire_bytes: int = 4,
) -> Problem:
    """Returns the problem of storing tables on parameter servers.

    A table is on one server, or its rows are sharded over all servers. The time
    of a server contains the calls, the rows that it reads and writes, and its
    share of the messages.

    Args:
      spec: The tables.
      lookups: Workload of each table.
      costs: Costs of the machines.
      budgets: Bytes of each server.
      wire_bytes: Bytes per value of rows and gradients in messages.
    """
    count = len(budgets)
    items: list[Item] = []
    for table, work in zip(spec.tables, lookups):
        alone = _choices_on_one_server(table, work, costs, count, wire_bytes)
        shard = largest_shard(table, count, by_segment=True)
        choices = alone
        if shard.num_shards == count > 1:
            choices = (
                *alone,
                Choice(
                    f"rows over {count} servers",
                    f"with its rows over all {count} servers",
                    _memory(table, work, shard, wire_bytes),
                    _server_seconds(table, work, costs, count, wire_bytes),
                    num_shards=count,
                    seconds_per_unit=_server_slope(
                        table, costs, count, wire_bytes
                    ),
                ),
            )
        items.append(_item(table, work, choices))
    return Problem(
        tuple(f"server {index}" for index in range(count)),
        tuple(budgets),
        tuple(items),
        fixed_memory={"closures": _APPLIED_BYTES},
        fixed_seconds={
            "worker": sum(
                _combine_seconds(table, work, costs)
                + (1 - _SERVER_SHARE)
                * work.unique
                * _message_seconds(table, costs, wire_bytes)
                for table, work in zip(spec.tables, lookups)
            ),
        },
        # A step calls each server for the rows, and for the gradients.
        use_seconds={"latency": 2 * costs.server_latency},
        sum_share=min(costs.server_sharing / count, 1.0) if count > 1 else 0.0,
    )


def _choices_on_one_server(
    table: config.TableSpec,
    work: Lookups,
    costs: MachineCosts,
    count: int,
    wire_bytes: int,
) -> tuple[Choice, ...]:
    shard = largest_shard(table, 1, by_segment=True)
    return tuple(
        Choice(
            f"table on server {server}",
            f"on server {server}",
            _memory(table, work, shard, wire_bytes),
            _server_seconds(table, work, costs, 1, wire_bytes),
            devices=(server,),
            seconds_per_unit=_server_slope(table, costs, 1, wire_bytes),
        )
        for server in range(count)
    )


def _row_bytes(table: config.TableSpec) -> int:
    """Returns the bytes of a row and its slot variables."""
    return (table.num_bytes + table.num_slot_bytes) // table.num_rows


def _message_bytes(table: config.TableSpec, wire_bytes: int) -> int:
    """Returns the bytes of an id, its row and its gradient in messages."""
    return 8 + 2 * wire_bytes * table.dim


def _server_seconds(
    table: config.TableSpec,
    work: Lookups,
    costs: MachineCosts,
    num_shards: int,
    wire_bytes: int,
) -> dict[str, float]:
    unique = work.unique / num_shards
    return {
        "rows": costs.table_seconds
        + costs.seconds_of_rows(unique, _row_bytes(table)),
        "network": _SERVER_SHARE
        * unique
        * _message_seconds(table, costs, wire_bytes),
    }


def _server_slope(
    table: config.TableSpec,
    costs: MachineCosts,
    num_shards: int,
    wire_bytes: int,
) -> float:
    return (
        costs.seconds_per_row(_row_bytes(table))
        + _SERVER_SHARE * _message_seconds(table, costs, wire_bytes)
    ) / num_shards


def _message_seconds(
    table: config.TableSpec, costs: MachineCosts, wire_bytes: int
) -> float:
    """Returns the time of an id, its row and its gradient in messages."""
    return _message_bytes(table, wire_bytes) / costs.server_bytes_per_second


def _combine_seconds(
    table: config.TableSpec, work: Lookups, costs: MachineCosts
) -> float:
    """Returns the time to combine rows, and to sum up their gradients."""
    return work.ids * costs.id_seconds + 2 * costs.seconds_of_copy(
        4 * table.dim * work.ids
    )


def _memory(
    table: config.TableSpec,
    work: Lookups,
    shard: TableShard,
    wire_bytes: int,
) -> dict[str, int]:
    """Returns the bytes of a shard on a server, by part."""
    unique = work.unique / shard.num_shards
    return _without_zeros(
        {
            "weights": shard.weights,
            "slot variables": shard.slots,
            "keys": shard.keys,
            "messages": int(unique * _message_bytes(table, wire_bytes)),
        }
    )


def _without_zeros(parts: Mapping[str, int]) -> dict[str, int]:
    return {
        part: size for part, size in parts.items() if size or part == "weights"
    }


def _item(
    table: config.TableSpec, work: Lookups, choices: tuple[Choice, ...]
) -> Item:
    return Item(
        table.name,
        "table",
        {table.name: (table.num_rows, table.dim)},
        choices,
        quantity=QUANTITY,
        amount=float(work.unique),
    )


def problem_for_process(
    spec: config.EmbeddingSpec,
    lookups: Sequence[Lookups],
    costs: MachineCosts,
    budget: int,
) -> Problem:
    """Returns the problem of storing all tables in one process."""
    items = [
        _item(
            table,
            work,
            (
                Choice(
                    "replicate",
                    "unsharded",
                    _process_memory(
                        table, work, largest_shard(table, 1, by_segment=False)
                    ),
                    {
                        "rows": costs.table_seconds
                        + costs.seconds_of_rows(work.unique, _row_bytes(table)),
                        "ids": _combine_seconds(table, work, costs),
                    },
                    seconds_per_unit=costs.seconds_per_row(_row_bytes(table)),
                ),
            ),
        )
        for table, work in zip(spec.tables, lookups)
    ]
    return Problem(("process",), (budget,), tuple(items))


def _process_memory(
    table: config.TableSpec, work: Lookups, shard: TableShard
) -> dict[str, int]:
    activations = int(4 * table.dim * work.activations)
    return _without_zeros(
        {
            "weights": shard.weights,
            "slot variables": shard.slots,
            "keys": shard.keys,
            "activations": activations,
            "gradients": activations,
        }
    )


def problem_for_workers(
    spec: config.EmbeddingSpec,
    lookups: Sequence[Lookups],
    costs: MachineCosts,
    budgets: Sequence[int],
) -> Problem:
    """Returns the problem of storing tables in several processes.

    `over_processes` applies to all tables, so that all tables are one item.

    Args:
      spec: The tables.
      lookups: Workload of each table in one process.
      costs: Costs of the machines.
      budgets: Bytes of each process.
    """
    count = len(budgets)
    copied = _Sum()
    sharded = _Sum()
    for table, work in zip(spec.tables, lookups):
        unsharded = largest_shard(table, 1, by_segment=False)
        row = _row_bytes(table)
        copied.add(
            _process_memory(table, work, unsharded),
            {
                # Each process applies the gradients of all processes.
                "rows": costs.table_seconds
                + costs.seconds_of_rows(
                    min(count * work.unique, table.num_rows), row
                ),
                "ids": _combine_seconds(table, work, costs),
                # Ids and gradients of all other processes.
                "network": costs.seconds_of_call(
                    (count - 1)
                    * (8 * work.ids + 4 * table.dim * work.activations),
                    0,
                ),
            },
        )
        shard = largest_shard(table, count, by_segment=True)
        # A key and the row that its owner returns.
        key = 12 if table.vocabulary is not None else 0
        sharded.add(
            _process_memory(table, work, shard),
            {
                "rows": costs.table_seconds
                + costs.seconds_of_rows(
                    min(work.unique, table.num_rows / count), row
                ),
                "ids": _combine_seconds(table, work, costs),
                # Requested ids or keys and their rows, and one gradient per id.
                "network": costs.seconds_of_call(
                    (count - 1)
                    / count
                    * (
                        (8 + key + 4 * table.dim) * work.unique
                        + (8 + 4 * table.dim) * work.ids
                    ),
                    0,
                ),
            },
        )
    item = Item(
        "tables",
        "tables",
        {table.name: (table.num_rows, table.dim) for table in spec.tables},
        (
            Choice(
                "replicate",
                "with a copy of each table in each process "
                '(over_processes="replicated")',
                copied.memory,
                copied.seconds,
            ),
            Choice(
                f"rows over {count} processes",
                f"with the rows of each table over all {count} processes "
                '(over_processes="sharded")',
                sharded.memory,
                sharded.seconds,
                num_shards=count,
            ),
        ),
    )
    return Problem(
        tuple(f"process {index}" for index in range(count)),
        tuple(budgets),
        (item,),
        fixed_seconds={"latency": 2 * costs.server_latency},
    )


class _Sum:
    """Sums of bytes and times by part."""

    def __init__(self):
        self.memory: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def add(
        self, memory: Mapping[str, int], seconds: Mapping[str, float]
    ) -> None:
        """Adds the parts of one table."""
        for part, size in memory.items():
            self.memory[part] = self.memory.get(part, 0) + size
        for part, time in seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + time


def with_16_bits(spec: config.EmbeddingSpec) -> config.EmbeddingSpec:
    """Returns the spec with 16-bit rows in all tables."""
    return dataclasses.replace(
        spec,
        tables=tuple(
            dataclasses.replace(
                table,
                dtype=table.dtype if table.is_half else "bfloat16",
            )
            for table in spec.tables
        ),
    )


def with_slots(
    spec: config.EmbeddingSpec, slots: tuple[optimizer_specs.SlotSpec, ...]
) -> config.EmbeddingSpec:
    """Returns the spec with other slot variables in all trained tables."""
    return dataclasses.replace(
        spec,
        tables=tuple(
            table
            if table.optimizer is None
            else dataclasses.replace(
                table,
                optimizer=dataclasses.replace(table.optimizer, slots=slots),
            )
            for table in spec.tables
        ),
    )


def suggestions(
    spec: config.EmbeddingSpec,
    problem_of: Callable[[config.EmbeddingSpec, int], Problem],
    kind: str,
    count: int,
    pins: Mapping[str, str],
) -> Iterator[str]:
    """Yields the changes with which the tables fit.

    Args:
      spec: The tables, which do not fit.
      problem_of: Function that returns the problem for a spec and a number of
        devices.
      kind: `"servers"`, `"workers"` or `"process"`.
      count: Number of devices.
      pins: The pins of the plan.
    """
    if kind != "process":
        number = search.fewest(
            lambda number: problem_of(spec, number), count, pins
        )
        if number is not None:
            yield f"{number} {kind} (num_{kind}={number})"
    per_row = (optimizer_specs.SlotSpec("accumulators", 0.0, True),)
    changes: list[
        tuple[str, Callable[[config.EmbeddingSpec], config.EmbeddingSpec]]
    ] = [
        ('16-bit rows (table_dtypes="bfloat16")', with_16_bits),
        (
            "the optimizer tlm.optimizers.RowwiseAdagrad",
            lambda table: with_slots(table, per_row),
        ),
        ("the optimizer SGD", lambda table: with_slots(table, ())),
    ]
    has_suggestion = False
    for sentence, change in changes:
        changed = change(spec)
        if _num_bytes(changed) < _num_bytes(spec) and search.fits(
            problem_of(changed, count), pins
        ):
            has_suggestion = True
            yield sentence
    both = with_16_bits(with_slots(spec, ()))
    if (
        not has_suggestion
        and _num_bytes(both) < _num_bytes(spec)
        and search.fits(problem_of(both, count), pins)
    ):
        yield '16-bit rows (table_dtypes="bfloat16") and the optimizer SGD'


def _num_bytes(spec: config.EmbeddingSpec) -> int:
    return sum(table.num_bytes + table.num_slot_bytes for table in spec.tables)
