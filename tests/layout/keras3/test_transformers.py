"""Checks that layers of transformers compute with shards of their weights.

The models are compared with the same models without a mesh, in float64. Their
layout maps are strict, so a replicated operation or a gathered weight raises an
error.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout import pairs
from tests.layout.meshes import layout_of, mesh_of
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.replication import measured, report

L = keras.layers
SERIES = np.random.default_rng(0).normal(size=(8, 6, 8))


@pytest.fixture(autouse=True)
def in_float64():
    # An earlier test can have created the policy, which then does not follow
    # `set_floatx`.
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def replicated_shares(make, axes, strict=True):
    """Trains a model on a mesh, and compares it with a model without a mesh.

    Args:
      make: Function that returns the model.
      axes: Mesh axes of weights, by name.
      strict: Whether the layout map is strict.

    Returns:
      For each layer, the largest share of FLOPs that each device repeats.
    """
    options = {"epochs": 2, "batch_size": 8, "metrics": ()}
    labels = np.arange(len(SERIES)) % 4
    plain = pairs.plain(make)
    expected = pairs.fit(plain, SERIES, labels, **options)
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=strict)
    for key, value in axes.items():
        layout_map[key] = layout_of(mesh, *value)
    keras.utils.set_random_seed(3)
    with tlm.layout_map_scope(layout_map):
        model = make()
    found = pairs.fit(model, SERIES, labels, **options)
    pairs.assert_alike(expected, found, rtol=1e-11, atol=0)
    assert report.replicated_ops_of_model(model) == ()
    shares = {}
    for one in measured.measure(model):
        assert not (strict and one.gathered_bytes), one
        shares[one.layer] = max(one.replicated, shares.get(one.layer, 0))
    return shares


def attention_model(**options):
    inputs = keras.Input((6, 8))
    x = L.GroupQueryAttention(
        head_dim=4,
        num_query_heads=4,
        num_key_value_heads=2,
        name="attention",
        **options,
    )(inputs, inputs)
    return keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(x)))


def test_grouped_query_attention_keeps_its_heads_sharded():
    shares = replicated_shares(
        attention_model,
        {
            ".*(query|key|value).kernel": (None, "model", None),
            ".*output.kernel": ("model", None, None),
        },
    )
    assert shares["'attention'"] == 0
    assert max(shares[f"'{name}'"] for name in ("query", "key", "value")) == 0


@pytest.mark.exhaustive
def test_bias_that_shards_another_dimension_does_not_gather_the_product():
    shares = replicated_shares(
        attention_model,
        {
            ".*(query|key|value).kernel": (None, "model", None),
            ".*(query|key|value).bias": (None, "model"),
        },
        strict=False,
    )
    assert shares["'attention'"] == 0


class Rotary(L.Layer):
    """Attention whose queries and keys are rotated."""

    def __init__(self, is_interleaved=False, **kwargs):
        super().__init__(**kwargs)
        self.is_interleaved = is_interleaved

    def build(self, shape):
        self.projections = [
            L.EinsumDense("btd,dhe->bthe", (6, 2, 4), name=name)
            for name in ("query", "key", "value")
        ]
        for layer in self.projections:
            layer.build(shape)

    def call(self, x):
        query, key, value = (layer(x) for layer in self.projections)
        angles = keras.ops.reshape(
            keras.ops.arange(12, dtype=x.dtype), (6, 1, 2)
        )

        def rotated(y):
            one, two = y[..., :2], y[..., 2:]
            parts = [
                one * keras.ops.cos(angles) - two * keras.ops.sin(angles),
                two * keras.ops.cos(angles) + one * keras.ops.sin(angles),
            ]
            y = keras.ops.concatenate(parts, axis=-1)
            if not self.is_interleaved:
                return y
            parts = keras.ops.split(y, 2, axis=-1)
            return keras.ops.reshape(
                keras.ops.stack(parts, axis=-1), keras.ops.shape(y)
            )

        scores = keras.ops.transpose(
            keras.ops.einsum("bthe,bshe->bhts", rotated(query), rotated(key)),
            (0, 2, 1, 3),
        )
        weights = keras.ops.softmax(keras.ops.transpose(scores, (0, 2, 1, 3)))
        return keras.ops.einsum("bhts,bshe->bthe", weights, value)


# The gradient of `stack`, which interleaves the rotated parts, is `unstack`.
@pytest.mark.exhaustive
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    "axes", [(None, "model", None), ("batch", "model", None)]
)
def test_rotated_heads_stay_sharded(axes, is_interleaved):
    shares = replicated_shares(
        lambda: pairs.sequential((6, 8), Rotary(is_interleaved, name="rotary")),
        {"rotary.*kernel": axes},
        strict=axes[0] is None,
    )
    assert shares["'rotary'"] == 0


class Experts(L.Layer):
    """All experts of a layer in two weights, with weights from a router."""

    def build(self, shape):
        self.first = self.add_weight(shape=(4, shape[-1], 6), name="first")
        self.second = self.add_weight(shape=(4, 6, shape[-1]), name="second")
        self.router = L.Dense(4, activation="softmax", name="router")
        self.router.build((None, shape[-1]))

    def call(self, x):
        shape = keras.ops.shape(x)
        x = keras.ops.reshape(x, (-1, shape[-1]))
        hidden = keras.ops.einsum("th,ehm->etm", x, self.first)
        out = keras.ops.einsum(
            "eti,eih->eth", keras.ops.silu(hidden), self.second
        )
        scores = keras.ops.transpose(self.router(x))[:, :, None]
        return keras.ops.reshape(keras.ops.sum(out * scores, axis=0), shape)


@pytest.mark.covering(None)
@pytest.mark.parametrize(
    "axes",
    [
        {
            "experts.first": (None, None, "model"),
            "experts.second": (None, "model", None),
        },
        {
            "experts.first": ("model", None, None),
            "experts.second": ("model", None, None),
        },
    ],
    ids=["columns", "experts"],
)
def test_experts_stay_sharded(axes):
    shares = replicated_shares(
        lambda: pairs.sequential((6, 8), Experts(name="experts")), axes
    )
    assert shares["'experts'"] == 0


def test_quantized_products_are_sharded_and_exact():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    x = pairs.FEATURES[:8]

    def make():
        return keras.Sequential(
            [
                keras.Input((8,)),
                L.Dense(16, activation="relu", name="d1"),
                L.Dense(4, name="d2"),
            ]
        )

    plain, model = pairs.plain(make), pairs.on_mesh(make)
    results = []
    for one in (plain, model):
        one.quantize("int8")
        results.append(one.predict(x, verbose=0))
    np.testing.assert_allclose(*results, rtol=1e-6)
    assert report.replicated_ops_of_model(model) == ()


class Positions(L.Layer):
    """Adds the first rows of a table, without a conversion to a tensor."""

    def build(self, shape):
        self.table = self.add_weight(shape=(8, shape[-1]), name="table")

    def call(self, x):
        rows = keras.ops.slice(self.table, (0, 0), (6, x.shape[-1]))
        tables = keras.ops.concatenate([self.table, 2 * self.table], axis=0)
        return x * rows + keras.ops.sum(tables[:10], axis=0)


def test_slices_of_a_sharded_table_are_sharded():
    replicated_shares(
        lambda: pairs.sequential((6, 8), Positions(name="positions")),
        {"positions.table": ("model", None)},
        strict=False,
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_repeated_elements_match_numpy(count, axis):
    mesh = mesh_of(batch=2, model=2)
    x = transfer.to_mesh(SERIES, layout_of(mesh, "batch", "model", None))
    with tracing.default_mesh(mesh, "batch"):
        result = tf.function(lambda x: keras.ops.repeat(x, count, axis))(x)
    np.testing.assert_array_equal(
        transfer.to_host(result), np.repeat(SERIES, count, axis)
    )
