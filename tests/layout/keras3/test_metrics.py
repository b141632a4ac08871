"""Compares every metric and loss of Keras with and without a mesh."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import mesh_of
from tf_layoutmap._core import patches
from tf_layoutmap.layout.mesh import tracing, transfer

dtensor = tf.experimental.dtensor
M = keras.metrics
RNG = np.random.default_rng(1)
X = RNG.normal(size=(24, 8)).astype(np.float32)
CLASSES = RNG.integers(0, 4, size=24)
ONE_HOT = np.eye(4, dtype=np.float32)[CLASSES]
SAMPLE_WEIGHTS = np.arange(24, dtype=np.float32) / 24

# Layouts of the predictions. "whole": the classes are not sharded. "model": the
# classes and the batches are sharded over different axes. "batch": the classes
# are sharded over the axis that shards batches.
PREDICTIONS = {
    "whole": {"d1.kernel": (None, "model"), "d2.kernel": ("model", None)},
    "model": {"d2.kernel": (None, "model"), "d2.bias": ("model",)},
    "batch": {"d2.kernel": (None, "batch"), "d2.bias": ("batch",)},
}

ARGUMENTS = {
    "IoU": (4, [0, 1]),
    "MeanIoU": (4,),
    "OneHotIoU": (4, [0, 2]),
    "OneHotMeanIoU": (4,),
    "PrecisionAtRecall": (0.5,),
    "RecallAtPrecision": (0.3,),
    "SensitivityAtSpecificity": (0.5,),
    "SpecificityAtSensitivity": (0.5,),
    "TopKCategoricalAccuracy": (2,),
    "SparseTopKCategoricalAccuracy": (2,),
}
FROM_CLASSES = {"IoU", "MeanIoU"}
# Base classes of metrics, and metrics whose inputs are not labels and
# predictions.
NO_METRICS_OF_PREDICTIONS = {"Metric", "MeanMetricWrapper", "Mean", "Sum"}
# Metrics that require one sample weight for each flattened prediction.
UNWEIGHTED = {"BinaryIoU"}


def names_of(module, base):
    return [
        name
        for name in dir(module)
        if isinstance(getattr(module, name), type)
        and issubclass(getattr(module, name), base)
    ]


def metrics_of(from_classes):
    """Returns a metric of each Keras class, some with several settings."""
    named = []
    for name in names_of(M, M.Metric):
        sparse = name.startswith("Sparse") or name in FROM_CLASSES
        if name in NO_METRICS_OF_PREDICTIONS or sparse != from_classes:
            continue
        options = {"sparse_y_pred": False} if name in FROM_CLASSES else {}
        named.append(
            getattr(M, name)(*ARGUMENTS.get(name, ()), name=name, **options)
        )
    if from_classes:
        return named
    return [
        *named,
        M.AUC(curve="PR", summation_method="majoring", name="auc_pr"),
        M.AUC(multi_label=True, num_labels=4, name="auc_multi"),
        M.AUC(thresholds=[0.1, 0.3, 0.35], name="auc_thresholds"),
        M.Precision(top_k=2, name="top"),
        M.Recall(class_id=1, name="one"),
        M.Precision([0.2, 0.4], name="two"),
        M.F1Score(average="macro", threshold=0.3, name="f1"),
    ]


def run(model, y, loss, metrics):
    model.compile(
        "sgd",
        loss,
        metrics=[m for m in metrics if m.name in UNWEIGHTED],
        weighted_metrics=[m for m in metrics if m.name not in UNWEIGHTED],
        run_eagerly=pairs.is_plain(model),
    )
    history = model.fit(
        X,
        y,
        batch_size=12,
        shuffle=False,
        verbose=0,
        sample_weight=SAMPLE_WEIGHTS,
    ).history
    return history, model.evaluate(X, y, verbose=0, return_dict=True)


def classifier():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "tanh", name="d1"),
            keras.layers.Dense(4, "softmax", name="d2"),
        ]
    )


def run_with_metrics(model, from_classes):
    y, loss = (
        (CLASSES, "sparse_categorical_crossentropy")
        if (from_classes)
        else (ONE_HOT, "mse")
    )
    return run(model, y, loss, metrics_of(from_classes))


@functools.cache
def metrics_without_a_mesh(from_classes):
    return run_with_metrics(pairs.plain(classifier), from_classes)


@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize("axes", ["model", "batch"])
@pytest.mark.filterwarnings("ignore:You are passing weight as")
@pytest.mark.parametrize("from_classes", [True, False])
def test_every_metric_of_keras_matches_a_single_device(from_classes, axes):
    plain = metrics_without_a_mesh(from_classes)
    spread = run_with_metrics(
        pairs.on_mesh(classifier, PREDICTIONS[axes]), from_classes
    )
    assert len(plain[1]) > (3 if from_classes else 40), len(plain[1])
    pairs.assert_alike(plain, spread)


LOSSES = [
    name
    for name in names_of(keras.losses, keras.losses.Loss)
    if name not in ("Loss", "CTC")
]
LOSSES_OF_CLASSES = {
    "SparseCategoricalCrossentropy",
    "Circle",
    "CategoricalGeneralizedCrossEntropy",
}


def output_for_each_loss():
    x = keras.Input((8,))
    hidden = keras.layers.Dense(16, "tanh", name="d1")(x)
    return keras.Model(
        x,
        {
            name: keras.layers.Dense(4, "softmax", name=name)(hidden)
            for name in LOSSES
        },
    )


def run_with_losses(model):
    y = {
        name: CLASSES if name in LOSSES_OF_CLASSES else ONE_HOT
        for name in LOSSES
    }
    model.compile(
        "sgd",
        {name: getattr(keras.losses, name)() for name in LOSSES},
        run_eagerly=pairs.is_plain(model),
    )
    return (
        model.fit(X, y, batch_size=12, shuffle=False, verbose=0).history,
        model.evaluate(X, y, verbose=0, return_dict=True),
    )


@functools.cache
def losses_without_a_mesh():
    return run_with_losses(pairs.plain(output_for_each_loss))


@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize("axes", ["whole", "model"])
def test_every_loss_of_keras_matches_a_single_device(axes):
    assert len(LOSSES) > 20
    layouts = {
        key.replace("d2", f"({'|'.join(LOSSES)})"): value
        for key, value in PREDICTIONS[axes].items()
    }
    expected = losses_without_a_mesh()
    assert len(expected[1]) == len(LOSSES) + 1
    pairs.assert_alike(
        expected, run_with_losses(pairs.on_mesh(output_for_each_loss, layouts))
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ctc_loss_matches_a_single_device():
    def make():
        return keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "tanh", name="d1"),
                keras.layers.Dense(20, name="d2"),
                keras.layers.Reshape((5, 4)),
            ]
        )

    y = np.random.default_rng(2).integers(1, 4, size=(24, 2))
    results = []
    for model in (pairs.plain(make), pairs.on_mesh(make, PREDICTIONS["whole"])):
        model.compile("sgd", keras.losses.CTC())
        results.append(
            (
                model.fit(
                    X, y, batch_size=10, shuffle=False, verbose=0
                ).history,
                model.evaluate(X, y, batch_size=12, verbose=0),
            )
        )
    pairs.assert_alike(*results)


def test_accuracy_with_classes_sharded_over_the_batch_axis():
    def make():
        return keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, name="d1"),
                keras.layers.Dense(4, name="d2"),
            ]
        )

    results = [
        pairs.fit(model, X, CLASSES, epochs=1)
        for model in (
            pairs.plain(make),
            pairs.on_mesh(make, PREDICTIONS["batch"]),
        )
    ]
    pairs.assert_alike(*results)


class Masked(keras.Model):
    """Subclassed model that passes its mask from layer to layer."""

    def __init__(self):
        super().__init__()
        self.e = keras.layers.Embedding(16, 8, mask_zero=True)
        self.c = keras.layers.Conv1D(8, 2, padding="same")
        self.c.supports_masking = True
        self.r = keras.layers.LSTM(8, unroll=True)
        self.d = keras.layers.Dense(4)

    def call(self, x):
        return self.d(self.r(self.c(self.e(x))))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_masks_pass_through_pinned_layers():
    tokens = pairs.TOKENS.copy()
    tokens[:, 3:] = 0
    tokens[::2, 1:] = 0
    results = []
    for model in (
        pairs.plain(Masked),
        pairs.on_mesh(Masked, {"e.embeddings": (None, "model")}),
    ):
        results.append(pairs.fit(model, tokens))
    pairs.assert_alike(*results)
    unmasked = Masked()
    unmasked.e.mask_zero = False
    unmasked(tokens[:1])
    for a, b in zip(unmasked.weights, model.weights):
        a.assign(b.numpy())
    assert not np.allclose(unmasked(tokens), model.predict(tokens, verbose=0))


def test_logits_pass_out_of_pinned_layers():
    # Keras stores the logits of a softmax in its output tensor, and the loss
    # treats them as logits of a sigmoid. If another op follows the softmax, the
    # loss uses the probabilities.
    def make():
        return keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Conv2D(4, 8, activation="softmax"),
                keras.layers.Flatten(),
            ]
        )

    def train(model):
        model.compile("sgd", "binary_crossentropy")
        return model.fit(
            pairs.IMAGES,
            np.eye(4)[pairs.LABELS],
            batch_size=8,
            shuffle=False,
            verbose=0,
        ).history

    pairs.assert_alike(train(pairs.plain(make)), train(pairs.on_mesh(make, {})))


def on_mesh(function, *arguments):
    """Runs `function` on a mesh, eagerly and traced; returns host arrays."""
    patches.ensure("mesh")
    patches.ensure("keras3")
    mesh = mesh_of(batch=2, model=2)
    arguments = [
        transfer.to_mesh(
            a, dtensor.Layout.batch_sharded(mesh, "batch", np.ndim(a))
        )
        for a in arguments
    ]
    with tracing.default_mesh(mesh):
        eager = function(*arguments)
        traced = tf.function(function, autograph=False)(*arguments)
    np.testing.assert_array_equal(*map(transfer.to_host, (eager, traced)))
    return transfer.to_host(traced)


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2)])
def test_flip_equals_numpy(axis):
    x = RNG.normal(size=(4, 3, 5)).astype(np.float32)
    np.testing.assert_array_equal(
        on_mesh(lambda x: keras.ops.flip(x, axis=axis), x), np.flip(x, axis)
    )


def test_diag_equals_numpy_with_infinities_off_the_diagonal():
    x = RNG.normal(size=(4, 4)).astype(np.float32)
    x[0, 1], x[2, 0] = np.inf, np.nan
    np.testing.assert_array_equal(on_mesh(keras.ops.diag, x), np.diag(x))


def test_scatter_equals_numpy_with_repeated_cells():
    indices = RNG.integers(0, 3, size=(8, 2))
    values = RNG.integers(-4, 5, size=8).astype(np.float32)
    expected = np.zeros((3, 4), np.float32)
    np.add.at(expected, tuple(indices.T), values)
    np.testing.assert_array_equal(
        on_mesh(lambda i, v: keras.ops.scatter(i, v, (3, 4)), indices, values),
        expected,
    )


@pytest.mark.parametrize("bad", [(-1, 2), (0, 4), (3, 0)])
def test_scatter_outside_the_shape_raises(bad):
    patches.ensure("mesh")
    patches.ensure("keras3")
    mesh = mesh_of(batch=2)
    indices = transfer.to_mesh(
        np.array([[0, 0], bad]), dtensor.Layout.replicated(mesh, 2)
    )
    values = transfer.to_mesh(
        np.ones(2, np.float32), dtensor.Layout.replicated(mesh, 1)
    )

    # The op runs eagerly, because after an error in a function, DTensor also
    # fails the next op.
    with (
        tracing.default_mesh(mesh),
        pytest.raises(ValueError, match="inside the shape"),
    ):
        keras.ops.scatter(indices, values, (3, 4))


def test_one_hot_equals_numpy():
    x = np.array([[0, 3], [2, 1], [3, 3], [0, 0]])
    np.testing.assert_array_equal(
        on_mesh(lambda x: keras.ops.one_hot(x, 4), x), np.eye(4)[x]
    )
