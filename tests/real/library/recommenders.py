"""Models of TensorFlow Recommenders and deepctr, which require tf_keras.

Both packages use `tf.keras`. The packages are imported only in the processes
that run cases. `kinds.ENVIRONMENT` sets TF_USE_LEGACY_KERAS=1 for these
processes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.real import placement
from tests.real.compare import (
    CLOSE,
    check,
    difference,
    losses_differ_by,
    warnings_reported,
    without_mesh,
)
from tests.real.rounding import allowed

RNG = np.random.default_rng(0)
SAMPLES, ROWS, EPOCHS = 32, 16, 4
IDS = {name: RNG.integers(0, ROWS, SAMPLES) for name in "abcd"}
NUMBERS = {name: RNG.normal(size=SAMPLES).astype(np.float32) for name in "xyz"}
LABELS = (np.arange(SAMPLES) % 2).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class RecommenderCase:
    """Test case for a model of another package.

    Attributes:
      make: Function that returns the compiled model.
      data: Arguments of `fit`, as a dictionary.
      predicts: Whether the model has a `call` method.
    """

    make: Callable[[], Any]
    data: dict[str, Any]
    predicts: bool = True

    def run(self) -> None:
        """Runs the test case and prints the result of each check."""
        with warnings_reported():
            _run(self)


def _model(case: RecommenderCase) -> Any:
    import tf_keras

    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(3)
    return case.make()


def _fit(case: RecommenderCase, model: Any) -> list[float]:
    return model.fit(
        **case.data, epochs=EPOCHS, shuffle=False, verbose=0
    ).history["loss"]


def _layouts(model: Any) -> tlm.LayoutMap:
    """Returns a layout map with a key for each weight that is large enough."""
    mesh = placement.mesh()
    layout_map = tlm.LayoutMap(mesh)
    for weight in model.weights:
        name = weight.name.partition(":")[0]
        axes = placement.generic_axes(name, tuple(weight.shape))
        key = placement.key_of(name)
        if axes is not None and key not in layout_map:
            layout_map[key] = placement.layout_of(mesh, *axes)
    return layout_map


def _run(case: RecommenderCase) -> None:
    with without_mesh():
        plain = _model(case)
        losses = _fit(case, plain)
        layouts = _layouts(plain)
        if not len(layouts):
            raise ValueError("no weight of the model is sharded")
    with check("make") as made, tlm.layout_map_scope(layouts):
        model = _model(case)
    if made.status != "trained":
        return

    def rounding() -> float:
        return allowed(losses, lambda: _fit(case, _model(case)))

    with check("fit", CLOSE, rounding) as found:
        found.difference = losses_differ_by(losses, _fit(case, model))
    with check("weights", 1e-5) as found:
        # All weights are compared together, because the gradient of a bias may
        # consist of rounding errors.
        found.difference = difference(_values(plain), _values(model))
    if case.predicts:
        with check("predict", CLOSE) as found:
            found.difference = difference(
                plain.predict(case.data["x"], verbose=0),
                model.predict(case.data["x"], verbose=0),
            )


def _values(model: Any) -> np.ndarray:
    return np.concatenate(
        [weight.numpy().reshape(-1) for weight in model.weights]
    )


def _batches(names: str) -> dict[str, Any]:
    features = {name: IDS[name] for name in names}
    features["label"] = LABELS[:, None]
    return {"x": tf.data.Dataset.from_tensor_slices(features).batch(8)}


def _tower() -> Any:
    import tf_keras

    return tf_keras.Sequential(
        [tf_keras.layers.Embedding(ROWS, 8), tf_keras.layers.Dense(8)]
    )


def retrieval() -> Any:
    """Returns the two-tower model of a TensorFlow Recommenders tutorial."""
    import tensorflow_recommenders as tfrs
    import tf_keras

    class Retrieval(tfrs.Model):
        def __init__(self):
            super().__init__()
            self.query, self.candidate = _tower(), _tower()
            self.task = tfrs.tasks.Retrieval()

        def compute_loss(self, features, training=False):
            return self.task(
                self.query(features["a"]),
                self.candidate(features["b"]),
                compute_metrics=False,
            )

    model = Retrieval()
    model.compile(tf_keras.optimizers.SGD(0.05))
    return model


def ranking() -> Any:
    """Returns a model that predicts ratings from two ids and has a metric."""
    import tensorflow_recommenders as tfrs
    import tf_keras

    class Ranking(tfrs.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = _tower(), _tower()
            self.head = tf_keras.Sequential(
                [
                    tf_keras.layers.Dense(16, activation="relu"),
                    tf_keras.layers.Dense(1),
                ]
            )
            self.task = tfrs.tasks.Ranking(
                loss=tf_keras.losses.MeanSquaredError(),
                metrics=[tf_keras.metrics.RootMeanSquaredError()],
            )

        def compute_loss(self, features, training=False):
            joined = tf.concat(
                [self.first(features["a"]), self.second(features["b"])], 1
            )
            return self.task(
                labels=features["label"], predictions=self.head(joined)
            )

    model = Ranking()
    model.compile(tf_keras.optimizers.Adagrad(0.1))
    return model


def cross() -> Any:
    """Returns a deep and cross network with a `call` method."""
    import tensorflow_recommenders as tfrs
    import tf_keras

    class Cross(tfrs.Model):
        def __init__(self):
            super().__init__()
            self.tables = [tf_keras.layers.Embedding(ROWS, 8) for _ in "abcd"]
            self.cross = tfrs.layers.dcn.Cross(
                kernel_initializer="glorot_uniform"
            )
            self.head = tf_keras.layers.Dense(1)
            self.task = tfrs.tasks.Ranking(
                loss=tf_keras.losses.BinaryCrossentropy(from_logits=True)
            )

        def call(self, features):
            joined = tf.concat(
                [
                    table(features[name])
                    for table, name in zip(self.tables, "abcd")
                ],
                1,
            )
            return self.head(self.cross(joined))

        def compute_loss(self, features, training=False):
            return self.task(
                labels=features["label"], predictions=self(features)
            )

    model = Cross()
    model.compile(tf_keras.optimizers.SGD(0.05))
    return model


def _deepctr(name: str) -> RecommenderCase:
    def make() -> Any:
        import deepctr.models
        import tf_keras
        from deepctr.feature_column import DenseFeat, SparseFeat

        columns = [
            *(SparseFeat(key, ROWS, embedding_dim=8) for key in IDS),
            *(DenseFeat(key, 1) for key in NUMBERS),
        ]
        model = getattr(deepctr.models, name)(columns, columns, task="binary")
        model.compile(tf_keras.optimizers.SGD(0.05), "binary_crossentropy")
        return model

    return RecommenderCase(
        make, {"x": {**IDS, **NUMBERS}, "y": LABELS, "batch_size": 8}
    )


CASES = {
    "tfrs, retrieval": RecommenderCase(
        retrieval, _batches("ab"), predicts=False
    ),
    "tfrs, ranking": RecommenderCase(ranking, _batches("ab"), predicts=False),
    "tfrs, cross": RecommenderCase(cross, _batches("abcd")),
    **{
        f"deepctr, {name}": _deepctr(name)
        for name in (
            "AutoInt",
            "DCN",
            "DCNMix",
            "DIFM",
            "DeepFM",
            "FNN",
            "FiBiNET",
            "FwFM",
            "IFM",
            "MLR",
            "NFM",
            "ONN",
            "WDL",
            "xDeepFM",
        )
    },
}
