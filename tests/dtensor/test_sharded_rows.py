"""Lookups and updates of a table sharded over a mesh match numpy."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tests.strategies  # noqa: F401  (splits the CPU before the first op)
from tf_layoutmap._core import dtensor_ops, tf_private

UNSHARDED = dtensor.UNSHARDED
NUM_ROWS, DIM = 24, 5


@pytest.fixture(params=[(2, 2), (1, 4), (4, 1), (1, 1)], scope="module")
def mesh(request):
    sizes = request.param
    return dtensor.create_mesh(
        list(zip(("batch", "model"), sizes)),
        devices=[f"CPU:{i}" for i in range(np.prod(sizes))],
    )


def on_mesh(value, specs, mesh):
    replicated = dtensor.copy_to_mesh(
        value, dtensor.Layout.replicated(mesh, np.ndim(value))
    )
    return dtensor.relayout(replicated, dtensor.Layout(specs, mesh))


def variable(value, mesh, specs=("model", UNSHARDED)):
    return dtensor.DVariable(on_mesh(value, list(specs), mesh))


def to_numpy(tensor, mesh):
    replicated = dtensor.relayout(
        tensor, dtensor.Layout.replicated(mesh, tensor.shape.rank)
    )
    return dtensor.unpack(replicated)[0].numpy()


def integers(shape, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(-4, 5, shape).astype(np.float32)


@pytest.mark.covering(1, 5)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("id_specs", [[UNSHARDED], ["batch"]])
def test_rows_are_returned_in_the_order_of_ids(mesh, dtype, id_specs):
    rows = integers((NUM_ROWS, DIM), 0)
    table = variable(rows, mesh)
    ids = np.array([23, 0, 7, 7, 12, 1, 23, 0], dtype)
    for lookup in (
        dtensor_ops.lookup_rows,
        tf.function(dtensor_ops.lookup_rows),
    ):
        found = lookup(table, on_mesh(ids, id_specs, mesh))
        np.testing.assert_array_equal(to_numpy(found, mesh), rows[ids])


@pytest.mark.parametrize("optimizer, num_slots", [("sgd", 0), ("adagrad", 1)])
def test_an_update_matches_numpy_and_changes_no_other_rows(
    mesh, optimizer, num_slots
):
    rows = integers((NUM_ROWS, DIM), 1)
    start = np.full((NUM_ROWS, DIM), 0.5, np.float32)
    table = variable(rows, mesh)
    slots = [variable(start, mesh) for _ in range(num_slots)]
    ids = np.array([3, 3, 20, 11, 3, 0])
    gradients = integers((len(ids), DIM), 2)
    rate = on_mesh(np.array([0.25], np.float32), [UNSHARDED], mesh)

    @tf.function
    def step(ids, gradients):
        dtensor_ops.update_rows(
            table,
            slots,
            ids,
            gradients,
            optimizer=optimizer,
            hyperparameters=rate,
        )

    step(
        on_mesh(ids, [UNSHARDED], mesh),
        on_mesh(gradients, [UNSHARDED, UNSHARDED], mesh),
    )

    total = np.zeros_like(rows)
    np.add.at(total, ids, gradients)
    if optimizer == "adagrad":
        accumulators = start + total * total
        expected = rows - np.float32(0.25) * total / np.sqrt(accumulators)
        np.testing.assert_array_equal(
            to_numpy(slots[0].read_value(), mesh), accumulators
        )
    else:
        expected = rows - np.float32(0.25) * total
    np.testing.assert_array_equal(to_numpy(table.read_value(), mesh), expected)
    assert table.layout.sharding_specs == ["model", UNSHARDED]


def test_a_consumer_with_a_sharded_batch_does_not_change_the_lookup(mesh):
    rows = integers((NUM_ROWS, DIM), 3)
    table = variable(rows, mesh)
    weights = integers((8, DIM), 4)
    ids = np.arange(8) * 3

    @tf.function
    def score(ids, weights):
        return dtensor_ops.lookup_rows(table, ids) * weights

    scores = score(
        on_mesh(ids, ["batch"], mesh),
        on_mesh(weights, ["batch", UNSHARDED], mesh),
    )
    np.testing.assert_array_equal(to_numpy(scores, mesh), rows[ids] * weights)


def test_an_out_of_range_id_raises_and_writes_nothing(mesh):
    rows = integers((NUM_ROWS, DIM), 5)
    table = variable(rows, mesh)
    for bad in (NUM_ROWS, -1):
        ids = on_mesh(np.array([1, bad]), [UNSHARDED], mesh)
        with pytest.raises(tf.errors.OpError):
            to_numpy(dtensor_ops.lookup_rows(table, ids), mesh)
        with pytest.raises(tf.errors.OpError):
            dtensor_ops.update_rows(
                table,
                [],
                ids,
                on_mesh(
                    np.ones((2, DIM), np.float32), [UNSHARDED, UNSHARDED], mesh
                ),
                optimizer="sgd",
                hyperparameters=on_mesh(
                    np.array([1.0], np.float32), [UNSHARDED], mesh
                ),
            )
            # The error of an op without outputs is raised by the next read.
            to_numpy(table.read_value(), mesh)
    np.testing.assert_array_equal(to_numpy(table.read_value(), mesh), rows)


@pytest.mark.parametrize(
    "specs", [[UNSHARDED, UNSHARDED], [UNSHARDED, "model"]]
)
def test_a_table_with_unsharded_rows_raises(mesh, specs):
    table = variable(integers((NUM_ROWS, 4), 6), mesh, specs)
    ids = on_mesh(np.array([1]), [UNSHARDED], mesh)
    with pytest.raises(ValueError, match="must be .num_rows, dim. with"):
        dtensor_ops.lookup_rows(table, ids)


def test_a_slot_variable_with_another_layout_raises(mesh):
    table = variable(integers((NUM_ROWS, DIM), 7), mesh)
    slot = variable(integers((NUM_ROWS, DIM), 8), mesh, [UNSHARDED, UNSHARDED])
    ids = on_mesh(np.array([1]), [UNSHARDED], mesh)
    gradients = on_mesh(
        np.ones((1, DIM), np.float32), [UNSHARDED, UNSHARDED], mesh
    )
    with pytest.raises(ValueError, match="must have the layout of the table"):
        dtensor_ops.update_rows(
            table,
            [slot],
            ids,
            gradients,
            optimizer="adagrad",
            hyperparameters=ids,
        )


def test_cached_mesh_tensors_are_dropped_with_the_dtensor_device(mesh):
    kept = dtensor_ops._shard_index(mesh, "model")
    assert dtensor_ops._shard_index(mesh, "model") is kept
    device = tf_private.dtensor_api._dtensor_singleton
    try:
        # `dtensor.shutdown_accelerator_system` also sets this variable to None.
        tf_private.dtensor_api._dtensor_singleton = None
        other = dtensor_ops._shard_index(mesh, "model")
        assert other.device != kept.device
        del other
    finally:
        tf_private.dtensor_api._dtensor_singleton = device
    assert dtensor_ops._shard_index(mesh, "model") is kept
