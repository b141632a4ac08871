"""Every row has one owner, and `locate` inverts `global_rows`."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_layoutmap.partition import RowPartition

partitions = st.one_of(
    st.builds(RowPartition.div, st.integers(0, 60), st.integers(1, 9)),
    st.builds(RowPartition.mod, st.integers(0, 60), st.integers(1, 9)),
    st.builds(
        RowPartition.from_sizes,
        st.lists(st.integers(0, 9), min_size=1, max_size=7),
    ),
    st.builds(
        lambda num_rows, num_shards: RowPartition.from_callable(
            # Rows are assigned to the last shard first, unlike in any built-in
            # placement.
            lambda rows: (
                num_shards - 1 - rows % num_shards,
                rows // num_shards,
            ),
            RowPartition.mod(num_rows, num_shards).sizes[::-1],
        ),
        st.integers(0, 60),
        st.integers(1, 9),
    ),
)


@given(partitions)
def test_every_row_has_exactly_one_owner(partition):
    owned = np.concatenate(
        [partition.global_rows(shard) for shard in range(partition.num_shards)]
    )
    assert sorted(owned.tolist()) == list(range(partition.num_rows))


@given(partitions)
def test_locate_is_the_inverse_of_global_rows(partition):
    shards, local_rows = partition.locate(np.arange(partition.num_rows))
    for row, (shard, local) in enumerate(zip(shards, local_rows)):
        assert partition.global_rows(shard)[local] == row


@given(partitions)
def test_sizes_match_the_rows_of_each_shard(partition):
    assert partition.sizes == tuple(
        len(partition.global_rows(shard))
        for shard in range(partition.num_shards)
    )


@given(st.integers(0, 60), st.integers(1, 9))
def test_div_and_mod_shards_differ_by_one_row_at_most(num_rows, num_shards):
    for partition in (
        RowPartition.div(num_rows, num_shards),
        RowPartition.mod(num_rows, num_shards),
    ):
        assert max(partition.sizes) == math.ceil(num_rows / num_shards)
        assert max(partition.sizes) - min(partition.sizes) <= 1
        assert list(partition.sizes) == sorted(partition.sizes, reverse=True)


def test_div_is_contiguous_and_mod_is_round_robin():
    assert RowPartition.div(7, 3).global_rows(1).tolist() == [3, 4]
    assert RowPartition.mod(7, 3).global_rows(1).tolist() == [1, 4]
    assert RowPartition.div(7, 3).is_contiguous
    assert not RowPartition.mod(7, 3).is_contiguous


def test_empty_shards_own_nothing():
    partition = RowPartition.from_sizes([0, 2, 0, 0, 1, 0])
    shards, local_rows = partition.locate([0, 1, 2])
    assert shards.tolist() == [1, 1, 4]
    assert local_rows.tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_locate_keeps_shape_and_dtype(dtype):
    shards, local_rows = RowPartition.div(6, 2).locate(
        np.array([[5, 0], [3, 2]], dtype)
    )
    assert shards.tolist() == [[1, 0], [1, 0]] and shards.dtype == np.int32
    assert local_rows.tolist() == [[2, 0], [0, 2]]
    assert local_rows.dtype == dtype


def test_locate_accepts_no_rows():
    shards, local_rows = RowPartition.div(6, 2).locate([])
    assert shards.shape == local_rows.shape == (0,)


@pytest.mark.parametrize("row", [-1, 6, 2**40])
def test_an_out_of_range_row_raises(row):
    with pytest.raises(ValueError, match=f"Row {row} is outside .* 6 rows"):
        RowPartition.div(6, 2).locate([0, row])


def test_non_integer_rows_raise():
    with pytest.raises(TypeError, match="integers.*float64"):
        RowPartition.div(6, 2).locate([0.5])


def test_equal_partitions_are_equal_and_hashable():
    assert RowPartition.from_sizes([3, 2]) == RowPartition.div(5, 2)
    assert RowPartition.div(5, 2) != RowPartition.mod(5, 2)
    assert len({RowPartition.div(5, 2), RowPartition.div(5, 2)}) == 1


@pytest.mark.parametrize(
    "placement, offsets, words",
    [
        ("round", (0, 4), "one of"),
        ("offsets", (0,), "at least two numbers"),
        ("offsets", (1, 4), "start at 0"),
        ("offsets", (0, 4, 3), "do not decrease"),
        ("div", (0, 1, 4), "even for placement 'div'"),
        ("mod", (0, 1, 4), "even for placement 'mod'"),
    ],
)
def test_invalid_offsets_raise(placement, offsets, words):
    with pytest.raises(ValueError, match=words):
        RowPartition(placement, offsets)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: RowPartition.div(5, 0), "`num_shards` must be at least 1"),
        (lambda: RowPartition.mod(-1, 2), "`num_rows` must be at least 0"),
        (lambda: RowPartition.from_sizes([]), "`sizes` must be not empty"),
        (lambda: RowPartition.from_sizes([-1]), "`sizes` must be at least 0"),
        (lambda: RowPartition.div(5, 2).global_rows(2), "at most 1"),
    ],
)
def test_invalid_numbers_raise(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda rows: (rows % 3, rows // 3), "row 2 outside the shards"),
        (lambda rows: (rows % 2, rows), "row 3 outside the shards"),
        (lambda rows: (rows * 0 - 1, rows), "row 0 outside the shards"),
        (
            lambda rows: (rows % 2, rows * 0),
            "no global row for local row 1 of shard 0",
        ),
    ],
)
def test_a_callable_that_loses_rows_raises(function, words):
    with pytest.raises(ValueError, match=words):
        RowPartition.from_callable(function, [3, 2])


def test_a_function_requires_the_callable_placement():
    with pytest.raises(TypeError, match="`function` must be callable"):
        RowPartition("callable", (0, 4))
    with pytest.raises(TypeError, match="`function` must be callable"):
        RowPartition("mod", (0, 4), lambda rows: (rows * 0, rows))
