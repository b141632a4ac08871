"""Ways to train tables over parameter servers, or without any.

All take one id a sample and feature, and make the same step: the loss is the
sum of the squares of all activations, the update Adagrad's.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import workloads

LEARNING_RATE = 0.05
_INITIAL = 0.1  # Of an accumulator.
_INITIAL_ROWS = tf.random_uniform_initializer(-0.05, 0.05)

WORKLOADS = {
    one.name: one
    for one in (
        # Criteo's columns, of which each table has at most 100,000 values.
        workloads.Workload(
            "26 tables",
            tuple(min(one, 100_000) for one in workloads.CRITEO_ROWS),
            16,
            4096,
            1,
            1,
        ),
        workloads.Workload("8 tables", (10_000,) * 8, 16, 1024, 1, 1),
        workloads.Workload("64 tables", (10_000,) * 64, 16, 1024, 1, 1),
        workloads.Workload("1 M rows", (1_000_000,), 16, 4096, 1, 1),
    )
}


def _loss(activations: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(one * one) for one in activations])


class Empty:
    """A step without tables: what the coordinator and its data take."""

    def __init__(self, workload: workloads.Workload):
        """Takes what the others take."""
        del workload

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """As of `Ours`."""
        return tf.reduce_sum(ids)


class Ours:
    """`tlm.TPUEmbedding`."""

    def __init__(self, workload: workloads.Workload, **options: Any):
        """Creates the tables, in the strategy in scope."""
        tpu = tf.tpu.experimental.embedding
        self._embedding = tlm.TPUEmbedding(
            [
                tpu.FeatureConfig(
                    tpu.TableConfig(
                        num_rows,
                        workload.dim,
                        initializer=_INITIAL_ROWS,
                        combiner="sum",
                        name=f"table_{number}",
                    )
                )
                for number, num_rows in enumerate(workload.num_rows)
            ],
            tpu.Adagrad(LEARNING_RATE, _INITIAL),
            **options,
        )
        self._embedding.build()

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """Trains on `[num_tables, num_samples]` ids; returns the loss."""
        self._embedding.enqueue(tf.unstack(ids))
        with tf.GradientTape() as tape:
            activations = self._embedding.dequeue()
            tape.watch(activations)
            loss = _loss(activations)
        self._embedding.apply_gradients(tape.gradient(loss, activations))
        return loss


class Stock:
    """`tf.nn.embedding_lookup_sparse`, and the sparse update of each shard."""

    def __init__(self, workload: workloads.Workload):
        """Creates the tables, in the strategy in scope."""
        shapes = [(one, workload.dim) for one in workload.num_rows]
        # In shards, if the strategy's partitioner says so.
        self._tables = [
            _shards(tf.Variable(_INITIAL_ROWS(shape))) for shape in shapes
        ]
        self._slots = [
            _shards(tf.Variable(tf.fill(shape, _INITIAL))) for shape in shapes
        ]

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """As of `Ours`."""
        samples = tf.range(tf.shape(ids)[1], dtype=tf.int64)
        indices = tf.stack([samples, tf.zeros_like(samples)], axis=1)
        shape = tf.stack([tf.size(samples, tf.int64), 1])
        with tf.GradientTape() as tape:
            loss = _loss(
                [
                    tf.nn.embedding_lookup_sparse(
                        table,
                        tf.SparseTensor(indices, one, shape),
                        None,
                        combiner="sum",
                    )
                    for table, one in zip(
                        self._tables, tf.unstack(ids, num=len(self._tables))
                    )
                ]
            )
        _apply(tape.gradient(loss, self._tables), self._tables, self._slots)
        return loss


class KerasEmbedding:
    """`keras.layers.Embedding`, and the same update."""

    def __init__(self, workload: workloads.Workload):
        """Creates the tables, in the strategy in scope."""
        self._layers = [
            keras.layers.Embedding(num_rows, workload.dim)
            for num_rows in workload.num_rows
        ]
        for layer in self._layers:
            layer.build()
        self._tables = [
            [layer.trainable_variables[0].value] for layer in self._layers
        ]
        self._slots = [
            [tf.Variable(tf.fill(table.shape, _INITIAL))]
            for (table,) in self._tables
        ]

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """As of `Ours`."""
        with tf.GradientTape() as tape:
            loss = _loss(
                [
                    layer(one)
                    for layer, one in zip(
                        self._layers, tf.unstack(ids, num=len(self._layers))
                    )
                ]
            )
        _apply(tape.gradient(loss, self._tables), self._tables, self._slots)
        return loss


CONTESTANTS = {
    "empty": Empty,
    "ours": Ours,
    "bfloat16": lambda one: Ours(one, wire_dtype="bfloat16"),
    "stock": Stock,
    "keras": KerasEmbedding,
}


def _shards(variable: Any) -> list[tf.Variable]:
    return list(getattr(variable, "variables", [variable]))


def _apply(
    gradients: Sequence[Sequence[tf.IndexedSlices]],
    tables: Sequence[Sequence[tf.Variable]],
    slots: Sequence[Sequence[tf.Variable]],
):
    """Updates each shard where it is."""
    for of_table in zip(gradients, tables, slots):
        for gradient, shard, slot in zip(*of_table):
            with tf.device(shard.device):
                tf.raw_ops.ResourceSparseApplyAdagradV2(
                    var=shard.handle,
                    accum=slot.handle,
                    lr=LEARNING_RATE,
                    epsilon=0.0,
                    grad=gradient.values,
                    indices=gradient.indices,
                )
