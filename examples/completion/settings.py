"""Settings of a run."""

from __future__ import annotations

import dataclasses

_FEWEST, _MOST = 200, 1440  # Limits of the default number of steps.


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and learning rates; a default run takes minutes on two cores.

    Attributes:
      dim: Number of columns of the tables of items.
      hidden: Width of the tower's hidden layer.
      dropout: Dropout rate of the hidden layer.
      num_shards: Number of shards of each table.
      batch_size: Number of positions in a training step.
      num_negatives: Number of negatives that are drawn in each step, before
        duplicates are removed.
      num_steps: Total number of training steps, or None for the default of
        `steps_for`.
      table_rate: Initial learning rate of the tables.
      tower_rate: Initial learning rate of the tower.
      seed: Seed of all random numbers.
    """

    dim: int = 48
    hidden: int = 192
    dropout: float = 0.1
    num_shards: int = 4
    batch_size: int = 1024
    num_negatives: int = 1024
    num_steps: int | None = None
    table_rate: float = 0.4
    tower_rate: float = 2e-3
    seed: int = 7

    def steps_for(self, num_positions: int) -> Settings:
        """Returns these settings with the number of steps set.

        The default is four passes over all positions, with at least 200 and at
        most 1,440 steps.

        >>> Settings().steps_for(102_400).num_steps
        400
        """
        if self.num_steps is not None:
            return self
        wanted = 4 * num_positions // self.batch_size
        return dataclasses.replace(
            self, num_steps=min(max(wanted, _FEWEST), _MOST)
        )
