"""The measured FLOPs and gathers agree with what the layouts imply."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of
from tf_layoutmap.layout.mesh import errors

dtensor = tf.experimental.dtensor
BATCH, FEATURES, UNITS = 8, 12, 6


@keras.saving.register_keras_serializable("tests")
class Gathering(keras.layers.Dense):
    """A Dense layer that gathers its kernel explicitly."""

    def call(self, inputs):
        kernel = dtensor.relayout(
            tf.convert_to_tensor(self.kernel),
            dtensor.Layout.replicated(self.kernel.layout.mesh, 2),
        )
        return inputs @ kernel


def train(layer, axes, *, sizes=None, strict=False, shape=(FEATURES,)):
    """Trains one step and returns the explanation of the model."""
    mesh = mesh_of(**(sizes or dict(batch=1, model=2)))
    layout_map = tlm.LayoutMap(mesh=mesh, strict=strict)
    layout_map[r"layer.*kernel"] = axes
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential([keras.Input(shape), layer()])
    model.compile("adam", "mse")
    x = np.ones([BATCH, *shape])
    model.fit(x, np.ones([BATCH, *model.output_shape[1:]]), verbose=0)
    return layout_map.explain(model)


def of_layer(explanation, step="train"):
    [found] = [
        one
        for one in explanation.measured
        if one.step == step and one.layer == "'layer'"
    ]
    return found


def dense():
    return keras.layers.Dense(UNITS, name="layer")


# The step multiplies matrices for the outputs and for the gradient of the
# kernel. The inputs have no gradient.
FLOPS = 2 * 2 * BATCH * FEATURES * UNITS


@pytest.mark.parametrize(
    ("axes", "sizes", "replicated"),
    [
        ((None, "model"), dict(batch=1, model=2), 0),
        (("model", None), dict(batch=1, model=2), 0),
        ((None, None), dict(batch=1, model=2), 1),
        ((None, None), dict(batch=2, model=1), 0),
        # Two of four devices compute the same samples.
        ((None, None), dict(batch=2, model=2), 1 / 3),
        ((None, "model"), dict(batch=2, model=2), 0),
    ],
)
def test_the_replicated_share_follows_from_the_layouts(axes, sizes, replicated):
    found = of_layer(train(dense, axes, sizes=sizes))
    assert found.flops == FLOPS
    assert found.replicated == pytest.approx(replicated)
    assert found.gathered_bytes == 0


def test_a_gathered_kernel_is_measured_in_bytes_and_printed():
    explanation = train(
        lambda: Gathering(UNITS, use_bias=False, name="layer"), (None, "model")
    )
    found = of_layer(explanation)
    assert found.gathered_bytes == 4 * FEATURES * UNITS
    assert found.replicated == 1
    assert "'layer': 100% of" in str(explanation)
    assert explanation.as_dict()["measured"][0]["gathered_bytes"] == (
        found.gathered_bytes
    )


@keras.saving.register_keras_serializable("tests")
class GatheringInBranch(Gathering):
    """A Dense layer that gathers its kernel if its inputs are positive."""

    def call(self, inputs):
        return tf.cond(
            tf.reduce_sum(inputs) > 0,
            lambda: super(GatheringInBranch, self).call(inputs),
            lambda: inputs @ tf.convert_to_tensor(self.kernel),
        )


@pytest.mark.parametrize("strict", [False, True])
def test_branches_of_conditionals_are_measured(strict):
    mesh = mesh_of(batch=1, model=2)
    layout_map = tlm.LayoutMap(mesh=mesh, strict=strict)
    layout_map["layer.*kernel"] = (None, "model")
    layer = GatheringInBranch(UNITS, use_bias=False, name="layer")
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential([keras.Input([FEATURES]), layer])
    x = np.ones([BATCH, FEATURES])
    if strict:
        with pytest.raises(
            errors.UnsupportedByDTensorError,
            match="gathers sharded weights on every device: 0.3 KiB 'layer'",
        ):
            model.predict(x, verbose=0)
        return
    model.predict(x, verbose=0)
    found = of_layer(layout_map.explain(model), "predict")
    assert found.gathered_bytes == 4 * FEATURES * UNITS
    # Each branch has one product.
    assert found.flops == 2 * 2 * BATCH * FEATURES * UNITS


def test_strict_raises_if_the_program_gathers_a_weight():
    with pytest.raises(
        errors.UnsupportedByDTensorError,
        match="gathers sharded weights on every device: 0.3 KiB 'layer'",
    ):
        train(
            lambda: Gathering(UNITS, use_bias=False, name="layer"),
            (None, "model"),
            strict=True,
        )
    train(dense, (None, "model"), strict=True)


@pytest.mark.parametrize(
    ("axes", "size"),
    [(("batch", None), FEATURES * UNITS), (("batch", "model"), FEATURES * 3)],
)
def test_strict_accepts_gathers_along_the_batch_axis(axes, size):
    # Such weights are gathered along this axis by design.
    found = of_layer(
        train(dense, axes, sizes=dict(batch=2, model=2), strict=True)
    )
    assert found.gathered_bytes == found.gathered_along_batch == 4 * size


def test_each_step_that_ran_is_measured():
    mesh = mesh_of(batch=1, model=2)
    layout_map = tlm.LayoutMap(mesh=mesh)
    layout_map["layer.*kernel"] = (None, "model")
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential([keras.Input([FEATURES]), dense()])
    assert layout_map.explain(model).measured == ()
    model.predict(np.ones([BATCH, FEATURES]), verbose=0)
    explanation = layout_map.explain(model)
    found = of_layer(explanation, "predict")
    assert found.flops == FLOPS // 2
    assert {one.step for one in explanation.measured} == {"predict"}


@keras.saving.register_keras_serializable("tests")
class Einsum(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=[4, 6, 5], name="kernel")

    def call(self, x):
        return tf.einsum("btd,hde->bthe", x, self.kernel)


@pytest.mark.parametrize(
    ("layer", "axes", "shape", "flops"),
    [
        # Outputs and the gradient of the kernel.
        (
            lambda: Einsum(name="layer"),
            ("model", None, None),
            (3, 6),
            2 * 2 * BATCH * 3 * 4 * 6 * 5,
        ),
        (
            lambda: keras.layers.Conv2D(6, 3, name="layer"),
            (None,) * 4,
            (5, 5, 2),
            2 * 2 * (BATCH * 3 * 3 * 6) * (3 * 3 * 2),
        ),
        (
            lambda: keras.layers.DepthwiseConv2D(
                3, depth_multiplier=2, name="layer"
            ),
            (None,) * 4,
            (5, 5, 2),
            2 * 2 * (BATCH * 3 * 3 * 4) * (3 * 3),
        ),
    ],
    ids=["einsum", "convolution", "depthwise"],
)
def test_flops_are_counted_from_the_shapes(layer, axes, shape, flops):
    found = of_layer(train(layer, axes, shape=shape))
    assert found.flops == flops
    assert found.replicated == (0 if axes[0] else 1)


@pytest.mark.parametrize(
    "axes", [(None,) * 3 + ("model",), (None, None, "model", None)]
)
def test_a_convolution_on_shards_is_not_replicated(axes):
    explanation = train(
        lambda: keras.layers.Conv2D(6, 3, name="layer"), axes, shape=(5, 5, 2)
    )
    # The result and the gradient of the kernel. The images of the batch have no
    # gradient.
    flops = 2 * 2 * (BATCH * 3 * 3 * 6) * (3 * 3 * 2)
    assert of_layer(explanation).flops == flops
    for one in explanation.measured:
        assert (one.replicated, one.gathered_bytes) == (0, 0)
