"""Tests `ShardedEmbedding` on a mesh whose size does not divide the rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers import models
from tests.layers.models import weighted_sum
from tests.layout.meshes import layout_of, mesh_of

# `make test` runs each test with one mesh.
pytestmark = pytest.mark.covering(1, 1)

rules = tf.tpu.experimental.embedding

DIM, LENGTH, BATCH = 4, 3, 8
RULES = {
    "sgd": lambda: rules.SGD(0.5),
    "adagrad": lambda: rules.Adagrad(0.5),
    "dense adam": lambda: rules.Adam(0.05, lazy_adam=False),
    "ftrl": lambda: rules.FTRL(0.05),
}
MESHES = {"2x2": dict(batch=2, model=2), "1x4": dict(batch=1, model=4)}
# With four devices, the last device holds no row of a table of 5 rows, and 3
# rows of a table of 21 rows.
SIZES = [5, 21]


@pytest.fixture(params=MESHES, scope="module")
def mesh(request):
    return mesh_of(**MESHES[request.param])


def data(num_rows):
    random = np.random.default_rng(1)
    ids = random.integers(0, num_rows, (12 * BATCH, LENGTH))
    ids[:, 1] = ids[:, 0]
    ids[:, 2] = num_rows - 1
    return ids, random.integers(-4, 5, (12 * BATCH, LENGTH, DIM)).astype(
        np.float32
    )


def model_of(num_rows, rule="adagrad", seed=5, **options):
    keras.utils.set_random_seed(seed)
    ids = keras.Input([LENGTH], dtype="int64", name="ids")
    layer = tlm.layers.ShardedEmbedding(
        num_rows, DIM, optimizer=RULES[rule](), name="words", **options
    )
    return keras.Model(ids, layer(ids))


def scope(mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["words.embeddings"] = layout_of(mesh, "model", None)
    return tlm.layout_map_scope(layout_map)


def on_mesh(mesh, *args, **options):
    with scope(mesh):
        return model_of(*args, **options)


def table_of(model):
    return model.get_layer("words")


def fit(model, num_rows):
    ids, y = data(num_rows)
    model.compile(keras.optimizers.SGD(0.1), loss=weighted_sum)
    model.fit(ids, y, batch_size=BATCH, shuffle=False, verbose=0)


def assert_same_tables(first, second):
    models.assert_same_tables(table_of(first), table_of(second))


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_rows", SIZES)
def test_training_is_bitwise_equal_to_a_table_on_the_host(mesh, num_rows, rule):
    host, meshed = (model_of(num_rows, rule), on_mesh(mesh, num_rows, rule))
    assert_same_tables(host, meshed)
    for model in (host, meshed):
        fit(model, num_rows)
    assert_same_tables(host, meshed)
    ids, _ = data(num_rows)
    np.testing.assert_array_equal(
        host.predict(ids, verbose=0), meshed.predict(ids, verbose=0)
    )


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("num_rows", SIZES)
def test_public_values_exclude_the_padding(mesh, num_rows, capsys):
    meshed = on_mesh(mesh, num_rows)
    layer = table_of(meshed)
    shape = (num_rows, DIM)
    assert tuple(layer.embeddings.shape) == shape
    assert layer.embeddings.numpy().shape == shape
    assert np.asarray(layer.embeddings).shape == shape
    assert tuple(layer.embeddings.value.shape) == shape
    np.testing.assert_array_equal(
        np.asarray(keras.ops.convert_to_numpy(layer.embeddings)),
        layer.embeddings.numpy(),
    )
    assert [weight.shape for weight in meshed.get_weights()] == [shape]
    assert meshed.count_params() == layer.count_params() == num_rows * DIM
    meshed.summary()
    assert str(num_rows * DIM) in capsys.readouterr().out
    for slot in layer.optimizer.slots.values():
        assert tuple(slot.shape) == slot.numpy().shape == shape
    drawn = tlm.visualize_layout(layer.embeddings, show=False)
    assert f"({num_rows}, {DIM})" in drawn
    assert f":{num_rows}, " in drawn


def test_explain_excludes_the_padding_before_variables_exist(mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["words.embeddings"] = layout_of(mesh, "model", None)
    for model in (model_of(21), on_mesh(mesh, 21)):
        report = layout_map.explain(model)
        one = next(v for v in report.variables if "embeddings" in v.name)
        assert one.shape == (21, DIM)
        assert not one.problems
        assert one.bytes_total == 21 * DIM * 4


@pytest.mark.parametrize("bad", [-1, 21, 22, 23])
def test_an_id_in_the_padding_raises(mesh, bad):
    meshed = on_mesh(mesh, 21)
    ids = np.full([BATCH, LENGTH], bad)
    with pytest.raises(tf.errors.OpError, match=r"words|21"):
        meshed.predict(ids, verbose=0)
    before = table_of(meshed).embeddings.numpy()
    meshed.compile("sgd", loss=weighted_sum)
    with pytest.raises(tf.errors.OpError, match=r"words|21"):
        meshed.train_on_batch(ids, np.zeros([BATCH, LENGTH, DIM]))
    np.testing.assert_array_equal(table_of(meshed).embeddings.numpy(), before)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("num_rows", SIZES)
def test_weights_are_set_and_assigned(mesh, num_rows):
    meshed = on_mesh(mesh, num_rows)
    values = np.arange(num_rows * DIM, dtype=np.float32).reshape(-1, DIM)
    meshed.set_weights([values])
    weight = table_of(meshed).embeddings
    np.testing.assert_array_equal(weight.numpy(), values)
    weight.assign_add(np.ones_like(values))
    np.testing.assert_array_equal(weight.numpy(), values + 1)
    weight.assign(weight.value * 2)
    np.testing.assert_array_equal(weight.numpy(), (values + 1) * 2)
    with pytest.raises(ValueError, match="shape"):
        weight.assign(np.zeros([num_rows + 1, DIM]))
    np.testing.assert_array_equal(weight.numpy(), (values + 1) * 2)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("way", ["checkpoint", "weights.h5", "keras"])
@pytest.mark.parametrize("num_rows", SIZES)
def test_files_exclude_the_padding(mesh, num_rows, way, tmp_path):
    meshed = on_mesh(mesh, num_rows)
    fit(meshed, num_rows)
    host, again = (model_of(num_rows, seed=1), on_mesh(mesh, num_rows, seed=2))
    if way == "checkpoint":
        path = tf.train.Checkpoint(table=table_of(meshed)).save(
            str(tmp_path / "model")
        )
        shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
        assert [num_rows, DIM] in shapes.values()
        assert not [
            shape
            for shape in shapes.values()
            if len(shape) == 2 and shape != [num_rows, DIM]
        ]
        for model in (host, again):
            tf.train.Checkpoint(table=table_of(model)).restore(path)
    elif way == "weights.h5":
        meshed.save_weights(tmp_path / "model.weights.h5")
        for model in (host, again):
            model.load_weights(tmp_path / "model.weights.h5")
    else:
        meshed.save(tmp_path / "model.keras")
        load = lambda: keras.saving.load_model(  # noqa: E731
            tmp_path / "model.keras",
            custom_objects={"weighted_sum": weighted_sum},
        )
        host = load()
        with scope(mesh):
            again = load()
    for model in (host, again):
        np.testing.assert_array_equal(
            table_of(model).embeddings.numpy(),
            table_of(meshed).embeddings.numpy(),
        )
    if way != "weights.h5":
        assert_same_tables(host, meshed)
        assert_same_tables(again, meshed)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize(
    "initializer", ["uniform", "zeros", "glorot_uniform", "truncated_normal"]
)
def test_initial_values_do_not_depend_on_the_padding(mesh, initializer):
    keras.utils.set_random_seed(3)
    meshed = on_mesh(mesh, 21, embeddings_initializer=initializer)
    found = table_of(meshed).embeddings.numpy()
    keras.utils.set_random_seed(3)
    host = table_of(model_of(21, embeddings_initializer=initializer))
    np.testing.assert_array_equal(found, host.embeddings.numpy())


def test_a_table_too_small_for_its_mesh_raises():
    with pytest.raises(
        ValueError, match="has size 2, which is too small to shard"
    ):
        table_of(on_mesh(mesh_of(batch=1, model=4), 2)).embeddings.numpy()


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("export", ["keras", "tlm"])
def test_exports_exclude_the_padding(mesh, export, tmp_path):
    meshed = on_mesh(mesh, 21)
    ids, _ = data(21)
    wanted = meshed.predict(ids, verbose=0)
    if export == "keras":
        meshed.export(str(tmp_path / "model"), verbose=False)
    else:
        tlm.export(meshed, tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(served.serve(ids), wanted)
    with pytest.raises(tf.errors.InvalidArgumentError):
        served.serve(np.full([1, LENGTH], 21))
    sizes = (
        tf.train.load_checkpoint(str(tmp_path / "model/variables/variables"))
        .get_variable_to_shape_map()
        .values()
    )
    assert [21, DIM] in sizes
    assert not [size for size in sizes if len(size) == 2 and size[0] > 21]
