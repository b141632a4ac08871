"""Programs on text: classification, a small GPT, masked words, translation."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

WORDS, LENGTH, DIM = 32, 12, 16
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, WORDS, (32, LENGTH))
MASKED = RNG.uniform(size=TOKENS.shape) < 0.3


class TokenAndPosition(layers.Layer):
    """Layer with an embedding of tokens and an embedding of positions."""

    def __init__(self):
        super().__init__()
        self.tokens = layers.Embedding(WORDS, DIM)
        self.positions = layers.Embedding(LENGTH, DIM)

    def call(self, x):
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[-1]))


class Block(layers.Layer):
    """Transformer block: attention and two dense layers with normalization."""

    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal
        self.attention = layers.MultiHeadAttention(2, DIM // 2)
        self.wide = layers.Dense(2 * DIM, activation="relu")
        self.narrow = layers.Dense(DIM)
        self.first = layers.LayerNormalization(epsilon=1e-6)
        self.second = layers.LayerNormalization(epsilon=1e-6)
        self.dropout = layers.Dropout(0.1, seed=4)

    def mask(self, x):
        count, length = ops.shape(x)[0], ops.shape(x)[1]
        i, j = ops.arange(length)[:, None], ops.arange(length)
        mask = ops.reshape(ops.cast(i >= j, "int32"), (1, length, length))
        return ops.broadcast_to(mask, (count, length, length))

    def call(self, x, training=None):
        mask = self.mask(x) if self.causal else None
        attended = self.attention(x, x, attention_mask=mask)
        x = self.first(x + self.dropout(attended, training=training))
        return self.second(x + self.narrow(self.wide(x)))


def text_classification():
    """Classifies reviews as good or bad."""
    inputs = keras.Input((LENGTH,))
    x = Block()(TokenAndPosition()(inputs))
    x = layers.Dropout(0.1, seed=1)(layers.GlobalAveragePooling1D()(x))
    x = layers.Dense(20, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    model.compile(
        "adam", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    history = model.fit(
        TOKENS,
        TOKENS[:, 0] % 2,
        batch_size=16,
        epochs=3,
        shuffle=False,
        verbose=0,
    ).history
    return history["loss"] + history["accuracy"], [model]


def mini_gpt():
    """Trains a model that predicts the next word, and generates text."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Block(causal=True)(TokenAndPosition()(inputs))
    outputs = layers.Dense(WORDS)(x)
    model = keras.Model(inputs, [outputs, x])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=[loss, None])
    dataset = (
        tf.data.Dataset.from_tensor_slices(TOKENS)
        .batch(16)
        .map(lambda x: (x[:, :-1], x[:, 1:]))
        .map(
            lambda x, y: (
                tf.pad(x, [[0, 0], [0, 1]]),
                tf.pad(y, [[0, 0], [0, 1]]),
            )
        )
    )
    losses = model.fit(dataset, epochs=3, verbose=0).history["loss"]
    written = [3, 1, 4]
    while len(written) < 8:
        padded = written + [0] * (LENGTH - len(written))
        logits, _ = model.predict(np.array([padded]), verbose=0)
        written.append(int(np.argmax(logits[0, len(written) - 1])))
    return losses + [float(token) for token in written], [model]


class MaskedLanguageModel(keras.Model):
    """Model whose loss counts only masked words, by sample weights."""

    def compile(self, optimizer, loss):
        super().compile(optimizer=optimizer)
        self.word_loss = loss
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = self.word_loss(y, y_pred, sample_weight)
        self.tracker.update_state(loss, sample_weight=sample_weight)
        return ops.sum(loss)

    @property
    def metrics(self):
        return [self.tracker]


def masked_language_model():
    inputs = keras.Input((LENGTH,), dtype="int64")
    x = Block()(TokenAndPosition()(inputs))
    outputs = layers.Dense(WORDS, activation="softmax")(x)
    model = MaskedLanguageModel(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(reduction=None),
    )
    dataset = tf.data.Dataset.from_tensor_slices(
        (np.where(MASKED, 0, TOKENS), TOKENS, MASKED.astype(np.float32))
    )
    return model.fit(dataset.batch(16), epochs=3, verbose=0).history["loss"], [
        model
    ]


def translation_with_lstm():
    """Trains a sequence-to-sequence model, and generates letter by letter."""
    source = keras.Input((6, WORDS))
    _, hidden, cell = layers.LSTM(DIM, return_state=True)(source)
    target = keras.Input((6, WORDS))
    decoder = layers.LSTM(DIM, return_sequences=True, return_state=True)
    x, _, _ = decoder(target, initial_state=[hidden, cell])
    head = layers.Dense(WORDS, activation="softmax")
    model = keras.Model([source, target], head(x))
    model.compile("rmsprop", "categorical_crossentropy")
    letters = np.eye(WORDS, dtype=np.float32)[TOKENS]
    losses = model.fit(
        [letters[:, :6], letters[:, 5:11]],
        letters[:, 6:],
        batch_size=16,
        epochs=3,
        shuffle=False,
        verbose=0,
    ).history["loss"]

    encoder = keras.Model(source, [hidden, cell])
    states = [keras.Input((DIM,)), keras.Input((DIM,))]
    one = keras.Input((1, WORDS))
    x, *after = decoder(one, initial_state=states)
    writer = keras.Model([one, *states], [head(x), *after])
    memory = encoder.predict(letters[:1, :6], verbose=0)
    token, written = np.zeros((1, 1, WORDS), np.float32), []
    for _ in range(3):
        found, *memory = writer.predict([token, *memory], verbose=0)
        written.append(int(np.argmax(found[0, 0])))
        token = np.eye(WORDS, dtype=np.float32)[[[written[-1]]]]
    return losses + [float(token) for token in written], [model]


PROGRAMS = [
    text_classification,
    mini_gpt,
    masked_language_model,
    translation_with_lstm,
]
