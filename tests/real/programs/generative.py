"""Programs that generate images with two models: VAE, DCGAN, WGAN-GP."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

IMAGES = (
    np.random.default_rng(0).uniform(size=(32, 16, 16, 1)).astype(np.float32)
)
LATENT = 4


class Sampling(layers.Layer):
    """Layer that draws from a normal distribution by reparameterization."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs):
        mean, log_var = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * noise


class VAE(keras.Model):
    """Encoder and decoder with a custom training step."""

    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.total = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            generated = self.decoder(z)
            far = ops.mean(
                ops.sum(
                    keras.losses.binary_crossentropy(data, generated),
                    axis=(1, 2),
                )
            )
            spread = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            loss = far + ops.mean(ops.sum(spread, axis=1))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights)
        )
        self.total.update_state(loss)
        return {"loss": self.total.result()}


def vae():
    inputs = keras.Input((16, 16, 1))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(
        inputs
    )
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    mean, log_var = layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)
    encoder = keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])])
    codes = keras.Input((LATENT,))
    x = layers.Dense(8 * 8 * 8, activation="relu")(codes)
    x = layers.Conv2DTranspose(
        8, 3, strides=2, padding="same", activation="relu"
    )(layers.Reshape((8, 8, 8))(x))
    decoder = keras.Model(
        codes,
        layers.Conv2DTranspose(1, 3, padding="same", activation="sigmoid")(x),
    )
    model = VAE(encoder, decoder)
    model.compile(optimizer=keras.optimizers.Adam())
    history = model.fit(
        IMAGES, epochs=3, batch_size=16, shuffle=False, verbose=0
    )
    return history.history["loss"], [encoder, decoder]


def discriminator(normalized: bool):
    stack = [
        keras.Input((16, 16, 1)),
        layers.Conv2D(8, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(16, 4, strides=2, padding="same"),
    ]
    if normalized:
        stack.append(layers.LayerNormalization())
    return keras.Sequential([*stack, layers.Flatten(), layers.Dense(1)])


def generator():
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(4 * 4 * 8),
            layers.Reshape((4, 4, 8)),
            layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 5, padding="same", activation="sigmoid"),
        ]
    )


class GAN(keras.Model):
    """GAN whose step trains a generator and a discriminator."""

    def __init__(self, critic, maker):
        super().__init__()
        self.critic, self.maker = critic, maker
        self.seed_generator = keras.random.SeedGenerator(11)
        self.judge_loss = keras.metrics.Mean(name="judge_loss")
        self.maker_loss = keras.metrics.Mean(name="maker_loss")

    def compile(self, judge_optimizer, maker_optimizer, loss):
        super().compile()
        self.judge_optimizer = judge_optimizer
        self.maker_optimizer = maker_optimizer
        self.loss = loss

    @property
    def metrics(self):
        return [self.judge_loss, self.maker_loss]

    def train_step(self, real):
        count = tf.shape(real)[0]
        codes = keras.random.normal((count, LATENT), seed=self.seed_generator)
        both = tf.concat([self.maker(codes), real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            judged = self.loss(labels, self.critic(both))
        gradients = tape.gradient(judged, self.critic.trainable_weights)
        self.judge_optimizer.apply_gradients(
            zip(gradients, self.critic.trainable_weights)
        )

        codes = keras.random.normal((count, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            fooled = self.loss(
                tf.zeros((count, 1)), self.critic(self.maker(codes))
            )
        gradients = tape.gradient(fooled, self.maker.trainable_weights)
        self.maker_optimizer.apply_gradients(
            zip(gradients, self.maker.trainable_weights)
        )
        self.judge_loss.update_state(judged)
        self.maker_loss.update_state(fooled)
        return {metric.name: metric.result() for metric in self.metrics}


def dcgan():
    model = GAN(discriminator(normalized=False), generator())
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.optimizers.Adam(1e-3),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    dataset = tf.data.Dataset.from_tensor_slices(IMAGES).batch(16)
    history = model.fit(dataset, epochs=3, verbose=0).history
    return (
        history["judge_loss"] + history["maker_loss"],
        [model.critic, model.maker],
    )


class WGAN(GAN):
    """Wasserstein GAN with a gradient penalty."""

    def penalty(self, real, generated):
        share = tf.random.uniform(
            (tf.shape(real)[0], 1, 1, 1), seed=5, dtype=keras.config.floatx()
        )
        mixed = real + share * (generated - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            judged = self.critic(mixed, training=True)
        (slope,) = tape.gradient(judged, [mixed])
        norm = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=[1, 2, 3]) + 1e-12)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real):
        count = tf.shape(real)[0]
        for turn in range(2):
            codes = tf.random.normal(
                (count, LATENT), seed=turn, dtype=keras.config.floatx()
            )
            with tf.GradientTape() as tape:
                generated = self.maker(codes, training=True)
                judged = (
                    tf.reduce_mean(self.critic(generated, training=True))
                    - tf.reduce_mean(self.critic(real, training=True))
                    + 10.0 * self.penalty(real, generated)
                )
            gradients = tape.gradient(judged, self.critic.trainable_variables)
            self.judge_optimizer.apply_gradients(
                zip(gradients, self.critic.trainable_variables)
            )
        codes = tf.random.normal(
            (count, LATENT), seed=9, dtype=keras.config.floatx()
        )
        with tf.GradientTape() as tape:
            fooled = -tf.reduce_mean(self.critic(self.maker(codes)))
        gradients = tape.gradient(fooled, self.maker.trainable_variables)
        self.maker_optimizer.apply_gradients(
            zip(gradients, self.maker.trainable_variables)
        )
        self.judge_loss.update_state(judged)
        self.maker_loss.update_state(fooled)
        return {metric.name: metric.result() for metric in self.metrics}


def wgan_gp():
    model = WGAN(discriminator(normalized=True), generator())
    model.compile(
        keras.optimizers.Adam(1e-4, beta_1=0.5),
        keras.optimizers.Adam(1e-4, beta_1=0.5),
        None,
    )
    history = model.fit(
        IMAGES, batch_size=16, epochs=3, shuffle=False, verbose=0
    ).history
    return (
        history["judge_loss"] + history["maker_loss"],
        [model.critic, model.maker],
    )


PROGRAMS = [vae, dcgan, wgan_gp]
