"""Contestants of `embedding_step`: tf_layoutmap, TensorFlow and the roof."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import roof, timing, workloads

LEARNING_RATE = 0.05
Batch = list[tuple[np.ndarray, np.ndarray]]


def draw_gradients(workload: workloads.Workload) -> list[tf.Tensor]:
    """Returns constant gradients of all activations, because no loss exists."""
    rng = np.random.default_rng(5)
    return [
        tf.constant(
            rng.standard_normal((workload.num_samples, workload.dim)),
            tf.float32,
        )
        for _ in workload.num_rows
    ]


def ragged(batch: Batch) -> list[tf.RaggedTensor]:
    """Returns the batch as one RaggedTensor per feature."""
    return [
        tf.RaggedTensor.from_row_splits(ids, splits) for ids, splits in batch
    ]


def grouped(batch: Batch) -> tuple[list[np.ndarray], ...]:
    """Returns the distinct rows of each table, and the samples of each row.

    For each table, the result contains the distinct rows, row_splits, and the
    indices of the samples that contain each row.
    """
    rows, splits, samples = [], [], []
    for ids, row_splits in batch:
        order = np.argsort(ids, kind="stable")
        distinct, starts = np.unique(ids[order], return_index=True)
        rows.append(distinct)
        splits.append(np.append(starts, len(ids)))
        samples.append(
            np.repeat(np.arange(len(row_splits) - 1), np.diff(row_splits))[
                order
            ]
        )
    return rows, splits, samples


class Ours:
    """The contestant `tlm.TPUEmbedding` with the host engine."""

    def __init__(
        self, workload: workloads.Workload, gradients: list[tf.Tensor]
    ):
        tpu = tf.tpu.experimental.embedding
        self.embedding = tlm.TPUEmbedding(
            [
                tpu.FeatureConfig(
                    tpu.TableConfig(
                        num_rows,
                        workload.dim,
                        combiner="sum",
                        name=f"table_{i}",
                        initializer=tf.random_uniform_initializer(seed=i),
                    )
                )
                for i, num_rows in enumerate(workload.num_rows)
            ],
            tpu.Adagrad(LEARNING_RATE),
        )
        self.embedding.build()
        self._gradients = gradients
        self.lookup = tf.function(self._lookup, reduce_retracing=True)
        self.train = tf.function(self._train, reduce_retracing=True)

    def _lookup(self, ids):
        self.embedding.enqueue(ids, training=False)
        return self.embedding.dequeue()

    def _train(self, ids):
        self.embedding.enqueue(ids)
        activations = self.embedding.dequeue()
        self.embedding.apply_gradients(self._gradients)
        return activations


class TensorFlow:
    """The contestant with TensorFlow's own operations.

    A step runs the same operations as a Keras layer with a sparse optimizer,
    such as a sum over duplicate ids and `ResourceSparseApplyAdagradV2`.
    """

    def __init__(
        self, workload: workloads.Workload, gradients: list[tf.Tensor]
    ):
        self._tables = [
            tf.Variable(
                tf.random.stateless_uniform([num_rows, workload.dim], [i, 1])
            )
            for i, num_rows in enumerate(workload.num_rows)
        ]
        self._accumulators = [
            tf.Variable(tf.fill(table.shape, 0.1)) for table in self._tables
        ]
        self._gradients = gradients
        self.lookup = tf.function(self._lookup, reduce_retracing=True)
        self.train = tf.function(self._train, reduce_retracing=True)

    def _lookup(self, ids):
        return [
            tf.nn.safe_embedding_lookup_sparse(table, table_ids, combiner="sum")
            for table, table_ids in zip(self._tables, ids)
        ]

    def _train(self, ids):
        with tf.GradientTape() as tape:
            activations = self._lookup(ids)
        slices = tape.gradient(activations, self._tables, self._gradients)
        for table, accumulator, table_ids in zip(
            self._tables, self._accumulators, slices
        ):
            rows, places = tf.unique(table_ids.indices)
            gradient = tf.math.unsorted_segment_sum(
                table_ids.values, places, tf.size(rows)
            )
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=table.handle,
                accum=accumulator.handle,
                lr=LEARNING_RATE,
                epsilon=0.0,
                grad=gradient,
                indices=rows,
            )
        return activations


def contestants(
    workload: workloads.Workload,
    batches: list[Batch],
) -> dict[str, Callable[[int], object]]:
    """Returns functions that accept the number of the round.

    The keys of the dictionary are `<contestant>.<operation>`.
    """
    gradients = draw_gradients(workload)
    ours, theirs = Ours(workload, gradients), TensorFlow(workload, gradients)
    machine = roof.load().Roof(
        workload.num_rows,
        workload.dim,
        workload.num_samples,
        roof.num_threads(),
    )
    forms = {"ragged": [ragged(batch) for batch in batches]}
    forms["sparse"] = [
        [ids.to_sparse() for ids in batch] for batch in forms["ragged"]
    ]
    forms["packed"] = [tlm.pack(batch) for batch in forms["ragged"]]
    lists = [tuple(map(list, zip(*batch))) for batch in batches]
    groups = [grouped(batch) for batch in batches]

    def on(inputs, run):
        def call(i):
            result = run(inputs[i % len(batches)])
            # Waits for all operations, because a function can return earlier.
            tf.test.experimental.sync_devices()
            return result

        return call

    return {
        "tlm.lookup": on(forms["ragged"], ours.lookup),
        "packed.lookup": on(forms["packed"], ours.lookup),
        "tf.lookup": on(forms["sparse"], theirs.lookup),
        "roof.lookup": lambda i: timing.Milliseconds(
            machine.lookup(*lists[i % len(batches)])
        ),
        "tlm.train": on(forms["ragged"], ours.train),
        "packed.train": on(forms["packed"], ours.train),
        "tf.train": on(forms["sparse"], theirs.train),
        "roof.update": lambda i: timing.Milliseconds(
            machine.update(*groups[i % len(batches)])
        ),
    }
