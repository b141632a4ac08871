"""With `enable()`, keras.distribution shards models on TensorFlow."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import data_adapters

import tf_layoutmap as tlm
from tests.distribution import stock
from tests.layout import pairs
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap import distribution as ours
from tf_layoutmap._core import keras_private
from tf_layoutmap.distribution import keras_backend
from tf_layoutmap.layout.keras3.variable import MeshVariable

theirs = keras.distribution
dtensor = tf.experimental.dtensor
CPUS = [f"cpu:{i}" for i in range(4)]
VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(autouse=True)
def enabled():
    with ours.enabled():
        yield
    theirs.set_distribution(None)
    ours.set_distribution(None)


def device_mesh():
    return theirs.DeviceMesh((2, 2), ["data", "model"], CPUS)


def model_parallel():
    layout_map = theirs.LayoutMap(device_mesh())
    layout_map[".*d1/kernel"] = (None, "model")
    layout_map[".*d1/bias"] = theirs.TensorLayout(("model",))
    layout_map[".*d2/kernel"] = ("model", None)
    return theirs.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def dense(name="d1", units=8):
    layer = keras.layers.Dense(units, name=name)
    layer.build((None, 8))
    return layer


def bytes_on_devices(variable):
    """Returns the bytes that each device holds of the value of `variable`."""
    parts = dtensor.unpack(tf.convert_to_tensor(variable.divided_value))
    return [part.numpy().nbytes for part in parts]


def functional():
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, activation="tanh", name="d1")(inputs)
    hidden = keras.layers.Dropout(0.3, seed=5)(hidden)
    return keras.Model(inputs, keras.layers.Dense(4, name="d2")(hidden))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.d1 = keras.layers.Dense(16, activation="tanh", name="d1")
        self.d2 = keras.layers.Dense(4, name="d2")

    def call(self, x):
        return self.d2(self.d1(x))


class WithTrainStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.parametrize(
    "make", [pairs.dense_model, functional, Subclassed, WithTrainStep]
)
@pytest.mark.parametrize("kind", ["model", "data"])
def test_training_matches_a_run_without_a_distribution(make, kind):
    plain = pairs.plain(make)
    expected = pairs.fit(plain, validation_split=0.25)
    parallel = model_parallel() if kind == "model" else theirs.DataParallel()
    theirs.set_distribution(parallel)
    assert theirs.distribution() is ours.distribution() is parallel
    keras.utils.set_random_seed(3)
    model = make()
    pairs.assert_alike(expected, pairs.fit(model, validation_split=0.25))
    pairs.assert_same_weights(plain, model)
    np.testing.assert_allclose(
        plain.predict(pairs.FEATURES, verbose=0),
        model.predict(pairs.FEATURES, verbose=0),
        **pairs.TOLERANCE,
    )
    pairs.assert_alike(
        plain.evaluate(pairs.FEATURES, pairs.LABELS, verbose=0),
        model.evaluate(pairs.FEATURES, pairs.LABELS, verbose=0),
    )
    kernel = next(w for w in model.weights if w.path.endswith("d1/kernel"))
    slot = next(v for v in model.optimizer.variables if "d1_kernel" in v.path)
    if kind == "model":
        assert axes_of(kernel) == axes_of(slot) == (None, "model")
        assert bytes_on_devices(kernel) == [8 * 8 * 4] * 4
        assert bytes_on_devices(slot) == [8 * 8 * 4] * 4
    else:
        assert axes_of(kernel) == axes_of(slot) == (None, None)
        assert kernel.mesh.size == len(theirs.list_devices())


@pytest.mark.exhaustive
def test_names_of_variables_match_a_run_without_a_distribution():
    found = []
    for distribution in (None, model_parallel()):
        keras.backend.clear_session()
        theirs.set_distribution(distribution)
        model = pairs.plain(functional)
        optimizer = keras.optimizers.AdamW()
        pairs.fit(model, epochs=1, optimizer=optimizer, run_eagerly=False)
        variables = [*model.variables, *optimizer.variables]
        found.append([one.value.name for one in variables])
    assert found[0] == found[1] and "d2/kernel:0" in found[0]


@pytest.mark.exhaustive
def test_a_dataset_and_uneven_batches_match_a_run_without_a_distribution():
    def run():
        data = tf.data.Dataset.from_tensor_slices(
            (pairs.FEATURES[:21], pairs.LABELS[:21])
        ).batch(8)
        keras.utils.set_random_seed(3)
        model = pairs.dense_model()
        return model, pairs.fit(model, data, None, batch_size=None)

    plain, expected = run()
    with model_parallel().scope():
        model, found = run()
    pairs.assert_alike(expected, found)
    pairs.assert_same_weights(plain, model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [None, (2, 4), (8, 1), (1, 8)])
def test_images_on_eight_devices_match_a_run_without_a_distribution(shape):
    """Follows the guide of keras.io about distributed training."""
    images = np.random.default_rng(0).normal(size=(32, 6, 6, 1))
    labels = np.random.default_rng(1).normal(size=(32, 10))

    def run():
        keras.utils.set_random_seed(3)
        inputs = keras.layers.Input((6, 6, 1))
        hidden = keras.layers.Flatten()(inputs)
        hidden = keras.layers.Dense(
            16, use_bias=False, activation="relu", name="d1"
        )(hidden)
        hidden = keras.layers.Dropout(0.4)(hidden)
        outputs = keras.layers.Dense(10, activation="softmax", name="d2")(
            hidden
        )
        model = keras.Model(inputs, outputs)
        model.compile(loss="mse", optimizer="adam")
        data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(16)
        return (
            model,
            model.fit(data, epochs=2, verbose=0).history,
            model.evaluate(data, verbose=0),
        )

    plain, *expected = run()
    if shape is None:
        parallel = theirs.DataParallel(devices=theirs.list_devices("cpu"))
    else:
        mesh = theirs.DeviceMesh(
            shape, ["data", "model"], theirs.list_devices("cpu")
        )
        layout_map = theirs.LayoutMap(mesh)
        layout_map["d1/kernel"] = (None, "model")
        layout_map["d2/output"] = ("data", None)
        parallel = theirs.ModelParallel(
            layout_map=layout_map, batch_dim_name="data"
        )
    theirs.set_distribution(parallel)
    model, *found = run()
    pairs.assert_alike(expected, found)
    pairs.assert_same_weights(plain, model)
    kernel = model.get_layer("d1").kernel
    parts = 1 if shape is None else shape[1]
    assert bytes_on_devices(kernel) == [36 * 16 * 4 // parts] * 8


@pytest.mark.exhaustive
def test_a_saved_model_is_loaded_with_the_current_distribution(tmp_path):
    file = tmp_path / "model.keras"
    with model_parallel().scope():
        model = pairs.dense_model()
        pairs.fit(model, epochs=1)
    model.save(file)
    expected = model.predict(pairs.FEATURES, verbose=0)
    plain = keras.models.load_model(file)
    assert not any(isinstance(v, MeshVariable) for v in plain.variables)
    with model_parallel().scope():
        loaded = keras.models.load_model(file)
    assert axes_of(loaded.layers[0].kernel) == (None, "model")
    for one in (plain, loaded):
        np.testing.assert_allclose(
            one.predict(pairs.FEATURES, verbose=0), expected, **pairs.TOLERANCE
        )
    pairs.assert_alike(pairs.fit(plain, epochs=1), pairs.fit(loaded, epochs=1))


@stock.creates_distributions
def test_objects_created_before_enable_are_used():
    keras_backend.disable()
    parallel = model_parallel()
    theirs.set_distribution(parallel)
    assert type(dense().kernel) is keras.Variable
    assert ours.distribution() is None
    ours.enable()
    assert ours.distribution() is parallel
    kernel = dense().kernel
    assert axes_of(kernel) == (None, "model")
    ours.disable()
    assert type(dense().kernel) is keras.Variable
    # A model that was created on a mesh keeps its mesh.
    np.testing.assert_array_equal(kernel.numpy().shape, (8, 8))


def test_enable_can_be_repeated_and_undone():
    def names():
        return dir(keras_private.distribution_backend)

    ours.enable()
    during = names()
    assert "distribute_tensor" in during
    ours.disable()
    assert not any(
        patch.group == "keras_distribution" for patch in tlm.process.patches()
    )
    added = {"distribute_tensor", "initialize", "num_processes", "process_id"}
    if hasattr(theirs, "get_device_count"):
        added.add("get_device_count")
    assert set(during) - set(names()) == added
    assert not hasattr(keras_private.Distribution, "_context_if_set_in_keras")
    ours.disable()
    with ours.enabled():
        with ours.enabled():
            pass
        assert keras_backend.is_enabled()
    assert not keras_backend.is_enabled()


def test_scopes_override_the_distribution_and_end():
    parallel = model_parallel()
    theirs.set_distribution(parallel)
    with theirs.DataParallel(devices=CPUS[:2]).scope():
        assert dense().kernel.mesh.size == 2
        with ours.DataParallel(mesh_of(batch=4)).scope():
            assert dense().kernel.mesh == mesh_of(batch=4)
    assert theirs.distribution() is parallel
    assert axes_of(dense().kernel) == (None, "model")
    theirs.set_distribution(None)
    assert type(dense().kernel) is keras.Variable


def test_initial_values_do_not_depend_on_the_distribution():
    def kernel():
        keras.utils.set_random_seed(7)
        return dense().kernel

    expected = kernel().numpy()
    for parallel in (model_parallel(), theirs.DataParallel(devices=CPUS)):
        with parallel.scope():
            np.testing.assert_array_equal(kernel().numpy(), expected)


def test_devices_are_the_logical_devices_of_tensorflow():
    count = len(tf.config.list_logical_devices("CPU"))
    names = [f"cpu:{i}" for i in range(count)]
    assert theirs.list_devices("cpu") == theirs.list_devices("CPU") == names
    if hasattr(theirs, "get_device_count"):
        assert theirs.get_device_count("cpu") == count
        assert theirs.get_device_count() == len(theirs.list_devices())
    mesh = theirs.DataParallel(devices=CPUS).device_mesh
    assert mesh.backend_mesh == mesh_of(batch=4)
    with pytest.raises(ValueError, match="`?device_type.*npu"):
        theirs.list_devices("npu")


def test_a_missing_device_raises():
    words = "Device not found: cpu:90.*set_logical_device_configuration"
    mesh = theirs.DeviceMesh((2,), ["batch"], ["cpu:90", "cpu:0"])
    with pytest.raises(ValueError, match=words):
        mesh.backend_mesh  # noqa: B018
    with pytest.raises(ValueError, match=words):
        with theirs.DataParallel(mesh).scope():
            dense()


@pytest.mark.parametrize("axes", [(None, "model"), ("data", None)])
@pytest.mark.parametrize("kind", [np.asarray, tf.constant, keras.Variable])
def test_distribute_tensor_shards_a_value(axes, kind):
    layout = theirs.TensorLayout(axes, device_mesh())
    spread = theirs.distribute_tensor(kind(VALUE), layout)
    assert dtensor.fetch_layout(spread) == layout.backend_layout
    assert {part.shape.num_elements() for part in dtensor.unpack(spread)} == {
        VALUE.size // 2
    }
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(spread), VALUE)
    again = theirs.TensorLayout(("model", "data"), layout.device_mesh)
    np.testing.assert_array_equal(
        theirs.distribute_tensor(spread, again), VALUE
    )


def test_keras_ops_accept_sharded_tensors():
    ops = keras.ops
    spread = theirs.distribute_tensor(
        VALUE, theirs.TensorLayout((None, "model"), device_mesh())
    )
    for found, expected in [
        (spread + 1, VALUE + 1),
        (ops.add(spread, VALUE), VALUE + VALUE),
        (ops.matmul(spread, VALUE.T), VALUE @ VALUE.T),
        (ops.sum(spread), VALUE.sum()),
        (ops.mean(spread, axis=1), VALUE.mean(axis=1)),
        (ops.concatenate([spread, VALUE]), np.concatenate([VALUE, VALUE])),
        (ops.argmax(spread, axis=-1), VALUE.argmax(-1)),
        (ops.reshape(spread, (6, 4)), VALUE.reshape(6, 4)),
        (spread[:, :5], VALUE[:, :5]),
    ]:
        np.testing.assert_allclose(
            ops.convert_to_numpy(found), expected, rtol=1e-6
        )


def test_distribute_tensor_raises_the_errors_of_keras():
    mesh = device_mesh()
    symbolic = keras.KerasTensor((4, 6))
    layout = theirs.TensorLayout((None, "model"), mesh)
    assert theirs.distribute_tensor(symbolic, layout) is symbolic
    with pytest.raises(ValueError, match="device mesh is not set"):
        theirs.distribute_tensor(VALUE, theirs.TensorLayout((None, "model")))
    with pytest.raises(ValueError, match="does not divide"):
        theirs.distribute_tensor(VALUE[:, :5], layout)
    with pytest.raises(ValueError, match="rank 1"):
        theirs.distribute_tensor(VALUE[0], layout)
    twice = theirs.TensorLayout(("model", "model"), mesh)
    with pytest.raises(ValueError, match="dimensions 0 and 1"):
        twice.backend_layout  # noqa: B018


@pytest.mark.parametrize(
    ("size", "axes"), [(8, ("data", "model")), (7, (None, "model"))]
)
def test_a_key_selects_the_layout_of_a_layer_output(size, axes):
    """An odd number of samples is replicated."""
    mesh = mesh_of(data=2, model=2)
    layout_map = theirs.LayoutMap(device_mesh())
    layout_map["d1/output"] = ("data", "model")
    plain = dense()
    ones = tlm.layout.to_mesh(
        np.ones((size, 8), np.float32), layout_of(mesh, None, None)
    )
    with theirs.ModelParallel(layout_map=layout_map).scope():
        layer = dense()
        with tlm.layout.default_mesh(mesh):
            found = layer(ones)
        assert dtensor.fetch_layout(found) == layout_of(mesh, *axes)
        # The output of a layer that is not on the mesh stays on the host.
        assert not dtensor.is_dtensor(plain(np.ones((size, 8))))


def test_a_key_of_a_layer_output_trains_without_a_warning(recwarn):
    plain = pairs.plain(functional)
    expected = pairs.fit(plain)
    parallel = model_parallel()
    # A regular expression need not contain the slash of "d2/output".
    parallel._layout_map[".*d2.*output"] = ("data", None)
    with parallel.scope():
        keras.utils.set_random_seed(3)
        model = functional()
    pairs.assert_alike(expected, pairs.fit(model))
    pairs.assert_same_weights(plain, model)
    assert not [w for w in recwarn if "without effect" in str(w.message)]


@pytest.mark.parametrize(
    ("layouts", "units", "words"),
    [
        ({".*kernel": (None, "model")}, 5, "size 5.*does not divide"),
        ({".*bias": (None, "model")}, 8, "layout has rank 2"),
        (
            {".*kernel": (None, "model"), "d1.*": ("model", None)},
            8,
            "matches multiple layout",
        ),
    ],
)
def test_a_weight_that_does_not_fit_raises(layouts, units, words):
    layout_map = theirs.LayoutMap(device_mesh())
    for key, axes in layouts.items():
        layout_map[key] = axes
    with theirs.ModelParallel(layout_map=layout_map).scope():
        layer = dense(units=units)
        with pytest.raises(ValueError, match=words):
            layer.get_weights()


def test_a_subclass_selects_layouts():
    class LastAxis(theirs.ModelParallel):
        def get_variable_layout(self, variable):
            axes = [None] * len(variable.shape)
            if variable.path.startswith("d1"):
                axes[-1] = "model"
            return theirs.TensorLayout(axes, self.device_mesh)

    with LastAxis(layout_map=theirs.LayoutMap(device_mesh())).scope():
        first, second = dense("d1"), dense("d2")
        assert axes_of(first.kernel) == (None, "model")
        assert axes_of(first.bias) == ("model",)
        assert axes_of(second.kernel) == (None, None)
    # As in Keras, the base class has no layouts.
    with pytest.raises(NotImplementedError):
        with keras_private.Distribution(device_mesh()).scope():
            dense()


def test_distributions_know_the_number_of_processes(monkeypatch):
    # The name of the attribute depends on the version of Keras.
    parallel = theirs.DataParallel()
    (count,) = {"num_processes", "_num_process"} & {*dir(parallel)}
    assert getattr(parallel, count) == 1
    monkeypatch.setattr(dtensor, "num_clients", lambda: 4)
    monkeypatch.setattr(dtensor, "client_id", lambda: 3)
    parallel = model_parallel()
    assert getattr(parallel, count) == 4
    if stock.CREATES_DISTRIBUTIONS:
        assert parallel.num_model_replicas == 2
        assert parallel.data_shard_id == 1
    names = theirs.list_devices("cpu")
    assert len(set(names)) == len(names)
    # Each process must get full batches, so Keras does not shard the dataset.
    data = tf.data.Dataset.range(8).batch(4)
    adapter = keras_private.TFDatasetAdapter(data, distribution=parallel)
    batches = [b.numpy().tolist() for b in adapter.get_tf_dataset()]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="`auto_shard_dataset` must be True"):
        parallel.auto_shard_dataset = False
    assert parallel.auto_shard_dataset
    parallel.auto_shard_dataset = True
    if stock.CREATES_DISTRIBUTIONS:
        monkeypatch.setattr(dtensor, "num_clients", lambda: 3)
        with pytest.raises(ValueError, match="must be divisible by"):
            model_parallel()


class Squares(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.full([2], float(index**2))


def test_a_py_dataset_is_never_sharded_over_processes(monkeypatch):
    monkeypatch.setattr(dtensor, "num_clients", lambda: 2)
    monkeypatch.setattr(dtensor, "client_id", lambda: 1)
    with model_parallel().scope():
        if not keras_private.is_needed("PyDatasetAdapter", "__init__"):
            with pytest.raises(ValueError, match="as a `tf.data.Dataset`"):
                data_adapters.get_data_adapter(Squares())
            return
        adapter = data_adapters.get_data_adapter(Squares())
        assert theirs.distribution() is not None
    batches = [batch[0][0] for batch in adapter._finite_generator()]
    assert batches == [index**2 for index in range(6)]


def test_initialize_reads_the_environment(monkeypatch):
    theirs.initialize(num_processes=1, process_id=0)
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "2")
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "0")
    monkeypatch.setenv("KERAS_DISTRIBUTION_JOB_ADDRESSES", "a:1")
    with pytest.raises(ValueError, match="an address for each of the 2"):
        theirs.initialize()
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "2")
    with pytest.raises(ValueError, match="process_id=2, num_processes=2"):
        theirs.initialize()


def test_without_enable_the_functions_are_missing():
    ours.disable()
    layout = theirs.TensorLayout((None, "model"), device_mesh())
    with pytest.raises(AttributeError, match="distribute_tensor"):
        theirs.distribute_tensor(VALUE, layout)
