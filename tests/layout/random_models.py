"""Compares random Keras models under random layouts with a single device.

A program consists of plain data that is drawn from a seed. It can therefore be
printed, repeated and minimized. Its model is trained in float64 with and
without a mesh, starting from the same weights. Losses, weights and predictions
must agree within `TOLERANCE`.

    python -m tests.layout.random_models --first 0 --seconds 3600
    python -m tests.layout.random_models --only 17 --minimize
"""

import argparse
import copy
import dataclasses
import itertools
import json
import random
import subprocess
import sys
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import layout_of, mesh_of
from tests.layout.random_expressions import EXPRESSIONS

# Results differ only because sums are computed in a different order. The
# magnitude of gradients is near 1.
TOLERANCE = 1e-7
NUM_SAMPLES, BATCH_SIZE, EPOCHS = 10, 4, 2
VOCABULARY = 12

L = keras.layers

MESHES = (
    {"batch": 1, "model": 2},
    {"batch": 1, "model": 4},
    {"batch": 2, "model": 2},
    {"batch": 2, "model": 4},
)

INPUTS = {
    "vector": (8,),
    "sequence": (6, 8),
    "image": (8, 8, 4),
    "tokens": (6,),
}


HOW = {
    "alone": lambda y, x: y,
    "plus input": lambda y, x: y + x,
    "times input": lambda y, x: y * x,
    "gates input": lambda y, x: tf.sigmoid(y) * x,
}


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


class Attend(L.Layer):
    """Self-attention layer of a sequence."""

    def __init__(self, make, **options):
        super().__init__(**options)
        self.attention = make()

    def build(self, shape):
        if not isinstance(self.attention, L.Attention):
            self.attention.build(shape, shape)

    def call(self, x):
        if isinstance(self.attention, L.Attention):
            return self.attention([x, x])
        return self.attention(x, x)


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
}
LAYERS = {
    "vector": _ANY,
    "sequence": _ANY
    | {
        "MultiHeadAttention": lambda n: Attend(
            lambda: L.MultiHeadAttention(2, 4, name="mha"), name=n
        ),
        "GroupQueryAttention": lambda n: Attend(
            lambda: L.GroupQueryAttention(4, 4, 2, name="gqa"), name=n
        ),
        "Attention": lambda n: Attend(
            lambda: L.Attention(use_scale=True, name="attention"), name=n
        ),
        "AdditiveAttention": lambda n: Attend(
            lambda: L.AdditiveAttention(name="additive"), name=n
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

O = keras.optimizers  # noqa: E741 - A table of optimizers follows.
OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.1),
    "SGD nesterov": lambda: O.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: O.Adam(0.01),
    "Adam global_clipnorm": lambda: O.Adam(0.01, global_clipnorm=0.1),
    "AdamW": lambda: O.AdamW(0.01, weight_decay=0.01),
    "Adagrad": lambda: O.Adagrad(0.05),
    "RMSprop": lambda: O.RMSprop(0.01),
    "Nadam": lambda: O.Nadam(0.01),
    "Adamax": lambda: O.Adamax(0.01),
    "Ftrl": lambda: O.Ftrl(0.05),
}


@dataclasses.dataclass
class Program:
    """A model, its layout and its training settings.

    Attributes:
      kind: Key of `INPUTS`.
      layers: `(name,)`, a key of `LAYERS[kind]`, or `("Expression", how,
        first, second)`, the arguments of `Expression`.
      mesh: Sizes of the mesh axes.
      axes: Mesh axes of each weight, by position in `model.weights`.
      optimizer: Key of `OPTIMIZERS`.
      loss: Name of a loss.
      end: Key of `END`.
      seed: Seed of the initial weights and the data.
    """

    kind: str
    layers: list[tuple[str, ...]]
    mesh: dict[str, int]
    axes: dict[int, list[str | None]]
    optimizer: str = "SGD"
    loss: str = "mse"
    end: str = "flatten"
    seed: int = 0


def build(program: Program) -> keras.Model:
    """Returns the built model."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(program.seed)
    shape = INPUTS[program.kind]
    x = inputs = keras.Input(
        shape, dtype="int32" if program.kind == "tokens" else None
    )
    if program.kind == "tokens":
        x = L.Embedding(VOCABULARY, 8, name="table")(x)
    for position, (name, *arguments) in enumerate(program.layers):
        if name == "Expression":
            layer = Expression(*arguments, name=f"l{position}")
        else:
            layer = LAYERS[program.kind][name](f"l{position}")
        length = x.shape[1]
        x = layer(x)
        if name == "EinsumDense":
            x = L.Reshape((length, 8))(x)
    if len(x.shape) > 2:
        x = END[program.end](x)
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def draw(seed: int) -> Program:
    """Draws a program from `seed`."""
    rng = random.Random(seed)
    kind = rng.choice([*INPUTS])
    names = [*LAYERS[kind]]
    layers: list[tuple[str, ...]] = []
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.45:
            count = rng.randint(1, 2)
            layers.append(
                (
                    "Expression",
                    rng.choice([*HOW]),
                    *rng.choices([*EXPRESSIONS], k=count),
                )
            )
        else:
            layers.append((rng.choice(names),))
    program = Program(
        kind,
        layers,
        rng.choice(MESHES),
        {},
        rng.choice([*OPTIMIZERS]),
        rng.choice(["mse", "sparse_categorical_crossentropy"]),
        rng.choice([*END]),
        seed,
    )
    if kind == "tokens" and program.end == "max":
        # Equal ids have equal rows, and rounding errors determine which of
        # these rows is the maximum and receives the gradient. The result can
        # differ, because Adagrad squares the gradient of each row separately.
        program.end = "mean"
    share = rng.choice([0.15, 0.5, 0.9])
    for position, weight in enumerate(build(program).weights):
        if not weight.shape or rng.random() > share:
            continue
        axes: list[str | None] = [None] * len(weight.shape)
        for axis in rng.sample([*program.mesh], rng.randint(1, 2)):
            fitting = [
                d
                for d, size in enumerate(weight.shape)
                if axes[d] is None and size % program.mesh[axis] == 0
            ]
            if fitting:
                axes[rng.choice(fitting)] = axis
        if any(axes):
            program.axes[position] = axes
    return program


@dataclasses.dataclass
class Result:
    """Losses, weights and predictions after training."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    predictions: np.ndarray


def train(model: keras.Model, program: Program) -> Result:
    """Trains a model on batches, of which the last is smaller."""
    rng = np.random.default_rng(program.seed)
    shape = (NUM_SAMPLES, *INPUTS[program.kind])
    # Ids are drawn from a small range, so that ids repeat in batches.
    x = (
        rng.integers(0, VOCABULARY // 2, shape)
        if program.kind == "tokens"
        else rng.normal(size=shape)
    )
    if program.loss == "mse":
        loss, y = "mse", rng.normal(size=(NUM_SAMPLES, 4))
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        y = rng.integers(0, 4, NUM_SAMPLES)
    model.compile(OPTIMIZERS[program.optimizer](), loss)
    history = model.fit(
        x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0
    ).history
    return Result(
        history["loss"],
        {
            f"{i} {w.path}": np.asarray(w.numpy())
            for i, w in enumerate(model.weights)
        },
        model.predict(x, batch_size=BATCH_SIZE, verbose=0),
    )


def run(program: Program) -> str:
    """Trains the program with and without a mesh and compares the results.

    Returns:
      `"equal"`; a description of the difference or of the exception; or
      `"diverges"` if the numbers are not finite on a single device.
    """
    model = build(program)
    values = model.get_weights()
    expected = train(model, program)
    if not all(
        np.all(np.isfinite(value))
        for value in (expected.losses, expected.predictions)
    ):
        return "diverges"
    try:
        mesh = mesh_of(**program.mesh)
        layout_map = tlm.LayoutMap(mesh)
        for position, axes in program.axes.items():
            path = model.weights[position].path
            layout_map[f"^{path}$"] = layout_of(mesh, *axes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with tlm.layout_map_scope(layout_map):
                model = build(program)
            model.set_weights(values)
            result = train(model, program)
    except Exception as error:  # Any exception is a failure to report.
        text = " ".join(str(error).split())
        return f"raised {type(error).__name__}: {text[:300]}"
    return difference(expected, result)


def difference(expected: Result, result: Result) -> str:
    """Compares losses, weights and predictions.

    Returns:
      `"equal"`, or a description of the first difference.
    """
    pairs = [
        ("losses", expected.losses, result.losses),
        *(
            (name, value, result.weights[name])
            for name, value in expected.weights.items()
        ),
        ("predictions", expected.predictions, result.predictions),
    ]
    for name, first, second in pairs:
        if not np.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE):
            apart = np.max(np.abs(np.subtract(first, second)))
            return f"differs in {name} by {apart:.1e}"
    return "equal"


def kind_of(outcome: str) -> str:
    """Returns the first word of an outcome, such as `equal` or `differs`."""
    return outcome.split()[0]


def minimized(program: Program) -> Program:
    """Returns a smaller program with the same kind of outcome."""
    kind = kind_of(run(program))
    while True:
        for smaller in _smaller(program):
            try:
                same = kind_of(run(smaller)) == kind
            except Exception:  # The smaller program is not a valid model.
                continue
            if same:
                program = smaller
                break
        else:
            return program


def _smaller(program: Program):
    for position in range(len(program.layers)):
        layers = copy.deepcopy(program.layers)
        del layers[position]
        # The positions of the weights change, so each layout is tried for each
        # weight of the same rank.
        yield from _relaid(dataclasses.replace(program, layers=layers))
    for position, layer in enumerate(program.layers):
        for simpler in _simpler(layer):
            layers = copy.deepcopy(program.layers)
            layers[position] = simpler
            yield dataclasses.replace(program, layers=layers)
    for position in program.axes:
        yield dataclasses.replace(
            program,
            axes={p: a for p, a in program.axes.items() if p != position},
        )
    if program.optimizer != "SGD":
        yield dataclasses.replace(program, optimizer="SGD")
    if program.mesh != MESHES[0]:
        yield dataclasses.replace(program, mesh=MESHES[0])


def _simpler(layer: tuple[str, ...]):
    if layer[0] != "Expression":
        return
    _, how, *expressions = layer
    if how != "alone":
        yield "Expression", "alone", *expressions
    for dropped in range(len(expressions)):
        if len(expressions) > 1:
            yield "Expression", how, expressions[1 - dropped]
        if expressions[dropped] != "identity":
            yield (
                "Expression",
                how,
                *(
                    "identity" if i == dropped else one
                    for i, one in enumerate(expressions)
                ),
            )


def _relaid(program: Program):
    weights = build(program).weights
    moved = {}
    for position, axes in program.axes.items():
        for shift in (0, -1, -2, -3, -4):
            target = position + shift
            if (
                0 <= target < len(weights)
                and target not in moved
                and len(weights[target].shape) == len(axes)
            ):
                moved[target] = axes
                break
    yield dataclasses.replace(program, axes=moved)


def _run_seeds(first: int, seconds: float) -> None:
    """Runs consecutive seeds in this process and prints their outcomes."""
    keras.config.set_floatx("float64")
    end = time.monotonic() + seconds
    for seed in itertools.count(first):
        if time.monotonic() > end:
            return
        print(f"begin {seed}", flush=True)
        print(f"end {seed} {run(draw(seed))}", flush=True)


def _drive(first: int, seconds: float) -> int:
    """Runs seeds in child processes and restarts them when they end.

    Each process runs for a few minutes only, because compiled functions are
    never freed.
    """
    end, count, bad = time.monotonic() + seconds, 0, 0
    while (left := end - time.monotonic()) > 0:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.layout.random_models",
                "--worker",
                "--first",
                str(first),
                "--seconds",
                str(min(left, 300)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        begun = first
        for line in process.stdout:
            word, seed, *outcome = line.split(maxsplit=2)
            if word == "begin":
                begun = int(seed)
            elif word == "end":
                count, begun = count + 1, int(seed) + 1
                if outcome[0].strip() not in ("equal", "diverges"):
                    bad += 1
                    print(seed, outcome[0].strip(), draw(int(seed)), flush=True)
        if process.wait() != 0:
            bad += 1
            print(
                begun,
                f"process ended with {process.returncode}",
                draw(begun),
                flush=True,
            )
            begun += 1
        first = begun
    print(f"{count} programs to seed {first}, {bad} findings")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", type=int)
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        _run_seeds(options.first, options.seconds)
        return 0
    if options.only is None:
        return _drive(options.first, options.seconds)
    keras.config.set_floatx("float64")
    program = draw(options.only)
    outcome = run(program)
    print(outcome)
    if options.minimize and outcome != "equal":
        program = minimized(program)
        print(run(program))
    print(json.dumps(dataclasses.asdict(program)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
