"""Invalid indices raise errors; test_differential.py covers valid indices."""

import numpy as np
import pytest
import tensorflow as tf

from tests.sharded.tables import make_table


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "index, error, words",
    [
        (10, IndexError, "Row 10 is outside table 'emb' with 10 rows"),
        (-11, IndexError, "Row -11 is outside table 'emb'"),
        ((0, 0, 0), IndexError, "at most 2 items for table 'emb'"),
        ((Ellipsis, 0, Ellipsis), IndexError, "at most one"),
        (slice(None, None, 0), ValueError, "zero"),
        ("a", TypeError, "ints, slices"),
        (1.5, TypeError, "ints, slices"),
        (True, TypeError, "single bool"),
        (tf.constant(True), TypeError, "single bool"),
        ((0, [1, 0]), TypeError, "rank 1 or more must index axis 0"),
        ((None, [1, 0]), TypeError, "New axes must come after"),
        ([True] * 9, IndexError, r"must have shape \(10,\)"),
        (np.ones((10, 3), bool), IndexError, r"must have shape \(10, 2\)"),
        (
            tf.constant(10),
            tf.errors.InvalidArgumentError,
            "outside table 'emb'",
        ),
        ([0, -11], tf.errors.InvalidArgumentError, "outside table 'emb'"),
    ],
)
def test_an_invalid_index_raises(values, sizes, index, error, words):
    with pytest.raises(error, match=words):
        make_table(values, sizes)[index]


def test_a_boolean_mask_of_elements_selects_elements(values, sizes):
    mask = values % 3 == 0
    np.testing.assert_array_equal(make_table(values, sizes)[mask], values[mask])


def test_tensor_indices_work_in_functions(values, sizes):
    table = make_table(values, sizes)
    row = tf.function(lambda i: table[i, 1])
    rows = tf.function(lambda i, mask: (table[i:], table[mask], table[mask, 0]))
    assert row(tf.constant(-3)) == values[-3, 1]
    mask = values[:, 0] > 7
    for found, wanted in zip(
        rows(tf.constant(6), tf.constant(mask)),
        (values[6:], values[mask], values[mask, 0]),
    ):
        np.testing.assert_array_equal(found, wanted)


def test_a_mask_of_unknown_length_is_checked_at_run_time(values, sizes):
    table = make_table(values, sizes)
    pick = tf.function(
        lambda mask: table[mask],
        input_signature=[tf.TensorSpec([None], tf.bool)],
    )
    np.testing.assert_array_equal(pick([True] * 10), values)
    with pytest.raises(tf.errors.InvalidArgumentError, match="A mask for"):
        pick([True] * 9)


def test_reading_one_row_does_not_read_the_others(values):
    table = make_table(values, [4, 6])
    with tf.GradientTape() as tape:
        row = table[5]
    gradients = tape.gradient(row, table.variables)
    assert gradients[0] is None
    assert gradients[1].indices.numpy().tolist() == [1]
