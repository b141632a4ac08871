"""Tests that models on a mesh and the memory of their weights are freed."""

import keras
import numpy as np
import pytest
import tf_keras

import tf_layoutmap as tlm
from tests.freed.alive import remaining_after
from tests.layout.meshes import layout_of, mesh_of


@pytest.mark.parametrize("package", [keras, tf_keras])
def test_a_model_trained_by_fit_is_freed(package):
    mesh = mesh_of(batch=1, model=2)

    def program():
        layout_map = tlm.LayoutMap(mesh=mesh)
        layout_map[".*embeddings"] = layout_of(mesh, "model", None)
        layout_map[".*kernel"] = layout_of(mesh, None, "model")
        with tlm.layout_map_scope(layout_map):
            ids = package.Input([1], dtype="int64")
            rows = package.layers.Embedding(10, 4)(ids)
            model = package.Model(
                ids, package.layers.Dense(2)(package.layers.Flatten()(rows))
            )
        model.compile("adam", "mse")
        model.fit(np.array([[1], [2]]), np.ones([2, 2]), verbose=0)

    assert not remaining_after(program)
