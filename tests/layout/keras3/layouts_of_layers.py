"""Compares layers with a single device under every layout of their weights.

`python -m tests.layout.keras3.layouts_of_layers MODEL` tests one model. Each
model runs in a separate process, because DTensor may abort the process for
unsupported layouts.
"""

import itertools
import re
import sys

import keras
import numpy as np

from tests.layout import pairs
from tests.layout.meshes import axes_of, mesh_of

L = keras.layers
MAPS = [("model", "batch"), ("batch", "model")]
IMAGES = np.random.default_rng(1).normal(size=(32, 8, 8, 4)).astype(np.float32)


class Products(L.Layer):
    """Layer whose weights are used in matrix products and in sums."""

    def build(self, shape):
        self.cube = self.add_weight(shape=(8, 8, 4), name="cube")
        self.matrix = self.add_weight(shape=(8, 8), name="matrix")
        self.places = self.add_weight(shape=(8,), name="places")

    def call(self, x):
        ops = keras.ops
        x = ops.tanh(x @ self.matrix) @ ops.transpose(self.matrix)
        bilinear = ops.einsum("ba,bc,acd->bd", x, ops.tanh(x), self.cube)
        h = ops.tensordot(x, self.cube, 1) + self.places[:, None]
        return ops.concatenate([bilinear, ops.einsum("bc,bcd->bd", x, h)], 1)


class Token(L.Layer):
    """Layer that prepends a learned token and adds position embeddings."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 2, 8), name="token")
        self.positions = self.add_weight(shape=(8, 8), name="positions")

    def call(self, x):
        token = keras.ops.broadcast_to(
            self.token, (keras.ops.shape(x)[0], 2, 8)
        )
        return keras.ops.concatenate([token, x], 1) + self.positions[None]


def stack(shape, *layers):
    return lambda: pairs.sequential(shape, *(make() for make in layers))


def attention(make, **options):
    def model():
        inputs = keras.Input((6, 8))
        x = make()(inputs, inputs, **options)
        return keras.Model(inputs, L.Dense(4, name="d2")(L.Flatten()(x)))

    return model


def reversible(tied):
    def model():
        inputs = keras.Input((6,))
        table = L.ReversibleEmbedding(16, 8, tie_weights=tied)
        x = table(table(inputs), reverse=True)
        return keras.Model(inputs, L.Dense(4, name="d2")(L.Flatten()(x)))

    return model


def einsum(equation, shape, bias):
    return stack((6, 8), lambda: L.EinsumDense(equation, shape, bias_axes=bias))


def einsum_of_heads(equation, shape, bias):
    return stack(
        (6, 8),
        lambda: L.Reshape((6, 4, 2)),
        lambda: L.EinsumDense(equation, shape, bias_axes=bias),
    )


S, T = pairs.SERIES, pairs.TOKENS
MODELS = {
    "Dense": (stack((8,), lambda: L.Dense(16)), pairs.FEATURES),
    "Dense of series": (stack((6, 8), lambda: L.Dense(16)), S),
    **{
        equation: (einsum(equation, *rest), S)
        for equation, *rest in (
            ("abc,cd->abd", (6, 16), "d"),
            ("abc,cde->abde", (6, 4, 2), "de"),
            ("...x,xy->...y", 16, "y"),
            ("bqm,muh->bquh", (6, 4, 2), "uh"),
            ("abc,bc->ab", 6, None),
            ("abc,bcd->ad", 8, "d"),
            ("abc,bcd->abd", (6, 8), "bd"),
            ("abc,bd->adc", (4, 8), "d"),
            ("bqm,mu->buq", (4, 6), "u"),
        )
    },
    **{
        equation: (einsum_of_heads(equation, *rest), S)
        for equation, *rest in (
            ("abcd,cde->abe", (6, 8), "e"),
            ("...nh,nhd->...d", 8, "d"),
        )
    },
    "Embedding": (stack((6,), lambda: L.Embedding(16, 8)), T),
    "Embedding with a mask": (
        stack(
            (6,),
            lambda: L.Embedding(16, 8, mask_zero=True),
            lambda: L.GlobalAveragePooling1D(),
        ),
        T,
    ),
    "ReversibleEmbedding": (reversible(True), T),
    "ReversibleEmbedding of two tables": (reversible(False), T),
    "Conv1D": (stack((6, 8), lambda: L.Conv1D(4, 3)), S),
    "Conv2D": (stack((8, 8, 4), lambda: L.Conv2D(4, 2)), IMAGES),
    "Conv2DTranspose": (
        stack((8, 8, 4), lambda: L.Conv2DTranspose(4, 2)),
        IMAGES,
    ),
    "DepthwiseConv2D": (stack((8, 8, 4), lambda: L.DepthwiseConv2D(2)), IMAGES),
    "SeparableConv1D": (stack((6, 8), lambda: L.SeparableConv1D(4, 2)), S),
    "SeparableConv2D": (
        stack((8, 8, 4), lambda: L.SeparableConv2D(4, 2)),
        IMAGES,
    ),
    "LayerNormalization": (stack((6, 8), lambda: L.LayerNormalization()), S),
    "LayerNormalization of two axes": (
        stack((6, 8), lambda: L.LayerNormalization(axis=(1, 2))),
        S,
    ),
    "BatchNormalization": (stack((6, 8), lambda: L.BatchNormalization()), S),
    "BatchNormalization of images": (
        stack((8, 8, 4), lambda: L.BatchNormalization()),
        IMAGES,
    ),
    "GroupNormalization": (stack((6, 8), lambda: L.GroupNormalization(4)), S),
    "RMSNormalization": (stack((6, 8), lambda: L.RMSNormalization()), S),
    "PReLU": (stack((6, 8), lambda: L.PReLU()), S),
    "MultiHeadAttention": (
        attention(
            lambda: L.MultiHeadAttention(4, 2, output_shape=8),
            use_causal_mask=True,
        ),
        S,
    ),
    "MultiHeadAttention of other values": (
        attention(
            lambda: L.MultiHeadAttention(4, 2, value_dim=4, use_bias=False)
        ),
        S,
    ),
    "GroupQueryAttention": (
        attention(lambda: L.GroupQueryAttention(2, 4, 2), use_causal_mask=True),
        S,
    ),
    "AdditiveAttention": (lambda: _additive(), S),
    "products": (stack((8,), lambda: Products()), pairs.FEATURES),
    "token": (stack((6, 8), lambda: Token()), S),
    "SpectralNormalization": (
        stack((8,), lambda: L.SpectralNormalization(L.Dense(16))),
        pairs.FEATURES,
    ),
    "TimeDistributed": (
        stack((6, 8), lambda: L.TimeDistributed(L.Dense(16))),
        S,
    ),
}


def _additive():
    inputs = keras.Input((6, 8))
    x = L.AdditiveAttention()([inputs, inputs])
    return keras.Model(inputs, L.Dense(4, name="d2")(L.Flatten()(x)))


def plain(name):
    """Returns the model without a mesh; variable names are reproducible."""
    keras.utils.clear_session(free_memory=False)
    return pairs.plain(MODELS[name][0])


def _weights(name):
    return {
        re.escape(w.path.replace("/", ".")): tuple(w.shape)
        for w in plain(name).weights
        if ".d2." not in f".{w.path.replace('/', '.')}" and "seed" not in w.path
    }


def layouts(shape):
    """Yields the mesh axes of every sharded layout of a variable of `shape`."""
    for axes in itertools.product((None, "batch", "model"), repeat=len(shape)):
        used = [axis for axis in axes if axis is not None]
        if (
            used
            and len(set(used)) == len(used)
            and all(
                axis is None or size % 2 == 0 for axis, size in zip(axes, shape)
            )
        ):
            yield axes


def map_of_all_weights(name, order):
    """Returns mesh axes for fully sharded data parallelism, by weight."""
    found = {".*d2.kernel": order}
    for key, shape in _weights(name).items():
        axes, left = (
            [None] * len(shape),
            [axis for axis in order if len(shape) > 1 or axis == "model"],
        )
        for dim, size in enumerate(shape):
            if left and size % 2 == 0:
                axes[dim] = left.pop(0)
        if any(axes):
            found[key] = tuple(axes)
    return found


def every_map(name):
    """Yields maps that shard all weights, and maps that shard one weight."""
    yield from (map_of_all_weights(name, order) for order in MAPS)
    for key, shape in _weights(name).items():
        yield from ({key: axes} for axes in layouts(shape))


def numbers_of(model, x):
    """Trains for two steps and returns predictions, losses and weights."""
    predicted = [
        # A trace takes longer than one eager call.
        model(x[:size], training=False).numpy()
        if pairs.is_plain(model)
        else model.predict(x[:size], verbose=0, batch_size=size)
        for size in (8, 5)
    ]
    losses = pairs.fit(
        model,
        x[:16],
        pairs.LABELS[:16],
        epochs=1,
        metrics=(),
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
    )
    return [*predicted, losses["loss"], model.get_weights()]


def assert_alike(name, axes, expected):
    """Compares a model on 2x2 devices with the same model without a mesh."""
    make, x = MODELS[name]
    keras.utils.clear_session(free_memory=False)
    model = pairs.on_mesh(make, axes, mesh_of(batch=2, model=2))
    assert sum(any(axes_of(w)) for w in model.weights) == len(axes)
    pairs.assert_alike(expected, numbers_of(model, x), rtol=1e-4, atol=1e-5)


def expected_of(name):
    return numbers_of(plain(name), MODELS[name][1])


def main(name):
    expected, refused = expected_of(name), 0
    for axes in every_map(name):
        print("tries", name, axes, file=sys.stderr, flush=True)
        try:
            assert_alike(name, axes, expected)
        except ValueError as error:
            # The error contains the variable name and is raised before any
            # variable is allocated.
            print("refused", name, axes, str(error)[:300], flush=True)
            assert "nothing was allocated" in str(error), axes
            refused += 1
    print("refused:", refused, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
