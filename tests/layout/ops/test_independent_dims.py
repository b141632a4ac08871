"""Ops that process some dimensions independently, against one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.mesh import shard_map, transfer
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError
from tf_layoutmap.layout.mesh.known_layouts import known_axes
from tf_layoutmap.layout.ops import independent_dims
from tf_layoutmap.layout.replication import report

dtensor = tf.experimental.dtensor
R = tf.raw_ops
RNG = np.random.default_rng(0)
# TensorFlow's kernels for CPUs compute some of the ops only in float32.
IMAGES = RNG.uniform(size=(4, 6, 6, 4))
FLOATS = IMAGES.astype(np.float32)
COLORS = RNG.uniform(size=(4, 4, 4, 3)).astype(np.float32)
VOLUMES = RNG.uniform(size=(4, 4, 4, 4, 2)).astype(np.float32)
TRANSFORMS = np.float32([[1, 0.1, i, 0, 1, 0.3, 0, 0] for i in range(4)])
PADDINGS = [[0, 0], [0, 3], [2, 1], [0, 0]]

# Layouts of images that are sharded by samples and channels, and the layout of
# the result.
BOTH = ("batch", None, None, "model")
SAMPLES = ("batch", None, None, None)
CHANNELS = (None, None, None, "model")

# Each case: the function of `RULES`, images, layout of the images, layout of
# the result, and the op.
CASES = {
    "average pooling": (
        "avg_pool",
        IMAGES,
        BOTH,
        BOTH,
        lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"),
    ),
    "average pooling of volumes": (
        "avg_pool3d",
        VOLUMES,
        ("batch", None, None, None, "model"),
        ("batch", None, None, None, "model"),
        lambda x: tf.nn.avg_pool3d(x, 2, 2, "VALID"),
    ),
    "max pooling": (
        "max_pool",
        IMAGES,
        BOTH,
        BOTH,
        lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"),
    ),
    "max pooling of volumes": (
        "max_pool3d",
        VOLUMES,
        (None, None, None, None, "model"),
        (None, None, None, None, "model"),
        lambda x: tf.nn.max_pool3d(x, 2, 1, "SAME"),
    ),
    "local response": (
        "lrn",
        FLOATS,
        ("batch", "model", None, None),
        ("batch", "model", None, None),
        lambda x: tf.nn.local_response_normalization(x, 1),
    ),
    "bilinear": (
        "resize_bilinear",
        FLOATS,
        BOTH,
        BOTH,
        lambda x: tf.image.resize(x, (9, 4)),
    ),
    "nearest": (
        "resize_nearest_neighbor",
        FLOATS,
        SAMPLES,
        SAMPLES,
        lambda x: tf.image.resize(x, (9, 4), "nearest"),
    ),
    "bicubic": (
        "resize_bicubic",
        FLOATS,
        CHANNELS,
        CHANNELS,
        lambda x: tf.image.resize(x, (9, 4), "bicubic"),
    ),
    "area": (
        "resize_area",
        FLOATS,
        BOTH,
        BOTH,
        lambda x: tf.image.resize(x, (9, 4), "area"),
    ),
    "lanczos": (
        "scale_and_translate",
        FLOATS,
        BOTH,
        BOTH,
        lambda x: tf.image.resize(x, (9, 4), "lanczos3", antialias=True),
    ),
    "transform per image": (
        "image_projective_transform_v3",
        FLOATS,
        BOTH,
        BOTH,
        lambda x: R.ImageProjectiveTransformV3(
            images=x,
            transforms=TRANSFORMS,
            output_shape=[5, 7],
            fill_value=0.5,
            interpolation="BILINEAR",
        ),
    ),
    "one transform": (
        "image_projective_transform_v2",
        FLOATS,
        BOTH,
        BOTH,
        lambda x: R.ImageProjectiveTransformV2(
            images=x,
            transforms=TRANSFORMS[1:2],
            output_shape=[5, 7],
            interpolation="BILINEAR",
        ),
    ),
    "contrast": (
        "adjust_contrastv2",
        FLOATS,
        BOTH,
        BOTH,
        lambda x: tf.image.adjust_contrast(x, 0.7),
    ),
    "hue": (
        "adjust_hue",
        COLORS,
        ("batch", "model", None, None),
        ("batch", "model", None, None),
        lambda x: tf.image.adjust_hue(x, 0.2),
    ),
    "saturation": (
        "adjust_saturation",
        COLORS,
        ("batch", "model", None, None),
        ("batch", "model", None, None),
        lambda x: tf.image.adjust_saturation(x, 0.7),
    ),
    "to hsv": (
        "rgb_to_hsv",
        COLORS,
        SAMPLES,
        SAMPLES,
        lambda x: tf.image.rgb_to_hsv(x),
    ),
    "to rgb": (
        "hsv_to_rgb",
        COLORS,
        SAMPLES,
        SAMPLES,
        lambda x: tf.image.hsv_to_rgb(x),
    ),
    "depth to space": (
        "depth_to_space",
        IMAGES,
        BOTH,
        SAMPLES,
        lambda x: tf.nn.depth_to_space(x, 2),
    ),
    "space to depth": (
        "space_to_depth",
        IMAGES,
        SAMPLES,
        SAMPLES,
        lambda x: tf.nn.space_to_depth(x, 2),
    ),
    "space to batch": (
        "space_to_batch_nd",
        IMAGES,
        BOTH,
        CHANNELS,
        lambda x: tf.space_to_batch_nd(x, [2, 2], [[1, 1], [0, 2]]),
    ),
    "batch to space": (
        "batch_to_space_nd",
        IMAGES,
        BOTH,
        CHANNELS,
        lambda x: tf.batch_to_space(x, [2, 2], [[1, 1], [0, 2]]),
    ),
    "padding": (
        "pad",
        IMAGES,
        ("batch", "model", None, None),
        SAMPLES,
        lambda x: tf.pad(x, PADDINGS),
    ),
    "padding with ones": (
        "pad_v2",
        IMAGES,
        BOTH,
        BOTH,
        lambda x: tf.pad(x, PADDINGS, constant_values=1),
    ),
    "padding of samples": (
        "pad",
        IMAGES,
        BOTH,
        CHANNELS,
        lambda x: tf.pad(x, [[1, 2], *[[0, 0]] * 3]),
    ),
    "reflection": (
        "mirror_pad",
        IMAGES,
        BOTH,
        BOTH,
        lambda x: tf.pad(x, PADDINGS, "REFLECT"),
    ),
    "roll": (
        "roll",
        IMAGES,
        BOTH,
        BOTH,
        lambda x: tf.roll(x, [1, 2], [1, -2]),
    ),
    "roll of samples": (
        "roll",
        IMAGES,
        BOTH,
        CHANNELS,
        lambda x: tf.roll(x, 1, 0),
    ),
    "patches": (
        "extract_image_patches",
        IMAGES,
        BOTH,
        SAMPLES,
        lambda x: tf.image.extract_patches(
            x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"
        ),
    ),
}
# TensorFlow has no gradients of these ops.
NO_GRADIENT = {
    "adjust_contrastv2",
    "adjust_hue",
    "adjust_saturation",
    "hsv_to_rgb",
    "resize_area",
}


def test_each_rule_has_a_case():
    assert {case[0] for case in CASES.values()} == {*independent_dims.RULES}


def result_and_gradient(name):
    """Returns a function of images and of the gradient of the result."""
    function, _, _, _, op = CASES[name]

    def step(x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = op(x * 1.0)
        if function in NO_GRADIENT:
            return (y,)
        return y, tape.gradient(y, x, dy)

    return step


def assert_matches(name, run, mesh=None):
    """Compares `run(x, dy)` on a mesh with the op on one device."""
    _, value, axes, _, op = CASES[name]
    mesh = mesh or mesh_of(batch=2, model=2)
    dy = RNG.normal(size=op(tf.constant(value)).shape).astype(value.dtype)
    wanted = result_and_gradient(name)(tf.constant(value), tf.constant(dy))
    got = run(
        to_mesh(value, layout_of(mesh, *axes)),
        to_mesh(dy, layout_of(mesh, *[None] * dy.ndim)),
    )
    rtol = 1e-12 if value.dtype == np.float64 else 1e-5
    for mine, plain in zip(got, wanted, strict=True):
        np.testing.assert_allclose(to_host(mine), plain, rtol, rtol)
    return got


@pytest.mark.covering(1, 14)
@pytest.mark.parametrize("name", CASES)
def test_an_eager_op_keeps_independent_dimensions_sharded(name):
    mesh = mesh_of(batch=2, model=2)
    with default_mesh(mesh):
        y, *_ = assert_matches(name, result_and_gradient(name))
    assert dtensor.fetch_layout(y) == layout_of(mesh, *CASES[name][3])


@pytest.mark.parametrize("name", CASES)
def test_an_op_of_a_function_keeps_known_layouts(name):
    function, value, axes, result_axes, _ = CASES[name]
    mesh = mesh_of(batch=2, model=2)
    step = tf.function(
        lambda x, dy: result_and_gradient(name)(
            dtensor.relayout(x, layout_of(mesh, *axes)), dy
        ),
        autograph=False,
    )
    with default_mesh(mesh):
        y, *_ = assert_matches(name, step)
    assert dtensor.fetch_layout(y) == layout_of(mesh, *result_axes)
    (graph,) = [f.graph for f in step._list_all_concrete_functions()]
    shape = list(value.shape)
    for dim, axis in enumerate(axes):
        if axis is not None and axis == result_axes[dim]:
            shape[dim] //= 2
    op_type = independent_dims.RULES[function].op
    ops = [op for op in graph.get_operations() if op.type == op_type]
    assert any(op.inputs[0].shape == shape for op in ops)
    assert all(shard_map.SCOPE in op.name for op in ops)
    gathers = any(axis not in result_axes for axis in axes)
    assert gathers == any(
        independent_dims.GATHERED_SCOPE in op.name for op in ops
    )


# Without a known layout, the first dimension is sharded like the batches.
@pytest.mark.parametrize(
    "name", ["average pooling", "bilinear", "roll", "roll of samples"]
)
def test_an_op_shards_samples_like_batches(name):
    mesh = mesh_of(batch=2, model=2)
    with default_mesh(mesh, "batch"):
        y, *_ = assert_matches(
            name, tf.function(result_and_gradient(name), autograph=False)
        )
    specs = dtensor.fetch_layout(y).sharding_specs
    expected = "batch" if name != "roll of samples" else dtensor.UNSHARDED
    assert specs[0] == expected


# DTensor's rules of these ops raise an error if channels are sharded.
@pytest.mark.parametrize("name", ["average pooling", "bilinear", "max pooling"])
@pytest.mark.filterwarnings("error:DTensor cannot shard function")
def test_an_unknown_layout_does_not_replicate_the_function(name):
    mesh = mesh_of(batch=2, model=2)
    with default_mesh(mesh):
        assert_matches(
            name, tf.function(result_and_gradient(name), autograph=False)
        )


def test_sizes_that_the_axis_does_not_divide_are_replicated():
    mesh = mesh_of(batch=2, model=2)
    x = RNG.normal(size=(3, 4, 4, 1)).astype(np.float32)
    with default_mesh(mesh, "batch"):
        y = tf.function(lambda x: tf.roll(x, 1, 1), autograph=False)(
            to_mesh(x, layout_of(mesh, None, None, None, None))
        )
    np.testing.assert_array_equal(to_host(y), np.roll(x, 1, 1))


def test_a_shift_can_be_computed():
    mesh = mesh_of(batch=2, model=2)
    x = RNG.normal(size=(4, 8))
    with default_mesh(mesh, "batch"):
        y = tf.function(lambda x, n: tf.roll(x, n + 1, 1), autograph=False)(
            to_mesh(x, layout_of(mesh, "batch", None)), tf.constant(2)
        )
    np.testing.assert_array_equal(to_host(y), np.roll(x, 3, 1))


def test_wrong_arguments_raise_the_error_of_tensorflow():
    mesh = mesh_of(batch=2, model=2)
    x = to_mesh(IMAGES, layout_of(mesh, *SAMPLES))
    with pytest.raises(tf.errors.InvalidArgumentError, match="axis"):
        tf.roll(x, 1, 7)
    with pytest.raises((ValueError, tf.errors.OpError)):
        tf.pad(x, [[0, 0]])
    with pytest.raises(TypeError):
        R.Roll(input=x)


def test_known_axes_follow_ops_that_keep_a_layout():
    mesh = mesh_of(batch=2, model=2)
    found = []

    @tf.function(autograph=False)
    def step(x, y):
        found.append(known_axes(x))
        a = dtensor.relayout(x, layout_of(mesh, "batch", None, "model"))
        b = tf.nn.relu(tf.cast(a, tf.float64) * tf.constant(2.0, tf.float64))
        found.append(known_axes(b))
        found.append(known_axes(tf.transpose(b, [2, 0, 1])))
        found.append(known_axes(tf.squeeze(tf.expand_dims(b, 1), 1)))
        found.append(known_axes(tf.expand_dims(b, -1)))
        found.append(
            known_axes(tf.custom_gradient(lambda v: (v, lambda dy: dy))(b))
        )
        found.append(known_axes(tf.reduce_sum(b, 0)))
        return tf.reduce_sum(b) + tf.reduce_sum(tf.cast(y, tf.float64))

    weight = dtensor.DVariable(
        to_mesh(np.ones([4, 2]), layout_of(mesh, "model", None))
    )
    with default_mesh(mesh):
        x = to_mesh(np.ones([4, 3, 2]), layout_of(mesh, None, None, None))
        step(x, to_mesh(np.ones([2]), layout_of(mesh, None)))
        of_weight = []
        tf.function(lambda: of_weight.append(known_axes(weight * 2.0)))()
    known = ("batch", None, "model")
    assert found == [
        None,
        known,
        ("model", "batch", None),
        known,
        (*known, None),
        known,
        None,
    ]
    assert of_weight == [("model", None)]


def test_a_step_does_not_report_ops_on_shards():
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=True)
    layout_map["dense.kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map, batch_dim="batch"):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Conv2D(4, 3, dilation_rate=2),
                keras.layers.DepthwiseConv2D(3),
                keras.layers.UpSampling2D(interpolation="bilinear"),
                keras.layers.AveragePooling2D(2),
                keras.layers.Flatten(),
                keras.layers.Dense(2, name="dense"),
            ]
        )
    model.compile("sgd", "mse")
    x = RNG.normal(size=(8, 8, 8, 3)).astype(np.float32)
    # The layout map is strict, so a replicated op raises an error.
    model.fit(x, np.zeros([8, 2]), batch_size=4, verbose=0)
    assert not report.replicated_ops_of_model(model)


def test_host_tensors_of_an_eager_op_are_copied_to_the_mesh():
    mesh = mesh_of(batch=2, model=2)
    x = to_mesh(FLOATS, layout_of(mesh, *BOTH))
    y = tf.image.adjust_contrast(x, tf.constant(0.7))
    np.testing.assert_allclose(
        transfer.to_host(y), tf.image.adjust_contrast(FLOATS, 0.7), 1e-6, 1e-6
    )


SPARSE = dict(
    input_indices=np.array([[0, 0], [1, 1]], np.int64),
    input_values=np.ones(2, np.float32),
    input_shape=np.array([2, 2], np.int64),
    reduction_axes=np.array([0], np.int32),
)


# Without the check, DTensor ends the process.
@pytest.mark.parametrize("in_function", [True, False])
def test_a_result_of_unknown_rank_raises_an_error(in_function):
    mesh = mesh_of(batch=2)
    inputs = {
        name: to_mesh(
            value, layout_of(mesh, "batch", *[None] * (value.ndim - 1))
        )
        if name.startswith("input_") and value.shape[0] == 2
        else to_mesh(value, layout_of(mesh, *[None] * value.ndim))
        for name, value in SPARSE.items()
    }

    def op(inputs):
        return R.SparseReduceSum(**inputs)

    if in_function:
        op = tf.function(op, autograph=False)
    with (
        default_mesh(mesh),
        pytest.raises(UnsupportedByDTensorError, match="SparseReduceSum"),
    ):
        op(inputs)


def test_an_unknown_rank_during_tracing_raises_an_error():
    mesh = mesh_of(batch=2)
    x = to_mesh(np.ones([2, 4], np.float32), layout_of(mesh, "batch", None))

    @tf.function(autograph=False)
    def step(x):
        k = tf.cast(tf.reduce_sum(x)[tf.newaxis], tf.int32)
        return R.MatrixDiagV3(
            diagonal=x, k=k, num_rows=-1, num_cols=-1, padding_value=0.0
        )

    with (
        default_mesh(mesh),
        pytest.raises(UnsupportedByDTensorError, match="ranks of the results"),
    ):
        step(x)


@pytest.mark.parametrize("op", ["FusedBatchNorm", "FusedBatchNormV2"])
@pytest.mark.parametrize("in_function", [True, False])
def test_old_fused_batch_norms_match_one_device(op, in_function):
    mesh = mesh_of(batch=2)
    row = np.ones(4, np.float32)
    empty = np.zeros(0, np.float32)

    def run(x, row, empty):
        return getattr(R, op)(
            x=x, scale=row, offset=row, mean=empty, variance=empty
        )[:3]

    wanted = run(*map(tf.constant, (FLOATS, row, empty)))
    with default_mesh(mesh):
        got = (tf.function(run, autograph=False) if in_function else run)(
            to_mesh(FLOATS, layout_of(mesh, "batch", None, None, None)),
            to_mesh(row, layout_of(mesh, None)),
            to_mesh(empty, layout_of(mesh, None)),
        )
    for mine, plain in zip(got, wanted, strict=True):
        np.testing.assert_allclose(to_host(mine), plain, 1e-4, 1e-4)


def test_a_cut_of_a_known_sharded_dimension_keeps_other_dimensions_sharded():
    mesh = mesh_of(batch=2, model=2)
    x = RNG.normal(size=(6, 4))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = dtensor.relayout(x, layout_of(mesh, "model", "batch"))[:3]
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, x)

    with default_mesh(mesh):
        y, gradient = step(to_mesh(x, layout_of(mesh, None, None)))
    assert dtensor.fetch_layout(y) == layout_of(mesh, None, "batch")
    np.testing.assert_array_equal(to_host(y), x[:3])
    np.testing.assert_array_equal(to_host(gradient)[:3], 2 * x[:3])
    np.testing.assert_array_equal(to_host(gradient)[3:], 0)
