"""The op `AllFinite` equals numpy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tf_layoutmap._core import ops

FLOATS = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
    elements=st.floats(width=32),
    fill=st.sampled_from([0.0, -0.0, 3e38, 1e-45]),
)


@given(st.lists(FLOATS, min_size=1, max_size=5))
def test_the_op_equals_numpy(tensors):
    expected = all(np.isfinite(one).all() for one in tensors)
    assert ops.all_finite(tensors=tensors).numpy() == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_large_tensors(bad):
    tensors = [np.full([3, 9000], 3e38, np.float32) for _ in range(3)]
    assert ops.all_finite(tensors=tensors).numpy()
    for position in (0, 4095, 4096, 26999):
        for one in tensors:
            one.flat[position] = bad
            assert not ops.all_finite(tensors=tensors).numpy()
            one.flat[position] = -3e38


def test_the_shape_is_inferred():
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def run(values):
        found = ops.all_finite(tensors=[values, values])
        assert found.shape == []
        return found

    assert run(tf.ones([2, 3]))
    assert not run(tf.constant(np.nan))
