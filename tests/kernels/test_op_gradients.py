"""The gradient of LookupRows matches a tape over plain TensorFlow ops."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cases
from tests.reference import lookup, partition
from tf_layoutmap._core import ops

_OP = "LayoutMap>LookupRows"


def plain_gradients(table, ids, row_splits, gains, coefficients):
    """Returns gradients of a dense table and gains, computed by a tape."""
    table, gains = tf.constant(table), tf.constant(gains)
    with tf.GradientTape() as tape:
        tape.watch([table, gains])
        activations = tf.math.unsorted_segment_sum(
            tf.gather(table, ids) * gains[:, tf.newaxis],
            lookup.sample_of(row_splits),
            len(row_splits) - 1,
        )
        loss = tf.reduce_sum(activations * coefficients)
    of_table, of_gains = tape.gradient(loss, [table, gains])
    return tf.convert_to_tensor(of_table).numpy(), of_gains.numpy()


def op_gradients(variables, sharding, ids, row_splits, gains, coefficients):
    gains = tf.convert_to_tensor(gains)
    with tf.GradientTape() as tape:
        tape.watch([*variables, gains])
        activations = ops.lookup_rows(
            shards=cases.handles(variables),
            ids=ids,
            row_splits=row_splits,
            gains=gains,
            dim=variables[0].shape[1],
            **sharding.attrs(),
        )
        loss = tf.reduce_sum(activations * coefficients)
    *of_shards, of_gains = tape.gradient(loss, [*variables, gains])
    return of_shards, of_gains


def integer_rows(table) -> np.ndarray:
    """Rounds a table to integers, so that sums are exact in any order."""
    return np.round(table * 8).astype(np.float32)


def check(sharding, ids, row_splits, *, graph, dim=3):
    table = integer_rows(cases.floats(sharding.num_rows, dim))
    gains = integer_rows(cases.floats(len(ids), seed=1))
    coefficients = integer_rows(cases.floats(len(row_splits) - 1, dim, seed=2))
    variables = cases.shard_variables(table, sharding)

    def call(ids, row_splits, gains, coefficients):
        return op_gradients(
            variables, sharding, ids, row_splits, gains, coefficients
        )

    if graph:
        call = tf.function(
            call,
            input_signature=[
                tf.TensorSpec([None], ids.dtype),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None], tf.float32),
                tf.TensorSpec([None, dim], tf.float32),
            ],
        )
    of_shards, of_gains = call(ids, row_splits, gains, coefficients)
    of_table, of_gains_expected = plain_gradients(
        table, ids, row_splits, gains, coefficients
    )
    expected = partition.split(of_table, sharding.offsets, sharding.placement)
    for found, wanted in zip(of_shards, expected, strict=True):
        assert isinstance(found, tf.IndexedSlices)
        assert found.dense_shape.numpy().tolist() == list(wanted.shape)
        np.testing.assert_array_equal(tf.convert_to_tensor(found), wanted)
    np.testing.assert_array_equal(of_gains, of_gains_expected)


@given(sharding=cases.shardings(), data=st.data())
def test_gradients_of_shards_and_gains(sharding, data):
    ids, row_splits = data.draw(cases.ragged(sharding.num_rows))
    check(sharding, ids, row_splits, graph=False)


@pytest.mark.parametrize("dtype", cases.ID_TYPES)
@pytest.mark.parametrize(
    "sharding",
    [
        cases.Sharding("div", (0, 4, 7, 10)),
        cases.Sharding("mod", (0, 4, 7, 10)),
        cases.Sharding("offsets", (0, 0, 9, 10)),
        cases.Sharding("div", (0, 10)),
    ],
    ids=lambda sharding: f"{sharding.placement}-{sharding.num_shards}",
)
def test_gradients_work_in_a_function(sharding, dtype):
    check(
        sharding,
        np.array([9, 0, 3, 9, 9, 7], dtype),
        np.array([0, 0, 3, 5, 6]),
        graph=True,
    )


def test_gradients_of_an_empty_batch_are_empty():
    sharding = cases.Sharding("div", (0, 2, 4))
    for graph in (False, True):
        check(sharding, np.zeros(0, np.int64), np.array([0, 0, 0]), graph=graph)


def test_indexed_slices_hold_one_local_row_per_id():
    sharding = cases.Sharding("mod", (0, 3, 5))
    variables = cases.shard_variables(cases.floats(5, 2), sharding)
    of_shards, _ = op_gradients(
        variables,
        sharding,
        np.array([4, 1, 4, 3]),
        np.array([0, 2, 4]),
        np.ones(4, np.float32),
        np.array([[1, 2], [3, 4]], np.float32),
    )
    assert of_shards[0].indices.numpy().tolist() == [2, 2]
    assert of_shards[0].values.numpy().tolist() == [[1, 2], [3, 4]]
    assert of_shards[1].indices.numpy().tolist() == [0, 1]
    assert of_shards[1].values.numpy().tolist() == [[1, 2], [3, 4]]


def lookup_ops(function) -> int:
    """Returns the number of LookupRows ops in an optimized graph."""
    graph = function.get_concrete_function().graph
    must_run = list(graph.control_outputs) + [t.op for t in graph.outputs]
    seen, found = set(), 0
    while must_run:
        op = must_run.pop()
        if op.name not in seen:
            seen.add(op.name)
            found += op.type == _OP
            must_run += [t.op for t in op.inputs] + list(op.control_inputs)
    return found


def test_an_unused_gradient_of_gains_is_pruned():
    variable = tf.Variable(tf.ones([4, 3]))

    def gradients(of_gains):
        gains = tf.ones([2])
        with tf.GradientTape() as tape:
            tape.watch([variable, gains] if of_gains else [variable])
            found = ops.lookup_rows(
                shards=[variable.handle],
                offsets=[0, 4],
                ids=[1, 2],
                row_splits=[0, 2],
                gains=gains,
                placement="div",
                dim=3,
            )
        wanted = [variable, gains] if of_gains else [variable]
        return tape.gradient(found, wanted)

    # The forward pass has one lookup. The gradient of the gains adds a second
    # lookup.
    assert lookup_ops(tf.function(lambda: gradients(False))) == 1
    assert lookup_ops(tf.function(lambda: gradients(True))) == 2


def test_reads_are_ordered_before_later_writes():
    variable = tf.Variable(tf.ones([4, 3]))

    def read():
        return ops.lookup_rows(
            shards=[variable.handle],
            offsets=[0, 4],
            ids=[1],
            row_splits=[0, 1],
            gains=[1.0],
            placement="div",
            dim=3,
        )

    @tf.function
    def read_write_read():
        before = read()
        variable.assign_add(tf.ones([4, 3]))
        return before, read()

    for turn in range(1, 4):
        before, after = read_write_read()
        assert before.numpy().tolist() == [[turn] * 3]
        assert after.numpy().tolist() == [[turn + 1] * 3]
