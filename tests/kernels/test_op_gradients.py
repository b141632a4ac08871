"""The gradient of LookupRows against a tape over plain TensorFlow."""

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
    """Of a dense table and of the gains, by gather and segment sum."""
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


def op_gradients(variables, cut, ids, row_splits, gains, coefficients):
    gains = tf.convert_to_tensor(gains)
    with tf.GradientTape() as tape:
        tape.watch([*variables, gains])
        activations = ops.lookup_rows(
            shards=cases.handles(variables),
            ids=ids,
            row_splits=row_splits,
            gains=gains,
            dim=variables[0].shape[1],
            **cut.attrs(),
        )
        loss = tf.reduce_sum(activations * coefficients)
    *of_shards, of_gains = tape.gradient(loss, [*variables, gains])
    return of_shards, of_gains


def whole(table) -> np.ndarray:
    """Small whole numbers: sums are exact in any order."""
    return np.round(table * 8).astype(np.float32)


def check(cut, ids, row_splits, *, graph, dim=3):
    table = whole(cases.floats(cut.num_rows, dim))
    gains = whole(cases.floats(len(ids), seed=1))
    coefficients = whole(cases.floats(len(row_splits) - 1, dim, seed=2))
    variables = cases.shard_variables(table, cut)

    def call(ids, row_splits, gains, coefficients):
        return op_gradients(
            variables, cut, ids, row_splits, gains, coefficients
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
    expected = partition.cut(of_table, cut.offsets, cut.placement)
    for found, wanted in zip(of_shards, expected, strict=True):
        assert isinstance(found, tf.IndexedSlices)
        assert found.dense_shape.numpy().tolist() == list(wanted.shape)
        np.testing.assert_array_equal(tf.convert_to_tensor(found), wanted)
    np.testing.assert_array_equal(of_gains, of_gains_expected)


@given(cut=cases.cuts(), data=st.data())
def test_gradients_of_shards_and_gains(cut, data):
    ids, row_splits = data.draw(cases.ragged(cut.num_rows))
    check(cut, ids, row_splits, graph=False)


@pytest.mark.parametrize("dtype", cases.ID_TYPES)
@pytest.mark.parametrize(
    "cut",
    [
        cases.Cut("div", (0, 4, 7, 10)),
        cases.Cut("mod", (0, 4, 7, 10)),
        cases.Cut("offsets", (0, 0, 9, 10)),
        cases.Cut("div", (0, 10)),
    ],
    ids=lambda cut: f"{cut.placement}-{cut.num_shards}",
)
def test_gradients_in_a_function(cut, dtype):
    check(
        cut,
        np.array([9, 0, 3, 9, 9, 7], dtype),
        np.array([0, 0, 3, 5, 6]),
        graph=True,
    )


def test_gradients_of_an_empty_batch():
    cut = cases.Cut("div", (0, 2, 4))
    for graph in (False, True):
        check(cut, np.zeros(0, np.int64), np.array([0, 0, 0]), graph=graph)


def test_slices_name_local_rows_one_per_id():
    cut = cases.Cut("mod", (0, 3, 5))
    variables = cases.shard_variables(cases.floats(5, 2), cut)
    of_shards, _ = op_gradients(
        variables,
        cut,
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
    """How many LookupRows a graph runs in the end."""
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


def test_the_gradient_of_gains_costs_nothing_where_it_is_not_asked_for():
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

    # The one of the forward pass; the gradient of gains reads the rows again.
    assert lookup_ops(tf.function(lambda: gradients(False))) == 1
    assert lookup_ops(tf.function(lambda: gradients(True))) == 2


def test_a_read_before_a_write_reads_before_it():
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
