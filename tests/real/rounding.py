"""Measures the differences that rounding errors cause, without a mesh.

Devices add in a different order, so the last bits of sums differ. Some models
amplify these differences, for example models that divide by the standard
deviation of few numbers. To measure the amplification, the same model is
trained with initial weights that differ in their last bit.
"""

import contextlib
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np
import tf_keras

from tests.real.compare import losses_differ_by

LAST_BIT = 2.0**-24
# Larger differences are never accepted as rounding errors.
MOST = 1e-4
# Factor between the accepted difference and the effect of the initial weights.
# The factor is above 1, because each step also rounds several sums.
FACTOR = 10
# The effect depends on which last bits are changed, so the largest effect of
# several random changes is used.
TIMES = 3
# In some models, each step amplifies a rounding error by a factor of 100. Such
# models are also compared in float64. A difference that is smaller in float64
# by the factor `IN_FLOAT64` is caused by rounding, because a wrong result would
# be equally wrong in both dtypes.
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
    """Changes the last bit of all weights that are initialized in the block."""
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
    """Makes models in this context compute in float64.

    Differences that rounding causes are much smaller in float64.
    """
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before)


def allowed(expected, train: Callable[[], list[float]]) -> float:
    """Returns the accepted difference of losses, at most `MOST`.

    Args:
      expected: Losses without a mesh.
      train: Function that trains again without a mesh and returns the losses.
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
    """Returns the accepted difference of losses on a mesh.

    Args:
      difference: Measured difference.
      expected: Losses without a mesh.
      train: Function that trains again without a mesh and returns the losses.
      train_on_mesh: Function that trains again on the mesh and returns the
        losses.

    Returns:
      A difference of at most `MOST`, or `ROUNDING_ALONE`.
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
    """Returns the accepted difference of outputs, at most `MOST`.

    Args:
      model: Model without a mesh. The weights are changed and restored.
      differ_by: Function that computes outputs, and returns their difference
        from the original outputs.
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
