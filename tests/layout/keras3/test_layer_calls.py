"""Checks eager calls of models on a mesh with host tensors and mesh tensors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout import to_host, to_mesh
from tf_layoutmap.layout.mesh import tracing

dtensor = tf.experimental.dtensor


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(batch=2, model=2)


@pytest.fixture(scope="module")
def pair(mesh):
    return pairs.plain(pairs.dense_model), pairs.on_mesh(
        pairs.dense_model, mesh=mesh
    )


@pytest.mark.parametrize(
    "make",
    [
        np.asarray,
        tf.constant,
        lambda x: x.astype(np.float64),
        lambda x: tf.constant(x[:5]),
    ],
)
def test_outputs_for_host_inputs_are_readable(pair, make):
    plain, on_mesh = (model(make(pairs.FEATURES)) for model in pair)
    pairs.assert_alike(plain.numpy(), on_mesh.numpy())


@pytest.mark.parametrize(
    "axes", [("batch", None), ("batch", "model"), (None, None)]
)
def test_inputs_with_any_layout_match_host_inputs(pair, mesh, axes):
    on_mesh = pair[1](to_mesh(pairs.FEATURES, layout_of(mesh, *axes)))
    assert dtensor.is_dtensor(on_mesh)
    pairs.assert_alike(pair[0](pairs.FEATURES).numpy(), to_host(on_mesh))


def test_gradients_flow_to_host_inputs(pair, mesh):
    def gradient(model):
        x = tf.Variable(pairs.FEATURES)
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.square(model(x)))
        return tape.gradient(y, x)

    plain = gradient(pair[0])
    with dtensor.default_mesh(mesh):
        x = to_mesh(pairs.FEATURES, layout_of(mesh, None, None))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.square(pair[1](x)))
        on_mesh = tape.gradient(y, x)
    pairs.assert_alike(plain.numpy(), to_host(on_mesh))


def test_masks_are_passed_with_their_inputs(mesh):
    def make():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Embedding(16, 4, mask_zero=True, name="e"),
                keras.layers.GlobalAveragePooling1D(),
            ]
        )

    plain = pairs.plain(make)
    on_mesh = pairs.on_mesh(make, {"e.embeddings": (None, "model")}, mesh)
    tokens = np.where(np.arange(6) < 4, pairs.TOKENS, 0)
    pairs.assert_alike(plain(tokens).numpy(), on_mesh(tokens).numpy())


def test_plain_and_symbolic_calls_are_unchanged(pair):
    assert not dtensor.is_dtensor(pair[0](pairs.FEATURES))
    symbolic = pair[1](keras.Input((8,)))
    assert isinstance(symbolic, keras.KerasTensor)


def test_default_mesh_is_reset_after_an_error(mesh):
    with pytest.raises(KeyError, match="mine"):
        with tracing.default_mesh(mesh):
            raise KeyError("mine")
    assert dtensor.get_default_mesh() is None
    assert not dtensor.is_dtensor(tf.constant(1.0))


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 1), (4, 3, -2)])
def test_eye_in_a_step_on_a_mesh_matches_numpy(mesh, shape):
    step = tf.function(lambda: keras.ops.eye(*shape, dtype="int32"))
    with tracing.default_mesh(mesh):
        got = to_host(step())
    np.testing.assert_array_equal(got, np.eye(*shape, dtype=np.int32))


@pytest.mark.exhaustive
def test_image_patches_match_a_single_device(mesh):
    def make():
        return pairs.sequential(
            (8, 8, 3),
            keras.layers.Lambda(
                lambda x: keras.ops.image.extract_patches(x, 4)
            ),
            keras.layers.Dense(16, name="d1"),
        )

    first, second = pairs.plain(make), pairs.on_mesh(make, mesh=mesh)
    pairs.assert_alike(
        *(pairs.fit(model, pairs.IMAGES, epochs=1) for model in (first, second))
    )


@pytest.mark.exhaustive
def test_time_distributed_before_a_recurrent_layer(mesh):
    # The mesh has more devices than the input has features. The mesh axis of
    # the batch moves to another dimension.
    def make():
        return pairs.sequential(
            (6, 3),
            keras.layers.TimeDistributed(keras.layers.Dense(8)),
            keras.layers.SimpleRNN(8, unroll=True),
        )

    axes = {"d2.kernel": (None, "model")}
    pairs.assert_alike(
        *(
            pairs.fit(model, pairs.SERIES[..., :3], epochs=1)
            for model in (pairs.plain(make), pairs.on_mesh(make, axes, mesh))
        )
    )


HEADS, LAST = (None, "model", None), (None, None, "model")


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(
    "first, second",
    [
        # The two layers use the same mesh axis for different dimensions.
        (HEADS, (None, "model", None)),
        (LAST, ("model", None, None)),
        (HEADS, ("model", None, None)),
        (HEADS, (None, None, "model")),
    ],
)
@pytest.mark.parametrize(
    "equations",
    [
        ("abc,cde->abde", "abde,dec->abc"),
        ("...bc,cde->...bde", "...bde,dec->...bc"),
    ],
)
def test_einsums_with_weights_sharded_in_different_dimensions(
    first, second, equations
):
    def make():
        return pairs.sequential(
            (6, 8),
            keras.layers.EinsumDense(
                equations[0], (6, 4, 4), bias_axes="de", name="first"
            ),
            keras.layers.EinsumDense(
                equations[1], (6, 8), bias_axes="c", name="second"
            ),
        )

    pairs.assert_trains_alike(
        make,
        pairs.SERIES,
        {
            "first.kernel": first,
            "second.kernel": second,
            "first.bias": (None, "model"),
        },
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes",
    [("batch", None, None), ("batch", "model", None), ("model", "batch", None)],
)
def test_summed_dimension_may_be_sharded_over_the_batch_axis(axes):
    # Without a correction, `fit` would crash the process, and `predict` would
    # return a wrong size.
    def make():
        return pairs.sequential(
            (6, 8),
            keras.layers.EinsumDense("bqm,muh->bquh", (6, 4, 2), name="e"),
        )

    model = pairs.assert_trains_alike(
        make,
        pairs.SERIES,
        {"e.kernel": axes},
        epochs=1,
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )
    pairs.assert_alike(
        *(
            m.predict(pairs.SERIES[:5], verbose=0, batch_size=5)
            for m in (with_weights_of(model, make), model)
        )
    )


def with_weights_of(model, make):
    """Returns the same model without a mesh, with the weights of `model`."""
    plain = make()
    plain.set_weights(model.get_weights())
    return plain


@pytest.mark.exhaustive
def test_attention_trains_after_a_row_sharded_embedding():
    # The gradient contains a RelayoutLike op, which DTensor cannot shard.
    def make():
        inputs = keras.Input((6,))
        x = keras.layers.Embedding(16, 8, name="e")(inputs)
        x += keras.layers.MultiHeadAttention(4, 2, name="att")(x, x)
        return keras.Model(
            inputs,
            keras.layers.Dense(4, name="d2")(
                keras.layers.GlobalAveragePooling1D()(x)
            ),
        )

    pairs.assert_trains_alike(
        make,
        pairs.TOKENS,
        {
            "e.embeddings": ("model", None),
            "att.(query|key|value)_dense.kernel": (None, "model", None),
            "att.output_dense.kernel": ("model", None, None),
        },
        epochs=1,
        optimizer=lambda: keras.optimizers.SGD(0.1),
    )
