"""Compares random Keras models under random layouts with a single device.

A program consists of plain data that is drawn from a seed. It can therefore be
printed, repeated and minimized. Its model is trained in float64 with and
without a mesh, starting from the same weights. Losses, weights and predictions
must agree within `TOLERANCE`.

    python -m tests.layout.random_models --first 0 --seconds 3600
    python -m tests.layout.random_models --only 17 --minimize
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import faulthandler
import functools
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
import warnings

import keras
import numpy as np

from tests.layout import random_layers, random_training
from tests.layout.random_expressions import EXPRESSIONS
from tests.layout.random_layers import (
    END,
    HOW,
    LAYERS,
    VOCABULARY,
    Expression,
    Typed,
)
from tests.layout.random_results import Result, apart, difference, numbers
from tests.layout.random_scopes import USES, scope_of
from tests.layout.random_training import BATCH_SIZE, OPTIMIZERS, WAYS
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.planning import search

NUM_SAMPLES = 10
# Time limit of one program.
MAX_SECONDS = 900
# First words of outcomes that are no findings.
ACCEPTED = ("equal", "noise", "diverges", "stock", "unplanned")

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
    "photo": (8, 8, 3),
    "columns": (),
}
# The kind of tensor that the layers of a program get.
KIND_OF_LAYERS = {name: name for name in INPUTS} | {
    "photo": "image",
    "columns": "vector",
}
POLICIES = ("float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass
class Program:
    """A model, its layout and its training settings.

    Attributes:
      kind: Key of `INPUTS`.
      layers: `(name,)`, a key of `LAYERS[kind]`; or `("Expression", how,
        first, second)`, the arguments of `Expression`; or `("Typed", dtype,
        initializer)`, the arguments of `Typed`.
      mesh: Sizes of the mesh axes.
      axes: Mesh axes of each weight, by position in `model.weights`.
      optimizer: Key of `OPTIMIZERS`.
      loss: Name of a loss.
      end: Key of `END`.
      seed: Seed of the initial weights and the data.
      front: Preprocessing layers, keys of `random_layers.PHOTOS` or `FEATURES`.
      options: Options of the optimizer.
      way: Key of `random_training.WAYS`.
      use: Element of `random_scopes.USES`.
      policy: Name of the dtype policy.
      file: Element of `random_training.FILES` in which the trained model is
        saved; None if the model is not saved.
      second_mesh: Sizes of the axes of the mesh on which the file is loaded;
        None for no mesh.
      second_axes: Mesh axes of each weight on the second mesh.
    """

    kind: str
    layers: list[tuple[str, ...]]
    mesh: dict[str, int]
    axes: dict[int, list[str | None]]
    optimizer: str = "SGD"
    loss: str = "mse"
    end: str = "flatten"
    seed: int = 0
    front: list[str] = dataclasses.field(default_factory=list)
    options: dict = dataclasses.field(default_factory=dict)
    way: str = "fit"
    use: str = "LayoutMap"
    policy: str = "float64"
    file: str | None = None
    second_mesh: dict[str, int] | None = None
    second_axes: dict[int, list[str | None]] = dataclasses.field(
        default_factory=dict
    )


def build(program: Program) -> keras.Model:
    """Returns the built model."""
    keras.utils.set_random_seed(program.seed)
    keras.config.set_dtype_policy(program.policy)
    try:
        return _build(program)
    finally:
        keras.config.set_dtype_policy(keras.config.floatx())


def build_without_mesh(program: Program) -> keras.Model:
    """Returns the built model; its weights have the paths of a new session."""
    keras.backend.clear_session()
    return build(program)


def _build(program: Program) -> keras.Model:
    inputs, x = _front(program)
    for position, (name, *arguments) in enumerate(program.layers):
        if name == "Expression":
            layer = Expression(*arguments, name=f"l{position}")
        elif name == "Typed":
            layer = Typed(*arguments, name=f"l{position}")
        else:
            kind = KIND_OF_LAYERS[program.kind]
            layer = LAYERS[kind][name](f"l{position}")
        length = x.shape[1]
        x = layer(x)
        if name == "EinsumDense":
            x = L.Reshape((length, 8))(x)
    if len(x.shape) > 2:
        x = END[program.end](x)
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def _front(program: Program):
    """Returns the inputs of the model and the input of its layers."""
    shape = INPUTS[program.kind]
    if program.kind == "columns":
        inputs = random_layers.Inputs()
        parts = [random_layers.FEATURES[name](inputs) for name in program.front]
        # A column without weights, so that there are two parts at least.
        parts.append(inputs["float"])
        x = L.Concatenate()([L.Flatten()(part) for part in parts])
        return {**inputs}, L.Dense(8, "tanh", name="front")(x)
    if program.kind == "tokens":
        inputs = keras.Input(shape, dtype="int32")
        return inputs, L.Embedding(VOCABULARY, 8, name="table")(inputs)
    x = inputs = keras.Input(shape)
    if program.kind == "photo":
        for name in program.front:
            x = random_layers.PHOTOS[name]()(x)
        x = L.Rescaling(1 / 255)(x)
        x = L.Conv2D(8, 3, padding="same", name="front")(x)
    return inputs, x


def draw(seed: int) -> Program:
    """Draws a program from `seed`."""
    rng = random.Random(seed)
    kind = rng.choice([*INPUTS])
    names = [*LAYERS[KIND_OF_LAYERS[kind]]]
    layers: list[tuple[str, ...]] = []
    for _ in range(rng.randint(1, 3)):
        draw = rng.random()
        if draw < 0.35:
            count = rng.randint(1, 2)
            layers.append(
                (
                    "Expression",
                    rng.choice([*HOW]),
                    *rng.choices([*EXPRESSIONS], k=count),
                )
            )
        elif draw < 0.5:
            dtype = rng.choice(random_layers.WEIGHT_DTYPES)
            initializers = (
                [*random_layers.INITIALIZERS]
                if "float" in dtype
                else random_layers.CONSTANTS
            )
            layers.append(("Typed", dtype, rng.choice(initializers)))
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
    if program.optimizer != "Adam global_clipnorm":
        program.options = random_training.draw_options(
            rng, kind in ("tokens", "columns")
        )
    if kind == "photo":
        program.front = rng.choices([*random_layers.PHOTOS], k=2)
        if "RandomCrop" in program.front:
            # Without a mesh, `RandomCrop` does not crop batches of a `fit`.
            program.end = "mean"
    elif kind == "columns":
        program.front = rng.sample([*random_layers.FEATURES], 3)
    program.way = rng.choice([*WAYS])
    program.use = rng.choice(USES)
    if {*program.front} & random_layers.NOT_IN_FLOAT64:
        program.policy = "float32"
    elif rng.random() < 0.3:
        program.policy = rng.choice(POLICIES)
    if rng.random() < 0.3:
        program.file = rng.choice(random_training.FILES)
        program.second_mesh = rng.choice([None, *MESHES])
    if kind == "tokens" and program.end == "max":
        # Equal ids have equal rows, and rounding errors determine which of
        # these rows is the maximum and receives the gradient. The result can
        # differ, because Adagrad squares the gradient of each row separately.
        program.end = "mean"
    if kind == "columns" and program.way not in random_training.FITS:
        # Strings cannot be copied to a mesh.
        program.way = "fit"
    try:
        weights = build_without_mesh(program).weights
    except Exception:  # `run` reports the error.
        return program
    program.axes = _draw_axes(rng, weights, program.mesh)
    if program.second_mesh is not None:
        program.second_axes = _draw_axes(rng, weights, program.second_mesh)
    return program


def _draw_axes(rng, weights, mesh) -> dict[int, list[str | None]]:
    found = {}
    share = rng.choice([0.15, 0.5, 0.9])
    for position, weight in enumerate(weights):
        if not weight.shape or rng.random() > share:
            continue
        axes: list[str | None] = [None] * len(weight.shape)
        for axis in rng.sample([*mesh], rng.randint(1, 2)):
            fitting = [
                d
                for d, size in enumerate(weight.shape)
                if axes[d] is None and size % mesh[axis] == 0
            ]
            if fitting:
                axes[rng.choice(fitting)] = axis
        if any(axes):
            found[position] = axes
    return found


def data_of(program: Program):
    """Returns inputs and labels; the last batch is smaller than the others."""
    rng = np.random.default_rng(program.seed)
    shape = (NUM_SAMPLES, *INPUTS[program.kind])
    if program.kind == "tokens":
        # Ids are drawn from a small range, so that ids repeat in batches.
        x = rng.integers(0, VOCABULARY // 2, shape)
    elif program.kind == "photo":
        x = rng.integers(0, 256, shape).astype(np.float64)
    elif program.kind == "columns":
        x = random_layers.columns(rng, NUM_SAMPLES)
    else:
        x = rng.normal(size=shape)
    y = (
        rng.normal(size=(NUM_SAMPLES, 4))
        if program.loss == "mse"
        else rng.integers(0, 4, NUM_SAMPLES)
    )
    return x, y


def values_of(variables) -> dict[str, np.ndarray]:
    """Returns the values of variables, with their paths and positions."""
    return {
        f"{i} {v.path}": np.asarray(v.numpy()) for i, v in enumerate(variables)
    }


def check_place(model: keras.Model, mesh) -> None:
    """Checks that the model is on a mesh if and only if `mesh` is not None."""
    for weight in model.trainable_weights:
        assert isinstance(weight, MeshVariable) == (mesh is not None), weight


def train(model: keras.Model, program: Program, mesh=None) -> Result:
    """Trains a compiled model."""
    check_place(model, mesh)
    x, y = data_of(program)
    if program.kind == "columns":
        x = {name: x[name] for name in model.input}
    initial = values_of(model.weights)
    losses = WAYS[program.way](model, x, y, mesh)
    return Result(
        initial,
        losses,
        values_of([*model.weights, *model.optimizer.variables]),
        np.asarray(model.predict(x, batch_size=BATCH_SIZE, verbose=0)),
    )


def places_of(program: Program, model: keras.Model):
    """Returns functions that return the scopes of both meshes.

    Args:
      program: The program.
      model: The model without a mesh; its weights determine the paths.
    """
    paths = [w.path for w in model.weights]
    return [
        functools.partial(
            scope_of,
            program.use,
            mesh,
            {paths[position]: tuple(axes[position]) for position in axes},
        )
        for mesh, axes in (
            (program.mesh, program.axes),
            (program.second_mesh, program.second_axes),
        )
    ]


no_mesh = functools.partial(contextlib.nullcontext, None)


def trained(program: Program, first, second, change=None) -> list[Result]:
    """Trains a program.

    Args:
      program: The program.
      first: Returns the scope of the model.
      second: Returns the scope of the model that is loaded from a file.
      change: Function of the initial values of the weights that returns
        other values; None keeps the values.

    Returns:
      The results before and after the model was saved and loaded.
    """
    # Keras clears its distribution, so the session is cleared before the scope.
    keras.backend.clear_session()
    with first() as mesh:
        model = build(program)
        if change is not None:
            model.set_weights([change(w) for w in model.get_weights()])
        random_training.compile_model(model, program)
        results = [train(model, program, mesh)]
    if program.file is None:
        return results
    with tempfile.TemporaryDirectory() as folder:
        path = random_training.saved(model, program.file, folder)
        keras.backend.clear_session()
        with second() as mesh:
            model = random_training.loaded(
                program.file, path, lambda: build(program), program
            )
            results.append(train(model, program, mesh))
    return results


def run(program: Program) -> str:
    """Trains the program with and without a mesh and compares the results.

    Returns:
      `"equal"`; `"noise"` if the results differ as much as rounding errors in
      the initial weights change them; a description of the difference or of the
      exception; `"unplanned"` if no plan fits into the memory; `"diverges"` if
      the numbers are not finite on a single device; or `"stock"` and the
      exception that is raised on a single device.
    """
    before = keras.config.floatx()
    keras.config.set_floatx(
        "float32" if program.policy == "float32" else "float64"
    )
    try:
        return _run(program)
    finally:
        keras.config.set_floatx(before)


def _run(program: Program) -> str:
    """Implements `run` for the default dtype of the program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = build_without_mesh(program)
            expected = trained(program, no_mesh, no_mesh)
        except Exception as error:
            return f"stock {described(error)}"
        if not all(
            np.all(np.isfinite(value))
            for result in expected
            for value in (result.losses, result.predictions)
        ):
            return "diverges"
        try:
            result = trained(program, *places_of(program, model))
        except search.PlanDoesNotFitError:
            return "unplanned"
        except Exception as error:  # Any exception is a failure to report.
            return described(error)
        found = difference(expected, result)
        if found == "equal" or found.startswith("initial"):
            return found
        return difference(expected, result, _noise(program, expected))


def described(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {text[:300]}"


# Rounding errors of weights, relative to the weights.
_EPSILONS = {
    "float64": 1e-14,
    "float32": 1e-7,
    "float16": 1e-3,
    "bfloat16": 0.01,
}


def _noise(program: Program, expected: list[Result]) -> list[list[float]]:
    """Returns how much rounding errors change each number of a run."""
    least = _EPSILONS.get(program.policy, 0.01)
    found = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)

        def change(value, rng=rng):
            if value.dtype.name not in _EPSILONS:
                return value
            eps = max(least, _EPSILONS[value.dtype.name])
            factors = 1 + eps * rng.choice([-1.0, 1.0], value.shape)
            return (value.astype(np.float64) * factors).astype(value.dtype)

        found.append(trained(program, no_mesh, no_mesh, change))
    return [
        [
            max(apart(value, other[i][1]) for other in others)
            for i, (_, value) in enumerate(numbers(result))
        ]
        for result, *others in zip(
            expected, *([numbers(r) for r in results] for results in found)
        )
    ]


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
    for position in range(len(program.front) - (program.kind == "columns")):
        front = [*program.front]
        del front[position]
        yield from _relaid(dataclasses.replace(program, front=front))
    for name, value in (
        ("optimizer", "SGD"),
        ("options", {}),
        ("way", "fit"),
        ("use", "LayoutMap"),
        ("policy", "float64"),
        ("file", None),
        ("second_mesh", None),
        ("second_axes", {}),
        ("mesh", MESHES[0]),
    ):
        if getattr(program, name) != value:
            yield dataclasses.replace(program, **{name: value})
    for option in program.options:
        options = {k: v for k, v in program.options.items() if k != option}
        yield dataclasses.replace(program, options=options)


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
    weights = build_without_mesh(program).weights
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
        # Ends the process if a program does not end.
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        print(f"end {seed} {run(draw(seed))}", flush=True)


def _drive(first: int, seconds: float) -> int:
    """Runs seeds in child processes and restarts them when they end.

    Each process runs for a few minutes only, because compiled functions are
    never freed.
    """
    end, count, bad = time.monotonic() + seconds, 0, 0
    kinds = collections.Counter()
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
                kinds[kind_of(outcome[0])] += 1
                if kind_of(outcome[0]) not in ACCEPTED:
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
        print(f"{count} programs to seed {first}, {dict(kinds)}", flush=True)
    print(f"{bad} findings")
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
