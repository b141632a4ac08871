"""Checks reads and writes of parts of sharded variables outside of layers."""

import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import to_host, to_mesh
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError
from tf_layoutmap.layout.mesh.variable import PaddedVariable, StoredVariable

VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)
ROWS = np.array([1, 7, 3])
UPDATES = np.arange(12, dtype=np.float32).reshape(3, 4) * 4 - 10
OPERATIONS = ("add", "sub", "max", "min", "update")


MESH = mesh_of(batch=2, model=2)
LAYOUT = layout_of(MESH, "model", None)


def make(rows=8):
    """Returns a sharded variable, which is padded if `rows` is odd."""
    if rows % 2 == 0:
        return StoredVariable(to_mesh(VALUE[:rows], LAYOUT))
    padded = np.concatenate([VALUE[:rows], np.zeros((1, 4), np.float32)])
    return PaddedVariable.of(to_mesh(padded, LAYOUT), rows)


@pytest.mark.parametrize("rows", [8, 7])
def test_rows_are_written(rows):
    variable, plain = make(rows), tf.Variable(VALUE[:rows])
    ids = ROWS % rows
    for operation in OPERATIONS:
        for one in (variable, plain):
            getattr(one, f"scatter_{operation}")(tf.IndexedSlices(UPDATES, ids))
            getattr(one, f"scatter_nd_{operation}")(
                [[0, 1], [rows - 1, 2]], [5.0, 30.0]
            )
        np.testing.assert_array_equal(to_host(variable), plain.numpy())
    assert variable.layout == LAYOUT


@pytest.mark.parametrize("rows", [8, 7])
def test_rows_are_read(rows):
    value = make(rows)
    for read in (
        tf.gather(value, ROWS[:1]),
        value.sparse_read([1]),
        value.gather_nd([[1]]),
    ):
        np.testing.assert_array_equal(to_host(read), VALUE[1:2])


def test_write_without_slices_raises():
    with pytest.raises(TypeError, match="must be a tf.IndexedSlices"):
        make().scatter_add(UPDATES)


def test_a_model_in_a_dataset_raises():
    model = pairs.on_mesh(pairs.dense_model)
    dataset = tf.data.Dataset.from_tensors(pairs.FEATURES)
    with pytest.raises(UnsupportedByDTensorError, match="batches of the datas"):
        dataset.map(lambda x: model(x))
