"""Measures the memory of a table with an open vocabulary.

    python -m benchmarks.vocabularies.memory

The program creates a table of 1 M rows x 16 with Adagrad, and adds keys until
85 % of the rows are used. The program compares the memory that the process uses
for the table with the minimum, which is the size of the rows and slot variables
plus 16 bytes per row for keys and counts. The program then trains for 10,000
steps with 256 known and 64 new keys each. The new keys evict other keys. The
memory is measured after 10, 100, 1,000, 2,000, 5,000 and 10,000 steps.
"""

from __future__ import annotations

import gc
import pathlib

import numpy as np
import rich.console
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import workloads

CAPACITY = 1_000_000
LOAD = 0.85
DIM = 16
NUM_STEPS = 10_000
KNOWN, NEW = 256, 64


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    gc.collect()
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status must have VmRSS.")


def _embedding(capacity: int, **settings) -> tlm.TPUEmbedding:
    tpu = tf.tpu.experimental.embedding
    table = tpu.TableConfig(
        capacity,
        DIM,
        combiner="sum",
        name="table",
        initializer=tf.random_uniform_initializer(-0.05, 0.05),
    )
    return tlm.TPUEmbedding(
        tpu.FeatureConfig(table),
        tpu.Adagrad(0.05),
        vocabularies={
            "table": tlm.vocabulary.OpenVocabulary(capacity, **settings)
        },
    )


def _step_of(embedding: tlm.TPUEmbedding):
    @tf.function(input_signature=[tf.TensorSpec([KNOWN + NEW], tf.int64)])
    def step(keys: tf.Tensor) -> None:
        embedding.enqueue(keys)
        embedding.apply_gradients(0.01 * embedding.dequeue())

    return step


def measure() -> dict[str, float]:
    """Returns the bytes after several steps, and values computed from them."""
    rng = np.random.default_rng(3)
    # A step with a small table allocates the memory that TensorFlow and a step
    # need for tables of any size.
    small = _embedding(10_000)
    _step_of(small)(tf.range(KNOWN + NEW, dtype=tf.int64))
    before = resident_bytes()
    embedding = _embedding(CAPACITY)
    vocabulary = embedding.vocabularies["table"]
    num_keys = int(LOAD * vocabulary.settings.num_rows)
    for part in np.array_split(np.arange(num_keys), 400):
        embedding.enqueue(tf.constant(part))
        embedding.dequeue()
        embedding.reset()
    step = _step_of(embedding)
    figures = {}
    next_key = num_keys
    for number in range(NUM_STEPS + 1):
        keys = np.concatenate(
            [
                workloads.draw_ids(rng, "zipf", KNOWN, num_keys),
                np.arange(next_key, next_key + NEW),
            ]
        ).astype(np.int64)
        next_key += NEW
        step(tf.constant(keys))
        if number in (10, 100, 1_000, 2_000, 5_000, NUM_STEPS):
            figures[f"bytes_at_step_{number}"] = resident_bytes() - before
    stats = vocabulary.stats()
    row_bytes = 16 + 2 * 4 * DIM
    figures["needed"] = num_keys * row_bytes / LOAD
    figures["ratio"] = figures["bytes_at_step_100"] / figures["needed"]
    figures["num_keys"] = stats["num_keys"]
    figures["num_evicted"] = stats["num_evicted"]
    return figures


if __name__ == "__main__":
    rich.console.Console().print(measure())
