"""Results of the random models in `random_models.py`, and their comparison."""

import dataclasses

import numpy as np

# Results in float64 differ only because sums are computed in a different order.
# The magnitude of gradients is near 1.
TOLERANCE = 1e-7
# A larger difference is accepted if it is at most this multiple of the
# difference that rounding errors in the initial weights cause.
NOISE_FACTOR = 30


@dataclasses.dataclass
class Result:
    """Numbers of a run, in the order in which they are compared."""

    initial: dict[str, np.ndarray]
    losses: list[float]
    weights: dict[str, np.ndarray]
    predictions: np.ndarray


def numbers(result: Result) -> list[tuple[str, np.ndarray]]:
    return [
        ("losses", np.asarray(result.losses)),
        *result.weights.items(),
        ("predictions", result.predictions),
    ]


def apart(first, second) -> float:
    first, second = (np.asarray(v, np.float64) for v in (first, second))
    if first.shape != second.shape:
        return np.inf
    return float(np.max(np.abs(first - second), initial=0.0))


def difference(
    expected: list[Result],
    results: list[Result],
    noise: list[list[float]] | None = None,
) -> str:
    """Compares initial weights, losses, weights and predictions.

    Args:
      expected: Results without a mesh.
      results: Results on a mesh.
      noise: How much rounding errors change each number.

    Returns:
      `"equal"`, `"noise"`, or a description of the first difference.
    """
    outcome = "equal"
    # Initial weights are bitwise identical. After loading a file, the weights
    # are trained weights.
    for name, value in expected[0].initial.items():
        if not np.array_equal(value, results[0].initial.get(name)):
            return f"initial value differs in {name}"
    for phase, (first, second) in enumerate(zip(expected, results)):
        pairs = zip(numbers(first), numbers(second), strict=True)
        for i, ((name, value), (other_name, other)) in enumerate(pairs):
            if name.split()[0] != other_name.split()[0]:
                return f"differs in names: {name}, {other_name}"
            distance = apart(value, other)
            scale = np.max(np.abs(np.asarray(value, np.float64)), initial=0.0)
            if distance <= TOLERANCE * (1 + scale):
                continue
            if noise is None or not distance <= NOISE_FACTOR * noise[phase][i]:
                return f"differs in {name} by {distance:.1e} in run {phase}"
            outcome = "noise"
    return outcome
