"""Models of others whose `Embedding` layers `shard_embeddings` replaces.

Each case trains the stock model and the model with replaced layers with
Adagrad, and compares the weights. Weight files are loaded in both directions.
The cases use Keras 3; `replaced_tf_keras.py` contains the cases of tf_keras.

    python -m tests.real.library.replaced_embeddings

prints the time of a training step of each model with large tables. The table in
docs/benchmarks.md is its output.
"""

import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tf_layoutmap as tlm
from tests.real.compare import CLOSE, check, difference, without_mesh

RATE, SAMPLES, LENGTH, SMALL, LARGE = 0.05, 64, 6, 40, 200_000
EPOCHS, BATCH = 3, 16


@dataclasses.dataclass(frozen=True)
class ReplacedCase:
    """Test case for a model whose layers are replaced.

    Attributes:
      version: Function that returns the module of the Keras version.
      make: Function of the number of rows that returns a compiled model, whose
        optimizer is Adagrad with the rate `RATE`.
      data: Function of the number of rows and of samples that returns the
        arguments of `fit`.
      num_replaced: Number of layers that are replaced.
      tolerance: Largest difference of weights, relative to the largest weight.
    """

    version: Callable[[], Any]
    make: Callable[[int], Any]
    data: Callable[[int, int], dict[str, Any]]
    num_replaced: int
    tolerance: float = CLOSE

    def model(self, num_rows: int, *, is_replaced: bool) -> Any:
        """Returns the model with stock or with replaced layers."""
        keras = self.version()
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        model = self.make(num_rows)
        if is_replaced:
            report = tlm.layers.shard_embeddings(
                model, min_rows=SMALL, optimizer=keras.optimizers.Adagrad(RATE)
            )
            if len(report.replaced) != self.num_replaced:
                raise ValueError(str(report))
        return model

    def fit(self, model: Any) -> list[float]:
        """Trains a model and returns the losses."""
        # Layers that are built later draw their weights here.
        self.version().utils.set_random_seed(3)
        return model.fit(
            **self.data(SMALL, SAMPLES), epochs=EPOCHS, shuffle=False, verbose=0
        ).history["loss"]

    def run(self) -> None:
        """Runs the case and prints each check when it ends."""
        with without_mesh():
            stock = self.model(SMALL, is_replaced=False)
            losses = self.fit(stock)
        with check("make") as made:
            model = self.model(SMALL, is_replaced=True)
        if made.status != "trained":
            return
        with check("fit", self.tolerance) as found:
            found.difference = difference(losses, self.fit(model))
        with check("weights", self.tolerance) as found:
            found.difference = difference(_values(stock), _values(model))
        with check("files") as found, tempfile.TemporaryDirectory() as folder:
            path = str(pathlib.Path(folder) / "model.weights.h5")
            expected = _values(stock)
            stock.save_weights(path)
            model.load_weights(path)
            found.difference = difference(expected, _values(model))
            model.save_weights(path)
            stock.load_weights(path)
            found.difference += difference(expected, _values(stock))


def _values(model: Any) -> np.ndarray:
    return np.concatenate(
        [np.asarray(one).reshape(-1) for one in model.get_weights()]
    )


# Cases of Keras 3.


def _keras() -> Any:
    # The imports may draw random numbers, so they must precede the seed.
    import keras
    import keras_rs  # noqa: F401

    return keras


def _compiled(model: Any, loss: Any) -> Any:
    model.compile(_keras().optimizers.Adagrad(RATE), loss)
    return model


def _sequences(num_rows: int, num_samples: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, num_rows, (num_samples, LENGTH)).astype("int32")
    return {"x": ids, "y": _labels(num_samples), "batch_size": BATCH}


def _labels(num_samples: int) -> np.ndarray:
    return (np.arange(num_samples) % 2).astype(np.float32)[:, None]


def _pairs(num_rows: int, num_samples: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, num_rows, (num_samples, 2)).astype("int32")
    return {"x": ids, "y": _labels(num_samples), "batch_size": BATCH}


def _next_tokens(num_rows: int, num_samples: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, num_rows, (num_samples, LENGTH)).astype("int32")
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    return {"x": inputs, "y": np.roll(ids, 1, 1), "batch_size": BATCH}


def _segments(num_rows: int, num_samples: int) -> dict[str, Any]:
    found = _next_tokens(num_rows, num_samples)
    ids = found["x"]["token_ids"]
    found["x"]["segment_ids"] = np.zeros_like(ids)
    return {**found, "y": _labels(num_samples)}


def gpt2(num_rows: int) -> Any:
    """Returns keras-hub's GPT-2, whose table is also the last layer."""
    import keras_hub

    keras = _keras()
    backbone = keras_hub.models.GPT2Backbone(
        num_rows, 1, 2, 8, 16, max_sequence_length=LENGTH, dropout=0.0
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    return _compiled(
        model, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


def bert(num_rows: int) -> Any:
    """Returns keras-hub's BERT with a classifier."""
    import keras_hub

    keras = _keras()
    backbone = keras_hub.models.BertBackbone(
        num_rows, 1, 2, 8, 16, max_sequence_length=LENGTH, dropout=0.0
    )
    inputs = backbone.input
    outputs = keras.layers.Dense(1)(backbone(inputs)["pooled_output"])
    model = keras.Model(inputs, outputs)
    return _compiled(model, "mse")


def dcn(num_rows: int) -> Any:
    """Returns a deep and cross network of keras-rs."""
    import keras_rs

    keras = _keras()
    ids = keras.Input([2], dtype="int32")
    rows = [keras.layers.Embedding(num_rows, 8)(ids[:, i]) for i in (0, 1)]
    joined = keras.layers.Concatenate()(rows)
    crossed = keras_rs.layers.FeatureCross()(joined, joined)
    hidden = keras.layers.Dense(8, activation="relu")(crossed)
    return _compiled(keras.Model(ids, keras.layers.Dense(1)(hidden)), "mse")


def dlrm(num_rows: int) -> Any:
    """Returns a model with the dot interaction of keras-rs."""
    import keras_rs

    keras = _keras()
    ids = keras.Input([2], dtype="int32")
    rows = [keras.layers.Embedding(num_rows, 8)(ids[:, i]) for i in (0, 1)]
    dots = keras_rs.layers.DotInteraction()(rows)
    joined = keras.layers.Concatenate()([dots, *rows])
    return _compiled(keras.Model(ids, keras.layers.Dense(1)(joined)), "mse")


def embed_reduce(num_rows: int) -> Any:
    """Returns a bag of words with a layer of keras-rs."""
    import keras_rs

    keras = _keras()
    layers = [
        keras.Input([LENGTH], dtype="int32"),
        keras_rs.layers.EmbedReduce(num_rows, 8),
        keras.layers.Dense(1),
    ]
    return _compiled(keras.Sequential(layers), "mse")


def retrieval(num_rows: int) -> Any:
    """Returns the two towers of the first tutorial of keras-rs."""
    keras = _keras()

    class Towers(keras.Model):
        def __init__(self):
            super().__init__()
            self.users = keras.Sequential(
                [keras.layers.Embedding(num_rows, 8), keras.layers.Dense(8)]
            )
            self.items = keras.Sequential(
                [keras.layers.Embedding(num_rows, 8), keras.layers.Dense(8)]
            )

        def call(self, ids):
            return keras.ops.sum(
                self.users(ids[:, 0]) * self.items(ids[:, 1]),
                axis=1,
                keepdims=True,
            )

    return _compiled(Towers(), "mse")


def collaborative(num_rows: int) -> Any:
    """Returns the model of keras.io's collaborative filtering example."""
    keras = _keras()

    class RecommenderNet(keras.Model):
        def __init__(self):
            super().__init__()
            normal = keras.initializers.HeNormal
            layer = keras.layers.Embedding
            self.user = layer(num_rows, 8, embeddings_initializer=normal(1))
            self.user_bias = layer(num_rows, 1)
            self.movie = layer(num_rows, 8, embeddings_initializer=normal(2))
            self.movie_bias = layer(num_rows, 1)

        def call(self, ids):
            dot = keras.ops.tensordot(
                self.user(ids[:, 0]), self.movie(ids[:, 1]), 2
            )
            bias = self.user_bias(ids[:, 0]) + self.movie_bias(ids[:, 1])
            return keras.ops.sigmoid(dot + bias)

    return _compiled(RecommenderNet(), "binary_crossentropy")


def lstm(num_rows: int) -> Any:
    """Returns the model of keras.io's bidirectional LSTM example."""
    keras = _keras()
    layers = [
        keras.Input([LENGTH], dtype="int32"),
        keras.layers.Embedding(num_rows, 8, mask_zero=True),
        keras.layers.Bidirectional(keras.layers.LSTM(4)),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
    return _compiled(keras.Sequential(layers), "binary_crossentropy")


def convolutions(num_rows: int) -> Any:
    """Returns the model of keras.io's text classification example."""
    keras = _keras()
    layers = [
        keras.Input([LENGTH], dtype="int32"),
        keras.layers.Embedding(num_rows, 8),
        keras.layers.Conv1D(8, 3, activation="relu"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
    return _compiled(keras.Sequential(layers), "binary_crossentropy")


def transformer(num_rows: int) -> Any:
    """Returns the model of keras.io's transformer example."""
    keras = _keras()

    class TokenAndPositionEmbedding(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.token_emb = keras.layers.Embedding(num_rows, 8)
            self.pos_emb = keras.layers.Embedding(LENGTH, 8)

        def call(self, ids):
            positions = keras.ops.arange(0, LENGTH, 1)
            return self.token_emb(ids) + self.pos_emb(positions)

    ids = keras.Input([LENGTH], dtype="int32")
    rows = TokenAndPositionEmbedding()(ids)
    attended = keras.layers.MultiHeadAttention(2, 4)(rows, rows)
    normal = keras.layers.LayerNormalization()(rows + attended)
    pooled = keras.layers.GlobalAveragePooling1D()(normal)
    return _compiled(keras.Model(ids, keras.layers.Dense(1)(pooled)), "mse")


CASES = {
    "keras-hub, GPT-2": ReplacedCase(_keras, gpt2, _next_tokens, 1),
    "keras-hub, BERT": ReplacedCase(_keras, bert, _segments, 1),
    "keras-rs, DCN": ReplacedCase(_keras, dcn, _pairs, 2),
    "keras-rs, DLRM": ReplacedCase(_keras, dlrm, _pairs, 2),
    "keras-rs, EmbedReduce": ReplacedCase(_keras, embed_reduce, _sequences, 1),
    "keras-rs, retrieval": ReplacedCase(_keras, retrieval, _pairs, 2),
    "keras.io, collaborative filtering": ReplacedCase(
        _keras, collaborative, _pairs, 4
    ),
    "keras.io, bidirectional LSTM": ReplacedCase(_keras, lstm, _sequences, 1),
    "keras.io, convolutions": ReplacedCase(_keras, convolutions, _sequences, 1),
    "keras.io, transformer": ReplacedCase(_keras, transformer, _sequences, 1),
}


def print_times(cases: dict[str, ReplacedCase], only: str) -> None:
    """Prints the time of a step of each case with large tables.

    The time is the mean of the fastest of three epochs.

    Args:
      cases: The cases by name.
      only: Part of the names of the measured cases.
    """
    print("| model | stock | replaced | ratio |\n|---|---|---|---|")
    for name, case in cases.items():
        if only not in name:
            continue
        data = case.data(LARGE, 10 * SAMPLES)
        models = [case.model(LARGE, is_replaced=one) for one in (False, True)]
        times = ([], [])
        for _ in range(4):
            for model, found in zip(models, times):
                start = time.perf_counter()
                model.fit(**data, verbose=0)
                found.append(time.perf_counter() - start)
        num_steps = 10 * SAMPLES // BATCH
        stock, replaced = (1e3 * min(one[1:]) / num_steps for one in times)
        print(
            f"| {name} | {stock:.1f} ms | {replaced:.1f} ms | "
            f"{stock / replaced:.1f} |",
            flush=True,
        )
        del models, model


if __name__ == "__main__":
    print_times(CASES, "".join(sys.argv[1:]))
