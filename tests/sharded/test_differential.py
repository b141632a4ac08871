"""Random programs run beside numpy and give the same table."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharded.tables import make_table

# The twin of each scatter verb. Whole numbers and powers of two keep float32
# exact, so tables are compared with ==.
TWINS = {
    "scatter_add": lambda t, ids, v: np.add.at(t, ids, v),
    "scatter_sub": lambda t, ids, v: np.subtract.at(t, ids, v),
    "scatter_mul": lambda t, ids, v: np.multiply.at(t, ids, v),
    "scatter_div": lambda t, ids, v: np.divide.at(t, ids, v),
    "scatter_min": lambda t, ids, v: np.minimum.at(t, ids, v),
    "scatter_max": lambda t, ids, v: np.maximum.at(t, ids, v),
    "scatter_update": lambda t, ids, v: t.__setitem__(ids, v),
}
pytestmark = pytest.mark.usefixtures("each_route")
FACTORS = ("scatter_mul", "scatter_div")


@st.composite
def tables(draw):
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(
        lambda sizes: sum(sizes) > 0))
    row_shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    seed = draw(st.integers(0, 2**16))
    values = np.random.default_rng(seed).integers(
        -8, 8, (sum(sizes), *row_shape)).astype(np.float32)
    return values, sizes


def draw_ids(data, num_rows, unique=False):
    ids = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=9,
                             unique=unique))
    ids = np.array(ids, data.draw(st.sampled_from([np.int32, np.int64])))
    if len(ids) % 2 == 0 and data.draw(st.booleans()):
        ids = ids.reshape(2, -1)
    return ids


def draw_values(data, shape, factors=False):
    generator = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    choices = [0.5, 1, 2, -1] if factors else np.arange(-4, 5)
    return generator.choice(choices, shape).astype(np.float32)


@settings(max_examples=60)
@given(tables(), st.data())
def test_any_program_of_reads_and_writes_equals_numpy(table, data):
    twin, sizes = table[0].copy(), table[1]
    sharded = make_table(twin, sizes)
    for _ in range(data.draw(st.integers(1, 12))):
        verb = data.draw(st.sampled_from(
            [*TWINS, "assign", "assign_add", "assign_sub", "gather"]))
        if verb == "gather":
            ids = draw_ids(data, len(twin))
            np.testing.assert_array_equal(sharded.sparse_read(ids), twin[ids])
        elif verb.startswith("assign"):
            value = draw_values(data, twin.shape)
            assert getattr(sharded, verb)(value) is sharded
            twin = {"assign": value, "assign_add": twin + value,
                    "assign_sub": twin - value}[verb]
        else:
            ids = draw_ids(data, len(twin), unique=verb == "scatter_update")
            shape = (ids.shape + twin.shape[1:]
                     if data.draw(st.booleans()) else ())
            value = draw_values(data, shape, verb in FACTORS)
            assert getattr(sharded, verb)(
                tf.IndexedSlices(value, ids)) is sharded
            TWINS[verb](twin, ids, value)
        np.testing.assert_array_equal(sharded.numpy(), twin)


@st.composite
def basic_indices(draw, shape):
    """An index of ints, slices, new axes and at most one ellipsis."""
    num_used = draw(st.integers(0, len(shape)))
    items = []
    for axis in range(num_used):
        size = shape[axis]
        bound = st.one_of(st.none(), st.integers(-size - 3, size + 3))
        kinds = [st.builds(slice, bound, bound, st.one_of(
            st.none(), st.integers(1, 4), st.integers(-4, -1)))]
        if size:
            kinds.append(st.integers(-size, size - 1))
        items.append(draw(st.one_of(kinds)))
    if draw(st.booleans()):
        # Behind the ellipsis, what is used counts from the last axis: keep
        # it in front, or use every axis.
        place = len(items) if num_used < len(shape) else draw(
            st.integers(0, len(items)))
        items.insert(place, Ellipsis)
    for _ in range(draw(st.integers(0, 2))):
        items.insert(draw(st.integers(0, len(items))), None)
    return items[0] if len(items) == 1 else tuple(items)


@settings(max_examples=400)
@given(tables(), st.data())
def test_any_basic_index_equals_numpy(table, data):
    values, sizes = table
    index = data.draw(basic_indices(values.shape))
    found, wanted = make_table(values, sizes)[index], values[index]
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)


@settings(max_examples=150)
@given(tables(), st.data())
def test_row_numbers_and_masks_index_like_numpy(table, data):
    values, sizes = table
    num_rows = len(values)
    kind = data.draw(st.sampled_from(["list", "array", "tensor", "mask"]))
    if kind == "mask":
        index = np.array(data.draw(st.lists(
            st.booleans(), min_size=num_rows, max_size=num_rows)), bool)
        given_index = data.draw(st.sampled_from(
            [index, index.tolist(), tf.constant(index)]))
    else:
        index = np.array(data.draw(st.lists(
            st.integers(-num_rows, num_rows - 1), max_size=6)), np.int64)
        given_index = {"list": index.tolist(), "array": index,
                       "tensor": tf.constant(index)}[kind]
    sharded = make_table(values, sizes)
    np.testing.assert_array_equal(sharded[given_index], values[index])
    if values.ndim > 1:
        np.testing.assert_array_equal(
            sharded[given_index, ..., :1], values[index, ..., :1])


@settings(max_examples=100)
@given(tables(), st.data())
def test_slices_with_tensor_bounds_equal_numpy(table, data):
    values, sizes = table
    size = len(values)
    bound = st.one_of(st.none(), st.integers(-size - 3, size + 3))
    start, stop = data.draw(bound), data.draw(bound)
    step = data.draw(st.sampled_from([-3, -1, 1, 2]))
    found = make_table(values, sizes)[
        start if start is None else tf.constant(start):
        stop if stop is None else tf.constant(stop, tf.int64):
        tf.constant(step)]
    np.testing.assert_array_equal(found, values[start:stop:step])


def test_a_traced_program_equals_the_eager_one(values, sizes):
    def program(table, ids, delta):
        table.scatter_add(tf.IndexedSlices(delta, ids))
        table.scatter_update(tf.IndexedSlices(delta[:1], ids[:1]))
        table.assign_sub(tf.ones([10, 2]))
        return tf.concat([table.sparse_read(ids), table[1:7:2],
                          table[ids[0]][None], table[::-1] * 2], axis=0)

    eager, traced = make_table(values, sizes), make_table(values, sizes)
    step = tf.function(lambda ids, delta: program(traced, ids, delta))
    generator = np.random.default_rng(3)
    for num_ids in (1, 6, 3):
        ids = tf.constant(generator.integers(0, 10, num_ids))
        delta = tf.constant(
            generator.integers(-4, 5, (num_ids, 2)).astype(np.float32))
        np.testing.assert_array_equal(
            step(ids, delta), program(eager, ids, delta))
        np.testing.assert_array_equal(traced.numpy(), eager.numpy())
