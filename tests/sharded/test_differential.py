"""Random programs have equal results on a table and in numpy."""

import os

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharded.programs import DTYPES, Program, values_of
from tests.sharded.tables import cuts, make_table
from tf_layoutmap.sharded import ShardedVariable

EXPLORE = os.environ.get("TF_LAYOUTMAP_EXPLORE") == "1"

pytestmark = pytest.mark.usefixtures("each_route")


@st.composite
def tables(draw):
    """Draws values and a table of these values with a random sharding."""
    row_shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    shape = (draw(st.integers(1, 12)), *row_shape)
    values = values_of(
        np.random.default_rng(draw(st.integers(0, 2**16))),
        shape,
        draw(st.sampled_from(DTYPES)),
    )
    return values, ShardedVariable.create(
        values, name="emb", **draw(cuts(shape))
    )


def examples(by_default, explored):
    """Sets the number of examples of a test."""
    return settings(max_examples=explored if EXPLORE else by_default)


# The tests of both routes together run 2 * (5 * 170 + 300) = 2,300 steps, or
# 17,200 steps with TF_LAYOUTMAP_EXPLORE=1.
@pytest.mark.exhaustive
@pytest.mark.slow
@examples(5, 40)
@given(tables(), st.integers(0, 2**16))
def test_any_program_of_reads_and_writes_equals_numpy(table, seed):
    assert Program(table[1], seed, is_traced=False).run(170) == 170


@pytest.mark.covering(1, 1)
@pytest.mark.slow
@examples(1, 6)
@given(tables(), st.integers(0, 2**16))
def test_any_traced_program_equals_numpy(table, seed):
    assert Program(table[1], seed, is_traced=True).run(300) == 300


@st.composite
def basic_indices(draw, shape):
    """Draws an index of ints, slices, new axes and at most one ellipsis."""
    num_used = draw(st.integers(0, len(shape)))
    items = []
    for axis in range(num_used):
        size = shape[axis]
        bound = st.one_of(st.none(), st.integers(-size - 3, size + 3))
        kinds = [
            st.builds(
                slice,
                bound,
                bound,
                st.one_of(st.none(), st.integers(1, 4), st.integers(-4, -1)),
            )
        ]
        if size:
            kinds.append(st.integers(-size, size - 1))
        items.append(draw(st.one_of(kinds)))
    if draw(st.booleans()):
        # Items after an ellipsis refer to the last axes. The ellipsis is
        # therefore the last item, unless the items use all axes.
        place = (
            len(items)
            if num_used < len(shape)
            else draw(st.integers(0, len(items)))
        )
        items.insert(place, Ellipsis)
    for _ in range(draw(st.integers(0, 2))):
        items.insert(draw(st.integers(0, len(items))), None)
    return items[0] if len(items) == 1 else tuple(items)


@examples(200, 400)
@given(tables(), st.data())
def test_any_basic_index_equals_numpy(table, data):
    values, sharded = table
    index = data.draw(basic_indices(values.shape))
    found, wanted = sharded[index], values[index]
    # `numpy()` is required: TensorFlow cannot convert a bfloat16 scalar to an
    # array.
    found = found.numpy()
    assert np.shape(found) == np.shape(wanted)
    np.testing.assert_array_equal(found, wanted)


@examples(75, 150)
@given(tables(), st.data())
def test_row_numbers_and_masks_index_like_numpy(table, data):
    values, sharded = table
    num_rows = len(values)
    kind = data.draw(st.sampled_from(["list", "array", "tensor", "mask"]))
    if kind == "mask":
        index = np.array(
            data.draw(
                st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)
            ),
            bool,
        )
        given_index = data.draw(
            st.sampled_from([index, index.tolist(), tf.constant(index)])
        )
    else:
        index = np.array(
            data.draw(
                st.lists(st.integers(-num_rows, num_rows - 1), max_size=6)
            ),
            np.int64,
        )
        given_index = {
            "list": index.tolist(),
            "array": index,
            "tensor": tf.constant(index),
        }[kind]
    np.testing.assert_array_equal(sharded[given_index], values[index])
    if values.ndim > 1:
        np.testing.assert_array_equal(
            sharded[given_index, ..., :1], values[index, ..., :1]
        )


@examples(50, 100)
@given(tables(), st.data())
def test_slices_with_tensor_bounds_equal_numpy(table, data):
    values, sharded = table
    size = len(values)
    bound = st.one_of(st.none(), st.integers(-size - 3, size + 3))
    start, stop = data.draw(bound), data.draw(bound)
    step = data.draw(st.sampled_from([-3, -1, 1, 2]))
    found = sharded[
        start if start is None else tf.constant(start) : stop
        if stop is None
        else tf.constant(stop, tf.int64) : tf.constant(step)
    ]
    np.testing.assert_array_equal(found, values[start:stop:step])


def test_a_traced_program_matches_eager_execution(values, sizes):
    def program(table, ids, delta):
        table.scatter_add(tf.IndexedSlices(delta, ids))
        table.scatter_update(tf.IndexedSlices(delta[:1], ids[:1]))
        table.assign_sub(tf.ones([10, 2]))
        return tf.concat(
            [
                table.sparse_read(ids),
                table[1:7:2],
                table[ids[0]][None],
                table[::-1] * 2,
            ],
            axis=0,
        )

    eager, traced = make_table(values, sizes), make_table(values, sizes)
    step = tf.function(lambda ids, delta: program(traced, ids, delta))
    generator = np.random.default_rng(3)
    for num_ids in (1, 6, 3):
        ids = tf.constant(generator.integers(0, 10, num_ids))
        delta = tf.constant(
            generator.integers(-4, 5, (num_ids, 2)).astype(np.float32)
        )
        np.testing.assert_array_equal(
            step(ids, delta), program(eager, ids, delta)
        )
        np.testing.assert_array_equal(traced.numpy(), eager.numpy())
