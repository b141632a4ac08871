"""Checks that slices that are split into parts select the same elements."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap.layout.ops.strided_slices import (
    arguments,
    expand_slice,
    normalized,
)

NAMES = {None: "new_axis", Ellipsis: "ellipsis"}
ENTRIES = [
    None,
    Ellipsis,
    0,
    -1,
    slice(None),
    slice(1, -1),
    slice(None, 2),
    slice(-9, 9, 2),
    slice(None, None, -1),
    slice(1, None, -2),
]


def packed(entries):
    """Returns the arguments of TensorFlow's StridedSlice for `x[entries]`."""
    begin, end, strides = [], [], []
    masks = dict.fromkeys(
        (
            "begin_mask",
            "end_mask",
            "ellipsis_mask",
            "new_axis_mask",
            "shrink_axis_mask",
        ),
        0,
    )
    for i, entry in enumerate(entries):
        part = entry if isinstance(entry, slice) else slice(0, 0)
        if isinstance(entry, int):
            part = slice(entry, entry + 1)
            masks["shrink_axis_mask"] |= 1 << i
        elif not isinstance(entry, slice):
            masks[NAMES[entry] + "_mask"] |= 1 << i
        begin.append(part.start or 0)
        end.append(part.stop or 0)
        strides.append(part.step or 1)
        masks["begin_mask"] |= (part.start is None) << i
        masks["end_mask"] |= (part.stop is None) << i
    return (begin, end, strides), masks


@pytest.mark.parametrize("length", range(4))
def test_expanded_slices_match_numpy(length):
    x = np.arange(4 * 3 * 5).reshape(4, 3, 5)
    for entries in itertools.product(ENTRIES, repeat=length):
        if entries.count(Ellipsis) > 1:
            continue
        vectors, masks = packed(entries)
        parts, added = expand_slice(3, *vectors, **masks)
        parts = list(map(normalized, parts, x.shape))
        selected = x[
            tuple(
                slice(part.start, part.end, part.step)
                if part.index is None
                else part.index
                for part in parts
            )
        ]
        for axis in added:
            selected = np.expand_dims(selected, axis)
        np.testing.assert_array_equal(
            selected, x[entries], err_msg=str(entries)
        )


@pytest.mark.parametrize(
    "entries",
    [
        (None, 1, slice(1, 3)),
        (slice(None, None, -1), None, -1),
        (slice(1, None, -1), Ellipsis, slice(-2, None)),
    ],
)
def test_arguments_are_valid_for_strided_slice(entries):
    x = np.arange(4 * 3 * 5).reshape(4, 3, 5)
    vectors, masks = packed(entries)
    parts, _ = expand_slice(3, *vectors, **masks)
    parts = list(map(normalized, parts, x.shape))
    without_new = tuple(e for e in entries if e is not None)
    np.testing.assert_array_equal(
        tf.strided_slice(x, **arguments(parts)), x[without_new]
    )


def test_slices_that_tensorflow_rejects_are_not_expanded():
    assert expand_slice(1, [0, 0], [1, 1], [1, 1]) is None
    assert expand_slice(2, [0, 0], [0, 0], [1, 1], ellipsis_mask=3) is None
