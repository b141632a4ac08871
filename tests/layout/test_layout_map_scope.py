"""Checks models that are created under `tlm.layout_map_scope`.

The tests cover every example of the documentation, and every way to create a
model in Keras.
"""

import gc
import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap.layout.keras3.variable import MeshVariable

dtensor = tf.experimental.dtensor

# Holds references to models that a test does not use. Without a reference, the
# garbage collector could free a model before the end of its scope.
KEPT = []


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(batch=2, model=2)


@pytest.fixture
def layouts(mesh):
    """Returns the layouts layout_1 ... layout_4 of the documentation.

    All four are different.
    """
    return (
        layout_of(mesh, None, "model"),
        layout_of(mesh, "model"),
        layout_of(mesh, "model", None),
        layout_of(mesh, "batch"),
    )


@pytest.fixture
def layout_map(mesh, layouts):
    layout_map = tlm.LayoutMap(mesh=mesh)
    layout_map["d1.kernel"] = layouts[0]
    layout_map["d1.bias"] = layouts[1]
    layout_map["d2.kernel"] = layouts[2]
    layout_map["d2.bias"] = layouts[3]
    return layout_map


class SubclassModel(keras.Model):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.d1 = keras.layers.Dense(1000)
        self.d2 = keras.layers.Dense(1000)

    def call(self, inputs):
        return self.d2(self.d1(inputs))


def functional():
    inputs = keras.Input((10,), batch_size=10)
    x = keras.layers.Dense(20, name="d1")(inputs)
    return keras.Model(inputs, keras.layers.Dense(30, name="d2")(x))


class FunctionalSubclass(keras.Model):
    """Functional subclass, which Keras also creates without `__init__`."""

    def __init__(self):
        inputs = keras.Input((10,))
        x = keras.layers.Dense(20, name="d1")(inputs)
        super().__init__(inputs, keras.layers.Dense(30, name="d2")(x))


def sequential():
    return keras.Sequential(
        [
            keras.Input((10,)),
            keras.layers.Dense(20, name="d1"),
            keras.layers.Dense(30, name="d2"),
        ]
    )


def sequential_without_input():
    return keras.Sequential(
        [keras.layers.Dense(20, name="d1"), keras.layers.Dense(30, name="d2")]
    )


def check(d1, d2, layouts):
    for variable, layout in zip(
        (d1.kernel, d1.bias, d2.kernel, d2.bias), layouts
    ):
        assert variable.layout == layout
        assert isinstance(variable.value, dtensor.DVariable)
        # The shards on the devices must also have this layout.
        parts = dtensor.unpack(variable.value.read_value())
        assert {tuple(p.shape) for p in parts} == {
            tuple(layout.local_shape_from_global_shape(variable.shape))
        }


@pytest.mark.parametrize(
    "enter", [tlm.layout_map_scope, lambda layout_map: layout_map.scope()]
)
@pytest.mark.parametrize("where", ["within", "after"])
def test_keys_of_a_subclassed_model_are_attributes(
    layout_map, layouts, enter, where
):
    inputs = tf.zeros((10, 10))
    with enter(layout_map):
        model = SubclassModel()
        if where == "within":
            results = model(inputs)
    if where == "after":
        results = model(inputs)
    check(model.d1, model.d2, layouts)
    np.testing.assert_array_equal(results.numpy(), np.zeros((10, 1000)))


def test_keys_of_a_functional_model_are_layer_names(layout_map, layouts):
    with tlm.layout_map_scope(layout_map):
        model = functional()
    check(model.layers[1], model.layers[2], layouts)


def test_keys_of_a_functional_subclass_are_layer_names(layout_map, layouts):
    with tlm.layout_map_scope(layout_map):
        model = FunctionalSubclass()
    check(model.layers[1], model.layers[2], layouts)


def test_keys_of_a_sequential_model_are_layer_names(layout_map, layouts):
    with tlm.layout_map_scope(layout_map):
        model = sequential()
    check(model.layers[0], model.layers[1], layouts)


def test_sequential_model_may_be_built_after_the_scope(layout_map, layouts):
    with tlm.layout_map_scope(layout_map):
        model = sequential_without_input()
    model.build((None, 10))
    check(model.layers[0], model.layers[1], layouts)


@pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`")
def test_sequential_model_accepts_the_input_shape_argument(layout_map, layouts):
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [
                keras.layers.Dense(20, name="d1", input_shape=(10,)),
                keras.layers.Dense(30, name="d2"),
            ]
        )
    check(model.layers[0], model.layers[1], layouts)


@pytest.mark.parametrize(
    "make", [functional, sequential, sequential_without_input, SubclassModel]
)
def test_initial_weights_match_the_same_model_without_a_mesh(layout_map, make):
    def built():
        keras.utils.set_random_seed(7)
        keras.utils.clear_session()
        model = make()
        model(np.zeros((10, 10), np.float32))
        return model

    plain = built()
    with tlm.layout_map_scope(layout_map):
        spread = built()
    assert [v.path for v in plain.weights] == [v.path for v in spread.weights]
    for a, b in zip(plain.weights, spread.weights):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_sharded_init_follows_the_distribution_of_the_initializer(mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map["wide.kernel"] = layout_of(mesh, None, "model")
    layout_map["tall.kernel"] = layout_of(mesh, "model", "batch")
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [
                keras.Input((200,)),
                keras.layers.Dense(
                    400,
                    name="wide",
                    kernel_initializer=(
                        keras.initializers.RandomUniform(-2, 3, seed=5)
                    ),
                ),
                keras.layers.Dense(
                    300,
                    name="tall",
                    kernel_initializer=(keras.initializers.HeNormal(seed=6)),
                ),
            ]
        )
    wide, tall = (layer.kernel.numpy() for layer in model.layers)
    assert -2 <= wide.min() < -1.99 and 2.99 < wide.max() <= 3
    assert abs(wide.mean() - 0.5) < 0.02
    # The scale of the initializer must be computed for the full kernel, not for
    # a shard.
    assert abs(tall.std() - np.sqrt(2 / 400)) < 0.001
    # The shards must not have equal values.
    for value in (wide, tall):
        half = value.shape[1] // 2
        assert not np.allclose(value[:, :half], value[:, half:])


def test_initial_values_depend_on_the_seed(mesh):
    layout_map = tlm.LayoutMap(mesh)
    layout_map[".*kernel"] = layout_of(mesh, None, "model")
    drawn = []
    for seed in (1, 2, 1):
        with tlm.layout_map_scope(layout_map):
            layer = keras.layers.Dense(
                8, kernel_initializer=keras.initializers.GlorotNormal(seed)
            )
            layer.build((None, 4))
        drawn.append(layer.kernel.numpy())
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert not np.array_equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.Orthogonal(seed=3),
        keras.initializers.Constant(2.5),
        "ones",
        "zeros",
        lambda shape, dtype=None: tf.ones(shape, dtype) * 3,
        keras.initializers.Constant(np.arange(32.0).reshape(4, 8)),
    ],
)
def test_unsupported_initializers_run_on_the_host(mesh, initializer):
    layout_map = tlm.LayoutMap(mesh)
    layout_map[".*kernel"] = layout_of(mesh, "batch", "model")

    def kernel():
        layer = keras.layers.Dense(8, kernel_initializer=initializer)
        layer.build((None, 4))
        return layer.kernel

    with tlm.layout_map_scope(layout_map):
        spread = kernel()
    assert axes_of(spread) == ("batch", "model")
    np.testing.assert_array_equal(spread.numpy(), kernel().numpy())


def test_unmatched_variable_is_replicated(mesh):
    with tlm.layout_map_scope(tlm.LayoutMap(mesh)):
        model = sequential()
    assert all(axes_of(v) == (None,) * v.ndim for v in model.weights)


class Block(keras.layers.Layer):
    """Layer with weights and sublayers in a list, a dict and an attribute."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.stack = [keras.layers.Dense(4), keras.layers.Dense(4)]
        self.table = {"left": keras.layers.Dense(4)}
        self._hidden = keras.layers.Dense(4)

    def build(self, shape):
        self.scales = [
            self.add_weight(shape=(4,), name="first"),
            self.add_weight(shape=(4,), name="second"),
        ]
        super().build(shape)

    def call(self, x):
        for layer in (*self.stack, self.table["left"], self._hidden):
            x = layer(x)
        return x * self.scales[0] * self.scales[1]


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(), Block()]
        self.head = sequential_without_input()

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("key", "pick"),
    [
        ("blocks.0.stack.1.kernel", lambda m: m.blocks[0].stack[1].kernel),
        (
            "blocks.1.table.left.kernel",
            lambda m: m.blocks[1].table["left"].kernel,
        ),
        ("blocks.1.hidden.kernel", lambda m: m.blocks[1]._hidden.kernel),
        ("head.d1.kernel", lambda m: m.head.layers[0].kernel),
        ("d2.kernel", lambda m: m.head.layers[1].kernel),
        (
            "nested/block_1/dense_4/kernel",
            lambda m: m.blocks[1].stack[0].kernel,
        ),
        ("block_1/dense_4/kernel", lambda m: m.blocks[1].stack[0].kernel),
        (
            "nested.block_1.dense_4.kernel",
            lambda m: m.blocks[1].stack[0].kernel,
        ),
    ],
)
def test_key_of_a_nested_layer_is_its_path(mesh, key, pick):
    keras.utils.clear_session()
    layout_map = tlm.LayoutMap(mesh)
    layout_map[key] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        model = Nested()
    model(np.zeros((2, 4), np.float32))
    sharded = [v for v in model.weights if any(axes_of(v))]
    assert len(sharded) == 1 and sharded[0] is pick(model)


@pytest.mark.parametrize("key", ["blocks.0.scales.1", "blocks.0.second"])
def test_key_of_a_weight_in_a_list_is_its_index_or_name(mesh, key):
    layout_map = tlm.LayoutMap(mesh)
    layout_map[key] = layout_of(mesh, "model")
    with tlm.layout_map_scope(layout_map):
        model = Nested()
    model(np.zeros((2, 4), np.float32))
    assert axes_of(model.blocks[0].scales[1]) == ("model",)
    assert axes_of(model.blocks[0].scales[0]) == (None,)


@pytest.mark.parametrize("key", ["one.kernel", "two.kernel"])
def test_each_path_of_a_shared_layer_is_a_key(mesh, key):
    class Shared(keras.Model):
        def __init__(self):
            super().__init__()
            self.one = keras.layers.Dense(4)
            self.two = self.one

        def call(self, x):
            return self.two(self.one(x))

    layout_map = tlm.LayoutMap(mesh)
    layout_map[key] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        model = Shared()
    model(np.zeros((2, 4), np.float32))
    assert model.one.kernel is model.two.kernel
    assert axes_of(model.one.kernel) == (None, "model")


def test_layer_shared_by_two_models_has_one_variable(mesh, layout_map):
    with tlm.layout_map_scope(layout_map):
        shared = keras.layers.Dense(20, name="d1")
        one = keras.Sequential([keras.Input((10,)), shared])
        two = keras.Sequential(
            [keras.Input((10,)), shared, keras.layers.Dense(2)]
        )
    assert one.layers[0].kernel is two.layers[0].kernel
    assert axes_of(shared.kernel) == (None, "model")


def test_inner_scope_applies_and_outer_scope_is_restored(mesh):
    outer, inner = tlm.LayoutMap(mesh), tlm.LayoutMap(mesh)
    outer[".*kernel"] = layout_of(mesh, None, "model")
    inner[".*kernel"] = layout_of(mesh, "model", None)
    with tlm.layout_map_scope(outer):
        with tlm.layout_map_scope(inner):
            a = keras.layers.Dense(4)
        b = keras.layers.Dense(4)
        # `a` was created under the inner scope, which applies even if `a` is
        # built elsewhere.
        a.build((None, 4))
    b.build((None, 4))
    assert axes_of(a.kernel) == ("model", None)
    assert axes_of(b.kernel) == (None, "model")


def test_scope_does_not_apply_to_other_threads(layout_map):
    created = {}

    def work():
        layer = keras.layers.Dense(4)
        layer.build((None, 4))
        created["kernel"] = layer.kernel

    with tlm.layout_map_scope(layout_map):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        inside = sequential()
    assert not isinstance(created["kernel"], MeshVariable)
    assert isinstance(inside.weights[0], MeshVariable)


def test_scopes_of_threads_are_independent(mesh):
    axes = [(None, "model"), ("model", None), ("batch", None), (None, "batch")]
    created, errors = {}, []

    def work(index):
        try:
            layout_map = tlm.LayoutMap(mesh)
            layout_map[".*kernel"] = layout_of(mesh, *axes[index])
            with tlm.layout_map_scope(layout_map):
                created[index] = sequential_without_input()
            created[index].build((None, 4))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for index, model in created.items():
        assert axes_of(model.layers[0].kernel) == axes[index]


def test_many_threads_initialize_a_model_once(layout_map):
    with tlm.layout_map_scope(layout_map):
        model = sequential_without_input()
    model.build((None, 10))
    seen = []
    threads = [
        threading.Thread(
            target=lambda: seen.append(id(model.layers[0].kernel.value))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 1


def test_clone_and_from_config_use_the_scope(layout_map, layouts):
    plain = functional()
    with tlm.layout_map_scope(layout_map):
        clone = keras.models.clone_model(plain)
        copy = keras.Model.from_config(plain.get_config())
    for model in (clone, copy):
        check(model.layers[1], model.layers[2], layouts)
    back = keras.models.clone_model(clone)
    assert not any(isinstance(v, MeshVariable) for v in back.weights)


def test_nothing_changes_outside_the_scope(layout_map):
    with tlm.layout_map_scope(layout_map):
        KEPT.append(sequential())
    plain = sequential()
    assert not any(isinstance(v, MeshVariable) for v in plain.weights)
    assert type(plain.weights[0]) is keras.Variable
    assert isinstance(plain.weights[0].value, tf.Variable)
    plain.compile("adam", "mse")
    plain.fit(np.zeros((4, 10)), np.zeros((4, 30)), verbose=0)
    assert not any(
        isinstance(v, MeshVariable) for v in plain.optimizer.variables
    )


def test_error_inside_the_scope_is_raised_unchanged(layout_map):
    with pytest.raises(KeyError, match="mine"):
        with tlm.layout_map_scope(layout_map):
            KEPT.append(sequential())
            raise KeyError("mine")
    assert not isinstance(sequential().weights[0], MeshVariable)


def test_nothing_is_allocated_before_the_layer_has_a_path(layout_map):
    with tlm.layout_map_scope(layout_map):
        model = sequential()
        assert all(v._value is None for v in model.weights)
        assert model.count_params() == 10 * 20 + 20 + 20 * 30 + 30
    assert all(v._value is not None for v in model.weights)


def test_read_inside_the_scope_allocates_with_the_layout(layout_map, layouts):
    with tlm.layout_map_scope(layout_map):
        model = sequential()
        assert model.layers[0].kernel.numpy().shape == (10, 20)
        assert model.layers[0].kernel.layout == layouts[0]


def test_regularizers_and_constraints_receive_the_full_weight(layout_map):
    with tlm.layout_map_scope(layout_map):
        layer = keras.layers.Dense(
            20, name="d1", kernel_regularizer=keras.regularizers.L2(0.1)
        )
        model = keras.Sequential([keras.Input((10,)), layer])
    expected = 0.1 * np.sum(layer.kernel.numpy() ** 2)
    np.testing.assert_allclose(float(model.losses[0]), expected, rtol=1e-6)


def test_models_are_freed(layout_map):
    import weakref

    with tlm.layout_map_scope(layout_map):
        model = sequential()
    gone = weakref.ref(model.layers[0].kernel)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (({},), TypeError, "must be a LayoutMap"),
        ((tlm.LayoutMap(),), ValueError, "needs a mesh"),
    ],
)
def test_scope_without_a_map_or_mesh_raises(arguments, kind, words):
    with pytest.raises(kind, match=words):
        with tlm.layout_map_scope(*arguments):
            pass


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"init": "lazy"}, TypeError, "Options of a scope must be.*init"),
        ({"batch_dim": "rows"}, ValueError, "must be one of"),
    ],
)
def test_unknown_options_raise(layout_map, options, kind, words):
    with pytest.raises(kind, match=words):
        with tlm.layout_map_scope(layout_map, **options):
            pass


@pytest.mark.parametrize("strict", [False, True])
def test_unmatched_key_is_reported(mesh, strict):
    layout_map = tlm.LayoutMap(mesh, strict=strict)
    layout_map["dense_that_is_not.kernel"] = layout_of(mesh, None, "model")
    words = "'dense_that_is_not.kernel' matches no variable"
    reported = (
        pytest.raises(ValueError, match=words)
        if strict
        else pytest.warns(UserWarning, match=words)
    )
    with reported, tlm.layout_map_scope(layout_map):
        KEPT.append(sequential())


def test_unmatched_keys_are_not_reported_before_layers_are_built(layout_map):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tlm.layout_map_scope(layout_map):
            sequential_without_input()


@pytest.mark.parametrize(
    ("key", "axes", "words"),
    [
        ("d1.kernel", ("model",), r"rank 1, the variable has rank 2"),
        (
            "d1.kernel",
            (None, "model"),
            "size 21, which mesh axis 'model' of size",
        ),
    ],
)
@pytest.mark.parametrize("when", ["within", "after"])
def test_invalid_layout_raises(mesh, key, axes, words, when):
    layout_map = tlm.LayoutMap(mesh)
    layout_map[key] = layout_of(mesh, *axes)

    def make():
        return keras.Sequential([keras.layers.Dense(21, name="d1")])

    with pytest.raises(ValueError, match=words) as caught:
        with tlm.layout_map_scope(layout_map):
            model = make()
            if when == "within":
                model.build((None, 10))
        model.build((None, 10))
        model.layers[0].kernel.numpy()
    assert f"from key {key!r}" in str(caught.value)
    assert "nothing was allocated" in str(caught.value)
    assert all(v._value is None for v in model.weights)


def test_two_matches_raise_in_the_scope_of_a_strict_map(mesh):
    layout_map = tlm.LayoutMap(mesh, strict=True)
    layout_map["d.*kernel"] = layout_of(mesh, None, "model")
    layout_map[".*1.kernel"] = layout_of(mesh, "model", None)
    with pytest.raises(ValueError, match=r"matched by 'd\.\*kernel'"):
        with tlm.layout_map_scope(layout_map):
            KEPT.append(sequential())


def test_unknown_mesh_axis_raises_in_the_scope(mesh):
    layout_map = tlm.distribution.LayoutMap()
    layout_map["d2.kernel"] = tlm.distribution.TensorLayout(
        (None, "model"), mesh
    )
    layout_map["d1.kernel"] = (None, "modle")
    with pytest.raises(ValueError, match="did you mean 'model'"):
        with tlm.layout_map_scope(layout_map):
            KEPT.append(sequential())


def test_scope_accepts_the_map_of_keras_distribution(mesh):
    layout_map = tlm.distribution.LayoutMap(mesh)
    layout_map["d1.*kernel"] = (None, "model")
    with tlm.layout_map_scope(layout_map):
        model = sequential()
    assert axes_of(model.layers[0].kernel) == (None, "model")


def model_with_inner_model():
    """Returns a model with two layers named `dense`, one in a model `ffn`."""
    keras.utils.clear_session()
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(8, name="dense"),
            keras.Sequential([keras.layers.Dense(8, name="dense")], name="ffn"),
        ]
    )


@pytest.mark.parametrize("kind", [tlm.LayoutMap, tlm.distribution.LayoutMap])
def test_keys_for_a_layer_and_its_namesake_in_an_inner_model(mesh, kind):
    layout_map = kind(mesh)
    layout_map["^dense/kernel$"] = (
        layout_of(mesh, None, "model")
        if (kind is tlm.LayoutMap)
        else (None, "model")
    )
    layout_map["^ffn/dense/kernel$"] = (
        layout_of(mesh, "model", None)
        if (kind is tlm.LayoutMap)
        else ("model", None)
    )
    with tlm.layout_map_scope(layout_map):
        model = model_with_inner_model()
    outer, inner = model.layers[0].kernel, model.layers[1].layers[0].kernel
    assert axes_of(outer) == (None, "model")
    assert axes_of(inner) == ("model", None)
    assert layout_map.explain(model).ok


@pytest.mark.parametrize("key", ["^dense/kernel$", r"dense\.kernel$"])
def test_name_of_one_variable_is_not_an_alias_of_another(mesh, key):
    layout_map = tlm.LayoutMap(mesh)
    layout_map[key] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        model = model_with_inner_model()
    assert axes_of(model.layers[0].kernel) == (None, "model")
    assert axes_of(model.layers[1].layers[0].kernel) == (None, None)


def test_match_of_a_full_name_precedes_match_of_an_alias(mesh):
    layout_map = tlm.distribution.LayoutMap(mesh)
    layout_map["^d.*/kernel"] = (None, "model")
    layout_map["^ffn/.*kernel"] = ("model", None)
    with tlm.layout_map_scope(layout_map):
        keras.utils.clear_session()
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.Sequential(
                    [keras.layers.Dense(8, name="dense_9")], name="ffn"
                ),
            ]
        )
    assert axes_of(model.layers[0].layers[0].kernel) == ("model", None)


@pytest.mark.parametrize("key", ["emb/embeddings", "emb.embeddings"])
def test_key_that_is_a_name_does_not_match_longer_names(mesh, key):
    layout_map = tlm.LayoutMap(mesh)
    layout_map[key] = layout_of(mesh, "model", None)
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Embedding(16, 8, name="emb")]
        )
        model.quantize("int8")
    layer = model.layers[0]
    assert axes_of(layer._embeddings) == ("model", None)
    assert axes_of(layer.embeddings_scale) == (None,)
