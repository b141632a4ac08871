"""Reads and writes of rows of a `tlm.ShardedVariable` and of other variables.

The table has 1 M rows x 64 float32. All contestants process the same ids in
each round:

* `tlm`: `tlm.ShardedVariable`, with one operation over all shards.
* `one`: a single `tf.Variable`, which shows the cost of sharding.
* `tf`: TensorFlow's own `ShardedVariable` with the same number of shards. The
  lookup of this contestant is `tf.nn.embedding_lookup`, because `tf.gather`
  returns wrong rows for TensorFlow's class.

The operation `route` compares the op `LayoutMap>RouteIds` with TensorFlow's
division, modulo and `dynamic_partition`. A training step has several
operations, so each measured call of a `tf.function` processes several batches
(`--batches_per_call`), and times are per batch. A call of an empty function
takes most of the time of a small call. The last column therefore compares times
from which the time of an empty call is subtracted. The last rows of the output
show the time and the peak memory of an eager lookup of 100 ids in a table of
1 GiB.

`--num_shards`, `--num_ids` and `--verbs` (all repeatable) select a part of the
benchmark. With any of these flags, the last rows are omitted.
"""

from collections.abc import Callable

import numpy as np
import rich.box
import rich.table
import tensorflow as tf
from absl import flags

import tf_layoutmap as tlm
from benchmarks import peak_memory, timing, workloads
from tf_layoutmap._core import ops

NUM_ROWS = 1_000_000
DIM = 64
NUM_SHARDS = (4, 16, 64)
NUM_IDS = (128, 10_000, 100_000)
VERBS = ("gather", "scatter_add", "scatter_update", "route")
BIG_ROWS = 1 << 22  # A table with this number of rows takes 1 GiB.

_NUM_SHARDS = flags.DEFINE_multi_integer(
    "num_shards", NUM_SHARDS, "Numbers of shards to measure."
)
_NUM_IDS = flags.DEFINE_multi_integer(
    "num_ids", NUM_IDS, "Numbers of ids to measure."
)
_BATCHES_PER_CALL = flags.DEFINE_integer(
    "batches_per_call",
    16,
    "Number of batches of ids in each call of a tf.function.",
    lower_bound=1,
)
_VERBS = flags.DEFINE_multi_enum(
    "verbs", VERBS, VERBS, "Operations to measure."
)


def _contestants(num_shards: int) -> dict[str, Callable]:
    """Returns functions that accept ids and rows.

    The keys of the dictionary are `<contestant>.<operation>`.
    """
    value = tf.zeros([NUM_ROWS, DIM])
    single = tf.Variable(value)
    ours = tlm.ShardedVariable.create(value, num_shards=num_shards)
    # TensorFlow's class gets separate variables, so that the writes of one
    # contestant do not affect the other contestant.
    theirs = tlm.ShardedVariable.create(value, num_shards=num_shards).to_tf()
    offsets = tf.constant(ours.partition.offsets, tf.int64)

    def scatter(table, verb):
        def write(ids, rows):
            getattr(table, verb)(tf.IndexedSlices(rows, ids))
            return tf.constant(0)

        return write

    def route_by_op(ids, rows):
        del rows
        routed = ops.route_ids(ids=ids, offsets=offsets, placement="div")
        # Returns the same results as `route_by_stock_ops`. The shard of each id
        # is not returned.
        return routed.local_rows, routed.splits, routed.permutation

    base, extra = divmod(NUM_ROWS, num_shards)

    # Routes ids in the same way as TensorFlow's class, and supports any number
    # of rows.
    def route_by_stock_ops(ids, rows):
        del rows
        owners = tf.maximum(ids // (base + 1), (ids - extra) // base)
        local_rows = tf.where(
            owners < extra, ids % (base + 1), (ids - extra) % base
        )
        owners = tf.cast(owners, tf.int32)
        return (
            tf.dynamic_partition(local_rows, owners, num_shards),
            tf.dynamic_partition(tf.range(tf.size(ids)), owners, num_shards),
        )

    contestants = {
        "tlm.gather": lambda ids, rows: tf.gather(ours, ids),
        "one.gather": lambda ids, rows: tf.gather(single, ids),
        "tf.gather": lambda ids, rows: tf.nn.embedding_lookup(theirs, ids),
        **{
            f"{name}.{verb}": scatter(table, verb)
            for verb in ("scatter_add", "scatter_update")
            for name, table in (("tlm", ours), ("one", single), ("tf", theirs))
        },
        "tlm.route": route_by_op,
        "tf.route": route_by_stock_ops,
        "one.call": lambda ids, rows: tf.constant(0),
    }
    return {
        name: _for_each_batch(run)
        for name, run in contestants.items()
        if name.split(".")[1] in (*_VERBS.value, "call")
    }


def _for_each_batch(run: Callable) -> Callable:
    return tf.function(
        lambda batches, rows: [run(ids, rows) for ids in batches]
    )


def measure(distribution: str, rounds: int) -> dict[str, float]:
    """Returns median milliseconds.

    Keys are `<shards>/<ids>/<contestant>.<operation>`.
    """
    rng = np.random.default_rng(7)
    medians = {}
    for num_shards in _NUM_SHARDS.value:
        contestants = _contestants(num_shards)
        for num_ids in _NUM_IDS.value:
            calls = [
                [
                    tf.constant(
                        workloads.draw_ids(rng, distribution, num_ids, NUM_ROWS)
                    )
                    for _ in range(_BATCHES_PER_CALL.value)
                ]
                for _ in range(4)
            ]
            rows = tf.ones([num_ids, DIM])

            def on(run, calls=calls, rows=rows):
                # `memoryview` waits for the end of the function and copies
                # nothing. One result is sufficient, because a function returns
                # all its results at the same time.
                return lambda i: memoryview(
                    tf.nest.flatten(run(calls[i % len(calls)], rows))[-1]
                )

            times = timing.interleave(
                {name: on(run) for name, run in contestants.items()}, rounds
            )
            medians |= {
                f"{num_shards}/{num_ids}/{name}": float(np.median(values))
                / _BATCHES_PER_CALL.value
                for name, values in times.items()
            }
    return medians


def measure_big(rounds: int) -> dict[str, float]:
    """Measures an eager lookup of 100 ids in a table of 1 GiB.

    Returns:
      Milliseconds and additional peak memory in MiB of each contestant.
    """
    ids = np.random.default_rng(7).integers(0, BIG_ROWS, 100)
    ours = tlm.ShardedVariable.create(
        tf.zeros_initializer(), [BIG_ROWS, DIM], num_shards=16
    )
    theirs = ours.to_tf()
    calls = {
        "big.tlm": lambda i=0: tf.nn.embedding_lookup(ours, ids).numpy(),
        "big.tf": lambda i=0: tf.nn.embedding_lookup(theirs, ids).numpy(),
    }
    results = {}
    if peak_memory.is_available():
        for name, call in calls.items():
            results[f"{name}.extra_mib"] = peak_memory.extra_bytes(call) / (
                1 << 20
            )
    times = timing.interleave(calls, min(rounds, 5), warm_up=1)
    return results | {
        name: float(np.median(values)) for name, values in times.items()
    }


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    # Peak memory is measured first, because later calls would reuse memory that
    # TensorFlow keeps.
    is_complete = (_NUM_SHARDS.value, _NUM_IDS.value, _VERBS.value) == tuple(
        map(list, (NUM_SHARDS, NUM_IDS, VERBS))
    )
    is_first = distribution == workloads.DISTRIBUTIONS[0]
    big = measure_big(rounds) if is_complete and is_first else {}
    medians = measure(distribution, rounds)
    table = rich.table.Table(
        title=f"{NUM_ROWS:,} x {DIM} float32, {distribution} ids, ms",
        box=rich.box.SIMPLE,
    )
    for column in (
        "shards",
        "ids",
        "",
        "tlm",
        "one",
        "TF",
        "tlm / one",
        "TF / tlm",
        "net",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for num_shards in _NUM_SHARDS.value:
        for num_ids in _NUM_IDS.value:
            call = medians[f"{num_shards}/{num_ids}/one.call"]
            table.add_row(
                str(num_shards),
                f"{num_ids:,}",
                "empty call",
                "",
                f"{call:.2f}",
                "",
                "",
                "",
                "",
            )
            for verb in _VERBS.value:
                ours, single, theirs = (
                    medians.get(f"{num_shards}/{num_ids}/{name}.{verb}")
                    for name in ("tlm", "one", "tf")
                )
                table.add_row(
                    str(num_shards),
                    f"{num_ids:,}",
                    verb,
                    f"{ours:.2f}",
                    "" if single is None else f"{single:.2f}",
                    f"{theirs:.2f}",
                    "" if single is None else f"{ours / single:.2f}",
                    f"{theirs / ours:.1f}",
                    f"{(theirs - call) / (ours - call):.1f}",
                )
    if big:
        table.add_section()
        table.add_row(
            "16",
            "100",
            "eager, 1 GiB",
            f"{big['big.tlm']:.2f}",
            "",
            f"{big['big.tf']:.2f}",
            "",
            f"{big['big.tf'] / big['big.tlm']:.0f}",
            "",
        )
    if "big.tlm.extra_mib" in big:
        table.add_row(
            "16",
            "100",
            "extra memory, MiB",
            f"{big['big.tlm.extra_mib']:.0f}",
            "",
            f"{big['big.tf.extra_mib']:.0f}",
            "",
            "",
            "",
        )
    return table, medians | big
