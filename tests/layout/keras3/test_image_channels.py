"""Images keep sharded channels between layers, against one device."""

import keras
import numpy as np
import pytest
from keras import layers as L

from tests.layout import pairs
from tests.layout.meshes import mesh_of
from tf_layoutmap.layout.replication import measured, program_counts

OUT, IN = (None, None, None, "model"), (None, None, "model", None)
LAYOUTS = {
    r"out\d\.kernel": OUT,
    r"in\d\.kernel": IN,
    r"(out\d\.bias|norm\..*)": ("model",),
}


def chain():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            L.Conv2D(8, 3, name="out0"),
            L.BatchNormalization(name="norm"),
            L.Activation("relu"),
            L.Conv2D(4, 3, name="in0"),
            L.Flatten(),
            L.Dense(4),
        ]
    )


def counts(model, kind):
    return program_counts.count(measured._of_models[model][kind].name)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_chain_of_layers_sends_only_the_sum_over_input_channels(batch):
    model = pairs.on_mesh(chain, LAYOUTS, mesh_of(batch=batch, model=2))
    found = model.predict(pairs.IMAGES, batch_size=8, verbose=0)
    expected = pairs.plain(chain).predict(pairs.IMAGES, batch_size=8, verbose=0)
    np.testing.assert_allclose(found, expected, **pairs.TOLERANCE)
    program = counts(model, "predict")
    assert program.collectives == 1
    # An all-reduce over two devices sends the size of the result.
    assert program.sent_bytes == 4 * (8 // batch) * 4 * 4 * 4
    assert program.ops > program.kernels > 0


def test_a_chain_trains_like_on_a_single_device():
    model = pairs.assert_trains_alike(
        chain,
        pairs.IMAGES,
        LAYOUTS,
        mesh=mesh_of(batch=1, model=2),
        optimizer=lambda: keras.optimizers.SGD(0.1),
        epochs=1,
        metrics=(),
    )
    # The sum of the second convolution, and the number with which a step waits
    # for all devices. The images of the batch have no gradient.
    program = counts(model, "train")
    assert program.collectives == 2
    assert program.sent_bytes == 4 * (8 * 4 * 4 * 4 + 1)


def branches():
    """Returns a model with all kinds of layers that keep sharded channels."""
    x = inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(8, 3, padding="same", activation="relu", name="out0")(x)
    x = L.Dropout(0.0)(L.BatchNormalization()(x))
    other = L.LeakyReLU()(L.Conv2D(8, 1, name="out1")(inputs))
    x = L.MaxPooling2D()(L.Add()([x, other]))
    x = L.UpSampling2D()(L.ZeroPadding2D()(x))
    x = L.Cropping2D(2)(L.AveragePooling2D(2, 1, "same")(x))
    x = L.DepthwiseConv2D(3, padding="same", name="in1")(x)
    x = L.Conv2D(8, 3, padding="same", groups=4, name="out2")(x)
    x = L.Conv2DTranspose(6, 2, strides=2, name="up0")(x)
    pooled = L.GlobalAveragePooling2D()(x)
    # This layer needs all channels.
    normalized = L.LayerNormalization()(x)
    x = L.Conv2D(4, 3, activation="softmax", name="out4")(normalized)
    return keras.Model(
        inputs, L.Dense(4)(L.Concatenate()([L.Flatten()(x), pooled]))
    )


@pytest.mark.exhaustive
def test_all_layers_train_like_on_a_single_device():
    pairs.assert_trains_alike(
        branches,
        pairs.IMAGES,
        # The kernel of a transposed convolution contains its outputs before its
        # inputs.
        {**LAYOUTS, r"up0\.kernel": IN},
        optimizer=lambda: keras.optimizers.SGD(0.1),
        epochs=1,
    )


@keras.saving.register_keras_serializable("tests")
class Flattened(keras.Model):
    """A model whose own code reads the channels of a convolution."""

    def __init__(self):
        super().__init__()
        self.convolution = L.Conv2D(8, 3, name="out0")
        self.norm = L.BatchNormalization(name="norm")
        self.dense = L.Dense(4)

    def call(self, x):
        x = self.convolution(x)
        y = keras.ops.relu(self.norm(x)) + keras.ops.flip(x, axis=-1)
        return self.dense(keras.ops.reshape(y, [-1, 6 * 6 * 8]))


def test_code_of_users_reads_gathered_channels():
    pairs.assert_trains_alike(
        Flattened, pairs.IMAGES, {r".*out0.kernel": OUT}, epochs=1
    )
