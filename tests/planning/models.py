"""Small Keras models for the tests of plans on a mesh."""

import keras
import numpy as np

VOCABULARY, LENGTH, SAMPLES, CLASSES = 32, 8, 8, 4


class Block(keras.layers.Layer):
    """A transformer layer with an MLP of two or three matrices."""

    def __init__(self, dim, heads, hidden, *, is_gated=False, kv_heads=None):
        super().__init__()
        self.attention = (
            keras.layers.MultiHeadAttention(heads, dim // heads)
            if kv_heads is None
            else keras.layers.GroupQueryAttention(dim // heads, heads, kv_heads)
        )
        self.first_norm = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(
            hidden, activation=None if is_gated else "relu"
        )
        self.gate = (
            keras.layers.Dense(hidden, activation="silu") if is_gated else None
        )
        self.down = keras.layers.Dense(dim)
        self.second_norm = keras.layers.LayerNormalization()

    def build(self, shape):
        self.attention.build(shape, shape)
        self.first_norm.build(shape)
        self.up.build(shape)
        hidden = self.up.compute_output_shape(shape)
        if self.gate is not None:
            self.gate.build(shape)
        self.down.build(hidden)
        self.second_norm.build(shape)
        super().build(shape)

    def call(self, x):
        x = self.first_norm(x + self.attention(x, x))
        hidden = self.up(x)
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        return self.second_norm(x + self.down(hidden))


def transformer(
    dim=16, heads=4, hidden=32, layers=2, vocabulary=VOCABULARY, **options
):
    """Returns a language model with `layers` transformer layers."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, dim, name="words")(tokens)
    for number in range(layers):
        block = Block(dim, heads, hidden, **options)
        block.name = f"block_{number}"
        x = block(x)
    x = keras.layers.Dense(vocabulary, name="head")(x)
    return keras.Model(tokens, x)


def mlp():
    """Returns a Sequential model of four layers."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", name="one"),
            keras.layers.Dense(8, name="two"),
            keras.layers.Dense(24, activation="relu", name="three"),
            keras.layers.Dense(CLASSES, name="four"),
        ]
    )


def functional_mlp(prefix=""):
    """Returns the same model as `mlp`, as a functional model."""
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, activation="relu", name=prefix + "one")(inputs)
    x = keras.layers.Dense(8, name=prefix + "two")(x)
    x = keras.layers.Dense(24, activation="relu", name=prefix + "three")(x)
    x = keras.layers.Dense(CLASSES, name=prefix + "four")(x)
    return keras.Model(inputs, x)


class SubclassedMlp(keras.Model):
    """The same model as `mlp`, as a subclassed model."""

    def __init__(self):
        super().__init__()
        self.one = keras.layers.Dense(16, activation="relu")
        self.two = keras.layers.Dense(8)
        self.three = keras.layers.Dense(24, activation="relu")
        self.four = keras.layers.Dense(CLASSES)

    def call(self, x):
        return self.four(self.three(self.two(self.one(x))))


def images():
    """Returns a model with convolutions."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(8, 3, padding="same", name="first"),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(16, 3, padding="same", name="second"),
            keras.layers.DepthwiseConv2D(3, padding="same", name="third"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(CLASSES, name="head"),
        ]
    )


def recurrent():
    """Returns a model with a recurrent layer."""
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 8, name="words"),
            keras.layers.LSTM(8, name="lstm"),
            keras.layers.Dense(CLASSES, name="head"),
        ]
    )


class Experts(keras.layers.Layer):
    """A mixture of experts with two matrices per expert."""

    def build(self, shape):
        dim = shape[-1]
        self.router = self.add_weight(shape=(dim, 4), name="router")
        self.up = self.add_weight(shape=(4, dim, 32), name="up")
        self.down = self.add_weight(shape=(4, 32, dim), name="down")
        super().build(shape)

    def call(self, x):
        scores = keras.ops.softmax(keras.ops.matmul(x, self.router))
        hidden = keras.ops.relu(keras.ops.einsum("btd,edh->bteh", x, self.up))
        outputs = keras.ops.einsum("bteh,ehd->bted", hidden, self.down)
        return x + keras.ops.sum(outputs * scores[..., None], axis=-2)


def mixture():
    """Returns a model with a mixture of experts."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 16, name="words")(tokens)
    x = Experts(name="experts")(x)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY, name="head")(x))


def batch_of(model):
    """Returns inputs and labels for a model."""
    rng = np.random.default_rng(0)
    shape = tuple(model.inputs[0].shape)[1:]
    x = (
        rng.integers(0, VOCABULARY, (SAMPLES, *shape)).astype("int32")
        if "int" in model.inputs[0].dtype
        else rng.normal(size=(SAMPLES, *shape)).astype("float32")
    )
    classes = model.outputs[0].shape[-1]
    y = rng.integers(0, classes, (SAMPLES, *model.outputs[0].shape[1:-1]))
    return x, y


def compiled(model, optimizer="adam"):
    """Compiles a classifier and returns it."""
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def losses(model):
    """Returns the losses of three steps."""
    x, y = batch_of(model)
    return model.fit(
        x, y, epochs=3, batch_size=SAMPLES, shuffle=False, verbose=0
    ).history["loss"]
