"""Checks that random models on a mesh match a single device, in float64.

`tests/layout/random_models.py` draws the programs. `FIXED` lists minimized
programs that failed in earlier versions.
"""

import keras
import pytest

from tests import covering
from tests.layout import random_models
from tests.layout.random_models import Program

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


# Tokens have the layers of sequences.
@pytest.mark.parametrize("kind", covering.but(random_models.LAYERS, "tokens"))
def test_every_layer_and_expression_builds(kind):
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


# The program of seed 5 diverges on a single device.
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [seed for seed in range(13) if seed != 5])
def test_random_model_matches_a_single_device(seed):
    program = random_models.draw(seed)
    assert random_models.run(program) == "equal", program


@pytest.mark.exhaustive
def test_comparison_detects_a_difference():
    """Checks that the comparison detects a different learning rate."""
    program = Program("vector", [("Dense",)], PAIR, {0: COLUMNS})
    model = random_models.build(program)
    values = model.get_weights()
    first = random_models.train(model, program)
    model = random_models.build(program)
    model.set_weights(values)
    program.optimizer = "SGD nesterov"
    second = random_models.train(model, program)
    assert random_models.difference(first, first) == "equal"
    assert random_models.difference(first, second).startswith("differs in ")
