"""Reads return rows in id order; writes with invalid ids change nothing."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.sharded.tables import make_table
from tf_layoutmap.partition import RowPartition
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.routing import checks, parts, routing

outside = pytest.mark.parametrize("bad_id", [-1, 10, -(2**31), 2**31 - 1])


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    st.sampled_from(["mod", "offsets"]),
)
def test_tensors_are_assigned_like_numpy_arrays(sizes, placement):
    partition = (
        RowPartition.from_sizes(sizes)
        if placement == "offsets"
        else RowPartition.mod(sum(sizes), len(sizes))
    )
    rows = np.arange(partition.num_rows)
    for found, wanted in zip(
        parts.assign(partition, tf.constant(rows)), partition.locate(rows)
    ):
        np.testing.assert_array_equal(found, wanted)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_the_last_of_equal_ids_is_selected(ids):
    last = {row: place for place, row in enumerate(ids)}
    np.testing.assert_array_equal(
        parts.last_of_equal(tf.constant(ids, tf.int32)),
        [last[row] for row in ids],
    )


def test_one_native_op_serves_all_shards_on_this_cpu(values):
    shards = make_table(values, [4, 6])._shards()

    def are_fused():
        return [part.is_fused for part in parts.parts_of(shards)]

    assert are_fused() == [True]
    seen = []
    tf.function(lambda: seen.append(are_fused()))()
    tf.function(lambda: seen.append(are_fused()), jit_compile=True)()
    assert seen == [[True], [False, False]]


def test_each_device_runs_one_op(values):
    table = ShardedVariable.create(
        values, num_shards=5, devices=["CPU:0", "CPU:1"]
    )
    found = parts.parts_of(table._shards())
    assert [list(part.numbers) for part in found] == [[0, 2, 4], [1, 3]]
    assert all(part.is_fused for part in found)
    for ids in ([9, 0, 4, 9], [], [[1, 2], [3, 8]]):
        np.testing.assert_array_equal(
            table.sparse_read(ids), values[np.array(ids, int)]
        )


def test_xla_compiles_lookups_and_scatters(values, sizes):
    table = make_table(values, sizes)

    @tf.function(jit_compile=True)
    def step(ids):
        table.scatter_add(tf.IndexedSlices(tf.ones([3, 2]), ids))
        return table.sparse_read(ids)

    np.testing.assert_array_equal(
        step(tf.constant([9, 0, 4])), values[[9, 0, 4]] + 1
    )


def test_nan_appears_only_where_an_id_is_invalid():
    tf.debugging.enable_check_numerics()
    try:
        marked = tf.function(checks.nan_where, autograph=False)
        for dtype in (tf.float32, tf.bfloat16, tf.complex64):
            rows = tf.ones([2, 3], dtype)
            valid = marked(tf.constant([False, False]), rows)
            np.testing.assert_array_equal(valid, rows)
    finally:
        tf.debugging.disable_check_numerics()
    for dtype in (tf.float32, tf.bfloat16, tf.complex64):
        rows = checks.nan_where(
            tf.constant([False, True]), tf.ones([2, 3], dtype)
        )
        found = np.isnan(rows.numpy().astype(np.complex64))
        np.testing.assert_array_equal(found, [[False] * 3, [True] * 3])


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3), (1, 1, 2)])
def test_ids_of_any_shape_are_supported(values, sizes, shape):
    table = make_table(values, sizes)
    ids = np.random.default_rng(1).integers(0, 10, shape)
    unknown = tf.function(
        lambda ids: table.sparse_read(ids, name="read"),
        input_signature=[tf.TensorSpec(None, tf.int64)],
    )
    for rows in (table.sparse_read(ids), unknown(ids)):
        np.testing.assert_array_equal(rows, values[ids])
    table.scatter_add(tf.IndexedSlices(np.ones((*shape, 2)), ids))
    ref = values.copy()
    np.add.at(ref, ids, 1)
    np.testing.assert_array_equal(table.numpy(), ref)


@pytest.mark.covering(1)
@outside
def test_reading_an_out_of_range_row_raises_with_the_table_name(
    values, sizes, bad_id
):
    table = make_table(values, sizes)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"Id {bad_id} .* is outside table 'emb' with 10 rows",
    ):
        table.sparse_read([0, bad_id, 3])
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"Id {bad_id} \(ids\[1\]\) is outside table",
    ):
        tf.function(table.sparse_read)(tf.constant([0, bad_id, 3]))


@pytest.mark.covering(2)
@outside
@pytest.mark.parametrize("verb", routing.SCATTER_VERBS)
def test_writing_an_out_of_range_row_writes_nothing(
    values, sizes, verb, bad_id
):
    table = make_table(values, sizes)

    def write(ids):
        getattr(table, verb)(tf.IndexedSlices(np.full([3, 2], 7.0), ids))

    for call in (write, tf.function(write)):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="outside table"
        ):
            call(tf.constant([0, bad_id, 3]))
        np.testing.assert_array_equal(table.numpy(), values)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (3,), (3, 3), (3, 1)])
def test_writing_a_mismatched_shape_writes_nothing(values, sizes, shape):
    table = make_table(values, sizes)
    with pytest.raises(ValueError, match="table 'emb' must have shape"):
        table.scatter_add(tf.IndexedSlices(np.ones(shape), [0, 5, 9]))
    unknown = tf.function(
        lambda delta: (
            table.scatter_add(tf.IndexedSlices(delta, [0, 5, 9])) is None
        ),
        input_signature=[tf.TensorSpec(None, tf.float32)],
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="for table 'emb' must"
    ):
        unknown(np.ones(shape, np.float32))
    np.testing.assert_array_equal(table.numpy(), values)


@pytest.mark.parametrize("ids", [[0.5], np.array([1], np.int16), [True]])
def test_ids_of_an_unsupported_dtype_raise(values, ids):
    with pytest.raises(TypeError, match="int32 or int64.*table 'emb'"):
        make_table(values, [4, 6]).sparse_read(ids)


def test_large_int64_ids_are_not_truncated_to_int32(values):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"Id {2**32 + 1} .* is outside"
    ):
        make_table(values, [4, 6]).sparse_read(np.array([2**32 + 1]))


def test_a_scatter_requires_indexed_slices(values):
    with pytest.raises(TypeError, match="tf.IndexedSlices.*table 'emb'"):
        make_table(values, [4, 6]).scatter_add(7.0)


def test_every_repeated_id_is_applied(values, sizes):
    table = make_table(values, sizes)
    table.scatter_add(tf.IndexedSlices(tf.ones([5, 2]), [9, 9, 0, 9, 0]))
    np.testing.assert_array_equal(
        (table.numpy() - values)[:, 0], [2, *[0] * 8, 3]
    )


@pytest.mark.parametrize(("axis", "num_plans"), [(0, 1), (1, 2)])
@pytest.mark.parametrize(
    "call",
    [
        lambda table, ids: tf.gather(table, ids),
        lambda table, ids: tf.nn.embedding_lookup(table, ids),
        lambda table, ids: table.sparse_read(ids),
        lambda table, ids: table.scatter_add(
            tf.IndexedSlices(tf.ones([2, 2]), ids)
        ),
    ],
    ids=["gather", "embedding_lookup", "sparse_read", "scatter_add"],
)
def test_each_call_is_planned_once(monkeypatch, values, call, axis, num_plans):
    # A table whose columns are in two shards is planned as two tables.
    plans = []
    original = parts.parts_of
    monkeypatch.setattr(
        parts,
        "parts_of",
        lambda shards: plans.append(shards) or original(shards),
    )
    table = ShardedVariable.create(values, num_shards=2, axis=axis)
    call(table, tf.constant([3, 0]))
    assert len(plans) == num_plans
    tf.function(call)(table, tf.constant([3, 0]))
    assert len(plans) == 2 * num_plans
