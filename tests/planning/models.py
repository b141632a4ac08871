"""Small Keras models for the tests of plans on a mesh."""

import keras
import numpy as np

import tf_layoutmap as tlm
from tf_layoutmap.planning import keras_models

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


def with_head(backbone):
    """Returns a language model with a backbone of keras-hub."""
    inputs = {
        name: keras.Input((LENGTH,), dtype=x.dtype, name=name)
        for name, x in backbone.input.items()
    }
    logits = backbone.token_embedding(backbone(inputs), reverse=True)
    return keras.Model(inputs, logits)


class Patches(keras.layers.Layer):
    """Projections of the patches of an image, with learned positions."""

    def __init__(self, dim, size):
        super().__init__()
        self.project = keras.layers.Conv2D(dim, size, strides=size)
        self.dim = dim

    def build(self, shape):
        self.project.build(shape)
        _, rows, columns, _ = self.project.compute_output_shape(shape)
        self.positions = self.add_weight(
            shape=(rows * columns, self.dim), name="positions"
        )
        super().build(shape)

    def call(self, x):
        x = self.project(x)
        x = keras.ops.reshape(x, (-1, *self.positions.shape))
        return x + self.positions


def vision_transformer():
    """Returns a classifier of images with two transformer layers."""
    images = keras.Input((8, 8, 3))
    x = Patches(16, 4)(images)
    for number in range(2):
        block = Block(16, 4, 32)
        block.name = f"block_{number}"
        x = block(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(images, keras.layers.Dense(CLASSES, name="head")(x))


class Mixer(keras.Model):
    """A subclassed MLP-Mixer with two layers, and dropout."""

    def __init__(self):
        super().__init__()
        self.patches = Patches(16, 2)
        self.mixing = [
            [keras.layers.Dense(n) for n in (32, 16, 64, 16)] for _ in range(2)
        ]
        self.norms = [keras.layers.LayerNormalization() for _ in range(4)]
        self.dropout = keras.layers.Dropout(0.1)
        self.head = keras.layers.Dense(CLASSES)
        self(keras.Input((8, 8, 3), batch_size=SAMPLES))

    def call(self, x):
        x = self.patches(x)
        for (one, two, three, four), first, second in zip(
            self.mixing, self.norms[::2], self.norms[1::2]
        ):
            y = keras.ops.swapaxes(first(x), 1, 2)
            y = two(keras.ops.gelu(one(y)))
            x = x + keras.ops.swapaxes(y, 1, 2)
            x = x + four(keras.ops.gelu(three(second(x))))
        return self.head(keras.ops.mean(self.dropout(x), axis=1))


def recommender():
    """Returns a model with tables, numbers, and products of all features."""
    dim = 8
    inputs, vectors = {}, []
    numbers = keras.Input((5,), name="numbers")
    for name, rows in {"user": 40, "item": VOCABULARY}.items():
        inputs[name] = keras.Input((), dtype="int32", name=name)
        table = keras.layers.Embedding(rows, dim, name=f"{name}_table")
        vectors.append(table(inputs[name]))
    # The rows of this table are padded on a mesh.
    inputs["words"] = keras.Input((3,), dtype="int32", name="words")
    words = tlm.layers.ShardedEmbedding(
        33, dim, optimizer="adagrad", name="words_table"
    )
    vectors.append(keras.ops.mean(words(inputs["words"]), axis=1))
    x = keras.layers.Dense(32, "relu", name="bottom_1")(numbers)
    vectors.append(keras.layers.Dense(dim, name="bottom_2")(x))
    stacked = keras.ops.stack(vectors, axis=1)
    products = keras.ops.matmul(stacked, keras.ops.swapaxes(stacked, 1, 2))
    x = keras.ops.concatenate(
        [vectors[-1], keras.layers.Flatten()(products)], axis=-1
    )
    x = keras.layers.Dense(64, "relu", name="top_1")(x)
    inputs["numbers"] = numbers
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="top_2")(x))


def odd():
    """Returns a model in which no axis of two devices divides a dimension."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY + 1, 15, name="words")(inputs)
    x = keras.layers.Conv1D(7, 3, padding="same", name="convolution")(x)
    x = keras.layers.GRU(5, name="gru")(x)
    x = keras.layers.Dense(21, "relu", name="up")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


def fewest_bytes(model, sizes, optimizer=None):
    """Returns the bytes per device of the smallest layouts of a model."""
    problem = keras_models.problem_of_model(
        model, sizes, 10**9, optimizer, batch_size=SAMPLES
    )
    return sum(problem.fixed_memory.values()) + sum(
        min(sum(c.memory.values()) for c in i.choices if c.refused is None)
        for i in problem.items
    )


def batch_of(model):
    """Returns inputs and labels for a model."""
    rng = np.random.default_rng(0)

    def values(x):
        shape = (SAMPLES, *x.shape[1:])
        if "int" in x.dtype:
            high = 2 if "mask" in x.name else VOCABULARY
            return rng.integers(0, high, shape).astype(x.dtype)
        return rng.normal(size=shape).astype("float32")

    if isinstance(model, Mixer):
        x, outputs = rng.normal(size=(SAMPLES, 8, 8, 3)), (SAMPLES, CLASSES)
        return x.astype("float32"), rng.integers(0, outputs[-1], outputs[:1])
    inputs = model.inputs[0] if len(model.inputs) == 1 else model.input
    x = keras.tree.map_structure(values, inputs)
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
