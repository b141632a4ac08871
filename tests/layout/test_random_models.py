"""Checks that random models on a mesh match a single device, in float64.

`tests/layout/random_models.py` draws the programs. `FIXED` lists minimized
programs that failed in earlier versions.
"""

import keras
import pytest

from tests.layout import random_layers, random_models, random_results
from tests.layout.random_models import Program, no_mesh

# Each test trains a model twice and compiles it for a mesh, which takes
# seconds.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

PAIR = {"batch": 1, "model": 2}
SQUARE = {"batch": 2, "model": 2}
ROWS, COLUMNS = ["model", None], [None, "model"]


@pytest.fixture(autouse=True)
def float64():
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)
    # Keras also stores the dtype in its default dtype policy.
    keras.backend.clear_session()


def _gate(second, normalization):
    return [
        ("Dense",),
        ("Expression", "gates input", "identity", *second),
        (normalization,),
    ]


FIXED = {
    # In an earlier version, later uses of a tensor received a copy from
    # `tf.stop_gradient`, which no tape had recorded.
    "gate": Program(
        "vector", _gate((), "GroupNormalization"), SQUARE, {2: ROWS}, seed=3
    ),
    "gate, cumsum": Program(
        "vector",
        _gate(("cumsum",), "BatchNormalization"),
        PAIR,
        {2: ROWS},
        seed=3,
    ),
    "gate, sort": Program(
        "vector",
        _gate(("sort",), "BatchNormalization"),
        SQUARE,
        {2: ROWS},
        seed=3,
    ),
    # In an earlier version, the gradient of a replicated lookup became dense.
    **{
        f"repeated ids, {optimizer}": Program(
            "tokens",
            [("GroupNormalization",), ("Dense",)],
            SQUARE,
            {0: ["model", "batch"], 3: ROWS},
            optimizer,
        )
        for optimizer in ("Adam", "Adagrad", "Adam global_clipnorm")
    },
    # No key matches the table. In an earlier version, the lookup was replicated
    # because of the next layer.
    "repeated ids without a key": Program(
        "tokens",
        [("BatchNormalization",)],
        SQUARE,
        {2: ["model"]},
        "Adam",
    ),
    # In an earlier version, the constant permutation of a transpose was
    # replicated like data, which hid its value from DTensor.
    "reduce_prod": Program(
        "vector",
        [("Dense",), ("Expression", "times input", "reduce_prod")],
        SQUARE,
        {0: COLUMNS, 2: ROWS},
    ),
    # In an earlier version, products stayed sharded in a fully replicated step,
    # and the error did not contain the name of the unsupported op.
    "tile": Program(
        "sequence",
        [("Dense",), ("MultiHeadAttention",)],
        SQUARE,
        {8: [None, None, "model"]},
        end="mean",
    ),
}


# A model of tokens uses the same layers as a model of sequences.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["vector", "sequence", "image", "photo", "columns"]
)
def test_every_layer_and_expression_builds(kind):
    if kind in ("photo", "columns"):
        fronts = {
            "photo": random_layers.PHOTOS,
            "columns": random_layers.FEATURES,
        }[kind]
        for name in fronts:
            policy = "float32" if kind == "photo" else "float64"
            random_models.build(
                Program(kind, [], PAIR, {}, front=[name], policy=policy)
            )
        return
    layers = [(name,) for name in random_models.LAYERS[kind]]
    layers += [
        ("Expression", "alone", "identity", name)
        for name in random_models.EXPRESSIONS
    ]
    for layer in layers:
        random_models.build(Program(kind, [layer], PAIR, {}))


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("name", FIXED)
def test_fixed_program_matches_a_single_device(name):
    assert random_models.run(FIXED[name]) == "equal"


# Programs that together contain preprocessing layers, weights of other dtypes,
# options of optimizers, files, and several ways of training.
COVERING = {
    "columns": Program(
        "columns",
        [("Counter int32",)],
        SQUARE,
        {3: COLUMNS, 4: ["model"]},
        "several",
        front=[
            "HashedCrossing of slices",
            "Normalization adapted",
            "CategoryEncoding weights",
        ],
        options={
            "clipnorm": 0.1,
            "weight_decay": 0.05,
            "gradient_accumulation_steps": 2,
        },
        use="keras.ModelParallel",
    ),
    "typed weights in a file": Program(
        "vector",
        [("Typed", "bfloat16", "array"), ("Typed", "int32", "function")],
        PAIR,
        {0: ROWS, 2: COLUMNS},
        "Adam",
        options={
            "use_ema": True,
            "ema_momentum": 0.5,
            "ema_overwrite_frequency": 2,
            "scaled": True,
        },
        way="train_on_batch",
        use="distribution.LayoutMap",
        file="keras",
        second_mesh=SQUARE,
        second_axes={0: COLUMNS, 1: ROWS},
    ),
    "planned recurrent layer": Program(
        "tokens",
        [("GRU",), ("Typed", "float16", "random_normal")],
        SQUARE,
        {},
        "AdamW",
        end="mean",
        options={"weight_decay": 0.05},
        way="eager tape of a function",
        use="auto with little memory",
        file="weights.h5",
    ),
    "photos": Program(
        "photo",
        [("Conv2D strides",)],
        SQUARE,
        {0: [None, None, None, "model"]},
        end="mean",
        front=["RandomRotation", "RandomColorJitter"],
        way="tape in a function",
        use="distribution.ModelParallel",
        policy="float32",
    ),
}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(
    "name",
    [
        "columns",
        "typed weights in a file",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("planned recurrent layer", "photos")
        ),
    ],
)
def test_covering_program_matches_a_single_device(name):
    outcome = random_models.run(COVERING[name])
    assert random_models.kind_of(outcome) in ("equal", "noise"), outcome


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(24))
def test_random_model_matches_a_single_device(seed):
    program = random_models.draw(seed)
    outcome = random_models.run(program)
    assert random_models.kind_of(outcome) in random_models.ACCEPTED, (
        outcome,
        program,
    )


@pytest.mark.exhaustive
def test_comparison_detects_a_difference():
    """Checks that the comparison detects another weight decay."""
    program = Program("vector", [("Dense",)], PAIR, {0: COLUMNS})
    first = random_models.trained(program, no_mesh, no_mesh)
    program.options = {"weight_decay": 0.1}
    second = random_models.trained(program, no_mesh, no_mesh)
    assert random_results.difference(first, first) == "equal"
    for noise in (None, [[0.0] * 99]):
        outcome = random_results.difference(first, second, noise)
        assert outcome.startswith("differs in losses")
    noise = [[9.0] * 99]
    assert random_results.difference(first, second, noise) == "noise"
