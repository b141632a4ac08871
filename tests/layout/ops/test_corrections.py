"""Checks that ops on a mesh match plain TensorFlow or raise an error.

Every case runs with many layouts of inputs and outputs.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import default_mesh, to_host, to_mesh
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError

dtensor = tf.experimental.dtensor

MESH = mesh_of(batch=2, model=2)
MATRIX = [(None, None), ("batch", None), (None, "model"), ("batch", "model")]
CUBE = [
    (None, None, None),
    ("batch", None, None),
    (None, None, "model"),
    ("batch", "model", None),
]
QUAD = [
    (None, "model", None, None),
    ("batch", None, None, "model"),
    ("batch", None, "model", None),
]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def halves_swapped(x):
    # Rotary embeddings contain this pattern. The next op determines the layout
    # of the slices.
    return tf.concat([-x[..., 4:], x[..., :4]], -1)


def concat_of_two_layers(x):
    return tf.concat([tf.tanh(x * 2), tf.sin(x)], 1)


CASES = {
    "concat of slices": (halves_swapped, numbers(4, 4, 8), CUBE),
    "concat of samples": (
        lambda x: tf.concat([x[2:], x[:2]], 0),
        numbers(4, 8),
        MATRIX,
    ),
    "concat of features": (concat_of_two_layers, numbers(4, 8), MATRIX),
    "stack": (
        lambda x: tf.reshape(tf.stack([x, 2 * x], 1), [4, 16]),
        numbers(4, 8),
        MATRIX,
    ),
    "slice of features": (
        lambda x: tf.slice(x, [0, 4], [4, 4]),
        numbers(4, 8),
        MATRIX,
    ),
    "slice of samples": (
        lambda x: tf.slice(x, [2, 0], [2, -1]),
        numbers(4, 8),
        MATRIX,
    ),
    "reversed features": (lambda x: x[:, ::-1], numbers(4, 8), MATRIX),
    "reversed samples": (lambda x: x[::-1], numbers(4, 8), MATRIX),
    "reversed, some": (lambda x: x[1, ..., ::-2], numbers(4, 4, 8), CUBE),
    "batched product": (
        lambda x: tf.matmul(x, x, transpose_b=True),
        numbers(4, 4, 4, 8),
        QUAD,
    ),
}
# These cases must not raise an error for any layout.
ALWAYS = {
    "concat of features",
    "concat of samples",
    "reversed features",
    "slice of features",
    "slice of samples",
    "reversed samples",
    "reversed, some",
}


def sharded_at(dim, rank):
    return tuple("model" if d == dim else None for d in range(rank))


def layouts_for(shape):
    rank = len(shape)
    yield (None,) * rank
    for dim, size in enumerate(shape):
        if size % 2 == 0:
            yield sharded_at(dim, rank)


def step_of(function, place):
    def step(x, factors):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = place(function(x * 1.0))
            loss = tf.reduce_sum(tf.sin(y) * factors)
        return y, tape.gradient(loss, x)

    return step


@pytest.mark.covering(1, 6)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_plain_tensorflow(name):
    function, x, before = CASES[name]
    shape = tuple(function(tf.constant(x)).shape)
    factors = numbers(*shape, seed=1)
    wanted = step_of(function, lambda y: y)(
        tf.constant(x), tf.constant(factors)
    )
    refused = 0
    for axes, after in itertools.product(before, layouts_for(shape)):
        layout = layout_of(MESH, *after)
        step = tf.function(
            step_of(function, lambda y, to=layout: dtensor.relayout(y, to)),
            autograph=False,
        )
        try:
            with default_mesh(MESH):
                got = step(
                    to_mesh(x, layout_of(MESH, *axes)), to_mesh(factors, layout)
                )
        except (tf.errors.OpError, UnsupportedByDTensorError):
            refused += 1
            continue
        for mine, plain in zip(got, wanted):
            # An element that is a difference of large terms has their rounding
            # errors, which depend on the instruction set.
            largest = max(1.0, np.abs(plain).max())
            np.testing.assert_allclose(
                to_host(mine),
                plain,
                1e-5,
                1e-5 * largest,
                err_msg=f"{axes} {after}",
            )
    # Values are not compared for layouts that raise an error, so only few
    # layouts may raise an error.
    assert refused <= (0 if name in ALWAYS else 12), refused


PRODUCTS = {
    "matmul": lambda x, y: tf.matmul(x, y, transpose_b=True),
    "attention": lambda x, y: tf.einsum("bqhd,bkhd->bhqk", x, y),
    "bias": lambda x, y: tf.nn.bias_add(tf.tanh(x), y[0, 0, 0]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PRODUCTS)
def test_next_op_may_move_a_mesh_axis_to_another_dimension(name):
    # The program does not call `relayout`, so DTensor must insert the relayout.
    function, x, y = (
        PRODUCTS[name],
        numbers(4, 4, 4, 4),
        numbers(4, 4, 4, 4, seed=1),
    )
    factors = numbers(4, 4, 4, 4, seed=2)
    places = [sharded_at(dim, 4) for dim in range(4)]

    def step(x, y, factors):
        with tf.GradientTape() as tape:
            tape.watch((x, y))
            loss = tf.reduce_sum(function(x, y) * factors)
        return (function(x, y) * factors, *tape.gradient(loss, (x, y)))

    wanted = step(*map(tf.constant, (x, y, factors)))
    right = 0
    for before, after in itertools.product(places, places):
        try:
            with default_mesh(MESH):
                got = tf.function(step, autograph=False)(
                    to_mesh(x, layout_of(MESH, *before)),
                    to_mesh(y, layout_of(MESH, *before)),
                    to_mesh(factors, layout_of(MESH, *after)),
                )
        except (tf.errors.OpError, UnsupportedByDTensorError):
            continue  # The layout is not supported, so no values are compared.
        for mine, plain in zip(got, wanted):
            np.testing.assert_allclose(
                to_host(mine), plain, 1e-4, 1e-5, err_msg=f"{before} {after}"
            )
        right += 1
    assert right >= 12, right


def product(equation):
    return lambda x, y: tf.einsum(equation, x, y)


# In these products, either the product or one of its gradients is summed over
# two dimensions.
SUMS = {
    **{
        equation: product(equation)
        for equation in (
            "abc,bcd->ad",
            "abc,dcb->ad",
            "abc,ac->b",
            "ab,cd->abcd",
            "abd,abd->a",
            "...bc,bcd->...d",
        )
    },
    "tensordot": lambda x, y: tf.tensordot(x, y, [[1, 2], [1, 0]]),
    "raw": lambda x, y: tf.raw_ops.Einsum(
        inputs=[x, y], equation="abc,bcd->ad"
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_one_mesh_axis_may_shard_different_dimensions_of_a_sum(name):
    function = SUMS[name]
    ranks = {"abc,ac->b": (3, 2), "ab,cd->abcd": (2, 2)}.get(name, (3, 3))
    x, y = (numbers(*[4] * rank, seed=rank) for rank in ranks)
    factors = numbers(*function(x, y).shape, seed=2)

    def step(x, y, factors):
        with tf.GradientTape() as tape:
            tape.watch((x, y))
            loss = tf.reduce_sum(tf.sin(function(x * 1.0, y * 1.0)) * factors)
        return (loss, *tape.gradient(loss, (x, y)))

    wanted = step(*map(tf.constant, (x, y, factors)))
    for axes in itertools.product(
        *(
            [sharded_at(dim, rank) for dim in range(rank)]
            for rank in (*ranks, factors.ndim)
        )
    ):
        with default_mesh(MESH):
            got = tf.function(step, autograph=False)(
                *(
                    to_mesh(value, layout_of(MESH, *at))
                    for value, at in zip((x, y, factors), axes)
                )
            )
        for mine, plain in zip(got, wanted):
            np.testing.assert_allclose(
                to_host(mine), plain, 1e-4, 1e-4, err_msg=str(axes)
            )


EVERYWHERE = {
    "reversed": lambda x: tf.sin(x[:, ::-1]),
    "summed": lambda x: tf.einsum("ab,ba->", x, tf.sin(x)),
    "class numbers": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        np.arange(4), tf.cast(x, tf.float64)
    ),
}


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize(
    "scope", [default_mesh, dtensor.default_mesh], ids=["ours", "TensorFlow's"]
)
@pytest.mark.parametrize(
    "run",
    [tf.function(autograph=False), lambda step: step],
    ids=["traced", "eager"],
)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_step_matches_plain_tensorflow_in_every_scope(name, run, scope):
    x = numbers(4, 4)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = EVERYWHERE[name](x * 1.0)
        return y, tape.gradient(y, x)

    wanted = step(tf.constant(x))
    for axes in MATRIX:
        with scope(MESH):
            got = run(step)(to_mesh(x, layout_of(MESH, *axes)))
        for mine, plain in zip(got, wanted):
            np.testing.assert_allclose(
                to_host(mine), plain, 1e-4, 1e-4, err_msg=str(axes)
            )


def test_functions_are_traced_for_the_host_after_an_error():
    # After an error, the default mesh of TensorFlow stays set, but `tf.einsum`
    # must not be traced for this mesh.
    with pytest.raises(KeyError), dtensor.default_mesh(MESH):
        raise KeyError
    x = numbers(4, 4)
    np.testing.assert_allclose(
        tf.function(product("ab,ba->"))(x, x), np.sum(x * x.T), 1e-5
    )
    with dtensor.default_mesh(MESH):
        pass


def test_raw_ops_are_corrected():
    x = numbers(4, 8)
    layout = layout_of(MESH, None, "model")

    @tf.function(autograph=False)
    def swapped(x):
        left, right = (
            tf.raw_ops.Slice(input=x, begin=[0, at], size=[4, 4])
            for at in (0, 4)
        )
        return dtensor.relayout(
            tf.raw_ops.ConcatV2(values=[right, left], axis=1), layout
        )

    with default_mesh(MESH):
        got = swapped(to_mesh(x, layout))
    np.testing.assert_array_equal(
        to_host(got), np.concatenate([x[:, 4:], x[:, :4]], 1)
    )
    np.testing.assert_array_equal(
        tf.raw_ops.Slice(input=x, begin=[0, 4], size=[4, 4]), x[:, 4:]
    )


@pytest.mark.parametrize(
    "dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64]
)
def test_sparse_cross_entropy_with_sharded_classes(dtype):
    logits = tf.cast(numbers(8, 4), dtype)
    labels = np.arange(8) % 4

    def step(logits, labels):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, logits
            )
        return loss, tape.gradient(loss, logits)

    wanted = step(logits, labels)
    with default_mesh(MESH):
        got = tf.function(step, autograph=False)(
            to_mesh(logits, layout_of(MESH, "batch", "model")),
            to_mesh(labels, layout_of(MESH, "batch")),
        )
    tolerance = 1e-5 if dtype.size > 2 else 3e-2
    for mine, plain in zip(got, wanted):
        np.testing.assert_allclose(
            to_host(mine).astype(np.float64),
            plain.numpy().astype(np.float64),
            tolerance,
            tolerance,
        )


def test_out_of_range_label_gives_nan_with_sharded_classes():
    loss = tf.function(
        tf.nn.sparse_softmax_cross_entropy_with_logits, autograph=False
    )
    with default_mesh(MESH):
        got = to_host(
            loss(
                labels=to_mesh(np.array([0, 9, -1, 3]), layout_of(MESH, None)),
                logits=to_mesh(numbers(4, 4), layout_of(MESH, None, "model")),
            )
        )
    assert np.isnan(got).tolist() == [False, True, True, False]


@pytest.mark.parametrize("shape", [(4, 2, 6, 8), (2, 4, 2, 6, 8)])
def test_mesh_axis_moves_to_any_other_dimension(shape):
    x, rank = numbers(*shape), len(shape)
    for here, there in itertools.permutations(range(rank), 2):
        now, then = (
            layout_of(MESH, *sharded_at(dim, rank)) for dim in (here, there)
        )
        moved = dtensor.relayout(to_mesh(x, now), then)
        assert dtensor.fetch_layout(moved) == then
        np.testing.assert_array_equal(to_host(moved), x)


def test_gradients_flow_through_a_moved_axis():
    x = numbers(4, 2, 6, 8)
    now = layout_of(MESH, "batch", "model", None, None)
    then = layout_of(MESH, "batch", None, None, "model")

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(dtensor.relayout(x, then) ** 3)
        return tape.gradient(loss, x)

    with default_mesh(MESH):
        np.testing.assert_allclose(
            to_host(step(to_mesh(x, now))), 3 * x**2, 1e-5
        )


@pytest.mark.parametrize(
    "here, there", list(itertools.permutations((1, 2, 3), 2))
)
def test_pinned_sample_is_gathered_before_it_is_resharded(here, there):
    x = numbers(4, 2, 6, 8)
    now, then = (
        layout_of(
            MESH, "batch", *("model" if d == dim else None for d in (1, 2, 3))
        )
        for dim in (here, there)
    )

    @tf.function(autograph=False)
    def step(x, factors):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tracing.pin_unsharded_samples(x, MESH) * factors
            loss = tf.reduce_sum(y)
        return y, tape.gradient(loss, x)

    with default_mesh(MESH):
        y, gradient = step(to_mesh(x, now), to_mesh(2 + x, then))
    np.testing.assert_allclose(to_host(y), x * (2 + x), 1e-5)
    np.testing.assert_allclose(to_host(gradient), 2 + x, 1e-5)


def test_shapes_and_datasets_are_unchanged():
    with default_mesh(MESH):
        pairs = tf.data.Dataset.range(4).map(
            lambda i: tf.concat([[i], [i + 1]], 0)[::-1]
        )
        graph = (
            tf.function(
                lambda x: tf.reshape(x, tf.concat([tf.shape(x)[:1], [2, 4]], 0))
            )
            .get_concrete_function(tf.TensorSpec([None, 8]))
            .graph
        )
    assert [p.tolist() for p in pairs.as_numpy_iterator()] == [
        [i + 1, i] for i in range(4)
    ]
    assert "Relayout" not in {op.type for op in graph.get_operations()}
    assert graph.outputs[0].shape[1:] == [2, 4]


def test_loss_that_computes_shapes_matches_plain_tensorflow():
    labels = np.eye(4, dtype=np.float32)
    wanted = tf.nn.softmax_cross_entropy_with_logits(labels, numbers(4, 4))
    loss = tf.function(tf.nn.softmax_cross_entropy_with_logits, autograph=False)
    with default_mesh(MESH):
        got = loss(
            labels=to_mesh(labels, layout_of(MESH, "batch", None)),
            logits=to_mesh(numbers(4, 4), layout_of(MESH, "batch", "model")),
        )
    np.testing.assert_allclose(to_host(got), wanted, 1e-5)


def test_no_op_is_added_without_a_mesh():
    graph = (
        tf.function(halves_swapped)
        .get_concrete_function(tf.TensorSpec([4, 8]))
        .graph
    )
    assert "Relayout" not in {op.type for op in graph.get_operations()}


@pytest.mark.parametrize("data_format", ["N...C", "NC..."])
def test_bias_add_supports_both_data_formats(data_format):
    # Without a correction, DTensor treats the last dimension as the channels.
    x, last = numbers(4, 2, 8), data_format == "N...C"
    bias = numbers(8 if last else 2, seed=1)

    def step(x, bias):
        with tf.GradientTape() as tape:
            tape.watch((x, bias))
            y = tf.nn.bias_add(x * 1.0, bias, data_format=data_format)
            loss = tf.reduce_sum(y**2)
        return y, *tape.gradient(loss, (x, bias))

    wanted = step(tf.constant(x), tf.constant(bias))
    for axes in (
        (None, "model", None),
        ("batch", "model", None),
        ("batch", None, "model"),
    ):
        with default_mesh(MESH):
            got = tf.function(step, autograph=False)(
                to_mesh(x, layout_of(MESH, *axes)),
                to_mesh(bias, layout_of(MESH, None)),
            )
        for mine, plain in zip(got, wanted):
            np.testing.assert_allclose(
                to_host(mine), plain, 1e-5, 1e-5, err_msg=str(axes)
            )


@pytest.mark.parametrize("own", [None, "batch", "model"])
@pytest.mark.parametrize("axes", [("batch", "model"), ("batch", None)])
def test_channels_first_bias_add_keeps_the_layout_of_its_value(axes, own):
    x, bias = numbers(4, 4, 2, 2), numbers(4)
    layout = layout_of(MESH, *axes, None, None)
    y = tf.nn.bias_add(
        to_mesh(x, layout),
        to_mesh(bias, layout_of(MESH, own)),
        data_format="NCHW",
    )
    assert dtensor.fetch_layout(y) == layout
    np.testing.assert_allclose(
        to_host(y), x + bias[:, np.newaxis, np.newaxis], 1e-6
    )


@pytest.mark.covering(1, 6)
@pytest.mark.parametrize("axes", [("batch",), (None,), ("batch", "model")])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW", "NDHWC"])
def test_fused_batch_norm_matches_the_fused_op(data_format, is_training, axes):
    # Without a correction, DTensor ends the process.
    shape = dict(NHWC=(4, 2, 6, 3), NCHW=(4, 4, 2, 3), NDHWC=(4, 2, 2, 2, 3))
    x = numbers(*shape[data_format]) * 2 + 1
    size = x.shape[1 if data_format == "NCHW" else -1]
    scale, offset, mean = (numbers(size, seed=i) for i in (1, 2, 3))

    def step(x, scale, offset, mean):
        with tf.GradientTape() as tape:
            tape.watch((x, scale, offset))
            y, new_mean, new_variance = tf.compat.v1.nn.fused_batch_norm(
                x * 1.0,
                scale,
                offset,
                mean,
                mean**2 + 0.5,
                data_format=data_format,
                is_training=is_training,
                exponential_avg_factor=0.9 if is_training else 1.0,
            )
            loss = tf.reduce_sum(y**3)
        found = tape.gradient(loss, (x, scale, offset))
        return y, new_mean, new_variance, *found

    # CPUs support the fused op only if the channels are last.
    plain_x, plain_format = x, data_format
    if data_format == "NCHW":
        plain_x, plain_format = np.moveaxis(x, 1, -1), "NHWC"
    data_format, ours = plain_format, data_format
    wanted = [
        np.asarray(one)
        for one in step(*map(tf.constant, (plain_x, scale, offset, mean)))
    ]
    data_format = ours
    if data_format == "NCHW":
        for i in (0, 3):
            wanted[i] = np.moveaxis(wanted[i], -1, 1)
    layout = layout_of(MESH, *axes, *[None] * (x.ndim - len(axes)))
    row = layout_of(MESH, None)
    with default_mesh(MESH):
        got = tf.function(step, autograph=False)(
            to_mesh(x, layout),
            *(to_mesh(v, row) for v in (scale, offset, mean)),
        )
    for mine, plain in zip(got, wanted, strict=True):
        np.testing.assert_allclose(to_host(mine), plain, 1e-3, 1e-3)


def test_where_with_a_scalar_condition_does_not_end_the_process():
    mesh = mesh_of(batch=2, model=2)
    x = np.arange(8.0).reshape(4, 2)

    @tf.function
    def step(x):
        return tf.where(tf.reduce_sum(x) > 0, x, 0.0)

    with default_mesh(mesh, "batch"):
        found = step(to_mesh(x, layout_of(mesh, "batch", None)))
    np.testing.assert_array_equal(to_host(found), x)


@pytest.mark.parametrize(
    "limit, is_known",
    [
        (lambda x: tf.clip_by_value(x, 0, 7), True),
        (lambda x: tf.maximum(0, tf.minimum(x, 7)), True),
        (lambda x: tf.minimum(tf.maximum(x, 0), 7), True),
        (lambda x: tf.clip_by_value(x, 0, 8), False),
        (lambda x: tf.maximum(x, 0), False),
    ],
)
def test_number_of_bins_is_known_if_all_values_are_below_it(limit, is_known):
    # `RandAugment` counts the values of images in this way.
    values = np.array([[0, 3, 12], [7, 9, 1], [2, -2, 2], [5, 0, 6]], np.int32)
    shapes = []

    def counts(values):
        bins = tf.math.bincount(tf.reshape(limit(values), [-1]), minlength=8)
        shapes.append(bins.shape)
        return bins

    with default_mesh(MESH):
        x = to_mesh(values, layout_of(MESH, "batch", None))
        got = tf.function(counts, autograph=False)(x)
    assert shapes[0] == ([8] if is_known else [None])
    np.testing.assert_array_equal(to_host(got), counts(values))


@pytest.mark.parametrize("binary", [False, True])
def test_number_of_bins_is_known_if_both_limits_are_equal(binary):
    # `CategoryEncoding` counts in this way.
    ids = np.array([[0, 3, 3], [7, 9, 1], [2, 2, 2], [5, 0, 6]])

    def counts(ids):
        bins = tf.math.bincount(
            ids, minlength=8, maxlength=8, axis=-1, binary_output=binary
        )
        assert bins.shape == (4, 8)
        return bins

    with default_mesh(MESH):
        x = to_mesh(ids, layout_of(MESH, "batch", None))
        got = tf.function(counts, autograph=False)(x)
    np.testing.assert_array_equal(to_host(got), counts(ids))
