"""Which positions and which negatives a training step gets."""

from __future__ import annotations

import numpy as np

# Between drawing by frequency (0 would be evenly): rare items are drawn more
# often than they occur, or they would hardly ever be told apart.
_POWER = 0.75


class BatchSampler:
    """Draws the batches of a run: the same for a step whenever it is asked.

    So a run that goes on from a checkpoint sees what it would have seen.
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
        """Prepares the draws.

        Args:
          positions: Those that are trained on, at least `batch_size`.
          counts: `[num_rows]` how often training has each row; the rows
            with 0 are never drawn.
          batch_size: Positions of a step.
          num_negatives: Draws of a step.
          seed: Chooses all of it.
        """
        self._positions = positions
        self._batch_size = batch_size
        self._num_negatives = num_negatives
        self._seed = seed
        shares = np.where(counts > 0, counts, 0).astype(np.float64) ** _POWER
        shares /= shares.sum()
        self._up_to = np.cumsum(shares)
        self._up_to /= self._up_to[-1]
        # Chance that a row is among the draws at least once.
        self._log_chance = np.log(
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
        """Returns the full batches in all positions."""
        return len(self._positions) // self._batch_size

    def positions(self, step: int) -> np.ndarray:
        """Returns the positions of a step; an epoch has each at most once."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            order = np.random.default_rng([self._seed, 1, epoch])
            self._epoch = (epoch, order.permutation(self._positions))
        start = index * self._batch_size
        return self._epoch[1][start : start + self._batch_size]

    def negatives(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns distinct rows, int32, and the log of the chance of each."""
        draws = np.random.default_rng([self._seed, 2, step]).random(
            self._num_negatives
        )
        rows = np.unique(np.searchsorted(self._up_to, draws, side="right"))
        return rows.astype(np.int32), self._log_chance[rows]
