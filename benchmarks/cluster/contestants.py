"""Contestants that train tables, with or without parameter servers.

All contestants look up one id per sample and feature, and train with Adagrad.
The loss is the sum of the squares of all activations.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import workloads

LEARNING_RATE = 0.05
_INITIAL = 0.1  # Initial value of Adagrad's accumulators.
_INITIAL_ROWS = tf.random_uniform_initializer(-0.05, 0.05)

WORKLOADS = {
    workload.name: workload
    for workload in (
        # Criteo's columns, with at most 100,000 rows per table.
        workloads.Workload(
            "26 tables",
            tuple(min(size, 100_000) for size in workloads.CRITEO_ROWS),
            16,
            4096,
            1,
            1,
        ),
        workloads.Workload("8 tables", (10_000,) * 8, 16, 1024, 1, 1),
        workloads.Workload("64 tables", (10_000,) * 64, 16, 1024, 1, 1),
        workloads.Workload("1 M rows", (1_000_000,), 16, 4096, 1, 1),
        workloads.Workload(
            "8 tables, 2,048 samples", (10_000,) * 8, 16, 2048, 1, 1
        ),
        # Steps with few ids, whose time is the time of the calls.
        workloads.Workload("tiny steps", (10_000,) * 8, 16, 8, 1, 1),
        # The number of ids, and the number of rows of all tables, is the same.
        *(
            workloads.Workload(
                f"16,384 ids, {num_tables} tables",
                (2_097_152 // num_tables,) * num_tables,
                16,
                16_384 // num_tables,
                1,
                1,
            )
            for num_tables in (8, 64, 512)
        ),
        *(
            workloads.Workload(
                f"4,096 ids, {num_tables} tables",
                (2_097_152 // num_tables,) * num_tables,
                16,
                4096 // num_tables,
                1,
                1,
            )
            for num_tables in (8, 512)
        ),
    )
}


def _loss(activations: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(
        [tf.reduce_sum(activation * activation) for activation in activations]
    )


def _loss_of_layers(layers: Sequence[Any], ids: tf.Tensor) -> tf.Tensor:
    """Returns the loss of layers that look up one row of `ids` each."""
    of_layers = tf.unstack(ids, num=len(layers))
    return _loss(
        [layer(layer_ids) for layer, layer_ids in zip(layers, of_layers)]
    )


class Empty:
    """The contestant without tables.

    A step without tables measures the time of the coordinator and of the input
    pipeline.
    """

    def __init__(self, workload: workloads.Workload):
        """Creates a contestant; `workload` is not used."""
        del workload

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the ids."""
        return tf.reduce_sum(ids)


class Ours:
    """The contestant `tlm.TPUEmbedding`."""

    def __init__(self, workload: workloads.Workload, **options: Any):
        """Creates the tables in the scope of the current strategy."""
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
        """Trains on `[num_tables, num_samples]` ids and returns the loss."""
        self._embedding.enqueue(tf.unstack(ids))
        with tf.GradientTape() as tape:
            activations = self._embedding.dequeue()
            tape.watch(activations)
            loss = _loss(activations)
        self._embedding.apply_gradients(tape.gradient(loss, activations))
        return loss


class Unpacked(Ours):
    """The contestant `tlm.TPUEmbedding` with a separate input per table.

    The loss has the same ops as the loss of `Packed`.
    """

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """Trains on `[num_tables, num_samples]` ids and returns the loss."""
        return self._step(tf.unstack(ids))

    def _step(self, features: Any) -> tf.Tensor:
        self._embedding.enqueue(features)
        activations = self._embedding.dequeue()
        with tf.GradientTape() as tape:
            tape.watch(activations)
            joined = tf.concat(activations, axis=0)
            loss = tf.reduce_sum(joined * joined)
        self._embedding.apply_gradients(tape.gradient(loss, activations))
        return loss


class Packed(Unpacked):
    """The contestant `tlm.TPUEmbedding` with packed batches.

    The number of operations of a step does not depend on the number of tables,
    except for operations inside `concat` and its gradient.
    """

    @staticmethod
    def prepare(ids: np.ndarray) -> np.ndarray:
        """Packs a batch of `[num_tables, num_samples]` ids."""
        return tlm.pack(list(ids)).numpy()

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """Trains on a packed batch and returns the loss."""
        return self._step(ids)


class Stock:
    """The contestant with TensorFlow's own operations.

    A step calls `tf.nn.embedding_lookup_sparse`, and applies a sparse update
    to each shard.
    """

    def __init__(self, workload: workloads.Workload):
        """Creates the tables in the scope of the current strategy."""
        shapes = [(num_rows, workload.dim) for num_rows in workload.num_rows]
        # The strategy's partitioner may shard these variables.
        self._tables = [
            _shards(tf.Variable(_INITIAL_ROWS(shape))) for shape in shapes
        ]
        self._slots = [
            _shards(tf.Variable(tf.fill(shape, _INITIAL))) for shape in shapes
        ]

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """Trains on `[num_tables, num_samples]` ids and returns the loss."""
        samples = tf.range(tf.shape(ids)[1], dtype=tf.int64)
        indices = tf.stack([samples, tf.zeros_like(samples)], axis=1)
        shape = tf.stack([tf.size(samples, tf.int64), 1])
        with tf.GradientTape() as tape:
            loss = _loss(
                [
                    tf.nn.embedding_lookup_sparse(
                        table,
                        tf.SparseTensor(indices, values, shape),
                        None,
                        combiner="sum",
                    )
                    for table, values in zip(
                        self._tables, tf.unstack(ids, num=len(self._tables))
                    )
                ]
            )
        _apply(tape.gradient(loss, self._tables), self._tables, self._slots)
        return loss


class KerasEmbedding:
    """The contestant `keras.layers.Embedding`, also trained with Adagrad."""

    def __init__(self, workload: workloads.Workload):
        """Creates the tables in the scope of the current strategy."""
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
        """Trains on `[num_tables, num_samples]` ids and returns the loss."""
        with tf.GradientTape() as tape:
            loss = _loss_of_layers(self._layers, ids)
        _apply(tape.gradient(loss, self._tables), self._tables, self._slots)
        return loss


class Layers:
    """The contestant with one `tlm.layers.ShardedEmbedding` per table."""

    def __init__(self, workload: workloads.Workload):
        """Creates the layers in the scope of the current strategy."""
        tpu = tf.tpu.experimental.embedding
        self._layers = [
            tlm.layers.ShardedEmbedding(
                num_rows,
                workload.dim,
                optimizer=tpu.Adagrad(LEARNING_RATE, _INITIAL),
            )
            for num_rows in workload.num_rows
        ]
        for layer in self._layers:
            layer.build()
        self._weights = [
            weight for layer in self._layers for weight in layer.weights
        ]
        # The optimizer only passes the gradients of the tables to the layers.
        self._optimizer = keras.optimizers.SGD()
        self._optimizer.build(self._weights)

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """Trains on `[num_tables, num_samples]` ids and returns the loss."""
        with tf.GradientTape() as tape:
            loss = _loss_of_layers(self._layers, ids)
        gradients = tape.gradient(
            loss, [weight.value for weight in self._weights]
        )
        self._optimizer.apply(gradients, self._weights)
        return loss


class Dlrm(Layers):
    """The contestant with a complete model: tables and dense layers."""

    def __init__(self, workload: workloads.Workload):
        """Creates the layers in the scope of the current strategy."""
        super().__init__(workload)
        self._dense = keras.Sequential(
            [
                keras.Input([workload.dim * len(workload.num_rows)]),
                keras.layers.Dense(128, "relu"),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(32, "relu"),
                keras.layers.Dense(1),
            ]
        )
        self._weights += self._dense.trainable_weights
        self._optimizer = keras.optimizers.Adam()
        self._optimizer.build(self._weights)

    def step(self, ids: tf.Tensor) -> tf.Tensor:
        """Trains on `[num_tables, num_samples]` ids and returns the loss."""
        of_layers = tf.unstack(ids, num=len(self._layers))
        with tf.GradientTape() as tape:
            rows = [layer(own) for layer, own in zip(self._layers, of_layers)]
            loss = tf.reduce_mean(self._dense(tf.concat(rows, axis=1)) ** 2)
        gradients = tape.gradient(
            loss, [weight.value for weight in self._weights]
        )
        self._optimizer.apply(gradients, self._weights)
        return loss


CONTESTANTS = {
    "dlrm": Dlrm,
    "empty": Empty,
    "ours": Ours,
    "packed": Packed,
    "unpacked": Unpacked,
    "bfloat16": lambda workload: Ours(workload, wire_dtype="bfloat16"),
    "layers": Layers,
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
    """Applies Adagrad to each shard on the shard's device."""
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
