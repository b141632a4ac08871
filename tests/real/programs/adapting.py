"""Programs that start from a trained model: transfer, LoRA, quantization."""

import os
import tempfile

import keras
import numpy as np
from keras import layers, ops

RNG = np.random.default_rng(0)
SIDE = 32
IMAGES = RNG.uniform(size=(16, SIDE, SIDE, 3)).astype(np.float32)
LABELS = (np.arange(16) % 2).astype(np.float32)
TOKENS = RNG.integers(0, 32, (32, 8))


def transfer():
    """Trains a new head on a frozen body, then fine-tunes part of the body."""
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    options = dict(batch_size=8, shuffle=False, verbose=0)
    body = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 3)),
            layers.Conv2D(8, 3, strides=2, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(16, 3, strides=2),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
        ],
        name="body",
    )
    before = keras.Sequential([body, layers.Dense(4)])
    before.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    losses = before.fit(IMAGES, np.arange(16) % 4, epochs=2, **options).history[
        "loss"
    ]

    body.trainable = False
    inputs = keras.Input((SIDE, SIDE, 3))
    x = layers.Rescaling(2.0, offset=-1)(inputs)
    x = layers.Dense(16)(body(x, training=False))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.01), loss)
    losses += model.fit(IMAGES, LABELS, epochs=3, **options).history["loss"]
    body.trainable = True
    for layer in body.layers[:-3]:
        layer.trainable = False
    model.compile(keras.optimizers.Adam(1e-5), loss)
    losses += model.fit(IMAGES, LABELS, epochs=2, **options).history["loss"]
    return losses, [before, model]


def text_model() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(32, 16)(inputs)
    x = layers.EinsumDense(
        "abc,cd->abd", (None, 32), bias_axes="d", activation="relu"
    )(x)
    x = layers.Dense(16, activation="relu", name="narrow")(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def fitted(model, epochs: int = 2) -> list[float]:
    return model.fit(
        TOKENS,
        TOKENS[:, 0] % 4,
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    ).history["loss"]


def lora():
    """Enables LoRA in a trained model and trains the low-rank weights."""
    model = text_model()
    losses = fitted(model)
    for layer in model.layers:
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(4)
        else:
            layer.trainable = False
    model.compile(keras.optimizers.Adam(0.01), model.loss)
    return losses + fitted(model), [model]


def quantization():
    """Quantizes the weights to eight bits after training."""
    model = text_model()
    losses = fitted(model)
    model.quantize("int8")
    return losses + [
        float(ops.sum(ops.abs(model.predict(TOKENS, verbose=0))))
    ], [model]


def saved_and_gone_on_with():
    """Saves the best weights and the full model, and continues training."""
    model = text_model()
    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.weights.h5")
        losses = model.fit(
            TOKENS,
            TOKENS[:, 0] % 4,
            batch_size=16,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[
                keras.callbacks.ModelCheckpoint(
                    best,
                    monitor="loss",
                    save_best_only=True,
                    save_weights_only=True,
                )
            ],
        ).history["loss"]
        model.load_weights(best)
        model.save(os.path.join(folder, "whole.keras"))
        losses += fitted(
            keras.models.load_model(os.path.join(folder, "whole.keras"))
        )
    return losses, [model]


def style():
    """Optimizes an image so that its features match a style."""
    body = keras.applications.VGG16(
        input_shape=(SIDE, SIDE, 3), include_top=False, weights=None
    )
    names = ("block1_conv1", "block2_conv1", "block3_conv1")
    features = keras.Model(
        body.inputs, {name: body.get_layer(name).output for name in names}
    )
    head = layers.Dense(8)
    wanted = features(IMAGES[1:2])
    image = keras.Variable(IMAGES[:1], name="image")
    optimizer = keras.optimizers.SGD(1e-4)

    def gram(x):
        x = ops.reshape(ops.transpose(x[0], (2, 0, 1)), (x.shape[-1], -1))
        return ops.matmul(x, ops.transpose(x))

    import tensorflow as tf

    losses = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            found = features(image)
            loss = sum(
                ops.sum(ops.square(gram(found[name]) - gram(wanted[name])))
                for name in names
            )
            loss = loss + ops.mean(ops.square(head(found[names[2]])))
        gradients = tape.gradient(loss, [image])
        optimizer.apply(gradients, [image])
        losses.append(float(loss))
    return losses, [features, head]


PROGRAMS = [transfer, lora, quantization, saved_and_gone_on_with, style]
