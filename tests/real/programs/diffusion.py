"""Program that learns to remove noise, and generates images from noise."""

import math

import keras
import numpy as np
from keras import layers, ops

IMAGES = (
    np.random.default_rng(0).uniform(size=(16, 16, 16, 3)).astype(np.float32)
)


@keras.saving.register_keras_serializable(package="tests")
def sinusoids(x):
    """Returns sine waves of several frequencies, which encode a number."""
    frequencies = ops.exp(ops.linspace(math.log(1.0), math.log(100.0), 4))
    speeds = ops.cast(2.0 * math.pi * frequencies, "float32")
    return ops.concatenate([ops.sin(speeds * x), ops.cos(speeds * x)], axis=3)


def residual(x, width):
    before = x if x.shape[3] == width else layers.Conv2D(width, 1)(x)
    x = layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(width, 3, padding="same", activation="swish")(x)
    x = layers.Conv2D(width, 3, padding="same")(x)
    return layers.Add()([x, before])


def network():
    images, variances = keras.Input((16, 16, 3)), keras.Input((1, 1, 1))
    waves = layers.Lambda(sinusoids, output_shape=(1, 1, 8))(variances)
    waves = layers.UpSampling2D(16, interpolation="nearest")(waves)
    x = layers.Concatenate()([layers.Conv2D(8, 1)(images), waves])
    x = first = residual(x, 8)
    x = layers.AveragePooling2D(2)(x)
    x = layers.Dense(16)(residual(x, 16))
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = residual(layers.Concatenate()([x, first]), 8)
    outputs = layers.Conv2D(3, 1, kernel_initializer="zeros")(x)
    return keras.Model([images, variances], outputs)


class Diffusion(keras.Model):
    """Diffusion model; a moving average of its network generates images."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = network()
        self.slow = keras.models.clone_model(self.network)
        self.seeds = keras.random.SeedGenerator(13)

    def compile(self, **options):
        super().compile(**options)
        self.tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def schedule(self, times):
        start, end = math.acos(0.95), math.acos(0.02)
        angles = start + ops.cast(times, "float32") * (end - start)
        return ops.sin(angles), ops.cos(angles)

    def split_noise(self, noisy, noise_share, image_share, training):
        model = self.network if training else self.slow
        noise = model([noisy, noise_share**2], training=training)
        return noise, (noisy - noise_share * noise) / image_share

    def train_step(self, images):
        import tensorflow as tf

        images = self.normalizer(images, training=True)
        noises = keras.random.normal((8, 16, 16, 3), seed=self.seeds)
        times = keras.random.uniform((8, 1, 1, 1), seed=self.seeds)
        noise_share, image_share = self.schedule(times)
        noisy = image_share * images + noise_share * noises
        with tf.GradientTape() as tape:
            found, _ = self.split_noise(noisy, noise_share, image_share, True)
            loss = self.loss(noises, found)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.network.trainable_weights)
        )
        self.tracker.update_state(loss)
        for weight, slow in zip(self.network.weights, self.slow.weights):
            slow.assign(0.9 * slow + (1 - 0.9) * weight)
        return {"n_loss": self.tracker.result()}

    def generated(self, noise, steps: int):
        images = noise
        for step in range(steps):
            times = ops.ones((noise.shape[0], 1, 1, 1)) - step / steps
            shares = self.schedule(times)
            found, clean = self.split_noise(images, *shares, False)
            shares = self.schedule(times - 1 / steps)
            images = shares[1] * clean + shares[0] * found
        return images


def diffusion():
    model = Diffusion()
    model.normalizer.adapt(IMAGES)
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-4),
        loss=keras.losses.mean_absolute_error,
    )
    losses = model.fit(
        IMAGES, batch_size=8, epochs=3, shuffle=False, verbose=0
    ).history["n_loss"]
    noise = np.random.default_rng(1).normal(size=(4, 16, 16, 3))
    generated = model.generated(
        ops.convert_to_tensor(noise.astype(np.float32)), 3
    )
    return losses + [float(ops.mean(ops.abs(generated)))], [model]


PROGRAMS = [diffusion]
