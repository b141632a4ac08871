"""The ops for lookups whose gradients the caller holds compare with numpy."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap._core import ops
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.layers.base.row_gradients import OpenRows

tpu = tf.tpu.experimental.embedding
DIM = 3
RATE = 0.5


class Table:
    """A table with an open vocabulary, and its rows in numpy."""

    def __init__(self, num_shards=2, capacity=40, **settings):
        config = tpu.TableConfig(capacity, DIM, tf.ones, combiner="sum")
        self.embedding = tlm.TPUEmbedding(
            tpu.FeatureConfig(config),
            tpu.SGD(RATE),
            partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
            vocabularies={
                "table_0": tlm.vocabulary.OpenVocabulary(capacity, **settings)
            },
        )
        self.embedding.build()
        self.access = LayerAccess(self.embedding)
        self.rows = self.embedding.embedding_tables[config]
        self.open_rows = OpenRows.of_table(self)

    def read(self):
        return tf.convert_to_tensor(self.rows).numpy()

    def gradient(self, keys, factors):
        """Returns the recorded gradient of a lookup."""
        with tf.GradientTape() as tape:
            assert self.open_rows.is_recorded()
            values = self.open_rows.look_up(tf.constant(keys))
            loss = tf.reduce_sum(values * factors)
        return values.numpy(), tape.gradient(loss, self.open_rows)

    def rows_of(self, keys):
        return self.embedding.vocabularies["table_0"].lookup(keys).numpy()


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_steps_equal_numpy(num_shards):
    table = Table(num_shards)
    rng = np.random.default_rng(0)
    for _ in range(6):
        keys = rng.integers(0, 20, 12)
        factors = rng.integers(-4, 5, [12, DIM]).astype(np.float32)
        values, gradient = table.gradient(keys, factors)
        expected = table.read()
        rows = table.rows_of(keys)
        np.testing.assert_array_equal(values, expected[rows])
        order = np.argsort(gradient.indices.numpy(), kind="stable")
        ranks = np.argsort(rows, kind="stable")
        np.testing.assert_array_equal(
            gradient.indices.numpy()[order], rows[ranks]
        )
        np.testing.assert_array_equal(
            gradient.values.numpy()[order], factors[ranks]
        )
        np.subtract.at(expected, rows, RATE * factors)
        table.open_rows.apply_to_rows(gradient)
        np.testing.assert_array_equal(table.read(), expected)
    assert table.embedding.stats()["num_updates"] == 6


def test_dense_gradients_change_all_rows():
    table = Table()
    _, gradient = table.gradient([3, 4], np.ones([2, DIM], np.float32))
    dense = tf.convert_to_tensor(gradient) + 1.0
    expected = table.read() - RATE * dense.numpy()
    table.open_rows.apply_to_rows(dense)
    np.testing.assert_array_equal(table.read(), expected)


def test_samples_without_a_row_are_zero_and_have_no_gradient():
    table = Table(admission="count", min_count=2)
    table.gradient([3, 3, 3], 1.0)
    keys = tf.RaggedTensor.from_row_splits(
        tf.constant([3, 8], tf.int64), [0, 1, 1, 2]
    )
    with tf.GradientTape() as tape:
        assert table.open_rows.is_recorded()
        values = table.open_rows.look_up(keys)
    np.testing.assert_array_equal(values, [[1] * DIM, [0] * DIM, [0] * DIM])
    gradient = tape.gradient(values, table.open_rows)
    np.testing.assert_array_equal(gradient.indices, table.rows_of([3]))


def test_empty_batches_and_gradients_are_supported():
    table = Table()
    keys = np.zeros([0], np.int64)
    values, gradient = table.gradient(keys, np.zeros([0, DIM], np.float32))
    assert values.shape == (0, DIM)
    before = table.read()
    table.open_rows.apply_to_rows(gradient)
    np.testing.assert_array_equal(table.read(), before)
    assert table.embedding.stats()["followed"] == [0]


def test_invalid_inputs_raise_and_change_nothing():
    table = Table()
    _, gradient = table.gradient([3, 4], np.ones([2, DIM], np.float32))
    before = table.read()
    engine = table.embedding._state.backend.engine
    arguments = {
        "rows": gradient.indices,
        "gradients": gradient.values,
        "hyperparameters": [tf.constant([RATE])],
        "is_dense": False,
    }
    for changed, match in (
        ({"gradients": gradient.values[:1]}, r"must have shape \[2, 3\]"),
        ({"gradients": gradient.values[:, :2]}, r"must have shape \[2, 3\]"),
        ({"is_dense": True}, r"must have shape \[\d\d, 3\]"),
        ({"rows": gradient.indices + 1000}, "is outside|must be in"),
        ({"hyperparameters": [tf.constant([-1.0])]}, "learning rate"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            engine.apply_recorded(**{**arguments, **changed})
    np.testing.assert_array_equal(table.read(), before)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="Lookup 99 has expired"
    ):
        ops.mark_rows(
            engine=engine.handle,
            token=tf.constant(99, tf.int64),
            rows=tf.constant([0], tf.int64),
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match="Received: -2"):
        ops.read_open_rows(
            engine=engine.handle,
            token=tf.constant(1, tf.int64),
            rows=tf.constant([-2], tf.int64),
            shards=[shard.handle for shard in table.rows.variables],
            offsets=tf.constant(table.rows.partition.offsets, tf.int64),
            placement=table.rows.partition.placement,
            dim=DIM,
        )
    engine.apply_recorded(**arguments)


def test_rows_of_a_function_traced_without_a_tape_raise():
    table = Table()
    table.gradient([3], 1.0)

    @tf.function
    def read(rows):
        return tf.gather(table.rows.variables[0], rows)

    with tf.GradientTape() as tape:
        assert table.open_rows.is_recorded()
        loss = tf.reduce_sum(read(tf.constant([0])))
    gradient = tape.gradient(loss, table.open_rows)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="while no tape recorded it"
    ):
        table.open_rows.apply_to_rows(gradient)
