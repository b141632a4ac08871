"""Programs on images: segmentation, classification, upscaling, mixup."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RNG = np.random.default_rng(0)
SIDE, CLASSES = 16, 4
IMAGES = RNG.uniform(size=(32, SIDE, SIDE, 3)).astype(np.float32)
NOISE = RNG.normal(size=IMAGES.shape)
LABELS = np.arange(32) % CLASSES
MASKS = (IMAGES.mean(-1) > 0.5).astype(np.int64)


def trained(model, x, y, epochs: int = 3) -> list[float]:
    return model.fit(
        x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0
    ).history["loss"]


def autoencoder():
    """Trains an autoencoder that removes noise from images."""
    inputs = keras.Input((SIDE, SIDE, 3))
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Dense(16, activation="relu")(x)
    x = layers.Conv2DTranspose(
        8, 3, strides=2, activation="relu", padding="same"
    )(x)
    outputs = layers.Conv2D(3, 3, activation="sigmoid", padding="same")(x)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="adam", loss="binary_crossentropy")
    noisy = np.clip(IMAGES + 0.1 * NOISE, 0, 1)
    return trained(model, noisy.astype(np.float32), IMAGES), [model]


def u_net():
    """Trains a model that predicts a class for each pixel."""
    inputs = keras.Input((SIDE, SIDE, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(inputs)
    x = before = layers.Activation("relu")(layers.BatchNormalization()(x))
    for filters in (8, 16):
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        before = layers.Conv2D(filters, 1, strides=2, padding="same")(before)
        x = before = layers.add([x, before])
    for filters in (16, 8, 8):
        x = layers.Activation("relu")(x)
        x = layers.Conv2DTranspose(filters, 3, padding="same")(x)
        x = layers.UpSampling2D(2)(layers.BatchNormalization()(x))
        before = layers.Conv2D(filters, 1, padding="same")(
            layers.UpSampling2D(2)(before)
        )
        x = before = layers.add([x, before])
    x = layers.Dense(16)(x)
    outputs = layers.Conv2D(2, 3, activation="softmax", padding="same")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy"
    )
    return trained(model, IMAGES, MASKS), [model]


def resnet():
    """Trains residual blocks, with data augmentation in the model."""
    inputs = keras.Input((SIDE, SIDE, 3))
    x = layers.RandomFlip("horizontal", seed=2)(inputs)
    x = layers.Rescaling(2.0, offset=-1.0)(x)
    for filters in (8, 16):
        short = layers.Conv2D(filters, 1, strides=2)(x)
        x = layers.Conv2D(
            filters, 3, strides=2, padding="same", use_bias=False
        )(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Conv2D(filters, 3, padding="same")(x)
        x = layers.ReLU()(layers.Add()([x, short]))
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        keras.callbacks.EarlyStopping(patience=5),
        keras.callbacks.ReduceLROnPlateau(patience=1),
    ]
    history = model.fit(
        IMAGES,
        LABELS,
        batch_size=16,
        epochs=3,
        validation_data=(IMAGES, LABELS),
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
    ).history
    return history["loss"] + history["val_loss"], [model]


class Patches(layers.Layer):
    """Layer that splits images into square patches."""

    def call(self, images):
        patches = ops.image.extract_patches(images, size=4)
        return ops.reshape(patches, (ops.shape(images)[0], 16, 48))


class PatchEncoder(layers.Layer):
    """Layer that projects patches and adds position embeddings."""

    def __init__(self):
        super().__init__()
        self.projection = layers.Dense(16)
        self.positions = layers.Embedding(16, 16)

    def call(self, patches):
        places = ops.expand_dims(ops.arange(0, 16, 1), axis=0)
        return self.projection(patches) + self.positions(places)


def vision_transformer():
    inputs = keras.Input((SIDE, SIDE, 3))
    x = PatchEncoder()(Patches()(inputs))
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([layers.MultiHeadAttention(2, 8)(y, y), x])
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        y = layers.Dense(32, activation=keras.activations.gelu)(y)
        x = layers.Add()([layers.Dense(16)(y), x])
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    model.compile(
        keras.optimizers.AdamW(1e-3, weight_decay=1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return trained(model, IMAGES, LABELS), [model]


def super_resolution():
    """Trains a model that doubles the image size by rearranging channels."""
    inputs = keras.Input((SIDE // 2, SIDE // 2, 3))
    x = layers.Conv2D(8, 5, activation="tanh", padding="same")(inputs)
    x = layers.Dense(12)(x)
    outputs = layers.Lambda(lambda x: tf.nn.depth_to_space(x, 2))(x)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    small = IMAGES.reshape(32, 8, 2, 8, 2, 3).mean((2, 4))
    return trained(model, small, IMAGES), [model]


def mixup():
    """Trains on mixtures of two images and their labels."""
    model = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )
    labels = np.eye(CLASSES, dtype=np.float32)[LABELS]
    one = tf.data.Dataset.from_tensor_slices((IMAGES, labels)).batch(16)
    other = tf.data.Dataset.from_tensor_slices(
        (IMAGES[::-1], labels[::-1])
    ).batch(16)

    def mix(first, second):
        share = tf.random.stateless_gamma([16], (1, 2), alpha=0.2)
        share = share / (
            share + tf.random.stateless_gamma([16], (3, 4), alpha=0.2)
        )
        wide = tf.reshape(share, (16, 1, 1, 1))
        tall = tf.reshape(share, (16, 1))
        return (
            first[0] * wide + second[0] * (1 - wide),
            first[1] * tall + second[1] * (1 - tall),
        )

    model.compile(
        "adam",
        keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        ),
    )
    mixed = tf.data.Dataset.zip((one, other)).map(mix)
    return model.fit(mixed, epochs=3, verbose=0).history["loss"], [model]


PROGRAMS = [
    autoencoder,
    u_net,
    resnet,
    vision_transformer,
    super_resolution,
    mixup,
]
