"""Convolutions whose kernel is sharded by channels, against one device."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers as L

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.mesh import shard_map as shard_maps
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.shard_map import SCOPE, shard_map

dtensor = tf.experimental.dtensor

# Sums over shards are computed in a different order.
FLOAT64: Any = dict(rtol=1e-11, atol=1e-11)


def result_and_gradients(layer):
    """Returns a function of images and of the gradient of the result."""

    def step(x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y * dy)
        weights = [w.value for w in layer.trainable_weights]
        return y, tape.gradient(loss, [x, *weights])

    return step


def on_mesh(make, shape, axes, mesh, **options):
    """Returns a layer on a mesh, whose map raises if a weight is gathered."""
    layout_map = tlm.LayoutMap(mesh, strict=True)
    for name, value in axes.items():
        layout_map[f".*[.]{name}$"] = layout_of(mesh, *value)
    with tlm.layout_map_scope(layout_map, **options):
        inputs, layer = keras.Input(batch_shape=shape), make()
        model = keras.Model(inputs, layer(inputs))
    return model, layer


def assert_matches_a_single_device(make, shape, axes, mesh=None):
    mesh = mesh or mesh_of(batch=2, model=2)
    rng = np.random.default_rng(0)
    plain = make()
    plain.build(shape)
    plain.set_weights([rng.normal(size=w.shape) for w in plain.weights])
    x = rng.normal(size=shape)
    dy = rng.normal(size=plain.compute_output_shape(shape))
    expected = result_and_gradients(plain)(tf.constant(x), tf.constant(dy))
    model, layer = on_mesh(make, shape, axes, mesh)
    layer.set_weights(plain.get_weights())
    assert assignments.sharded_kernels(layer)
    assert not assignments.gathers_weights(layer)
    step = tf.function(result_and_gradients(layer))
    with tlm.layout.default_mesh(mesh, "batch"):
        args = [transfer.to_batch(v, mesh, "batch") for v in (x, dy)]
        found = step(*args)
        graph = step.get_concrete_function(*args).graph
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
        np.testing.assert_allclose(transfer.to_host(one), other, **FLOAT64)
    for weight, gradient in zip(layer.trainable_weights, found[1][1:]):
        layout = dtensor.fetch_layout(gradient)
        if "kernel" in weight.name:
            assert layout == weight.layout
    assert_each_device_computes_a_part(graph, layer, axes)
    del model


def assert_each_device_computes_a_part(graph, layer, axes):
    """Checks that convolutions use local shards of the sharded kernels."""
    kernels = {
        tuple(w.shape[-2:]): np.prod(w.shape)
        for w in layer.weights
        if any(axes.get(w.name, ())) and "kernel" in w.name
    }
    operations = [
        op
        for one in graphs_of(graph)
        for op in one.get_operations()
        if op.type in ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
        or op.type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
    ]
    assert operations
    for op in operations:
        assert tuple(op.inputs[1].shape[-2:]) not in kernels, op.name


def graphs_of(graph):
    return [
        graph,
        *(f.graph for f in graph._functions.values() if hasattr(f, "graph")),
    ]


def f64(kind, *args, **kwargs):
    return lambda: kind(*args, dtype="float64", **kwargs)


OUT_1D, IN_1D = (None, None, "model"), (None, "model", None)
OUT_2D, IN_2D = (None, None, None, "model"), (None, None, "model", None)
OUT_3D, IN_3D = (None, *OUT_2D), (None, *IN_2D)
BOTH = (None, None, "rows", "model")
# Each case: layer, shape of the images, layouts.
CASES = {
    "2D output": (f64(L.Conv2D, 6, 3), (4, 6, 5, 4), {"kernel": OUT_2D}),
    "2D output, sharded bias": (
        f64(L.Conv2D, 6, 3, strides=2, padding="same", activation="tanh"),
        (4, 6, 5, 4),
        {"kernel": OUT_2D, "bias": ("model",)},
    ),
    "2D input": (
        f64(L.Conv2D, 5, (2, 3), padding="same"),
        (4, 6, 5, 4),
        {"kernel": IN_2D},
    ),
    "2D input, sharded bias": (
        f64(L.Conv2D, 6, 3, strides=(1, 2)),
        (4, 6, 5, 4),
        {"kernel": IN_2D, "bias": ("model",)},
    ),
    "2D along the batch axis": (
        f64(L.Conv2D, 6, 3),
        (4, 6, 5, 4),
        {"kernel": (None, None, "batch", "model")},
    ),
    "2D dilation": (
        f64(L.Conv2D, 6, 3, dilation_rate=2),
        (4, 7, 7, 4),
        {"kernel": OUT_2D},
    ),
    "2D 1x1": (f64(L.Conv2D, 6, 1), (4, 5, 5, 4), {"kernel": IN_2D}),
    "patches": (
        f64(L.Conv2D, 6, 3, strides=3),
        (4, 6, 6, 3),
        {"kernel": OUT_2D},
    ),
    "odd batch": (f64(L.Conv2D, 6, 3), (3, 6, 5, 4), {"kernel": OUT_2D}),
    "groups": (
        f64(L.Conv2D, 8, 3, groups=2),
        (4, 5, 5, 4),
        {"kernel": OUT_2D},
    ),
    "groups per device": (
        f64(L.Conv2D, 8, 3, groups=4),
        (4, 5, 5, 8),
        {"kernel": OUT_2D},
    ),
    "3D groups": (
        f64(L.Conv3D, 8, 2, groups=4),
        (2, 3, 3, 3, 8),
        {"kernel": OUT_3D},
    ),
    "1D causal": (
        f64(L.Conv1D, 6, 3, padding="causal"),
        (4, 6, 4),
        {"kernel": OUT_1D},
    ),
    "1D input": (f64(L.Conv1D, 6, 3, strides=2), (4, 7, 4), {"kernel": IN_1D}),
    "3D output": (f64(L.Conv3D, 4, 2), (2, 4, 3, 3, 2), {"kernel": OUT_3D}),
    "3D input": (
        f64(L.Conv3D, 4, 3, padding="same", strides=2),
        (2, 4, 4, 4, 2),
        {"kernel": IN_3D},
    ),
    "depthwise": (
        f64(L.DepthwiseConv2D, 3, depth_multiplier=2, padding="same"),
        (4, 6, 5, 4),
        {"kernel": IN_2D, "bias": ("model",)},
    ),
    "depthwise strides": (
        f64(L.DepthwiseConv2D, 3, strides=2),
        (4, 7, 7, 4),
        {"kernel": IN_2D},
    ),
    "depthwise 1D": (
        f64(L.DepthwiseConv1D, 3),
        (4, 6, 4),
        {"kernel": IN_1D},
    ),
    "separable": (
        f64(L.SeparableConv2D, 6, 3),
        (4, 6, 5, 4),
        {"depthwise_kernel": IN_2D, "pointwise_kernel": OUT_2D},
    ),
    "separable pointwise": (
        f64(L.SeparableConv2D, 6, 3, strides=2),
        (4, 7, 7, 4),
        {"pointwise_kernel": IN_2D},
    ),
    "separable depthwise": (
        f64(L.SeparableConv1D, 6, 3),
        (4, 6, 4),
        {"depthwise_kernel": IN_1D},
    ),
    "transposed 2D output": (
        f64(L.Conv2DTranspose, 6, 3, strides=2, padding="same"),
        (4, 4, 5, 4),
        {"kernel": IN_2D, "bias": ("model",)},
    ),
    "transposed 2D input": (
        f64(L.Conv2DTranspose, 6, 3),
        (4, 4, 5, 4),
        {"kernel": OUT_2D},
    ),
    "transposed 1D": (
        f64(L.Conv1DTranspose, 6, 3, strides=2),
        (4, 4, 4),
        {"kernel": IN_1D},
    ),
    "transposed 3D": (
        f64(L.Conv3DTranspose, 4, 2, strides=2),
        (2, 3, 2, 2, 4),
        {"kernel": OUT_3D},
    ),
}


@pytest.mark.covering(1, 4)
@pytest.mark.parametrize("name", CASES)
def test_layer_matches_a_single_device(name):
    make, shape, axes = CASES[name]
    assert_matches_a_single_device(make, shape, axes)


@pytest.mark.parametrize(
    "kind, has_tpus",
    [(L.Conv2D, False), (L.Conv2D, True), (L.Conv2DTranspose, False)],
)
def test_kernel_that_is_sharded_in_both_dimensions(kind, has_tpus, monkeypatch):
    # On a mesh of TPUs, another op reads the local shards.
    monkeypatch.setattr(shard_maps, "_has_tpus", lambda mesh: has_tpus)
    mesh = mesh_of(rows=2, model=2)
    rng = np.random.default_rng(0)
    shape = (2, 5, 5, 4)
    make = f64(kind, 4, 3)
    plain = make()
    plain.build(shape)
    x = rng.normal(size=shape)
    dy = rng.normal(size=plain.compute_output_shape(shape))
    expected = result_and_gradients(plain)(tf.constant(x), tf.constant(dy))
    _model, layer = on_mesh(make, shape, {"kernel": BOTH}, mesh)
    layer.set_weights(plain.get_weights())
    (kernel,) = assignments.sharded_kernels(layer)
    assert kernel.axes == ("rows", "model")
    with tlm.layout.default_mesh(mesh):
        found = tf.function(result_and_gradients(layer))(
            *(
                transfer.to_mesh(v, dtensor.Layout.replicated(mesh, 4))
                for v in (x, dy)
            )
        )
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
        np.testing.assert_allclose(transfer.to_host(one), other, **FLOAT64)


@settings(max_examples=6, deadline=None)
@given(
    data=st.data(),
    rank=st.integers(1, 3),
    padding=st.sampled_from(["same", "valid"]),
    shards=st.sampled_from(["input", "output"]),
)
def test_any_convolution_matches_a_single_device(data, rank, padding, shards):
    size = data.draw(st.integers(1, 3))
    stride = data.draw(st.integers(1, 2))
    length = data.draw(st.integers(size, 6))
    inner, outer = (2 * data.draw(st.integers(1, 3)) for _ in range(2))
    kernel = [None] * rank
    kernel += ["model", None] if shards == "input" else [None, "model"]
    assert_matches_a_single_device(
        lambda: {1: L.Conv1D, 2: L.Conv2D, 3: L.Conv3D}[rank](
            outer, size, strides=stride, padding=padding, dtype="float64"
        ),
        (2, *[length] * rank, inner),
        {"kernel": kernel},
    )


def make_network():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            L.Conv2D(8, 3, name="c1"),
            L.BatchNormalization(),
            L.ReLU(),
            L.DepthwiseConv2D(3, name="c2"),
            L.Conv2D(6, 1, name="c3"),
            L.GlobalAveragePooling2D(),
            L.Dense(4),
        ]
    )


NETWORK = {
    "c1.kernel": OUT_2D,
    "c1.bias": ("model",),
    "c2.kernel": IN_2D,
    "c3.kernel": IN_2D,
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error::tf_layoutmap.layout.LayoutMapWarning")
def test_network_trains_like_on_a_single_device_without_replicated_ops():
    model = pairs.assert_trains_alike(
        make_network,
        pairs.IMAGES,
        NETWORK,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        epochs=1,
    )
    assert axes_of(model.layers[0].kernel) == OUT_2D
    layout_map = tlm.LayoutMap(mesh_of(batch=2, model=2))
    assert layout_map.explain(model).replicated_ops == ()


@keras.saving.register_keras_serializable("tests")
class CausalConvolution(L.Layer):
    """A depthwise convolution whose kernel is `[channels, size]`."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")

    def call(self, x):
        x = keras.ops.pad(x, [[0, 0], [2, 0], [0, 0]])
        kernel = keras.ops.transpose(self.kernel)[..., None]
        return keras.ops.depthwise_conv(x, kernel, padding="valid")


def make_causal():
    return keras.Sequential(
        [
            keras.Input((6, 4)),
            L.Dense(8, name="d1"),
            CausalConvolution(name="causal"),
            L.GlobalAveragePooling1D(),
            L.Dense(4),
        ]
    )


SERIES = np.random.default_rng(0).normal(size=(32, 6, 4)).astype(np.float32)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error::tf_layoutmap.layout.LayoutMapWarning")
@pytest.mark.parametrize("axes", [("model", None), (None, None)])
def test_depthwise_kernel_of_another_layer_is_not_gathered(axes):
    model = pairs.assert_trains_alike(
        make_causal,
        SERIES,
        {"d1.kernel": (None, "model"), "causal.kernel": axes},
        epochs=1,
    )
    layout_map = tlm.LayoutMap(mesh_of(batch=2, model=2))
    for one in layout_map.explain(model).measured:
        assert one.gathered_bytes == 0


@pytest.mark.filterwarnings("error::tf_layoutmap.layout.LayoutMapWarning")
@pytest.mark.parametrize("axes", [("model", None), (None, None)])
def test_depthwise_convolution_of_sharded_channels_and_unsharded_samples(axes):
    expected = pairs.plain(make_causal)(SERIES)
    model = pairs.on_mesh(
        make_causal, {"d1.kernel": (None, "model"), "causal.kernel": axes}
    )
    mesh = model.get_layer("d1").kernel.layout.mesh
    with tlm.layout.default_mesh(mesh):
        found = tf.function(model)(
            transfer.to_mesh(SERIES, layout_of(mesh, None, None, None))
        )
    np.testing.assert_allclose(
        transfer.to_host(found), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.exhaustive
def test_network_predicts_eagerly_like_on_a_single_device():
    expected = pairs.plain(make_network)(pairs.IMAGES[:4])
    model = pairs.on_mesh(make_network, NETWORK)
    np.testing.assert_allclose(
        np.asarray(model(pairs.IMAGES[:4])), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("layer", "shape", "axes", "why"),
    [
        (
            lambda: L.Conv2D(4, 2, name="c", data_format="channels_first"),
            (4, 6, 6),
            OUT_2D,
            "data_format",
        ),
        (
            lambda: L.DepthwiseConv2D(3, depth_multiplier=2, name="c"),
            (6, 6, 4),
            OUT_2D,
            "multiplier",
        ),
        (lambda: L.Conv2D(6, 3, groups=3, name="c"), (6, 6, 3), OUT_2D, "3"),
        (
            lambda: L.Conv2D(4, 3, groups=2, name="c"),
            (6, 6, 4),
            IN_2D,
            "groups",
        ),
    ],
    ids=["channels first", "multiplier", "uneven groups", "input groups"],
)
def test_kernel_that_is_gathered_is_reported(layer, shape, axes, why):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=True)
    layout_map["c.kernel"] = layout_of(mesh, *axes)
    with pytest.raises(ValueError, match=f"would gather the weight.*{why}"):
        with tlm.layout_map_scope(layout_map):
            _model = keras.Sequential([keras.Input(shape), layer()])
    model = pairs.on_mesh(
        lambda: keras.Sequential([keras.Input(shape), layer()]),
        {"c.kernel": axes},
    )
    assert assignments.gathers_weights(model.layers[0])


def test_user_defined_layer_can_change_the_kernel():
    class Standardized(L.Conv2D):
        def convolution_op(self, inputs, kernel):
            kernel = kernel - keras.ops.mean(kernel, axis=(0, 1, 2))
            return super().convolution_op(inputs, kernel)

    assert_matches_a_single_device(
        lambda: Standardized(6, 3, dtype="float64"),
        (4, 6, 6, 4),
        {"kernel": OUT_2D},
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [OUT_2D, IN_2D], ids=["output", "input"])
def test_gradient_of_a_function_that_is_computed_outside_of_it(axes):
    make, shape = f64(L.Conv2D, 6, 3), (4, 6, 5, 4)
    x = np.random.default_rng(0).normal(size=shape)
    mesh = mesh_of(batch=2, model=2)
    model, layer = on_mesh(make, shape, {"kernel": axes}, mesh)
    plain = make()
    plain.build(shape)
    plain.set_weights(layer.get_weights())

    def gradients(call, layer, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(x) ** 2)
        return tape.gradient(loss, [w.value for w in layer.trainable_weights])

    expected = gradients(plain, plain, tf.constant(x))
    with tlm.layout.default_mesh(mesh, "batch"):
        for call in (tf.function(layer), layer):
            found = gradients(call, layer, transfer.to_batch(x, mesh, "batch"))
            for one, other in zip(found, expected):
                np.testing.assert_allclose(
                    transfer.to_host(one), other, **FLOAT64
                )
    del model


def test_gradient_of_a_gradient_matches_a_single_device():
    make, shape = f64(L.Conv2D, 6, 3, activation="tanh"), (4, 6, 5, 4)
    x = np.random.default_rng(0).normal(size=shape)
    mesh = mesh_of(batch=2, model=2)
    model, layer = on_mesh(make, shape, {"kernel": OUT_2D}, mesh)
    plain = make()
    plain.build(shape)
    plain.set_weights(layer.get_weights())

    def step(layer, x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(layer(x) ** 2)
            loss = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(loss, [w.value for w in layer.trainable_weights])

    expected = step(plain, tf.constant(x))
    with tlm.layout.default_mesh(mesh, "batch"):
        found = tf.function(lambda x: step(layer, x))(
            transfer.to_batch(x, mesh, "batch")
        )
    for one, other in zip(found, expected):
        np.testing.assert_allclose(
            transfer.to_host(one), other, rtol=1e-10, atol=1e-10
        )
    del model


def test_shard_map_runs_a_function_on_local_shards():
    mesh = mesh_of(batch=2, model=2)
    x = np.arange(24.0).reshape(4, 6)
    shapes = []

    def double(x):
        shapes.append(tuple(x.shape))
        return 2 * x

    @tf.function
    def step(x):
        kept = shard_map(
            double, mesh, [x], [("batch", "model")], ("batch", "model")
        )
        summed = shard_map(
            double, mesh, [x], [("batch", "model")], ("batch", None), ["model"]
        )
        return kept, summed

    with tlm.layout.default_mesh(mesh, "batch"):
        kept, summed = step(transfer.to_batch(x, mesh, "batch"))
    assert set(shapes) == {(2, 3)}
    assert dtensor.fetch_layout(kept).sharding_specs == ["batch", "model"]
    np.testing.assert_array_equal(transfer.to_host(kept), 2 * x)
    np.testing.assert_array_equal(
        transfer.to_host(summed), 2 * (x[:, :3] + x[:, 3:])
    )
    assert SCOPE not in tf.get_current_name_scope()


def test_user_can_call_the_ops_that_read_local_shards():
    mesh = mesh_of(batch=2, model=2)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    args = np.zeros([3, 2], np.float32), np.array([[0], [2], [2], [1]])

    def step(x):
        sums = tf.raw_ops.ScatterNdNonAliasingAdd(
            input=args[0], indices=args[1], updates=x
        )
        default = tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, 2])
        product = tf.math.unsorted_segment_prod(x, args[1][:, 0], 3)
        return sums, product, tf.ensure_shape(default, x.shape)

    expected = step(x)
    with tlm.layout.default_mesh(mesh, "batch"):
        found = tf.function(step)(transfer.to_batch(x, mesh, "batch"))
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(transfer.to_host(one), other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool"])
@pytest.mark.parametrize(
    "has_tpus, used, unused",
    [
        (False, "PlaceholderWithDefault", "UnsortedSegmentProd"),
        (True, "UnsortedSegmentProd", "PlaceholderWithDefault"),
    ],
)
def test_local_shards_are_bitwise_equal(
    has_tpus, used, unused, dtype, monkeypatch
):
    mesh = mesh_of(batch=2, model=2)
    monkeypatch.setattr(shard_maps, "_has_tpus", lambda mesh: has_tpus)
    spec = ("batch", "model")
    x = tf.cast(np.array([[0.0, 1, 3, 0], [0, 7, -0.0, 9]]), dtype)

    @tf.function
    def step(x):
        return shard_map(tf.identity, mesh, [x], [spec], spec)

    with tlm.layout.default_mesh(mesh, "batch"):
        x_on_mesh = transfer.to_batch(x, mesh, "batch")
        found = transfer.to_host(step(x_on_mesh))
        graph = step.get_concrete_function(x_on_mesh).graph
    ops = {op.type for op in graph.get_operations()}
    assert used in ops
    assert unused not in ops
    assert "ScatterNdNonAliasingAdd" not in ops
    assert found.tobytes() == x.numpy().tobytes()


def test_local_shards_for_gpus_are_equal(monkeypatch):
    mesh = mesh_of(batch=2, model=2)
    monkeypatch.setattr(shard_maps, "_shares_memory", lambda mesh: False)
    spec = ("batch", "model")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    @tf.function
    def step(x):
        return shard_map(tf.identity, mesh, [x], [spec], spec)

    with tlm.layout.default_mesh(mesh, "batch"):
        x_on_mesh = transfer.to_batch(x, mesh, "batch")
        np.testing.assert_array_equal(transfer.to_host(step(x_on_mesh)), x)
        graph = step.get_concrete_function(x_on_mesh).graph
    assert "ScatterNdNonAliasingAdd" in {
        op.type for op in graph.get_operations()
    }


# Each case: op, shape of the kernel, layout of the images in eager mode.
UNSHARDED = {
    "2D": (
        lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"),
        (3, 3, 4, 6),
        ("batch", None, None, "model"),
    ),
    "2D channels": (
        lambda x, k: tf.nn.conv2d(x, k, 2, "VALID"),
        (3, 3, 4, 5),
        (None, None, None, "model"),
    ),
    "groups": (
        lambda x, k: tf.nn.conv2d(x, k, 1, "VALID"),
        (3, 3, 2, 4),
        ("batch", None, None, "model"),
    ),
    "dilated": (
        lambda x, k: tf.nn.convolution(x, k, padding="SAME", dilations=2),
        (3, 3, 4, 6),
        ("batch", None, None, "model"),
    ),
    "transposed": (
        lambda x, k: tf.nn.conv2d_transpose(x, k, [4, 12, 12, 5], 2),
        (3, 3, 5, 4),
        ("batch", None, None, "model"),
    ),
    "depthwise": (
        lambda x, k: tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "SAME"),
        (3, 3, 4, 2),
        ("batch", None, None, "model"),
    ),
    "dilated depthwise": (
        lambda x, k: tf.nn.depthwise_conv2d(
            x, k, [1, 1, 1, 1], "VALID", dilations=[2, 2]
        ),
        (3, 3, 4, 1),
        ("batch", None, None, None),
    ),
}


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("name", UNSHARDED)
@pytest.mark.filterwarnings("error:DTensor cannot shard")
def test_samples_stay_sharded_with_an_unsharded_kernel(name, is_eager):
    op, shape, axes = UNSHARDED[name]
    mesh = mesh_of(batch=2, model=2)
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(4, 6, 6, 4)), rng.normal(size=shape)

    def step(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch((x, kernel))
            y = op(x * 1.0, kernel)
            loss = tf.reduce_sum(tf.sin(y))
        return y, *tape.gradient(loss, (x, kernel))

    # TensorFlow's kernels for CPUs do not support gradients of groups.
    if name == "groups":

        def step(x, kernel):
            return (op(x * 1.0, kernel),)

    wanted = step(tf.constant(x), tf.constant(kernel))
    if not is_eager:
        axes = ("batch", None, None, None)
    with tlm.layout.default_mesh(mesh, "batch"):
        got = (step if is_eager else tf.function(step, autograph=False))(
            tlm.layout.to_mesh(x, layout_of(mesh, *axes)),
            tlm.layout.to_mesh(kernel, layout_of(mesh, *[None] * 4)),
        )
    for mine, plain in zip(got, wanted, strict=True):
        np.testing.assert_allclose(transfer.to_host(mine), plain, **FLOAT64)
    specs = dtensor.fetch_layout(got[0]).sharding_specs
    assert specs[0] == ("batch" if axes[0] else dtensor.UNSHARDED)
