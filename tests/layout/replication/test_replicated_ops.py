"""What DTensor refuses to divide is computed whole, to the same numbers."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import covering
from tests.layout import pairs
from tests.layout.meshes import axes_of, layout_of, mesh_of
from tf_layoutmap.layout.mesh import tracing, transfer
from tf_layoutmap.layout.mesh.errors import UnsupportedByDTensorError
from tf_layoutmap.layout.replication import replicated_ops, retrace
from tf_layoutmap.layout.replication.replicated_ops import Extent

COLUMNS = {"d1.kernel": (None, "model")}
L = keras.layers


class Uses(L.Layer):
    """A layer that does one thing."""

    def __init__(self, does, **options):
        super().__init__(**options)
        self.does = does

    def call(self, x):
        return self.does(x)


def _triangle(x):
    """The triangular part of matrices whose transposes are divided."""
    matrices = tf.transpose(tf.reshape(x, [-1, 4, 4]), [0, 2, 1])
    return tf.reshape(tf.linalg.qr(matrices)[1], [-1, 16])


def _split(x):
    a, b = tf.split(x, 2, axis=-1)
    return a * tf.sigmoid(b)


# What DTensor has no rule for, or refuses with the columns of d1 divided.
USES = {
    "cumsum": lambda x: tf.cumsum(x, -1),
    "roll": lambda x: tf.roll(x, 1, 1),
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


def model_with(does):
    return pairs.sequential(
        (8,), L.Dense(16, name="d1"), Uses(does, name="user")
    )


@pytest.mark.parametrize(
    "name", covering.but(USES, "roll", "diagonal", "sort", "triangle")
)
@pytest.mark.filterwarnings("ignore:To ")
def test_a_model_trains_to_the_same_numbers(name):
    pairs.assert_trains_alike(
        lambda: model_with(USES[name]), pairs.FEATURES, COLUMNS
    )


def position_model():
    """A table of positions with its rows divided, read as a slice."""

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
def test_tables_of_positions_are_read_as_slices(axes):
    pairs.assert_trains_alike(position_model, pairs.TOKENS, axes)


class Experts(L.Layer):
    """Experts, weighted by a router whose scores are transposed."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, shape[-1], 6), name="kernel")
        self.router = L.Dense(4, activation="softmax", name="router")
        self.router.build(shape)

    def call(self, x):
        of_experts = tf.einsum("th,ehm->etm", x, self.kernel)
        scores = tf.transpose(self.router(x))[:, :, None]
        return tf.reduce_sum(of_experts * scores, axis=0)


@pytest.mark.filterwarnings("ignore:To ")
def test_experts_whose_scores_are_transposed():
    pairs.assert_trains_alike(
        lambda: pairs.sequential((8,), Experts(name="experts")),
        pairs.FEATURES,
        {"experts.kernel": (None, "model", None)},
    )


def test_what_stays_refused_is_computed_whole_altogether(monkeypatch):
    monkeypatch.setattr(retrace.UnshardableOps, "mark", lambda *_: False)
    with pytest.warns(
        tlm.layout.LayoutMapWarning,
        match="everything, with all weights .*0.5 KiB per dev",
    ):
        pairs.assert_trains_alike(
            lambda: model_with(_split), pairs.FEATURES, COLUMNS
        )
    with pytest.raises(UnsupportedByDTensorError, match="Split"):
        trained(_split, strict=True)


def trained(does, strict=False):
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh, strict=strict)
    layout_map["d1.kernel"] = layout_of(mesh, None, "model")
    with tlm.layout_map_scope(layout_map):
        model = model_with(does)
    pairs.fit(model, epochs=1)
    return layout_map, model


def test_it_is_said_once_with_layer_operation_reason_and_bytes():
    with pytest.warns(tlm.layout.LayoutMapWarning) as caught:
        layout_map, model = trained(USES["roll"])
    told = [
        str(one.message)
        for one in caught
        if issubclass(one.category, tlm.layout.LayoutMapWarning)
    ]
    assert len(told) == 1
    # [8, 16] floats, in and out, forward and backward.
    assert "2 Roll in layer 'user'" in told[0] and (
        "no rule for it; 2.0 KiB per device" in told[0]
    )
    report = layout_map.explain(model)
    assert [one.operation for one in report.computed_whole] == ["Roll"]
    assert "Computed whole on every device: 2 Roll" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlm.layout.LayoutMapWarning)
        pairs.fit(model, epochs=1)


def test_a_strict_map_refuses_it_before_anything_is_computed():
    with pytest.raises(
        UnsupportedByDTensorError, match=r"Roll in layer 'user'.*strict=False"
    ):
        trained(USES["roll"], strict=True)


def test_what_a_step_of_ones_own_computes_is_computed_whole_too():
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                logits = tf.reverse(tf.roll(self(x), 1, -1), [1])
                loss = tf.reduce_mean(tf.square(logits - tf.one_hot(y, 4)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables)
            )
            return {"loss": loss}

    def make():
        return Own(
            [keras.Input((8,)), L.Dense(16, name="d1"), L.Dense(4, name="d2")]
        )

    with pytest.warns(tlm.layout.LayoutMapWarning, match="Roll"):
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


def test_kernels_of_convolutions_and_gates_are_gathered_for_their_layers():
    def make():
        return pairs.sequential(
            (8, 8, 3),
            L.Conv2D(4, 3, name="c"),
            L.SeparableConv2D(4, 3, name="s"),
            L.Reshape((4, 16)),
            L.LSTM(8, name="r"),
        )

    with pytest.warns(
        tlm.layout.LayoutMapWarning, match="gather of weights in layer 'c'"
    ):
        model = pairs.assert_trains_alike(
            make,
            pairs.IMAGES,
            {
                "c.kernel": (None, None, None, "model"),
                "s.pointwise_kernel": (None, None, "model", "batch"),
                "r.cell.kernel": ("batch", "model"),
            },
        )
    assert axes_of(model.layers[0].kernel) == (None, None, None, "model")


@pytest.mark.parametrize(
    "parts",
    [
        lambda p: [p[:, 16:], p],
        lambda p: [p, p[:, :0], p[:, 2:3]],
        lambda p: [p[:, 3:4], p[:, :3], p[:, 16:]],
    ],
    ids=["one", "two", "last"],
)
def test_empty_parts_of_a_concatenation_have_gradients_too(parts):
    # The gradient of one ended the process.
    pairs.assert_trains_alike(
        lambda: pairs.sequential(
            (8,),
            L.Dense(16, name="d1"),
            Uses(lambda p: tf.concat(parts(p), axis=1)),
        ),
        pairs.FEATURES,
        {"d1.kernel": (None, "model")},
    )


def gradient_of_replicated(function, x):
    """The gradient of `function(tanh(x))`, with `tanh` replicated."""
    mesh = mesh_of(model=2)
    marks = replicated_ops.ReplicationMarks()
    marks.refused, marks.extents = True, {"first/Tanh": Extent.ALL}

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.name_scope("first"):
                y = tf.tanh(x)
            result = function(y)
        return tape.gradient(result, x)

    with tracing.default_mesh(mesh), marks.applied(mesh):
        result = step(transfer.to_mesh(x, layout_of(mesh, None, "model")))
        assert "Relayout" in {
            op.type
            for op in step.get_concrete_function(
                tf.TensorSpec(x.shape, x.dtype)
            ).graph.get_operations()
        }
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
