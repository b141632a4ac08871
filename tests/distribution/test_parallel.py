"""Programs written for keras.distribution run on TensorFlow."""

import keras
import numpy as np
import pytest

from tests.layout import pairs
from tests.layout.meshes import axes_of, mesh_of
from tf_layoutmap.distribution import (
    DataParallel,
    DeviceMesh,
    LayoutMap,
    ModelParallel,
)

CPUS = [f"cpu:{i}" for i in range(4)]


def test_model_parallel_shards_weights_and_matches_one_device():
    mesh = DeviceMesh((2, 2), ("rows", "model"), CPUS)
    layout_map = LayoutMap(mesh)
    layout_map["d1.*kernel"] = (None, "model")
    distribution = ModelParallel(layout_map=layout_map)
    assert distribution.batch_dim_name == "rows"
    with distribution.scope():
        model = pairs.plain(pairs.dense_model)
    assert axes_of(model.layers[0].kernel) == (None, "model")
    plain = pairs.plain(pairs.dense_model)
    pairs.assert_alike(pairs.fit(plain), pairs.fit(model))
    pairs.assert_same_weights(plain, model)


def test_the_context_has_the_mesh_of_the_distribution():
    distribution = DataParallel(devices=CPUS)
    context = distribution._model_context()
    assert context.mesh == distribution.device_mesh.to_dtensor()
    assert context.batch_dim == "batch"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataParallel(devices=CPUS),
        lambda: DataParallel(mesh_of(batch=4)),
        lambda: DataParallel(DeviceMesh((4,), ("batch",), CPUS)),
    ],
)
def test_data_parallel_replicates_weights(make):
    with make().scope():
        model = pairs.plain(pairs.dense_model)
    assert all(axes_of(w) == (None,) * w.ndim for w in model.weights)
    plain = pairs.plain(pairs.dense_model)
    for a, b in zip(plain.weights, model.weights):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    pairs.assert_alike(pairs.fit(plain, epochs=1), pairs.fit(model, epochs=1))


def test_data_parallel_uses_all_devices_by_default():
    assert DataParallel().device_mesh.size >= len(CPUS)
    with pytest.raises(ValueError, match="Only one of"):
        DataParallel(mesh_of(batch=4), CPUS)


def test_an_unknown_batch_axis_raises():
    layout_map = LayoutMap(mesh_of(batch=2, model=2))
    with pytest.raises(ValueError, match="batch_dim_name"):
        ModelParallel(layout_map=layout_map, batch_dim_name="rows")
    with pytest.raises(TypeError, match="LayoutMap"):
        ModelParallel(layout_map={})
    with pytest.raises(ValueError, match="needs a mesh"):
        ModelParallel(layout_map=LayoutMap())


def test_unrelated_keras_layers_keep_their_type():
    with DataParallel(devices=CPUS).scope():
        layer = keras.layers.Dense(2)
        layer.build((None, 2))
    assert type(layer) is keras.layers.Dense
    assert isinstance(layer.kernel, keras.Variable)
