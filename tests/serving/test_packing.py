"""Tests `tf_layoutmap.deltas.served.packing`, which stores rows as bytes."""

import hypothesis.extra.numpy
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tf_layoutmap.deltas.served import packing
from tf_layoutmap.deltas.served.packing import RowFormat
from tf_layoutmap.serving import row_gathers

ROWS = st.integers(1, 9).flatmap(
    lambda dim: hypothesis.extra.numpy.arrays(
        np.float32,
        st.tuples(st.integers(0, 6), st.just(dim)),
        elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=True),
    )
)


@given(rows=ROWS, kind=st.sampled_from(["int8", "int4"]))
def test_the_error_is_at_most_half_a_quantization_step(rows, kind):
    form = RowFormat(kind, rows.shape[1])
    stored = packing.pack(rows, form)
    assert stored.shape == (len(rows), form.width)
    assert stored.nbytes == len(rows) * form.row_bytes
    found = packing.unpack(stored, form).astype(np.float64)
    for row, one in zip(rows.astype(np.float64), found):
        step = (row.max() - row.min()) / form.highest_code
        # The scale, the product and the sum are each rounded to float32.
        rounding = 4e-7 * np.abs(row).max() + 2e-38
        assert np.abs(one - row).max() <= step / 2 + rounding


@given(rows=ROWS)
def test_constant_rows_are_bitwise_identical(rows):
    rows = np.repeat(rows[:, :1], rows.shape[1], axis=1)
    for kind in ("int8", "int4"):
        form = RowFormat(kind, rows.shape[1])
        np.testing.assert_array_equal(
            packing.unpack(packing.pack(rows, form), form), rows
        )


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dim", [1, 2, 5, 8])
def test_integers_equal_to_codes_are_bitwise_identical(kind, dim):
    form = RowFormat(kind, dim)
    rows = (
        np.random.default_rng(0)
        .integers(0, form.highest_code, [20, dim], endpoint=True)
        .astype(np.float32)
    )
    rows[:, 0], rows[:, -1] = form.highest_code, 0.0
    np.testing.assert_array_equal(
        packing.unpack(packing.pack(rows, form), form), rows
    )


def test_float32_rows_are_stored_without_a_copy():
    rows = np.array([[np.nan, np.inf]], np.float32)
    form = packing.choose("float32", "float32", 2)
    assert packing.pack(rows, form) is rows


def test_float16_keeps_non_finite_values_and_raises_on_overflow():
    form = RowFormat("float16", 2)
    rows = np.array([[np.nan, -np.inf], [1.5, 65504.0]], np.float32)
    np.testing.assert_array_equal(
        packing.unpack(packing.pack(rows, form), form), rows
    )
    with pytest.raises(
        packing.UnfitRowError,
        match="Row 1 holds -70000.0 in "
        "column 0, which exceeds the largest float16 number",
    ):
        packing.pack(np.array([[1, 2], [-7e4, 3]], np.float32), form)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_non_finite_row_raises(kind, bad):
    rows = np.array([[1, 2], [3, bad]], np.float32)
    with pytest.raises(
        packing.UnfitRowError,
        match=("Row 1 holds .* in column 1, which is not finite"),
    ):
        packing.pack(rows, RowFormat(kind, 2))


def test_a_range_that_overflows_float32_raises():
    rows = np.array([[0, 1], [-3e38, 3e38]], np.float32)
    with pytest.raises(packing.UnfitRowError, match="Row 1 .* differs from"):
        packing.pack(rows, RowFormat("int8", 2))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("largest", [1e-44, 1e-40, 1e-37, 1e-36, 1e-35, 1e-30])
def test_small_rows_are_within_half_a_quantization_step_in_a_graph(
    kind, largest
):
    """Uses a graph, because TensorFlow's threads flush subnormals to zero."""
    rows = (
        np.random.default_rng(0)
        .uniform(-largest, largest, [200, 8])
        .astype(np.float32)
    )
    rows[0, :4] = 0.0
    form = RowFormat(kind, 8)
    stored = tf.Variable(packing.pack(rows, form))
    found = (
        tf.function(lambda ids: row_gathers.gather_unpacked(stored, ids, form))(
            tf.range(200, dtype=tf.int64)
        )
        .numpy()
        .astype(np.float64)
    )
    rows = rows.astype(np.float64)
    step = np.ptp(rows, axis=1, keepdims=True) / form.highest_code
    rounding = 4e-7 * np.abs(rows).max(axis=1, keepdims=True)
    assert (np.abs(found - rows) <= step / 2 + rounding + 2e-38).all()


@pytest.mark.parametrize(
    ("kind", "dim", "ratio"),
    [("int8", 64, 0.30), ("int4", 64, 0.17), ("float16", 7, 0.5)],
)
def test_the_size_matches_the_documented_ratio(kind, dim, ratio):
    assert packing.choose(kind, "float32", dim).row_bytes <= ratio * 4 * dim


def test_rows_that_would_grow_are_not_quantized():
    assert packing.choose("int8", "float32", 2).kind == "float32"
    assert packing.choose("int8", "float32", 3).kind == "int8"
    assert packing.choose("int8", "bfloat16", 8).kind == "bfloat16"
    assert packing.choose("int4", "bfloat16", 8).kind == "int4"
    assert packing.choose("float16", "bfloat16", 8).kind == "bfloat16"
