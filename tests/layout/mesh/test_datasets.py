"""Checks that a DTensorDataset yields each batch once.

The mesh must stay usable after the end of the data.
"""

import textwrap

import numpy as np
import pytest
import tensorflow as tf

from tests import forked_process
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap._core import patches
from tf_layoutmap.layout.mesh import transfer

dtensor = tf.experimental.dtensor
ROWS = np.arange(64, dtype=np.float32).reshape(32, 2)


def dataset_of(data, mesh, batch_dim="batch", batched=False, size=8):
    patches.ensure("mesh")
    return dtensor.DTensorDataset(
        data,
        mesh=mesh,
        layouts=layout_of(mesh, batch_dim, None),
        global_batch_size=size,
        batch_dim=batch_dim,
        dataset_already_batched=batched,
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch_dim", ["batch", None])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1},
        {"batch": 2},
        {"batch": 2, "model": 2},
        {"batch": 1, "model": 4},
        {"batch": 4, "model": 2},
    ],
)
def test_each_epoch_yields_every_batch_once_and_in_order(sizes, batch_dim):
    mesh = mesh_of(**sizes)
    # DTensor caches compiled functions by mesh and shape, but not by layout.
    # Each layout has a different batch size, so that DTensor does not reuse the
    # function of another layout.
    size = 8 if batch_dim else 4
    data = tf.data.Dataset.from_tensor_slices(ROWS)
    for batched in (False, True):
        if batched:
            data = data.batch(
                size // mesh.dim_size(batch_dim) if batch_dim else size,
                drop_remainder=True,
            )
        dataset = dataset_of(data, mesh, batch_dim, batched, size)
        for _ in range(2):
            batches = [transfer.to_host(batch) for batch in dataset]
            assert [batch.shape for batch in batches] == [(size, 2)] * (
                32 // size
            )
            np.testing.assert_array_equal(np.concatenate(batches), ROWS)


def test_remainder_is_dropped_and_the_mesh_stays_usable():
    mesh = mesh_of(batch=2, model=2)
    dataset = dataset_of(tf.data.Dataset.from_tensor_slices(ROWS[:31]), mesh)
    assert len(list(dataset)) == 3
    ones = dtensor.call_with_layout(
        tf.ones, layout_of(mesh, "batch"), shape=[4]
    )
    np.testing.assert_array_equal(transfer.to_host(ones), np.ones(4))


def test_infinite_data_is_supported():
    dataset = dataset_of(
        tf.data.Dataset.from_tensor_slices(ROWS).repeat(), mesh_of(batch=2)
    )
    batches = iter(dataset)
    for _ in range(9):
        last = next(batches)
    np.testing.assert_array_equal(transfer.to_host(last), ROWS[:8])


def test_asserted_cardinality_is_sufficient():
    data = (
        tf.data.Dataset.from_tensor_slices(ROWS)
        .filter(lambda row: True)
        .apply(tf.data.experimental.assert_cardinality(32))
    )
    assert len(list(dataset_of(data, mesh_of(batch=2)))) == 4


UNKNOWN_LENGTH = """
    import tensorflow as tf
    from tests.layout.mesh import test_datasets as this
    data = tf.data.Dataset.from_tensor_slices(this.ROWS).filter(
        lambda row: True)
    try:
        list(this.dataset_of(data, this.mesh_of(batch=2)))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
def test_end_of_data_of_unknown_length_raises():
    # The error makes all meshes of a process unusable, so the program runs in a
    # separate process.
    done = forked_process.run_code(textwrap.dedent(UNKNOWN_LENGTH))
    assert "unknown length must not be read past" in done.stdout
    assert "assert_cardinality(n)" in done.stdout


def test_function_may_iterate_over_batches():
    batches = iter(
        dataset_of(tf.data.Dataset.from_tensor_slices(ROWS), mesh_of(batch=2))
    )

    @tf.function
    def double(iterator):
        return 2 * next(iterator)

    np.testing.assert_array_equal(
        transfer.to_host(double(batches)), 2 * ROWS[:8]
    )
