"""Sampling of the positions and the negatives of a training step."""

from __future__ import annotations

import numpy as np

# Negatives are drawn with a probability proportional to `frequency ** _POWER`.
# With a power of 1, rare items would be drawn too rarely to train their rows.
# With a power of 0, all items would be drawn equally often.
_POWER = 0.75


class BatchSampler:
    """A sampler whose draws depend only on the seed and the step.

    A run that resumes from a checkpoint therefore sees the same batches as an
    uninterrupted run.
    """

    def __init__(
        self,
        positions: np.ndarray,
        counts: np.ndarray,
        *,
        batch_size: int,
        num_negatives: int,
        seed: int,
    ):
        """Initializes the sampler.

        Args:
          positions: Training positions, at least `batch_size`.
          counts: `[num_rows]` frequency of each row in training; rows with a
            frequency of 0 are never drawn.
          batch_size: Number of positions in a step.
          num_negatives: Number of draws in a step.
          seed: Seed of all draws.
        """
        self._positions = positions
        self._batch_size = batch_size
        self._num_negatives = num_negatives
        self._seed = seed
        shares = np.where(counts > 0, counts, 0).astype(np.float64) ** _POWER
        shares /= shares.sum()
        self._up_to = np.cumsum(shares)
        self._up_to /= self._up_to[-1]
        # Log of the probability that a row is drawn at least once.
        self._log_probability = np.log(
            np.maximum(
                -np.expm1(
                    num_negatives * np.log1p(-np.minimum(shares, 1 - 1e-9))
                ),
                1e-30,
            )
        ).astype(np.float32)
        self._epoch = (-1, positions)

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches in an epoch."""
        return len(self._positions) // self._batch_size

    def positions(self, step: int) -> np.ndarray:
        """Returns the positions of a step, each at most once per epoch."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            order = np.random.default_rng([self._seed, 1, epoch])
            self._epoch = (epoch, order.permutation(self._positions))
        start = index * self._batch_size
        return self._epoch[1][start : start + self._batch_size]

    def negatives(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns distinct rows, int32, and the log of their probabilities."""
        draws = np.random.default_rng([self._seed, 2, step]).random(
            self._num_negatives
        )
        rows = np.unique(np.searchsorted(self._up_to, draws, side="right"))
        return rows.astype(np.int32), self._log_probability[rows]
