"""Workloads of the benchmarks with seeded, uniform or skewed ids.

This module does not import TensorFlow, because processes that measure other
libraries use it, too.
"""

import dataclasses

import numpy as np

DISTRIBUTIONS = ("uniform", "zipf")

# Numbers of distinct values of the 26 categorical columns of Criteo's display
# advertising data, limited to a million.
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
    """The tables and batches of a benchmark.

    Attributes:
      name: Name of the workload in tables, charts and JSON files.
      num_rows: Number of rows of each table. Each table has one feature.
      dim: Number of columns of the tables.
      num_samples: Number of samples in a batch.
      fewest_ids: Minimum number of ids of a sample in each feature.
      most_ids: Maximum number of ids of a sample in each feature. The numbers
        of ids are uniformly distributed between `fewest_ids` and `most_ids`.
      distribution: Distribution of the ids, one of `DISTRIBUTIONS`.
    """

    name: str
    num_rows: tuple[int, ...]
    dim: int
    num_samples: int
    fewest_ids: int
    most_ids: int
    distribution: str = "uniform"

    def draw(self, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns a batch: the int64 ids and row_splits of each feature."""
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
    workload.name: workload
    for workload in (
        Workload("one table", (2_000_000,), 64, 8192, 20, 20),
        Workload("zipf", (2_000_000,), 64, 8192, 20, 20, "zipf"),
        Workload("26 tables", CRITEO_ROWS, 64, 4096, 1, 1),
        Workload("ragged", (200_000,) * 8, 32, 2048, 0, 40),
        Workload("wide", (1_000_000,), 256, 4096, 10, 10),
    )
}


@dataclasses.dataclass(frozen=True)
class Dlrm:
    """Sizes of a DLRM with Criteo's tables.

    Attributes:
      dim: Number of columns of the tables.
      num_samples: Number of samples in a batch. Each sample has one id per
        table.
      num_rows: Number of rows of each table.
      num_numbers: Number of dense features.
      bottom: Widths of the layers between the dense features and a vector with
        `dim` values.
      top: Widths of the layers between the interactions and the logit.
      num_batches: Number of distinct batches.
    """

    dim: int
    num_samples: int
    num_rows: tuple[int, ...] = CRITEO_ROWS
    num_numbers: int = 13
    bottom: tuple[int, ...] = (128,)
    top: tuple[int, ...] = (256, 64)
    num_batches: int = 4

    def draw(
        self, distribution: str
    ) -> list[tuple[np.ndarray, list[np.ndarray], np.ndarray]]:
        """Returns batches: dense features, the ids of each table, labels."""
        rng = np.random.default_rng(7)
        return [
            (
                rng.random((self.num_samples, self.num_numbers), np.float32),
                [
                    draw_ids(rng, distribution, self.num_samples, size)
                    for size in self.num_rows
                ],
                rng.integers(0, 2, (self.num_samples, 1)).astype(np.float32),
            )
            for _ in range(self.num_batches)
        ]


DLRMS = {"dim 16": Dlrm(16, 2048), "dim 64": Dlrm(64, 4096)}


def draw_ids(
    rng: np.random.Generator,
    distribution: str,
    num_ids: int,
    num_rows: int,
) -> np.ndarray:
    """Returns random ids.

    Args:
      rng: Random number generator.
      distribution: `"uniform"` or `"zipf"`. With `"zipf"` the row of rank
        `k` is about `k ** -1.05` times as frequent as the row of rank 1.
        Frequent rows are spread over the table, as in a table of hashed ids.
      num_ids: Number of ids.
      num_rows: Number of rows of the table.

    Returns:
      `[num_ids]` int64 in `[0, num_rows)`.
    """
    if distribution == "uniform":
        return rng.integers(0, num_rows, num_ids)
    exponent = 1.05
    # Ranks are the inverse of the continuous distribution function on
    # [1, num_rows], applied to uniform random numbers.
    tail = 1.0 - num_rows ** (1.0 - exponent)
    ranks = (1.0 - rng.random(num_ids) * tail) ** (1.0 / (1.0 - exponent))
    ranks = np.minimum(ranks.astype(np.int64), num_rows) - 1
    # Ranks are multiplied by a prime number. The prime does not divide the
    # table size, so this is a permutation of the rows.
    return ranks * 2_654_435_761 % num_rows
