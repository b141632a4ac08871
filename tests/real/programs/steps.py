"""Programs with custom training loops and steps."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(64, 8)).astype(np.float32)
CLASSES = np.argmax(FEATURES[:, :4], 1)
NOISE = RNG.normal(size=(64, 4)).astype(np.float32)


def classifier(width: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(4),
        ]
    )


class Distiller(keras.Model):
    """Student model that learns from labels and from a teacher."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer, metrics, student_loss, teacher_loss):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss, self.teacher_loss = student_loss, teacher_loss

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False
    ):
        teacher_logits = self.teacher(x, training=False)
        soft = (
            self.teacher_loss(
                ops.softmax(teacher_logits / 3.0, axis=1),
                ops.softmax(y_pred / 3.0, axis=1),
            )
            * 9.0
        )
        return 0.1 * self.student_loss(y, y_pred) + 0.9 * soft

    def call(self, x):
        return self.student(x)


def distillation():
    teacher, student = classifier(32), classifier(8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(keras.optimizers.Adam(), loss)
    before = teacher.fit(
        FEATURES, CLASSES, epochs=2, shuffle=False, verbose=0
    ).history["loss"]
    model = Distiller(student, teacher)
    model.compile(
        keras.optimizers.Adam(),
        [keras.metrics.SparseCategoricalAccuracy()],
        loss,
        keras.losses.KLDivergence(),
    )
    history = model.fit(
        FEATURES, CLASSES, epochs=3, shuffle=False, verbose=0
    ).history
    student.compile(loss=loss, metrics=["accuracy"])
    return (
        before
        + history["loss"]
        + student.evaluate(FEATURES, CLASSES, verbose=0),
        [teacher, student],
    )


def loop_with_a_tape():
    """Trains in a custom loop with a compiled step and manual metrics."""
    model = classifier(16)
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    dataset = tf.data.Dataset.from_tensor_slices((FEATURES, CLASSES))

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_function(y, logits)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        accuracy.update_state(y, logits)
        return loss

    losses = []
    for _ in range(2):
        for x, y in dataset.batch(16):
            losses.append(float(train_step(x, y)))
        losses.append(float(accuracy.result()))
        accuracy.reset_state()
    return losses, [model]


def loop_without_a_graph():
    """Trains in a custom loop with eager execution."""
    model = classifier(16)
    optimizer = keras.optimizers.Adam(1e-2)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses = []
    for step in range(4):
        x = FEATURES[step * 16 :][:16]
        y = CLASSES[step * 16 :][:16]
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights))
        losses.append(float(loss))
    return losses, [model]


class TrainAndTest(keras.Model):
    """Model with `train_step`, `test_step` and its own metrics."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = ops.mean(keras.losses.mean_squared_error(y, y_pred))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.error.update_state(y, y_pred)
        return {"mae": self.error.result()}

    @property
    def metrics(self):
        return [self.tracker, self.error]


def own_steps():
    inputs = keras.Input((8,))
    x = layers.Dense(16, activation="tanh", kernel_regularizer="l2")(inputs)
    model = TrainAndTest(inputs, layers.Dense(1)(x))
    model.compile(optimizer="adam")
    y = FEATURES.sum(1, keepdims=True)
    history = model.fit(
        FEATURES,
        y,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=(FEATURES, y),
    ).history
    return history["loss"] + history["val_mae"], [model]


def gradients_of_several_batches():
    """Trains with an optimizer that accumulates gradients."""
    model = classifier(16)
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(0.01, 20),
            gradient_accumulation_steps=2,
            global_clipnorm=1.0,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: None
    )
    return model.fit(
        FEATURES,
        CLASSES,
        epochs=3,
        batch_size=16,
        shuffle=False,
        callbacks=[callback],
        verbose=0,
    ).history["loss"], [model]


def actor_critic():
    """Trains an actor and a critic to walk on a line, from sampled actions."""
    inputs = keras.Input((4,))
    common = layers.Dense(16, activation="relu")(inputs)
    model = keras.Model(
        inputs,
        [
            layers.Dense(2, activation="softmax")(common),
            layers.Dense(1)(common),
        ],
    )
    optimizer = keras.optimizers.Adam(0.01)
    huber = keras.losses.Huber()
    draws = np.random.default_rng(1)
    losses = []
    for _ in range(3):
        place, actions, critics, rewards = NOISE[0].copy(), [], [], []
        with tf.GradientTape() as tape:
            for _ in range(4):
                state = ops.expand_dims(ops.convert_to_tensor(place), 0)
                chances, critic = model(state)
                critics.append(critic[0, 0])
                action = draws.choice(
                    2,
                    p=np.squeeze(chances).astype(np.float64)
                    / np.squeeze(chances).astype(np.float64).sum(),
                )
                actions.append(ops.log(chances[0, action]))
                place = place + (0.1 if action else -0.1)
                rewards.append(-float(np.abs(place).sum()))
            returns = np.cumsum(rewards[::-1])[::-1].astype(np.float32)
            actor = [
                -log * (total - value)
                for log, value, total in zip(actions, critics, returns)
            ]
            critic = [
                huber(ops.expand_dims(value, 0), ops.expand_dims(total, 0))
                for value, total in zip(critics, returns)
            ]
            loss = sum(actor) + sum(critic)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        losses.append(float(loss))
    return losses, [model]


PROGRAMS = [
    distillation,
    loop_with_a_tape,
    loop_without_a_graph,
    own_steps,
    gradients_of_several_batches,
    actor_critic,
]
