"""Measures training steps and the memory of a vocabulary that keeps strings.

    python -m benchmarks.vocabularies.kept_strings [rounds]

Two tables of 1 M rows x 16 with Adagrad train on the same batches of 8,192
samples with 20 strings each. One table has `keep_strings=True`. The strings
have 20 bytes, and 85 % of the rows belong to keys. In a step with new keys,
100,000 strings of the batch are new and evict other keys.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import rich.console
import rich.table
import tensorflow as tf
from absl import app

import tf_layoutmap as tlm
from benchmarks import timing, workloads
from benchmarks.open_vocabulary import (
    CAPACITY,
    DIM,
    IDS_PER_SAMPLE,
    LOAD,
    NUM_NEW,
    NUM_SAMPLES,
)
from benchmarks.vocabularies import memory


def _texts(rows: np.ndarray) -> tf.Tensor:
    return tf.strings.join(
        [
            "product/",
            tf.strings.as_string(tf.constant(rows), width=12, fill="0"),
        ]
    )


class _Table:
    """A table of the host engine whose ids are strings."""

    def __init__(self, *, keep_strings: bool):
        tpu = tf.tpu.experimental.embedding
        config = tpu.TableConfig(
            CAPACITY,
            DIM,
            combiner="sum",
            name="table",
            initializer=tf.random_uniform_initializer(-0.05, 0.05),
        )
        self._embedding = tlm.TPUEmbedding(
            tpu.FeatureConfig(config),
            tpu.Adagrad(0.05),
            vocabularies={
                "table": tlm.vocabulary.OpenVocabulary(
                    CAPACITY, keep_strings=keep_strings
                )
            },
        )
        self._embedding.build()
        self.vocabulary = self._embedding.vocabularies["table"]

    def fill(self, num_keys: int) -> int:
        """Adds keys, and returns the growth of the process in bytes."""
        before = memory.resident_bytes()
        for part in np.array_split(np.arange(num_keys), 20):
            self._embedding.enqueue(_texts(part))
            self._embedding.reset()
        gc.collect()
        return memory.resident_bytes() - before

    @tf.function
    def train(self, ids: tf.RaggedTensor) -> tf.Tensor:
        self._embedding.enqueue(ids)
        activations = self._embedding.dequeue()
        self._embedding.apply_gradients(0.01 * activations)
        return tf.reduce_sum(activations)


def measure(
    rounds: int,
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, int]]]:
    """Returns milliseconds, and the bytes and statistics of each table."""
    rng = np.random.default_rng(7)
    tables = {
        name: _Table(keep_strings=name == "strings")
        for name in ("hashes", "strings")
    }
    num_keys = int(LOAD * tables["hashes"].vocabulary.settings.num_rows)
    sizes = {}
    for name, table in tables.items():
        num_bytes = table.fill(num_keys)
        stats = table.vocabulary.stats()
        sizes[name] = {
            "num_bytes": num_bytes,
            "num_keys": stats["num_keys"],
            "num_string_bytes": stats.get("num_string_bytes", 0),
        }
    splits = np.arange(NUM_SAMPLES + 1) * IDS_PER_SAMPLE

    def ragged(rows: np.ndarray) -> tf.RaggedTensor:
        return tf.RaggedTensor.from_row_splits(_texts(rows), splits)

    batches = {
        distribution: [
            ragged(workloads.draw_ids(rng, distribution, splits[-1], num_keys))
            for _ in range(4)
        ]
        for distribution in ("uniform", "zipf")
    }
    next_new = num_keys
    batches["new"] = []
    for _ in range(rounds + 2):
        rows = workloads.draw_ids(rng, "uniform", splits[-1], num_keys)
        rows[:NUM_NEW] = np.arange(next_new, next_new + NUM_NEW)
        next_new += NUM_NEW
        batches["new"].append(ragged(rows))

    def step(name: str, kind: str) -> Callable[[int], object]:
        values = batches[kind]
        return lambda i: tables[name].train(values[i % len(values)]).numpy()

    # The steps with known keys come first, because new keys evict known keys.
    times = {}
    for kinds in (("uniform", "zipf"), ("new",)):
        times.update(
            timing.interleave(
                {
                    f"{name}.{kind}": step(name, kind)
                    for kind in kinds
                    for name in tables
                },
                rounds,
            )
        )
    return times, sizes


def report(rounds: int = 15) -> list[rich.table.Table]:
    """Runs the benchmark and returns tables of medians and of sizes."""
    times, sizes = measure(rounds)
    steps = rich.table.Table(title="Milliseconds of a training step")
    for column in ("keys", "hashes", "strings", "strings / hashes"):
        steps.add_column(column)
    for kind in ("uniform", "zipf", "new"):
        hashes, strings = (
            times[f"{name}.{kind}"] for name in ("hashes", "strings")
        )
        steps.add_row(
            kind,
            f"{np.median(hashes):.1f}",
            f"{np.median(strings):.1f}",
            f"{np.median(strings) / np.median(hashes):.2f}",
        )
    growth = rich.table.Table(title="Memory of the process for all keys")
    for column in ("table", "keys", "MB", "MB of strings"):
        growth.add_column(column)
    for name, size in sizes.items():
        growth.add_row(
            name,
            f"{size['num_keys']:,}",
            f"{size['num_bytes'] / 1e6:.0f}",
            f"{size['num_string_bytes'] / 1e6:.0f}",
        )
    return [steps, growth]


def main(argv: list[str]) -> None:
    rounds = int(argv[1]) if len(argv) > 1 else 15
    console = rich.console.Console(width=100)
    for table in report(rounds):
        console.print(table)


if __name__ == "__main__":
    app.run(main)
