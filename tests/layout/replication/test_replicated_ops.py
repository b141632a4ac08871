"""Checks that ops that DTensor cannot shard are replicated.

The results match a single device.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import covering
from tests.layout import pairs, unsupported
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError
from tf_layoutmap.layout.replication import report, traces
from tf_layoutmap.layout.replication.traces import Extent

COLUMNS = {"d1.kernel": (None, "model")}
L = keras.layers


class ApplyFunction(L.Layer):
    """Layer that applies one function."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)


def _triangle(x):
    """Returns the triangular part of matrices whose transposes are sharded."""
    matrices = tf.transpose(tf.reshape(x, [-1, 4, 4]), [0, 2, 1])
    return tf.reshape(tf.linalg.qr(matrices)[1], [-1, 16])


def _split(x):
    a, b = unsupported.split(x, 2, axis=-1)
    return a * tf.sigmoid(b)


# Ops without a DTensor rule, and ops that DTensor does not support if the
# columns of d1 are sharded.
USES = {
    "cumsum": lambda x: tf.cumsum(x, -1),
    "band": lambda x: tf.linalg.band_part(x, 7, 15),
    "diagonal": lambda x: x + tf.linalg.diag_part(x[:4, :4])[0],
    "fft": lambda x: tf.abs(tf.signal.rfft(x)),
    "sort": lambda x: tf.sort(x, axis=-1),
    "largest": lambda x: tf.math.top_k(x, 3)[0],
    "triangle": _triangle,
    "split": _split,
    "loop": lambda x: tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, tf.cumsum(y, 1) / 8), (0, x)
    )[1],
}


def model_with(function):
    return pairs.sequential(
        (8,), L.Dense(16, name="d1"), ApplyFunction(function, name="user")
    )


@pytest.mark.parametrize(
    "name", covering.but(USES, "band", "diagonal", "sort", "triangle")
)
@pytest.mark.filterwarnings("ignore:To ")
def test_model_with_a_replicated_op_matches_a_single_device(name):
    pairs.assert_trains_alike(
        lambda: model_with(USES[name]), pairs.FEATURES, COLUMNS
    )


def position_model():
    """Returns a model that slices a row-sharded table of positions."""

    class Positions(L.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(8, 4), name="table")
            self.bias = L.Embedding(16, 4, name="bias")

        def call(self, x):
            ids = tf.range(6)[:, None] - tf.range(6)[None, :] + 6
            bias = tf.reduce_sum(self.bias(ids), axis=1)
            return x + self.table[:6] + bias

    return pairs.sequential(
        (6,), L.Embedding(16, 4, name="words"), Positions(name="positions")
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes",
    [
        {"positions.table": ("model", None)},
        {"positions.bias.embeddings": ("model", "batch")},
        {
            "positions.table": (None, "model"),
            "words.embeddings": ("model", None),
        },
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:To ")
def test_slices_of_position_tables_match_a_single_device(axes):
    pairs.assert_trains_alike(position_model, pairs.TOKENS, axes)


class Experts(L.Layer):
    """Layer of experts with weights from a router with transposed scores."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, shape[-1], 6), name="kernel")
        self.router = L.Dense(4, activation="softmax", name="router")
        self.router.build(shape)

    def call(self, x):
        of_experts = tf.einsum("th,ehm->etm", x, self.kernel)
        scores = tf.transpose(self.router(x))[:, :, None]
        return tf.reduce_sum(of_experts * scores, axis=0)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:To ")
def test_experts_with_transposed_scores_match_a_single_device():
    pairs.assert_trains_alike(
        lambda: pairs.sequential((8,), Experts(name="experts")),
        pairs.FEATURES,
        {"experts.kernel": (None, "model", None)},
    )


def test_step_that_stays_unsupported_is_fully_replicated(monkeypatch):
    monkeypatch.setattr(traces.Replication, "extend", lambda *_: False)
    with pytest.warns(
        tlm.layout.LayoutMapWarning,
        match="everything, with all weights .*0.5 KiB per dev",
    ):
        pairs.assert_trains_alike(
            lambda: model_with(_split), pairs.FEATURES, COLUMNS
        )
    with pytest.raises(UnsupportedByDTensorError, match="Split"):
        trained(_split, strict=True)


def trained(function, strict=False):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=strict)
    layout_map["d1.kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        model = model_with(function)
    pairs.fit(model, epochs=1)
    return layout_map, model


def test_warning_names_layer_op_reason_and_bytes_once():
    with pytest.warns(tlm.layout.LayoutMapWarning) as caught:
        layout_map, model = trained(USES["band"])
    messages = [
        str(one.message)
        for one in caught
        if issubclass(one.category, tlm.layout.LayoutMapWarning)
    ]
    assert len(messages) == 1
    # 2.0 KiB is the size of the inputs and outputs of both ops, each `[8, 16]`
    # floats: one op in the forward pass and one in the backward pass.
    assert "2 MatrixBandPart in layer 'user'" in messages[0] and (
        "no rule for it; 2.0 KiB per device" in messages[0]
    )
    report = layout_map.explain(model)
    assert [one.operation for one in report.replicated_ops] == [
        "MatrixBandPart"
    ]
    assert "Replicated on every device: 2 MatrixBandPart" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlm.layout.LayoutMapWarning)
        pairs.fit(model, epochs=1)


def test_strict_map_raises_before_any_computation():
    with pytest.raises(
        UnsupportedByDTensorError,
        match=r"MatrixBandPart in layer 'user'.*strict=False",
    ):
        trained(USES["band"], strict=True)


@pytest.mark.exhaustive
def test_unsupported_op_in_a_custom_step_is_replicated():
    class CustomStep(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                logits = tf.reverse(tf.linalg.band_part(self(x), -1, -1), [1])
                loss = tf.reduce_mean(tf.square(logits - tf.one_hot(y, 4)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables)
            )
            return {"loss": loss}

    def make():
        return CustomStep(
            [keras.Input((8,)), L.Dense(16, name="d1"), L.Dense(4, name="d2")]
        )

    with pytest.warns(tlm.layout.LayoutMapWarning, match="MatrixBandPart"):
        histories = []
        for model in (
            pairs.plain(make),
            pairs.on_mesh(make, {"d2.kernel": ("model", None)}),
        ):
            model.compile(keras.optimizers.Adam(0.01))
            histories.append(
                model.fit(
                    pairs.FEATURES,
                    pairs.LABELS,
                    shuffle=False,
                    verbose=0,
                    batch_size=8,
                    epochs=2,
                ).history
            )
    pairs.assert_alike(*histories)


@pytest.mark.exhaustive
def test_kernels_that_are_not_sharded_by_channels_are_gathered():
    def make():
        return pairs.sequential(
            (8, 8, 3),
            L.Conv2D(4, 2, name="c"),
            L.SeparableConv2D(4, 3, name="s"),
            L.Reshape((5, 20)),
            L.LSTM(8, name="r"),
        )

    with pytest.warns(tlm.layout.LayoutMapWarning, match="gather of weights"):
        model = pairs.assert_trains_alike(
            make,
            pairs.IMAGES,
            {
                "c.kernel": ("model", None, None, None),
                "s.pointwise_kernel": (None, None, "model", "batch"),
                "r.cell.kernel": ("batch", "model"),
            },
        )
    assert axes_of(model.layers[0].kernel) == ("model", None, None, None)
    gathered = {
        one.layer
        for one in report.replicated_ops_of_model(model)
        if one.operation == "gather of weights"
    }
    assert gathered == {"'c'"}


@pytest.mark.parametrize(
    "parts",
    [
        lambda p: [p[:, 16:], p],
        lambda p: [p, p[:, :0], p[:, 2:3]],
        lambda p: [p[:, 3:4], p[:, :3], p[:, 16:]],
    ],
    ids=["one", "two", "last"],
)
def test_empty_parts_of_a_concatenation_have_gradients(parts):
    # Without a correction, the gradient of an empty part crashes the process.
    pairs.assert_trains_alike(
        lambda: pairs.sequential(
            (8,),
            L.Dense(16, name="d1"),
            ApplyFunction(lambda p: tf.concat(parts(p), axis=1)),
        ),
        pairs.FEATURES,
        {"d1.kernel": (None, "model")},
    )


def gradient_of_replicated(function, x):
    """Returns the gradient of `function(tanh(x))`, with `tanh` replicated."""
    mesh = mesh_of(model=2)
    replication = traces.Replication()
    replication.is_named = True
    replication.extents = {"first/Tanh": Extent.ALL}

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.name_scope("first"):
                y = tf.tanh(x)
            result = function(y)
        return tape.gradient(result, x)

    # A call of `step` itself would be traced with a separate replication.
    with tracing.default_mesh(mesh), replication.traced(mesh):
        concrete = step.get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
        assert "Relayout" in {op.type for op in concrete.graph.get_operations()}
        result = concrete(transfer.to_mesh(x, layout_of(mesh, None, "model")))
    return transfer.to_host(result)


def _first_used_without_a_tape(y):
    return tf.reduce_sum(y * tf.stop_gradient(y) + tf.square(y))


def _watched_after_its_first_use(y):
    square = tf.square(y)
    with tf.GradientTape() as tape:
        tape.watch(y)
        cube = y**3
    return tf.reduce_sum(square + tape.gradient(cube, y))


@pytest.mark.parametrize(
    "function, slope",
    [
        (_first_used_without_a_tape, lambda y: 3 * y),
        (_watched_after_its_first_use, lambda y: 2 * y + 6 * y),
    ],
)
def test_each_use_of_a_replicated_result_has_a_gradient(function, slope):
    x = np.linspace(-1, 1, 8).reshape(2, 4)
    y = np.tanh(x)
    np.testing.assert_allclose(
        gradient_of_replicated(function, tf.constant(x)),
        slope(y) * (1 - y * y),
        rtol=1e-12,
    )
