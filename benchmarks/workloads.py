"""Seeded ids, uniform and skewed, and the lookups that are measured.

Imports no TensorFlow: other libraries measure the same in processes of their
own.
"""

import dataclasses

import numpy as np

DISTRIBUTIONS = ("uniform", "zipf")

# Distinct values of the 26 categorical columns of Criteo's display advertising
# data, no more than a million of each.
CRITEO_ROWS = tuple(
    min(num_values, 1_000_000)
    for num_values in (
        1460,
        583,
        10_131_227,
        2_202_608,
        305,
        24,
        12_517,
        633,
        3,
        93_145,
        5683,
        8_351_593,
        3194,
        27,
        14_992,
        5_461_306,
        10,
        5652,
        2173,
        4,
        7_046_547,
        18,
        15,
        286_181,
        105,
        142_572,
    )
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step looks up, and updates with Adagrad.

    Attributes:
      name: In tables, pictures and JSON.
      num_rows: Of each table; each has one feature.
      dim: Floats in a row.
      num_samples: Of a batch.
      fewest_ids: Of a sample, in each feature.
      most_ids: The same. Every number between them is as likely.
      distribution: One of `DISTRIBUTIONS`.
    """

    name: str
    num_rows: tuple[int, ...]
    dim: int
    num_samples: int
    fewest_ids: int
    most_ids: int
    distribution: str = "uniform"

    def draw(self, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Draws a batch: of each feature ids and row_splits, int64."""
        rng = np.random.default_rng(seed)
        batch = []
        for num_rows in self.num_rows:
            sizes = rng.integers(
                self.fewest_ids, self.most_ids + 1, self.num_samples
            )
            splits = np.concatenate([[0], np.cumsum(sizes)])
            batch.append(
                (
                    draw_ids(rng, self.distribution, int(splits[-1]), num_rows),
                    splits,
                )
            )
        return batch

    def __str__(self) -> str:
        tables = (
            f"{self.num_rows[0]:,} rows"
            if len(self.num_rows) == 1
            else f"{len(self.num_rows)} tables"
        )
        ids = (
            f"{self.most_ids}"
            if self.fewest_ids == self.most_ids
            else f"{self.fewest_ids}-{self.most_ids}"
        )
        return (
            f"{tables} x {self.dim}, {self.num_samples} x {ids} "
            f"{self.distribution} ids"
        )


WORKLOADS = {
    one.name: one
    for one in (
        Workload("one table", (2_000_000,), 64, 8192, 20, 20),
        Workload("zipf", (2_000_000,), 64, 8192, 20, 20, "zipf"),
        Workload("26 tables", CRITEO_ROWS, 64, 4096, 1, 1),
        Workload("ragged", (200_000,) * 8, 32, 2048, 0, 40),
        Workload("wide", (1_000_000,), 256, 4096, 10, 10),
    )
}


def draw_ids(
    rng: np.random.Generator,
    distribution: str,
    num_ids: int,
    num_rows: int,
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
