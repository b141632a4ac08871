"""Tests the settings of an open vocabulary and the placement of its keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.reference import vocabulary as reference
from tf_layoutmap._core.ops import native
from tf_layoutmap.vocabulary import bucket_layout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "`capacity` must be at least 1"),
        ({"capacity": 2**32}, "`capacity` must be at most"),
        (
            {"min_count": 0, "admission": "count"},
            "`min_count` must be at least 1",
        ),
        ({"min_count": 256, "admission": "count"}, "at most 255"),
        (
            {"min_count": 2},
            "`min_count` must be left out unless admission='count'",
        ),
        ({"admission": "often"}, "`admission` must be one of"),
        ({"probability": 0.5}, "left out unless admission='probability'"),
        (
            {"probability": 1.5, "admission": "probability"},
            r"a number in \[0, 1\]",
        ),
        (
            {"probability": float("nan"), "admission": "probability"},
            "a number in",
        ),
        ({"evict": "fifo"}, "`evict` must be one of"),
        ({"half_life_steps": 3}, "left out unless evict='lfu'"),
        ({"half_life_steps": -3, "evict": "lfu"}, "must be at least 1"),
        ({"ttl_steps": -1}, "`ttl_steps` must be at least 1"),
        ({"oov_embedding": "ones"}, "`oov_embedding` must be one of"),
        ({"on_full": "grow"}, "`on_full` must be one of"),
        ({"on_full": "error"}, '`evict` must be "none" with on_full="error"'),
        ({"seed": 2**63}, "`seed` must be at most"),
    ],
)
def test_invalid_settings_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        tlm.vocabulary.OpenVocabulary(**{"capacity": 100, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"capacity": "many"},
        {"capacity": 10.0},
        {"capacity": True},
        {"ttl_steps": 1.5},
        {"seed": None},
    ],
)
def test_non_numeric_settings_raise(arguments):
    with pytest.raises(TypeError, match="must be an integer"):
        tlm.vocabulary.OpenVocabulary(**{"capacity": 100, **arguments})


@given(capacity=st.one_of(st.integers(1, 3000), st.integers(1, 2**32 - 4096)))
def test_the_number_of_buckets_matches_the_core(capacity):
    num_buckets = bucket_layout.num_buckets_for(capacity)
    assert num_buckets == reference.num_buckets_for(capacity)
    assert bucket_layout.num_segments(num_buckets) == reference.num_segments(
        num_buckets
    )
    assert capacity <= 8 * num_buckets < 2**32
    assert num_buckets % bucket_layout.num_segments(num_buckets) == 0
    if capacity < 3000:
        core = native.Vocabulary(capacity, admission="count")
        assert core.num_rows == 8 * num_buckets
        assert core.state()["sketch"].size == np.prod(
            bucket_layout.sketch_shape(num_buckets)
        )
        assert (
            tlm.vocabulary.OpenVocabulary(capacity).num_rows
            == core.num_rows + 1
        )


@given(num_buckets=st.integers(1, 400), num_shards=st.integers(1, 9))
def test_shards_do_not_split_buckets(num_buckets, num_shards):
    buckets = bucket_layout.bucket_partition(num_buckets, num_shards)
    rows = bucket_layout.row_partition(
        bucket_layout.bucket_partition(num_buckets, num_shards)
    )
    assert rows.num_rows == 8 * num_buckets + 1
    assert [one // 8 for one in rows.offsets] == list(buckets.offsets)


@pytest.mark.parametrize("capacity", [1, 64, 100, 5000, 100_000])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 64])
def test_shards_of_servers_do_not_split_segments(capacity, num_shards):
    num_buckets = bucket_layout.num_buckets_for(capacity)
    segments = bucket_layout.num_segments(num_buckets)
    segments_by_shard = bucket_layout.segment_partition(
        num_buckets, min(num_shards, segments)
    )
    assert sum(segments_by_shard.sizes) == num_buckets
    assert min(segments_by_shard.sizes) > 0
    assert all(
        first % (num_buckets // segments) == 0
        for first in segments_by_shard.offsets
    )


def test_a_segment_has_at_least_as_many_buckets_as_are_probed():
    probes = bucket_layout.MAX_PROBES
    assert bucket_layout.num_segments(2 * probes - 1) == 1
    assert bucket_layout.num_segments(2 * probes) == 2
    assert bucket_layout.num_segments(4 * probes - 1) == 2
    assert bucket_layout.num_segments(4 * probes) == 4
    most = bucket_layout.MAX_SEGMENTS
    assert bucket_layout.num_segments(4 * most * probes) == most


@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    capacity=st.integers(1, 2**32 - 4096),
)
def test_buckets_of_keys_match_the_reference(keys, capacity):
    num_buckets = bucket_layout.num_buckets_for(capacity)
    found = bucket_layout.buckets_of(np.array(keys, np.int64), num_buckets)
    assert found.tolist() == [
        (reference.mix(key) >> 32) * num_buckets >> 32 for key in keys
    ]
