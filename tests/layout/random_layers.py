"""Layers of the random models in `random_models.py`.

Each entry of `LAYERS` maps a tensor to a tensor of the same kind, with a last
dimension that is even. `FEATURES` and `PHOTOS` contain preprocessing layers at
the inputs of a model.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.layout.random_expressions import EXPRESSIONS

VOCABULARY = 12

L = keras.layers
_serializable = keras.saving.register_keras_serializable("random_models")

HOW = {
    "alone": lambda y, x: y,
    "plus input": lambda y, x: y + x,
    "times input": lambda y, x: y * x,
    "gates input": lambda y, x: tf.sigmoid(y) * x,
}


@_serializable
class Expression(L.Layer):
    """Layer that applies expressions to a product and to its input.

    The product is the input times a square weight.

    Args:
      how: Key of `HOW`; determines how the first expression is used.
      first: Key of `EXPRESSIONS`; applied to the product.
      second: Key of `EXPRESSIONS`; applied to the input and added.
    """

    def __init__(self, how, first, second=None, **options):
        super().__init__(**options)
        self.how, self.first, self.second = how, first, second

    def build(self, shape):
        self.w = self.add_weight(
            shape=(shape[-1], shape[-1]), name="w", initializer="glorot_uniform"
        )

    def call(self, x):
        y = EXPRESSIONS[self.first](tf.matmul(x, self.w))
        y = HOW[self.how](y, x)
        if self.second is not None:
            y = y + EXPRESSIONS[self.second](x)
        return y


@_serializable
class Attend(L.Layer):
    """Self-attention layer of a sequence."""

    def __init__(self, attention, **options):
        super().__init__(**options)
        self.attention = attention

    def get_config(self):
        attention = keras.saving.serialize_keras_object(self.attention)
        return super().get_config() | {"attention": attention}

    @classmethod
    def from_config(cls, config):
        layer = keras.saving.deserialize_keras_object(config.pop("attention"))
        return cls(layer, **config)

    def build(self, shape):
        if not isinstance(self.attention, L.Attention):
            self.attention.build(shape, shape)

    def call(self, x):
        if isinstance(self.attention, L.Attention):
            return self.attention([x, x])
        return self.attention(x, x)


@_serializable
class Residual(L.Layer):
    """Layer that adds a shared `Dense` layer to its input `times` times."""

    def __init__(self, times, **options):
        super().__init__(**options)
        self.times = times

    def build(self, shape):
        self.dense = L.Dense(shape[-1], "tanh", name="dense")
        self.dense.build(shape)

    def call(self, x):
        for _ in range(self.times):
            x = x + self.dense(x)
        return x


def _thirds(shape, dtype=None):
    """Initializer that returns an array of NumPy with repeated values."""
    values = np.arange(np.prod(shape)).reshape(shape) % 3
    return values.astype(np.float32)


def _drawn(shape, dtype=None):
    """Initializer that draws with a seeded op of TensorFlow."""
    drawn = tf.random.stateless_uniform(shape, [3, 5], -1.0, 1.0)
    return tf.cast(drawn, dtype or tf.float32)


@_serializable
class _Steps(L.Layer):
    """Layer that adds the one-hot category of each value's interval."""

    def __init__(self, **options):
        super().__init__(**options)
        self.bins = L.Discretization([-0.5, 0.0, 0.7], name="bins")
        self.encode = L.CategoryEncoding(4, "one_hot", name="encode")

    def call(self, x):
        codes = self.encode(self.bins(x)[..., :1])
        return x + 0.1 * keras.ops.cast(
            keras.ops.sum(codes[..., 1:], -1, keepdims=True), x.dtype
        )


_I = keras.initializers
INITIALIZERS = {
    "random_normal": lambda: _I.RandomNormal(0.0, 0.5, seed=1),
    "random_uniform": lambda: _I.RandomUniform(-0.5, 0.5, seed=2),
    "truncated_normal": lambda: _I.TruncatedNormal(0.1, 0.5, seed=3),
    "variance_scaling": lambda: _I.VarianceScaling(
        2.0, "fan_avg", "uniform", seed=4
    ),
    "glorot_normal": lambda: "glorot_normal",
    "he_uniform": lambda: "he_uniform",
    "lecun_normal": lambda: "lecun_normal",
    "orthogonal": lambda: _I.Orthogonal(seed=5),
    "identity": lambda: _I.Identity(0.5),
    "zeros": lambda: "zeros",
    "ones": lambda: "ones",
    "constant": lambda: _I.Constant(2),
    "array": lambda: _thirds,
    "function": lambda: _drawn,
}
# Initializers of weights that are not floats.
CONSTANTS = ("zeros", "ones", "constant", "array", "function")
WEIGHT_DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "int32",
    "int64",
    "uint8",
    "bool",
)


@_serializable
class Typed(L.Layer):
    """Layer that multiplies its input with a weight of another dtype.

    Weights that are not floats are not trainable.

    Args:
      weight_dtype: Element of `WEIGHT_DTYPES`.
      initializer: Key of `INITIALIZERS`.
    """

    def __init__(self, weight_dtype, initializer, **options):
        super().__init__(**options)
        self.weight_dtype, self.initializer = weight_dtype, initializer

    def build(self, shape):
        self.w = self.add_weight(
            shape=(shape[-1], shape[-1]),
            name="w",
            dtype=self.weight_dtype,
            trainable="float" in self.weight_dtype,
            initializer=INITIALIZERS[self.initializer](),
        )

    def call(self, x):
        w = keras.ops.cast(self.w, x.dtype)
        return x + 0.1 * keras.ops.matmul(x, w)


@_serializable
class Counter(L.Layer):
    """Layer that counts its training steps in an integer weight.

    Args:
      weight_dtype: Dtype of the weight.
    """

    def __init__(self, weight_dtype, **options):
        super().__init__(**options)
        self.weight_dtype = weight_dtype

    def build(self, shape):
        self.n = self.add_weight(
            shape=(shape[-1],),
            name="n",
            dtype=self.weight_dtype,
            trainable=False,
            initializer="zeros",
        )

    def call(self, x, training=False):
        if training:
            self.n.assign(self.n + 1)
        return x * (1 + 0.1 * keras.ops.cast(self.n, x.dtype))


# Maps the name of each layer to a function that returns the layer. The output
# of a layer has the same kind as its input.
_ANY = {
    "Dense": lambda n: L.Dense(8, "relu", name=n),
    "Dense tanh": lambda n: L.Dense(8, "tanh", name=n),
    "Dense no bias": lambda n: L.Dense(16, "gelu", use_bias=False, name=n),
    "BatchNormalization": lambda n: L.BatchNormalization(name=n),
    "LayerNormalization": lambda n: L.LayerNormalization(name=n),
    "RMSNormalization": lambda n: L.RMSNormalization(name=n),
    "GroupNormalization": lambda n: L.GroupNormalization(4, name=n),
    "UnitNormalization": lambda n: L.UnitNormalization(name=n),
    "SpectralNormalization": lambda n: L.SpectralNormalization(
        L.Dense(8), name=n
    ),
    "Residual": lambda n: Residual(1, name=n),
    "Shared": lambda n: Residual(2, name=n),
    "PReLU": lambda n: L.PReLU(name=n),
    "Dropout": lambda n: L.Dropout(0.3, seed=7, name=n),
    "GaussianNoise": lambda n: L.GaussianNoise(0.1, seed=8, name=n),
    "GaussianDropout": lambda n: L.GaussianDropout(0.2, seed=9, name=n),
    "AlphaDropout": lambda n: L.AlphaDropout(0.2, seed=10, name=n),
    "Dense constrained": lambda n: L.Dense(
        8, kernel_constraint=keras.constraints.MaxNorm(0.5), name=n
    ),
    "Dense regularized": lambda n: L.Dense(
        8, kernel_regularizer="l2", activity_regularizer="l1", name=n
    ),
    "Rescaling": lambda n: L.Rescaling(0.5, 0.1, name=n),
    "Normalization": lambda n: L.Normalization(mean=0.1, variance=0.8, name=n),
    "Discretization": lambda n: _Steps(name=n),
    "Counter int32": lambda n: Counter("int32", name=n),
    "Counter int64": lambda n: Counter("int64", name=n),
    "Counter float16": lambda n: Counter("float16", name=n),
}
LAYERS = {
    "vector": _ANY,
    "sequence": _ANY
    | {
        "MultiHeadAttention": lambda n: Attend(
            L.MultiHeadAttention(2, 4, name="mha"), name=n
        ),
        "GroupQueryAttention": lambda n: Attend(
            L.GroupQueryAttention(4, 4, 2, name="gqa"), name=n
        ),
        "Attention": lambda n: Attend(
            L.Attention(use_scale=True, name="attention"), name=n
        ),
        "AdditiveAttention": lambda n: Attend(
            L.AdditiveAttention(name="additive"), name=n
        ),
        "LSTM": lambda n: L.LSTM(8, return_sequences=True, name=n),
        "GRU": lambda n: L.GRU(8, return_sequences=True, name=n),
        "SimpleRNN": lambda n: L.SimpleRNN(8, return_sequences=True, name=n),
        "Bidirectional": lambda n: L.Bidirectional(
            L.GRU(4, return_sequences=True), name=n
        ),
        "Conv1D": lambda n: L.Conv1D(8, 3, padding="same", name=n),
        "Conv1D causal": lambda n: L.Conv1D(
            8, 2, padding="causal", dilation_rate=2, name=n
        ),
        "SeparableConv1D": lambda n: L.SeparableConv1D(
            8, 3, padding="same", name=n
        ),
        "EinsumDense": lambda n: L.EinsumDense(
            "bsd,dhe->bshe", (None, 2, 4), bias_axes="he", name=n
        ),
        "TimeDistributed": lambda n: L.TimeDistributed(L.Dense(8), name=n),
        "AveragePooling1D": lambda n: L.AveragePooling1D(
            2, 1, padding="same", name=n
        ),
        "Permute": lambda n: L.Permute((2, 1), name=n),
        "SpatialDropout1D": lambda n: L.SpatialDropout1D(0.3, seed=7, name=n),
        "GRU dropout": lambda n: L.GRU(
            8, return_sequences=True, dropout=0.2, seed=5, name=n
        ),
    },
    "image": {
        name: make
        for name, make in _ANY.items()
        if name != "SpectralNormalization"
    }
    | {
        "Conv2D": lambda n: L.Conv2D(8, 3, padding="same", name=n),
        "Conv2D strides": lambda n: L.Conv2D(
            8, 3, strides=2, padding="same", activation="relu", name=n
        ),
        "Conv2DTranspose": lambda n: L.Conv2DTranspose(
            8, 3, padding="same", name=n
        ),
        "DepthwiseConv2D": lambda n: L.DepthwiseConv2D(
            3, padding="same", name=n
        ),
        "SeparableConv2D": lambda n: L.SeparableConv2D(
            8, 3, padding="same", name=n
        ),
        "MaxPooling2D": lambda n: L.MaxPooling2D(2, padding="same", name=n),
        "AveragePooling2D": lambda n: L.AveragePooling2D(
            2, padding="same", name=n
        ),
        "UpSampling2D": lambda n: L.UpSampling2D(2, name=n),
        "Resizing": lambda n: L.Resizing(6, 6, name=n),
        "CenterCrop": lambda n: L.CenterCrop(4, 4, name=n),
        "RandomFlip": lambda n: L.RandomFlip(seed=3, name=n),
        "RandomRotation": lambda n: L.RandomRotation(0.2, seed=3, name=n),
        "RandomTranslation": lambda n: L.RandomTranslation(
            0.2, 0.2, seed=3, name=n
        ),
        "RandomZoom": lambda n: L.RandomZoom(0.3, seed=3, name=n),
    },
}
LAYERS["tokens"] = LAYERS["sequence"]
# Functions that reduce sequences and images to vectors.
END = {
    "flatten": lambda x: L.Flatten()(x),
    "mean": lambda x: (
        L.GlobalAveragePooling1D()
        if len(x.shape) == 3
        else L.GlobalAveragePooling2D()
    )(x),
    "max": lambda x: (
        L.GlobalMaxPooling1D() if len(x.shape) == 3 else L.GlobalMaxPooling2D()
    )(x),
}


# Images with three channels, and layers that preprocess them. A mesh does not
# support `RandomElasticTransform`, whose blur has a kernel of random size.
_RANGE = dict(value_range=(0, 255), seed=3)
PHOTOS = {
    "AugMix": lambda: L.AugMix(**_RANGE),
    "AutoContrast": lambda: L.AutoContrast(),
    "CenterCrop": lambda: L.CenterCrop(6, 6),
    "Equalization": lambda: L.Equalization(),
    "MixUp": lambda: L.MixUp(seed=3),
    "CutMix": lambda: L.CutMix(seed=3),
    "RandAugment": lambda: L.RandAugment(**_RANGE),
    "RandomBrightness": lambda: L.RandomBrightness(0.3, **_RANGE),
    "RandomColorDegeneration": lambda: L.RandomColorDegeneration(0.5, **_RANGE),
    "RandomColorJitter": lambda: L.RandomColorJitter(
        brightness_factor=0.2,
        contrast_factor=0.2,
        saturation_factor=0.2,
        hue_factor=0.1,
        **_RANGE,
    ),
    "RandomContrast": lambda: L.RandomContrast(0.3, **_RANGE),
    "RandomCrop": lambda: L.RandomCrop(6, 6, seed=3),
    "RandomErasing": lambda: L.RandomErasing(0.5, **_RANGE),
    "RandomFlip": lambda: L.RandomFlip("horizontal", seed=3),
    "RandomGaussianBlur": lambda: L.RandomGaussianBlur(0.5, 3, 1.0, **_RANGE),
    "RandomGrayscale": lambda: L.RandomGrayscale(0.5, seed=3),
    "RandomHue": lambda: L.RandomHue(0.2, **_RANGE),
    "RandomInvert": lambda: L.RandomInvert(0.5, **_RANGE),
    "RandomPerspective": lambda: L.RandomPerspective(0.5, seed=3),
    "RandomPosterization": lambda: L.RandomPosterization(4, **_RANGE),
    "RandomRotation": lambda: L.RandomRotation(0.2, seed=3),
    "RandomSaturation": lambda: L.RandomSaturation(0.4, **_RANGE),
    "RandomSharpness": lambda: L.RandomSharpness(0.5, **_RANGE),
    "RandomShear": lambda: L.RandomShear(0.2, 0.2, seed=3),
    "RandomTranslation": lambda: L.RandomTranslation(0.2, 0.2, seed=3),
    "RandomZoom": lambda: L.RandomZoom(0.3, seed=3),
    "Rescaling": lambda: L.Rescaling(1 / 127.5, -1.0),
    "Resizing": lambda: L.Resizing(6, 6),
    "Solarization": lambda: L.Solarization(**_RANGE),
    "Normalization": lambda: L.Normalization(
        mean=[100.0, 120.0, 140.0], variance=[900.0, 1600.0, 2500.0]
    ),
}

# Keras raises an error for these layers and images in float64.
NOT_IN_FLOAT64 = {"AugMix", "RandAugment", "RandomRotation"}

# Inputs of a model of columns: shape and dtype. A value of `_VALUES` can also
# be unknown to a lookup.
COLUMNS = {
    "float": ((4,), None),
    "codes": ((4,), "int64"),
    "code": ((1,), "int64"),
    "small": ((1,), "int32"),
    "word": ((1,), "string"),
    "text": ((1,), "string"),
}
WORDS = ["red", "green", "blue"]


class Inputs(dict):
    """Inputs of a model, one for each column that is read."""

    def __missing__(self, name):
        shape, dtype = COLUMNS[name]
        self[name] = keras.Input(shape, dtype=dtype, name=name)
        return self[name]


def columns(rng: np.random.Generator, count: int) -> dict:
    """Returns `count` random values of each column."""
    words = np.array([*WORDS, "other"])
    return {
        "float": rng.normal(size=(count, 4)),
        "codes": rng.integers(0, 6, (count, 4)),
        "code": rng.integers(0, 6, (count, 1)),
        "small": rng.integers(0, 6, (count, 1), np.int32),
        # Keras does not accept arrays of strings in `train_on_batch`.
        "word": tf.constant(words[rng.integers(0, 4, (count, 1))]),
        "text": tf.constant(
            [[" ".join(rng.choice(words, 3))] for _ in range(count)]
        ),
    }


def _adapted(layer, column):
    layer.adapt(columns(np.random.default_rng(1), 20)[column])
    return layer


def _embedded(codes, size, name):
    return L.Flatten()(L.Embedding(size, 4, name=name)(codes))


_KNOWN = dict(vocabulary=[1, 2, 4])
_BINS = [-0.6, 0.1, 0.9]
# Functions of the columns that return a tensor of two dimensions.
FEATURES = {
    "Rescaling": lambda c: L.Rescaling(0.5, 1.0)(c["float"]),
    "Normalization": lambda c: L.Normalization(
        mean=[0.0, 0.1, 0.2, 0.3], variance=[1.0, 2.0, 3.0, 4.0]
    )(c["float"]),
    "Normalization adapted": lambda c: _adapted(L.Normalization(), "float")(
        c["float"]
    ),
    "Normalization of a product": lambda c: L.Normalization(
        mean=0.5, variance=2.0
    )(L.Dense(4, name="product")(c["float"])),
    "Discretization one_hot": lambda c: L.Discretization(
        _BINS, output_mode="one_hot"
    )(c["float"][:, :1]),
    "Discretization multi_hot": lambda c: L.Discretization(
        _BINS, output_mode="multi_hot"
    )(c["float"]),
    "Discretization count": lambda c: L.Discretization(
        _BINS, output_mode="count"
    )(c["float"]),
    "Discretization embedded": lambda c: _embedded(
        L.Discretization(_BINS)(c["float"]), 4, "bins"
    ),
    "Discretization adapted": lambda c: _embedded(
        _adapted(L.Discretization(num_bins=4), "float")(c["float"]), 4, "cuts"
    ),
    "CategoryEncoding one_hot": lambda c: L.CategoryEncoding(6, "one_hot")(
        c["code"]
    ),
    "CategoryEncoding multi_hot": lambda c: L.CategoryEncoding(6, "multi_hot")(
        c["codes"]
    ),
    "CategoryEncoding count": lambda c: L.CategoryEncoding(6, "count")(
        c["codes"]
    ),
    "CategoryEncoding weights": lambda c: L.CategoryEncoding(6, "count")(
        c["codes"], count_weights=c["float"]
    ),
    "CategoryEncoding after Discretization": lambda c: L.CategoryEncoding(
        4, "multi_hot"
    )(L.Discretization(_BINS)(c["float"])),
    "Hashing": lambda c: _embedded(L.Hashing(5)(c["codes"]), 5, "hashed"),
    "Hashing salted": lambda c: L.Hashing(
        5, salt=[3, 4], output_mode="multi_hot"
    )(c["codes"]),
    "Hashing one_hot": lambda c: L.Hashing(5, output_mode="one_hot")(
        c["small"]
    ),
    "Hashing words": lambda c: L.Hashing(5, output_mode="count")(c["word"]),
    "Hashing after a sum": lambda c: _embedded(
        L.Hashing(5)(c["codes"] + 1), 5, "summed"
    ),
    "HashedCrossing": lambda c: L.HashedCrossing(7, output_mode="one_hot")(
        (c["code"], c["small"])
    ),
    "HashedCrossing words": lambda c: _embedded(
        L.HashedCrossing(7)((c["word"], c["code"])), 7, "crossed"
    ),
    "HashedCrossing of slices": lambda c: L.HashedCrossing(
        7, output_mode="one_hot"
    )((c["codes"][:, :1], c["codes"][:, 1:2])),
    "IntegerLookup": lambda c: _embedded(
        L.IntegerLookup(**_KNOWN)(c["codes"]), 4, "looked_up"
    ),
    "IntegerLookup mask": lambda c: _embedded(
        L.IntegerLookup(mask_token=0, num_oov_indices=2, **_KNOWN)(c["codes"]),
        6,
        "masked",
    ),
    "IntegerLookup one_hot": lambda c: L.IntegerLookup(
        output_mode="one_hot", **_KNOWN
    )(c["code"]),
    "IntegerLookup multi_hot": lambda c: L.IntegerLookup(
        output_mode="multi_hot", **_KNOWN
    )(c["codes"]),
    "IntegerLookup count": lambda c: L.IntegerLookup(
        output_mode="count", **_KNOWN
    )(c["codes"]),
    "IntegerLookup tf_idf": lambda c: L.IntegerLookup(
        output_mode="tf_idf", idf_weights=[0.5, 1.0, 2.0], **_KNOWN
    )(c["codes"]),
    "IntegerLookup adapted": lambda c: _embedded(
        _adapted(L.IntegerLookup(max_tokens=5), "codes")(c["codes"]), 5, "found"
    ),
    "StringLookup": lambda c: _embedded(
        L.StringLookup(vocabulary=WORDS)(c["word"]), 4, "words"
    ),
    "StringLookup one_hot": lambda c: L.StringLookup(
        vocabulary=WORDS, output_mode="one_hot"
    )(c["word"]),
    "TextVectorization": lambda c: _embedded(
        L.TextVectorization(vocabulary=WORDS, output_sequence_length=4)(
            c["text"]
        ),
        8,
        "tokens",
    ),
    "TextVectorization multi_hot": lambda c: L.TextVectorization(
        vocabulary=WORDS, output_mode="multi_hot"
    )(c["text"]),
    "cast": lambda c: keras.ops.cast(c["codes"], keras.config.floatx()),
}
