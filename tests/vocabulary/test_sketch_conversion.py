"""Tests the conversion of admission sketches to another capacity."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import vocabulary as reference
from tf_layoutmap.vocabulary import bucket_layout, sketch_conversion

CAPACITIES = st.one_of(
    st.integers(1, 300), st.sampled_from([2048, 8192, 9000, 20_000])
)


def counts_of(keys, cells, num_buckets):
    """Returns the count of each key in a sketch."""
    segments, _, num_cells = cells.shape
    found = []
    for key in keys:
        high = reference.mix(key) >> 32
        segment = (high * num_buckets >> 32) // (num_buckets // segments)
        bits = reference.mix(reference.mix(key) + 0x9E3779B97F4A7C15)
        found.append(
            min(
                cells[segment, 0, (bits & 2**32 - 1) * num_cells >> 32],
                cells[segment, 1, (bits >> 32) * num_cells >> 32],
            )
        )
    return np.array(found, np.int64)


@given(
    old=CAPACITIES,
    new=CAPACITIES,
    seed=st.integers(0, 2**32 - 1),
    num_uses=st.integers(0, 2000),
)
def test_counts_never_decrease(old, new, seed, num_uses):
    rng = np.random.default_rng(seed)
    pool = rng.integers(-(2**62), 2**62, 60)
    one = reference.Vocabulary(old, admission="count", min_count=255)
    keys = rng.choice(pool, num_uses).tolist()
    one.admit(keys, 1, 1)
    cells, sums = one.sketch()
    num_buckets = bucket_layout.num_buckets_for(new)
    found, new_sums = sketch_conversion.convert(cells, sums, num_buckets)
    assert found.shape == bucket_layout.sketch_shape(num_buckets)
    assert (found.dtype, new_sums.dtype) == (np.uint8, np.int64)
    assert ((new_sums >= 0) & (new_sums < found.shape[2] // 2)).all()
    before = counts_of(pool.tolist(), cells, one.num_buckets)
    after = counts_of(pool.tolist(), found, num_buckets)
    assert (after >= before).all()
    if (
        found.shape[0] >= cells.shape[0]
        and found.shape[2] % cells.shape[2] == 0
    ):
        np.testing.assert_array_equal(after, before)
    if num_buckets == one.num_buckets:
        np.testing.assert_array_equal(found, cells)
        np.testing.assert_array_equal(new_sums, sums)
    # The reference moves the cells with loops.
    one.resize(new, 2)
    expected, expected_sums = one.sketch()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(new_sums, expected_sums)


@pytest.mark.parametrize(("size", "old"), [(3, 7), (256, 1000), (1000, 256)])
def test_all_hashes_of_a_new_cell_are_in_the_compared_old_cells(size, old):
    hashes = np.random.default_rng(0).integers(0, 2**32, 5000).tolist()
    values = np.random.default_rng(1).integers(0, 255, [1, 2, old])
    found = sketch_conversion._largest_of_overlapping(values, size, axis=2)
    for one in hashes:
        assert found[0, 0, one * size >> 32] >= values[0, 0, one * old >> 32]
