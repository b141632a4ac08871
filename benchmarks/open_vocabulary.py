"""Compares a table with an open vocabulary with a closed table.

Both tables have 1 M rows x 16 and Adagrad. Batches have 8192 samples with 20
ids per sample. In the open vocabulary, 85 % of the rows belong to keys.
Operations:

* `train`: a training step in which all keys are known.
* `train_new`: a training step in which 100,000 keys of the batch are new and
  evict other keys. In the closed table, 100,000 ids of the batch are distinct,
  so that the step reads and writes the same number of rows.
* `find`: the search for the rows of known keys, without a training step.
* `serve`: the lookup of 100,000 ids with TensorFlow's own operations, as in an
  exported model.
* `tf`: a training step with a `tf.lookup.experimental.MutableHashTable` from
  keys to rows, a gather and `ResourceSparseApplyAdagradV2`. New keys get the
  next free row.
"""

from collections.abc import Callable

import numpy as np
import rich.table
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import timing, workloads

CAPACITY = 1_000_000
LOAD = 0.85
DIM = 16
NUM_SAMPLES = 8192
IDS_PER_SAMPLE = 20
NUM_NEW = 100_000
LEARNING_RATE = 0.05
# Keys are row indices multiplied by this number. The number is odd, so all keys
# are distinct.
_TO_KEY = 0x9E3779B97F4A7C15


def _keys(rows: np.ndarray) -> np.ndarray:
    return (rows.astype(np.uint64) * np.uint64(_TO_KEY)).view(np.int64)


class _Embedding:
    """A table of the host engine with an open or a closed vocabulary."""

    def __init__(
        self,
        num_rows: int,
        gradient: tf.Tensor,
        vocabulary: tlm.vocabulary.OpenVocabulary | None,
    ):
        table = tf.tpu.experimental.embedding.TableConfig(
            num_rows,
            DIM,
            combiner="sum",
            name="table",
            initializer=tf.random_uniform_initializer(-0.05, 0.05),
        )
        self.embedding = tlm.TPUEmbedding(
            tf.tpu.experimental.embedding.FeatureConfig(table),
            tf.tpu.experimental.embedding.Adagrad(LEARNING_RATE),
            vocabularies=vocabulary and {"table": vocabulary},
        )
        self.embedding.build()
        self._gradient = gradient

    def fill(self, keys: np.ndarray):
        for part in np.array_split(keys, 20):
            self.embedding.enqueue(tf.constant(part))
            self.embedding.reset()

    @tf.function
    def train(self, ids: tf.RaggedTensor):
        self.embedding.enqueue(ids)
        with tf.GradientTape() as tape:
            activations = self.embedding.dequeue()
            tape.watch(activations)
            loss = tf.reduce_sum(activations * self._gradient)
        self.embedding.apply_gradients(tape.gradient(loss, activations))
        return loss

    @tf.function
    def serve(self, ids: tf.Tensor):
        return tf.reduce_sum(self.embedding(ids))


class _HashTable:
    """A `MutableHashTable` from keys to rows, and variables for the rows."""

    def __init__(self, num_rows: int, gradient: tf.Tensor):
        self._rows = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.int64, default_value=-1
        )
        initial = tf.random_uniform_initializer(-0.05, 0.05)
        self._table = tf.Variable(initial([num_rows, DIM]))
        self._accumulator = tf.Variable(tf.fill([num_rows, DIM], 0.1))
        self._next = tf.Variable(0, dtype=tf.int64)
        self._gradient = gradient

    def fill(self, keys: np.ndarray):
        self._rows.insert(keys, np.arange(len(keys)))
        self._next.assign(len(keys))

    @tf.function
    def train(self, ids: tf.RaggedTensor):
        keys, places = tf.unique(ids.values)
        rows = self._rows.lookup(keys)
        new = tf.where(rows < 0)[:, 0]
        fresh = self._next + tf.range(tf.size(new, tf.int64), dtype=tf.int64)
        self._rows.insert(tf.gather(keys, new), fresh)
        self._next.assign_add(tf.size(new, tf.int64))
        rows = tf.tensor_scatter_nd_update(rows, new[:, tf.newaxis], fresh)
        with tf.GradientTape() as tape:
            values = tf.gather(self._table, rows)
            tape.watch(values)
            activations = tf.math.segment_sum(
                tf.gather(values, places), ids.value_rowids()
            )
            loss = tf.reduce_sum(activations * self._gradient)
        gradient = tape.gradient(loss, values)
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=self._table.handle,
            accum=self._accumulator.handle,
            lr=LEARNING_RATE,
            epsilon=0.0,
            grad=tf.convert_to_tensor(gradient),
            indices=rows,
        )
        return loss


def measure(distribution: str, rounds: int) -> dict[str, np.ndarray]:
    """Returns milliseconds, with keys such as `open.train`."""
    rng = np.random.default_rng(7)
    gradient = tf.constant(rng.standard_normal((NUM_SAMPLES, DIM)), tf.float32)
    vocabulary = tlm.vocabulary.OpenVocabulary(CAPACITY)
    num_rows = vocabulary.num_rows
    open_table = _Embedding(CAPACITY, gradient, vocabulary)
    closed = _Embedding(num_rows, gradient, None)
    stock = _HashTable(2 * num_rows, gradient)
    num_keys = int(LOAD * num_rows)
    known = np.arange(num_keys)
    open_table.fill(_keys(known))
    stock.fill(_keys(known))
    splits = np.arange(NUM_SAMPLES + 1) * IDS_PER_SAMPLE

    def ragged(values):
        return tf.RaggedTensor.from_row_splits(tf.constant(values), splits)

    ids = [
        workloads.draw_ids(rng, distribution, splits[-1], num_keys)
        for _ in range(4)
    ]
    closed_batches = [ragged(batch_ids) for batch_ids in ids]
    batches = [ragged(_keys(batch_ids)) for batch_ids in ids]
    flat = [tf.constant(batch_ids[:NUM_NEW]) for batch_ids in ids]
    flat_keys = [tf.constant(_keys(batch_ids[:NUM_NEW])) for batch_ids in ids]
    state = open_table.embedding.vocabularies["table"]
    next_new = num_keys

    def new_batch():
        nonlocal next_new
        mixed = ids[0].copy()
        mixed[:NUM_NEW] = np.arange(next_new, next_new + NUM_NEW)
        next_new += NUM_NEW
        return ragged(_keys(mixed))

    new_batches = [new_batch() for _ in range(rounds + 2)]
    closed_new_batches = []
    for batch_ids in ids:
        mixed = batch_ids.copy()
        mixed[:NUM_NEW] = rng.permutation(num_keys)[:NUM_NEW]
        closed_new_batches.append(ragged(mixed))

    def on(values: list, run: Callable) -> Callable[[int], object]:
        return lambda i: run(values[i % len(values)]).numpy()

    return timing.interleave(
        {
            "open.train": on(batches, open_table.train),
            "closed.train": on(closed_batches, closed.train),
            "tf.train": on(batches, stock.train),
            "open.train_new": on(new_batches, open_table.train),
            "closed.train_new": on(closed_new_batches, closed.train),
            "open.find": on(flat_keys, state.lookup),
            "open.serve": on(flat_keys, open_table.serve),
            "closed.serve": on(flat, closed.serve),
        },
        rounds,
    )


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    median = {
        name: float(np.median(values))
        for name, values in measure(distribution, rounds).items()
    }
    table = rich.table.Table(
        title=f"{NUM_SAMPLES} samples x {IDS_PER_SAMPLE} keys, "
        f"{distribution}, table {CAPACITY:,} x {DIM}, load {LOAD}, "
        "Adagrad"
    )
    for column in ("", "open", "closed", "open / closed", "TF / open"):
        table.add_column(column, justify="right" if column else "left")
    for label, name, other in (
        ("training step, known keys", "train", "train"),
        (f"training step, {NUM_NEW:,} new keys", "train_new", "train"),
        ("  closed table with as many distinct rows", "train_new", "train_new"),
        (f"serving lookup of {NUM_NEW:,} ids", "serve", "serve"),
    ):
        ours, theirs = median[f"open.{name}"], median[f"closed.{other}"]
        stock = f"{median['tf.train'] / ours:.1f}" if name == "train" else ""
        table.add_row(
            label,
            f"{ours:.1f} ms",
            f"{theirs:.1f} ms",
            f"{ours / theirs:.2f}",
            stock,
        )
    rate = NUM_NEW / median["open.find"] / 1e3
    table.add_row("lookup of known keys", f"{rate:.1f} M/s", "", "", "")
    return table, median
