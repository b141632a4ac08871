"""One training step of one table, compared with TensorFlow's ops and the roof.

A batch of 8192 samples with 20 ids each looks up a table of 2 M rows x 64 and
updates it with Adagrad. Three contestants see the same ids in the same round:

* `tlm`: `tlm.TPUEmbedding`, enqueue -> dequeue -> apply_gradients;
* `tf`: `safe_embedding_lookup_sparse`, tape, duplicates summed, and
  `ResourceSparseApplyAdagradV2`: what a Keras layer with a sparse optimizer
  comes down to;
* `roof`: plain C++ that reads the row of every id, then reads, changes and
  writes each distinct row and its slot row, in ascending order.
"""

from collections.abc import Callable

import numpy as np
import rich.table
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import roof, timing, workloads

NUM_ROWS = 2_000_000
DIM = 64
NUM_SAMPLES = 8192
IDS_PER_SAMPLE = 20
LEARNING_RATE = 0.05


class _Ours:
    """The host engine behind the public class."""

    def __init__(self, gradient: tf.Tensor):
        table = tf.tpu.experimental.embedding.TableConfig(
            NUM_ROWS, DIM, combiner="sum", name="table",
            initializer=tf.random_uniform_initializer(seed=1))
        self._embedding = tlm.TPUEmbedding(
            tf.tpu.experimental.embedding.FeatureConfig(table),
            tf.tpu.experimental.embedding.Adagrad(LEARNING_RATE))
        self._embedding.build()
        self._gradient = gradient

    @tf.function
    def lookup(self, ids: tf.RaggedTensor) -> tf.Tensor:
        self._embedding.enqueue(ids, training=False)
        return self._embedding.dequeue()

    @tf.function
    def train(self, ids: tf.RaggedTensor) -> tf.Tensor:
        self._embedding.enqueue(ids)
        with tf.GradientTape() as tape:
            activations = self._embedding.dequeue()
            tape.watch(activations)
            loss = tf.reduce_sum(activations * self._gradient)
        self._embedding.apply_gradients(tape.gradient(loss, activations))
        return loss


class _TensorFlow:
    """The same with TensorFlow's own ops."""

    def __init__(self, gradient: tf.Tensor):
        initial = tf.random_uniform_initializer(seed=1)
        self._table = tf.Variable(initial([NUM_ROWS, DIM]))
        self._accumulator = tf.Variable(tf.fill([NUM_ROWS, DIM], 0.1))
        self._gradient = gradient

    @tf.function
    def lookup(self, ids: tf.SparseTensor) -> tf.Tensor:
        return tf.nn.safe_embedding_lookup_sparse(
            self._table, ids, combiner="sum")

    @tf.function
    def train(self, ids: tf.SparseTensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.lookup(ids) * self._gradient)
        slices = tape.gradient(loss, self._table)
        rows, places = tf.unique(slices.indices)
        gradient = tf.math.unsorted_segment_sum(
            slices.values, places, tf.size(rows))
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=self._table.handle, accum=self._accumulator.handle,
            lr=LEARNING_RATE, epsilon=0.0, grad=gradient, indices=rows)
        return loss


def measure(distribution: str, rounds: int) -> dict[str, np.ndarray]:
    """Milliseconds per call: `tlm.lookup`, `tf.train`, `roof.gather`, ..."""
    rng = np.random.default_rng(7)
    gradient = tf.constant(
        rng.standard_normal((NUM_SAMPLES, DIM)), tf.float32)
    ours, theirs = _Ours(gradient), _TensorFlow(gradient)
    machine = roof.load().Roof(NUM_ROWS, DIM, roof.num_threads())
    row_splits = np.arange(NUM_SAMPLES + 1) * IDS_PER_SAMPLE

    batches = []
    for _ in range(4):
        values = workloads.draw_ids(
            rng, distribution, NUM_SAMPLES * IDS_PER_SAMPLE, NUM_ROWS)
        ragged = tf.RaggedTensor.from_row_splits(values, row_splits)
        batches.append((values, np.unique(values), ragged,
                        ragged.to_sparse()))

    def on(batch_part: int, run: Callable) -> Callable[[int], object]:
        def call(i):
            result = run(batches[i % len(batches)][batch_part])
            # Wait for it: functions return before they are done.
            return result.numpy() if tf.is_tensor(result) else result
        return call

    return timing.interleave({
        "tlm.lookup": on(2, ours.lookup),
        "tf.lookup": on(3, theirs.lookup),
        "roof.gather": on(0, machine.gather),
        "tlm.train": on(2, ours.train),
        "tf.train": on(3, theirs.train),
        "roof.update": on(1, machine.read_modify_write),
    }, rounds)


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Measures, and puts medians and ratios side by side."""
    median = {name: float(np.median(values))
              for name, values in measure(distribution, rounds).items()}
    # A step reads the row of every id, then updates each distinct row.
    median["roof.train"] = median["roof.gather"] + median["roof.update"]
    table = rich.table.Table(
        title=f"{NUM_SAMPLES} samples x {IDS_PER_SAMPLE} ids, {distribution}, "
              f"table {NUM_ROWS:,} x {DIM}, Adagrad")
    table.add_column("")
    for column in ("tlm", "TF", "roof", "tlm / roof", "TF / tlm"):
        table.add_column(column, justify="right")
    for what, bottom in (("lookup", "roof.gather"), ("train", "roof.train")):
        ours, theirs = median[f"tlm.{what}"], median[f"tf.{what}"]
        table.add_row(
            {"lookup": "lookup", "train": "training step"}[what],
            f"{ours:.1f} ms", f"{theirs:.1f} ms", f"{median[bottom]:.1f} ms",
            f"{ours / median[bottom]:.2f}", f"{theirs / ours:.1f}")
    return table, median
