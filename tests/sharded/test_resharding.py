"""A table is resharded in place with memory for one extra shard."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.sharded.tables import backwards, cuts, make_table, placed
from tf_layoutmap.sharded import ShardedVariable, resharding


@settings(max_examples=60)
@given(st.data(), st.sampled_from([(7,), (6, 3), (12, 2, 2)]))
def test_any_layout_is_resharded_to_any_other_layout(data, shape):
    values = np.arange(np.prod(shape)).reshape(shape)
    first, second = data.draw(cuts(shape)), data.draw(cuts(shape))
    table = ShardedVariable.create(values, **first)
    if first["axis"] != second["axis"]:
        second = {"placement": first["placement"]}
    assert table.reshard(placement=second["placement"]) is table
    np.testing.assert_array_equal(table.numpy(), values)
    np.testing.assert_array_equal(table.value(), values)
    assert [v.shape[table.axis] for v in table.variables] == list(
        table.partition.sizes
    )
    table.scatter_add(
        tf.IndexedSlices(tf.ones((1, *shape[1:]), tf.int64), [shape[0] - 1])
    )
    values[-1] += 1
    np.testing.assert_array_equal(table.numpy(), values)


def test_reshard_infers_the_number_of_shards_from_any_option(values):
    table = make_table(values, [4, 6], trainable=False)
    assert table.reshard(4).partition.sizes == (3, 3, 2, 2)
    assert table.reshard(
        partitioner=tlm.partitioners.MaxSizePartitioner(40)
    ).partition.sizes == (5, 5)
    table.reshard(devices=["CPU:0", "CPU:1", "CPU:2"])
    assert [d[-5:] for d in table.devices] == ["CPU:0", "CPU:1", "CPU:2"]
    assert table.reshard(placement="mod").partition.num_shards == 3
    assert table.reshard(placement=[0, 1, 10]).partition.sizes == (1, 9)
    assert not table.trainable
    assert table.variables[1].name == "emb/part_1:0"
    np.testing.assert_array_equal(table.numpy(), values)


def test_at_most_one_shard_is_held_twice(monkeypatch, new_objects):
    values = np.arange(64.0 * 8).reshape(64, 8)
    table = placed(values, "div", 8)
    peaks = []

    def weigh(*args):
        alive = [
            t
            for t in new_objects()
            if isinstance(t, (tf.Tensor, tf.Variable)) and t.dtype == tf.float64
        ]
        tensors = sum(
            t.shape.num_elements() for t in alive if isinstance(t, tf.Tensor)
        )
        # The sizes are read from the values, because variables that were
        # emptied still report their original shapes.
        shards = sum(
            tf.size(v.read_value()).numpy()
            for v in alive
            if isinstance(v, tf.Variable)
        )
        peaks.append(tensors + shards)

    empty, assemble = resharding._empty, resharding._assemble

    def before_empty(variable):
        weigh()
        empty(variable)

    def after_assemble(*args):
        value = assemble(*args)
        weigh()
        return value

    monkeypatch.setattr(resharding, "_empty", before_empty)
    monkeypatch.setattr(resharding, "_assemble", after_assemble)
    table.reshard(placement=backwards(64, 8))
    assert len(peaks) == 16
    # The ids and the emptied variables take 16 more bytes.
    assert 64 * 8 < max(peaks) <= 64 * 8 + 64 + 16
    np.testing.assert_array_equal(table.numpy(), values)


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table.sparse_read([1]),
        lambda table: (
            table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [1])) is None
        ),
        lambda table: table * 2,
    ],
    ids=["read", "write", "dense"],
)
def test_a_function_traced_with_the_old_shards_raises(values, use):
    table = make_table(values, [4, 6])
    step = tf.function(lambda: use(table))
    step()
    before = table.numpy()
    table.reshard(5)
    with pytest.raises(tf.errors.OpError):
        step()
    np.testing.assert_array_equal(table.numpy(), before)
    tf.function(lambda: use(table))()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(num_shards=2, placement=[0, 10]), "must be left out when `plac"),
        (dict(placement=[0, 4, 9]), "must cover 10 rows"),
        (dict(placement="round"), "one of"),
        (dict(num_shards=0), "positive"),
        (dict(placement=lambda rows: (rows * 0, rows)), "outside the shards"),
    ],
)
def test_an_invalid_partition_raises_and_moves_no_rows(values, options, words):
    table = make_table(values, [4, 6])
    with pytest.raises(ValueError, match=words):
        table.reshard(**options)
    np.testing.assert_array_equal(table.numpy(), values)


def test_resharding_in_a_function_raises(values):
    with pytest.raises(RuntimeError, match="outside of tf.function"):
        tf.function(make_table(values, [10]).reshard)(2)
