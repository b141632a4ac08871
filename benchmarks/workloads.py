"""Seeded ids, uniform and skewed."""

import numpy as np

DISTRIBUTIONS = ("uniform", "zipf")


def draw_ids(
    rng: np.random.Generator, distribution: str, num_ids: int, num_rows: int,
) -> np.ndarray:
    """Ids as a training job has them.

    Args:
      rng: Where the randomness comes from.
      distribution: `"uniform"`, or `"zipf"`: the row of rank `k` is drawn
        about `k ** -1.05` as often as the first. Ranks are scattered over the
        table, as by hashed vocabularies.
      num_ids: How many.
      num_rows: Rows of the table.

    Returns:
      `[num_ids]` int64 in `[0, num_rows)`.
    """
    if distribution == "uniform":
        return rng.integers(0, num_rows, num_ids)
    exponent = 1.05
    # The inverse of the continuous distribution function on [1, num_rows].
    tail = 1.0 - num_rows ** (1.0 - exponent)
    ranks = (1.0 - rng.random(num_ids) * tail) ** (1.0 / (1.0 - exponent))
    ranks = np.minimum(ranks.astype(np.int64), num_rows) - 1
    # A prime that divides no usual table size visits every row once.
    return ranks * 2_654_435_761 % num_rows
