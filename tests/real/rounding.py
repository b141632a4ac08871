"""How much of a difference rounding makes, measured without a mesh.

Devices add up in another order, so the last bits of sums differ. What a model
makes of that is its own affair: one that divides by the deviation of a few
numbers makes much of it. The same model, its first weights changed by their
last bit, shows how much.
"""

import contextlib
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np
import tf_keras

from tests.real.compare import losses_differ_by

LAST_BIT = 2.0**-24
# Beyond this, no amount of rounding is an excuse.
MOST = 1e-4
# Several sums of a step are rounded, not only the first weights.
FACTOR = 10
# Where the last bits happen to fall matters as well.
TIMES = 3
# Steps of some models make a hundred times as much of a last bit as the one
# before. What differs so much less in float64 is rounding alone in float32: a
# wrong number would be as wrong in both.
IN_FLOAT64 = 1e-4
ROUNDING_ALONE = float("inf")

_RANDOM = tuple(
    getattr(package.initializers, name)
    for package in (keras, tf_keras)
    for name in (
        "VarianceScaling",
        "RandomUniform",
        "RandomNormal",
        "TruncatedNormal",
    )
)


def _changed(original: Callable, signs: np.random.Generator) -> Callable:
    def call(initializer, shape, dtype=None, **options):
        value = original(initializer, shape, dtype, **options)
        factors = 1 + LAST_BIT * 2 * signs.choice([-1, 1], tuple(shape))
        return value * keras.ops.convert_to_tensor(
            factors.astype(np.float32), dtype=value.dtype
        )

    return call


@contextlib.contextmanager
def last_bits_changed(seed: int = 0):
    """Weights that are drawn in here differ in their last bit."""
    signs = np.random.default_rng(seed)
    with contextlib.ExitStack() as stack:
        for kind in _RANDOM:
            stack.enter_context(
                mock.patch.object(
                    kind, "__call__", _changed(kind.__call__, signs)
                )
            )
        yield


@contextlib.contextmanager
def in_float64():
    """Models that are made in here compute in float64.

    What differs by rounding alone hardly differs there.
    """
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before)


def allowed(expected, train: Callable[[], list[float]]) -> float:
    """Returns by how much losses may differ, at most `MOST`.

    Args:
      expected: The losses without a mesh.
      train: Trains once more without one, and returns the losses.
    """
    moved = 0.0
    for seed in range(TIMES):
        with last_bits_changed(seed):
            moved = max(moved, losses_differ_by(expected, train()))
    return min(FACTOR * moved, MOST)


def of_losses(
    difference: float,
    expected,
    train: Callable[[], list[float]],
    train_on_mesh: Callable[[], list[float]],
) -> float:
    """Returns by how much losses on a mesh may differ.

    Args:
      difference: By how much they do.
      expected: The losses without a mesh.
      train: Trains once more without one, and returns the losses.
      train_on_mesh: Trains once more on it, and returns the losses.

    Returns:
      At most `MOST`, or `ROUNDING_ALONE`.
    """
    most = allowed(expected, train)
    if difference <= most:
        return most
    with in_float64():
        there = losses_differ_by(train(), train_on_mesh())
    return ROUNDING_ALONE if there < IN_FLOAT64 * difference else most


def allowed_of_outputs(
    model: keras.Model, differ_by: Callable[[], float]
) -> float:
    """Returns by how much outputs may differ, at most `MOST`.

    Args:
      model: Without a mesh; its weights are changed, and back again.
      differ_by: The difference of its outputs to those it had.
    """
    values = [keras.ops.convert_to_numpy(w) for w in model.weights]
    moved = 0.0
    for seed in range(TIMES):
        signs = np.random.default_rng(seed)
        for weight, value in zip(model.weights, values):
            if np.issubdtype(value.dtype, np.floating):
                weight.assign(
                    value
                    * (1 + LAST_BIT * 2 * signs.choice([-1, 1], value.shape))
                )
        moved = max(moved, differ_by())
    for weight, value in zip(model.weights, values):
        weight.assign(value)
    return min(FACTOR * moved, MOST)
