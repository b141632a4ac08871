"""Checks that mesh variables can be used in the same way as Keras variables."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap.layout import to_mesh

VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(batch=2, model=2)


@pytest.fixture(
    params=[("model", None), (None, "batch"), (None, None), ("batch", "model")]
)
def variable(request, mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["table"] = layout_of(mesh, *request.param)
    with tlm.layout_map_scope(layout_map):
        created = keras.Variable(VALUE, name="table")
    assert axes_of(created) == request.param
    return created


def test_reading_returns_the_full_value(variable):
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    np.testing.assert_array_equal(np.asarray(variable), VALUE)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), VALUE)
    assert variable.shape == (4, 6) and variable.dtype == "float32"


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "make",
    [
        np.asarray,
        tf.constant,
        lambda x: x.tolist(),
        keras.Variable,
        tf.Variable,
    ],
)
def test_assigning_a_host_value_keeps_the_layout(variable, make):
    before = axes_of(variable)
    variable.assign(make(VALUE * 2))
    np.testing.assert_array_equal(variable.numpy(), VALUE * 2)
    assert axes_of(variable) == before


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "axes", [(None, None), ("model", None), ("batch", "model")]
)
def test_mesh_value_with_any_layout_can_be_assigned(variable, mesh, axes):
    before = axes_of(variable)
    variable.assign(to_mesh(VALUE + 1, layout_of(mesh, *axes)))
    np.testing.assert_array_equal(variable.numpy(), VALUE + 1)
    assert axes_of(variable) == before


def test_assign_add_and_assign_sub_accept_host_values(variable):
    variable.assign_add(VALUE)
    np.testing.assert_array_equal(variable.numpy(), 2 * VALUE)
    variable.assign_sub(tf.constant(VALUE))
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    variable.assign_add(1.0)
    np.testing.assert_array_equal(variable.numpy(), VALUE + 1)


def test_assignment_in_a_function(variable):
    @tf.function
    def double():
        variable.assign(variable * 2.0)
        variable.assign_add(variable)

    double()
    np.testing.assert_array_equal(variable.numpy(), 4 * VALUE)


def test_assigning_a_value_of_another_shape_raises(variable):
    with pytest.raises(ValueError, match="shape"):
        variable.assign(np.zeros((6, 4), np.float32))
    np.testing.assert_array_equal(variable.numpy(), VALUE)


def test_later_writes_to_the_array_do_not_change_the_variable(variable):
    value = VALUE * 3
    variable.assign(value)
    value[:] = -1
    np.testing.assert_array_equal(variable.numpy(), VALUE * 3)


def test_scalar_variable_converts_to_a_number(mesh):
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        scalar = keras.Variable(3, dtype="int32")
    assert int(scalar) == 3 and float(scalar) == 3.0
    assert axes_of(scalar) == ()


def test_arithmetic_with_python_numbers(variable):
    np.testing.assert_array_equal(
        tlm.layout.to_host(variable * 2.0 + 1.0), VALUE * 2 + 1
    )


def test_initializer_may_be_a_string(mesh):
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        ones = keras.Variable("ones", shape=(2, 2))
    np.testing.assert_array_equal(ones.numpy(), np.ones((2, 2)))


def test_default_name_is_the_same_as_without_a_mesh(mesh):
    keras.utils.clear_session()
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        assert keras.Variable(0.0).name == "variable"


def test_deepcopy_raises(variable):
    with pytest.raises(TypeError, match="deepcopy .* is not supported"):
        copy.deepcopy(variable)


def test_copy_of_a_plain_variable_stays_plain(mesh):
    plain = keras.Variable(VALUE)
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        ref = copy.copy(plain)
    assert type(ref) is keras.Variable
    np.testing.assert_array_equal(ref.numpy(), VALUE)


def test_repr_shows_the_value(variable):
    assert "path=table" in repr(variable)


def weight(initializer, **options):
    """Returns a model with a weight that has these arguments."""

    class Product(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(
                shape=(8, 6), name="kernel", initializer=initializer, **options
            )

        def call(self, x):
            return x @ keras.ops.cast(self.kernel, "float32")

    return lambda: pairs.sequential((8,), Product(name="d1"))


def numbers(shape):
    return np.arange(np.prod(shape)).reshape(shape) - 20


PLACES = [{}, {"d1.kernel": (None, "model")}, {"d1.kernel": ("batch", None)}]


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("axes", PLACES)
@pytest.mark.parametrize("dtype", ["int64", "bool", "float64", "float16"])
def test_array_of_an_initializer_is_converted(dtype, axes):
    make = weight(lambda shape, **_: (numbers(shape) / 7).astype(dtype))
    plain, model = pairs.plain(make), pairs.on_mesh(make, axes)
    found = model.get_layer("d1").kernel
    assert found.value.dtype == tf.float32
    np.testing.assert_array_equal(
        found.numpy(), plain.get_layer("d1").kernel.numpy()
    )
    before = found.numpy()
    for one in (plain, model):
        pairs.fit(one, epochs=1, run_eagerly=one is plain)
    assert np.abs(found.numpy() - before).min() > 0
    pairs.assert_same_weights(plain, model)


@pytest.mark.covering(1, 4)
@pytest.mark.parametrize("axes", PLACES)
@pytest.mark.parametrize("dtype", ["int8", "int32", "bool", "float16"])
def test_value_has_the_dtype_of_the_variable(dtype, axes):
    make = weight(
        lambda shape, **_: numbers(shape), dtype=dtype, trainable=False
    )
    plain = pairs.plain(make).get_layer("d1").kernel
    found = pairs.on_mesh(make, axes).get_layer("d1").kernel
    assert found.value.dtype == plain.value.dtype
    np.testing.assert_array_equal(found.numpy(), plain.numpy())


@pytest.mark.parametrize("axes", PLACES)
@pytest.mark.parametrize(
    ("initializer", "received"),
    [
        (
            lambda shape, **_: np.zeros([1, 1]),
            r"float32 tensor of shape \(1, 1",
        ),
        (
            lambda shape, **_: np.zeros([7, 6]),
            r"float32 tensor of shape \(7, 6",
        ),
        (lambda shape, **_: tf.zeros(shape, tf.int32), "int32 tensor of shape"),
    ],
)
def test_wrong_value_of_an_initializer_raises(initializer, received, axes):
    with pytest.raises(
        ValueError,
        match=r"variable '.*d1/kernel' must return a float32 tensor of shape "
        rf"\(8, 6\). Received: an? {received}",
    ):
        pairs.on_mesh(weight(initializer), axes)


@pytest.mark.parametrize("is_subclassed", [False, True])
def test_initializer_with_own_generator_matches_stock_keras(is_subclassed):
    def make():
        generator = np.random.default_rng(0)

        def draw(shape, **_):
            return generator.normal(size=shape).astype(np.float32)

        layers = [
            keras.layers.Dense(6, kernel_initializer=draw) for _ in range(2)
        ]
        if not is_subclassed:
            return keras.Sequential([keras.Input((8,)), *layers])

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.blocks = layers

            def call(self, x):
                return self.blocks[1](self.blocks[0](x))

        return Model()

    plain, model = pairs.plain(make), pairs.on_mesh(make, {})
    for one in (plain, model):
        one(pairs.FEATURES[:8])
    for a, b in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("aggregation", ["none", "mean", "only_first_replica"])
def test_aggregation_is_kept(aggregation):
    make = weight("zeros", aggregation=aggregation)
    plain = pairs.plain(make).get_layer("d1").kernel.value
    found = pairs.on_mesh(make, {}).get_layer("d1").kernel.value
    assert found.aggregation == plain.aggregation
    assert found.synchronization == plain.synchronization
    assert found.trainable == plain.trainable


L = keras.layers


def functional():
    x = keras.Input((8,))
    inner = keras.Sequential([L.Dense(4, name="d1")], name="inner")
    y = L.Dropout(0.5)(L.BatchNormalization(name="norm")(inner(x)))
    return keras.Model(x, L.Dense(4, name="d2")(y), name="model")


def without_input():
    return keras.Sequential(
        [L.Dense(4, name="d1"), L.Dense(4, name="d2")], name="model"
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="model")
        self.d1, self.d2 = L.Dense(4, name="d1"), L.Dense(4, name="d2")

    def call(self, x):
        return self.d2(self.d1(x))


def table_model(layer):
    return keras.Sequential(
        [keras.Input((6,), dtype="int32"), layer, L.Flatten(), L.Dense(4)],
        name="model",
    )


def stock_table():
    return table_model(L.Embedding(16, 8, name="e"))


def table():
    return table_model(tlm.layers.ShardedEmbedding(16, 8, name="e"))


def names_after_fit(make, place, call_first=False):
    """Returns paths and names of the weights, slots and metrics of a model."""
    keras.backend.clear_session()
    model = place(make)
    is_table = make in (stock_table, table)
    x = pairs.TOKENS[:8] if is_table else pairs.FEATURES[:8]
    if call_first:
        model(x)
    optimizer = keras.optimizers.AdamW(0.01)
    pairs.fit(
        model,
        x,
        pairs.LABELS[:8],
        epochs=1,
        optimizer=optimizer,
        run_eagerly=False,
    )
    variables = [
        *model.variables,
        *optimizer.variables,
        *model.metrics_variables,
    ]
    return [(one.path, one.value.name) for one in variables]


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("call_first", [False, True])
@pytest.mark.parametrize(
    ("make", "stock"),
    [
        (functional, functional),
        (without_input, without_input),
        (Subclassed, Subclassed),
        (table, stock_table),
    ],
)
def test_names_are_the_same_as_without_a_mesh(make, stock, call_first):
    def on_mesh(make):
        axes = {"(d1.kernel|e.embeddings)": (None, "model")}
        return pairs.on_mesh(make, axes)

    expected = names_after_fit(stock, pairs.plain, call_first)
    assert names_after_fit(make, on_mesh, call_first) == expected


def test_weight_decay_excludes_layers_by_name():
    found = []
    for place in (pairs.plain, lambda make: pairs.on_mesh(make, {})):
        model = place(functional)
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["norm/", "d2"])
        pairs.fit(model, optimizer=optimizer, epochs=1)
        found.append(model.get_weights())
    # Weight decay changes the kernels by 0.02. Batch normalization makes the
    # gradient of the first bias consist of rounding errors.
    pairs.assert_alike(*found, atol=1e-3)


def test_watched_variables_have_the_names_of_stock_keras():
    found = []
    for place in (pairs.plain, lambda make: pairs.on_mesh(make, {})):
        model = place(functional)
        with tf.GradientTape() as tape:
            model(pairs.FEATURES[:8])
        found.append([one.name for one in tape.watched_variables()])
    assert found[0] == found[1] and "d2/kernel:0" in found[0]


def test_the_representation_contains_the_layout(mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["table"] = layout_of(mesh, "model", None)
    with tlm.layout_map_scope(layout_map):
        created = keras.Variable(VALUE, name="table")
        pending = repr(created)
    assert "layout" not in pending or "layout=('model', None)" in pending
    created.numpy()
    assert "dtype=float32, layout=('model', None), value=[[" in repr(created)
