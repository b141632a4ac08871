"""Tests how keys are assigned to parts, and the order of evicted keys."""

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap.embedding import key_editor
from tf_layoutmap.vocabulary import bucket_layout


@pytest.mark.parametrize(
    ("keys", "evicted", "expected"),
    [
        ([], [], []),
        ([5], [], []),
        ([9, -3, 5, 9, 7], [5, 9, -3], [9, -3, 5]),
        ([bucket_layout.EMPTY_KEY, 2**63 - 1], [2**63 - 1], [2**63 - 1]),
    ],
)
def test_evicted_keys_are_in_the_order_of_the_arguments(
    keys, evicted, expected
):
    ordered = key_editor._in_order_of(
        tf.constant(keys, tf.int64), tf.constant(evicted, tf.int64)
    )
    assert ordered.dtype == tf.int64
    assert ordered.numpy().tolist() == expected


@pytest.mark.parametrize("stops", [[8], [3, 8], [1, 3, 8]])
def test_each_key_is_written_in_exactly_one_part(stops):
    keys = np.arange(-50, 50, dtype=np.int64)
    buckets = [range(*ends) for ends in zip([0, *stops], stops)]
    places = key_editor._places_in_parts(keys, buckets, 8)
    of_keys = bucket_layout.buckets_of(keys, 8)
    for part, place in zip(buckets, places, strict=True):
        assert set(of_keys[place]) <= set(part)
    assert sorted(np.concatenate([keys[place] for place in places])) == list(
        keys
    )
