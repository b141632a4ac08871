"""AssignPartition, RouteIds and FindUniqueRows match numpy references."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cases
from tests.reference import partition, route, unique_rows
from tf_layoutmap._core import ops

InvalidArgument = tf.errors.InvalidArgumentError


def vector(dtype):
    return tf.TensorSpec([None], dtype)


@functools.cache
def graph(op: str, dtype, **attrs):
    """Wraps the op in a `tf.function` with unknown sizes."""
    call = functools.partial(getattr(ops, op), **attrs)
    inputs = {
        "assign_partition": [tf.TensorSpec(None, dtype), vector(tf.int64)],
        "route_ids": [vector(dtype), vector(tf.int64)],
        "find_unique_rows": [
            vector(dtype),
            vector(tf.int64),
            vector(tf.float32),
        ],
    }[op]
    return tf.function(call, input_signature=inputs)


def check(op, expected, *inputs, **attrs):
    """Checks the results of the op, eagerly and in a `tf.function`."""
    for call in (
        functools.partial(getattr(ops, op), **attrs),
        graph(op, inputs[0].dtype.type, **attrs),
    ):
        for found, wanted in zip(call(*inputs), expected, strict=True):
            cases.assert_bitwise_equal(found, wanted)


@given(
    sharding=cases.shardings(),
    dtype=st.sampled_from(cases.ID_TYPES),
    shape=st.sampled_from([(), (0,), (7,), (2, 3), (2, 0, 3)]),
    data=st.data(),
)
def test_each_id_is_assigned_to_its_owner(sharding, dtype, shape, data):
    size = int(np.prod(shape))
    ids = np.array(
        data.draw(
            st.lists(
                st.integers(0, sharding.num_rows - 1),
                min_size=size,
                max_size=size,
            )
        ),
        dtype,
    ).reshape(shape)
    check(
        "assign_partition",
        partition.assign_partition(ids, sharding.offsets, sharding.placement),
        ids,
        np.array(sharding.offsets, np.int64),
        placement=sharding.placement,
    )


@given(sharding=cases.shardings(), unique=st.booleans(), data=st.data())
def test_ids_are_routed_to_their_shards(sharding, unique, data):
    ids, _ = data.draw(cases.ragged(sharding.num_rows))
    check(
        "route_ids",
        route.route_ids(
            ids, sharding.offsets, sharding.placement, unique=unique
        ),
        ids,
        np.array(sharding.offsets, np.int64),
        placement=sharding.placement,
        unique=unique,
    )


@pytest.mark.parametrize("placement", ["div", "mod"])
@pytest.mark.parametrize("dtype", cases.ID_TYPES)
def test_many_ids_are_routed_in_order(placement, dtype):
    offsets = partition.even_offsets(1001, 7)
    ids = np.random.default_rng(1).integers(0, 1001, 100_000).astype(dtype)
    shards, local_rows = (
        np.array(
            [
                partition.owner(row, offsets, placement)[part]
                for row in range(1001)
            ]
        )[ids]
        for part in (0, 1)
    )
    found = ops.route_ids(ids, offsets, placement=placement)
    order = np.argsort(shards, kind="stable")
    np.testing.assert_array_equal(found.permutation, order)
    np.testing.assert_array_equal(found.local_rows, local_rows[order])
    np.testing.assert_array_equal(
        found.splits, np.searchsorted(shards[order], range(8))
    )
    np.testing.assert_array_equal(
        found.inverse.numpy()[order], np.arange(len(ids))
    )


@pytest.mark.parametrize("num_ids", [0, 7, 30_000])
def test_the_result_does_not_depend_on_the_use_of_the_inverse(num_ids):
    ids = np.random.default_rng(0).integers(0, 100, num_ids)
    offsets = [0, 30, 60, 100]

    @tf.function
    def without(ids):
        routed = ops.route_ids(ids, offsets, placement="offsets")
        return routed.local_rows, routed.splits, routed.permutation

    wanted = route.route_ids(ids, offsets, "offsets", unique=False)
    for found, expected in zip(without(ids), wanted):
        np.testing.assert_array_equal(found, expected)


@given(
    num_rows=st.sampled_from([1, 2, 9, 2**11, 2**22 + 1, 2**31]),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    weighted=st.booleans(),
    data=st.data(),
)
def test_unique_rows_and_gains_match_the_reference(
    num_rows, combiner, weighted, data
):
    ids, row_splits = data.draw(cases.ragged(num_rows))
    weights = np.array(
        data.draw(
            st.lists(
                st.sampled_from([0.0, 1.0, -1.0, 0.1, 3.5, 1e10, 1e-10]),
                min_size=len(ids),
                max_size=len(ids),
            )
        ),
        np.float32,
    )
    weights = weights if weighted else np.zeros(0, np.float32)
    check(
        "find_unique_rows",
        unique_rows.find_unique_rows(ids, row_splits, weights, combiner),
        ids,
        row_splits,
        weights,
        combiner=combiner,
        num_rows=num_rows,
    )


def test_the_last_row_of_the_largest_table_is_supported():
    found = ops.find_unique_rows(
        np.array([2**32 - 1, 0, 2**32 - 1]),
        [0, 3],
        np.zeros(0, np.float32),
        combiner="sum",
        num_rows=2**32,
    )
    assert found.unique_rows.numpy().tolist() == [0, 2**32 - 1]


def test_a_table_with_more_than_2_32_rows_raises():
    # Row indices have 32 bits internally, so id 2^32 + 5 must not be treated as
    # 5.
    for num_rows in (2**32 + 1, 2**40, 2**62):
        with pytest.raises(InvalidArgument, match="0 to 2\\^32 rows"):
            ops.find_unique_rows(
                np.array([5]),
                [0, 1],
                np.zeros(0, np.float32),
                combiner="sum",
                num_rows=num_rows,
            )


def bad_ids(num_rows, dtype):
    ids = [-1, num_rows, np.iinfo(dtype).max, np.iinfo(dtype).min]
    return [np.array([0, bad], dtype) for bad in ids]


@pytest.mark.parametrize("dtype", cases.ID_TYPES)
@pytest.mark.parametrize("unique", [False, True])
def test_out_of_range_ids_raise_with_their_position(dtype, unique):
    for ids in bad_ids(5, dtype):
        words = rf"Id {ids[1]} \(ids\[1\]\) is outside the table with 5 rows"
        with pytest.raises(InvalidArgument, match=words):
            ops.route_ids(ids, [0, 3, 5], placement="div", unique=unique)
        with pytest.raises(InvalidArgument, match=words):
            ops.assign_partition(ids, [0, 3, 5], placement="div")
        with pytest.raises(
            InvalidArgument,
            match=f"Feature 'clicked', sample 1: id {ids[1]} is outside "
            "table 'ads' with 5 rows",
        ):
            ops.find_unique_rows(
                ids,
                [0, 1, 2],
                np.zeros(0, np.float32),
                combiner="sum",
                num_rows=5,
                feature="clicked",
                table="ads",
            )


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([], "num_shards \\+ 1"),
        ([0], "num_shards \\+ 1"),
        ([1, 2], "start with 0"),
        ([0, 3, 2], "must not decrease"),
        ([0, 2**32 + 1], "at most 2\\^32 rows"),
        ([0, 2, 5], "split the rows evenly. Received: shard 1 starts at 2"),
        ([[0, 5]], "`offsets` must have rank 1"),
        (5, "`offsets` must have rank 1"),
    ],
)
def test_invalid_offsets_raise(offsets, words):
    offsets = np.array(offsets, np.int64)
    for op in (ops.assign_partition, ops.route_ids):
        with pytest.raises(InvalidArgument, match=words):
            op(np.array([0]), offsets, placement="div")


@pytest.mark.parametrize(
    ("row_splits", "words"),
    [
        ([], "samples"),
        ([0], "end with the number of ids. Received: 0, with 3 ids"),
        ([1, 3], "start with 0. Received: 1"),
        ([0, 2, 1, 3], "not decrease. Received: 2, then 1 \\(sample 1\\)"),
        ([0, 2], "end with the number of ids. Received: 2, with 3 ids"),
        ([[0, 3]], "`row_splits` must have rank 1"),
    ],
)
def test_invalid_row_splits_raise(row_splits, words):
    with pytest.raises(InvalidArgument, match=words):
        ops.find_unique_rows(
            np.array([1, 2, 3]),
            np.array(row_splits, np.int64),
            np.zeros(0, np.float32),
            combiner="sum",
            num_rows=9,
        )


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0], "one per id. Received: 1 weights, 2 ids"),
        ([1.0, np.nan], "sample 1: a weight must be finite. Received: nan"),
        ([np.inf, 1.0], "sample 0: a weight must be finite. Received: inf"),
        ([[1.0, 1.0]], "`weights` must have rank 1"),
    ],
)
def test_invalid_weights_raise(weights, words):
    with pytest.raises(InvalidArgument, match=words):
        ops.find_unique_rows(
            np.array([1, 2]),
            [0, 1, 2],
            np.array(weights, np.float32),
            combiner="mean",
            num_rows=9,
        )


def test_ids_of_the_wrong_rank_raise():
    with pytest.raises(InvalidArgument, match="`ids` must have rank 1"):
        ops.route_ids([[1]], [0, 5], placement="div")
    with pytest.raises(InvalidArgument, match="`ids` must have rank 1"):
        ops.find_unique_rows(
            [[1]], [0, 1], np.zeros(0, np.float32), combiner="sum", num_rows=5
        )


def test_static_shapes_are_inferred_from_unknown_sizes():
    @tf.function(input_signature=[vector(tf.int64), vector(tf.int64)])
    def trace(ids, offsets):
        shards, local_rows = ops.assign_partition(
            tf.reshape(ids, [3, -1]), offsets, placement="mod"
        )
        assert shards.shape.as_list() == [3, None]
        assert local_rows.shape.as_list() == [3, None]
        assert shards.dtype == tf.int32
        assert local_rows.dtype == tf.int64
        routed = ops.route_ids(ids, [0, 2, 4], placement="div")
        assert routed.splits.shape.as_list() == [3]
        ids = tf.ensure_shape(ids, [7])
        routed = ops.route_ids(ids, offsets, placement="div")
        assert routed.local_rows.shape.as_list() == [7]
        assert routed.permutation.shape.as_list() == [7]
        routed = ops.route_ids(ids, offsets, placement="div", unique=True)
        assert routed.local_rows.shape.as_list() == [None]
        assert routed.permutation.shape.as_list() == [None]
        assert routed.inverse.shape.as_list() == [7]
        found = ops.find_unique_rows(
            ids,
            offsets,
            tf.ones_like(ids, tf.float32),
            combiner="sum",
            num_rows=4,
        )
        assert found.gains.shape.as_list() == [7]
        assert found.positions.shape.as_list() == [7]
        assert found.unique_rows.shape.as_list() == [None]
        assert found.unique_splits.shape.as_list() == [None]

    trace.get_concrete_function()


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("assign_partition", ([1], [[0, 2]]), {"placement": "div"}),
        ("route_ids", ([[1]], [0, 2]), {"placement": "div"}),
        ("route_ids", ([1], [[0, 2]]), {"placement": "div"}),
        (
            "find_unique_rows",
            ([[1]], [0, 1], [1.0]),
            {"combiner": "sum", "num_rows": 5},
        ),
        (
            "find_unique_rows",
            ([1], [[0, 1]], [1.0]),
            {"combiner": "sum", "num_rows": 5},
        ),
        (
            "find_unique_rows",
            ([1], [0, 1], [[1.0]]),
            {"combiner": "sum", "num_rows": 5},
        ),
    ],
)
def test_wrong_ranks_raise_while_tracing(op, inputs, attrs):
    @tf.function
    def trace():
        # Because of `tf.cast`, the values are unknown during tracing, but the
        # ranks are known.
        types = [tf.int64, tf.int64, tf.float32]
        getattr(ops, op)(
            *(
                tf.cast(one, dtype)
                for one, dtype in zip(inputs, types, strict=False)
            ),
            **attrs,
        )

    with pytest.raises(ValueError, match="must be rank 1 but is rank 2"):
        trace.get_concrete_function()


@pytest.mark.parametrize("unique", [False, True])
def test_an_invalid_id_raises_with_the_table_name(unique):
    with pytest.raises(
        InvalidArgument,
        match=(r"^Id 5 \(ids\[1\]\) is outside table 'ads' with 5 rows$"),
    ):
        ops.route_ids(
            [1, 5], [0, 3, 5], placement="div", unique=unique, table="ads"
        )
