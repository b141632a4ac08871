"""What can be chosen about a run."""

from __future__ import annotations

import dataclasses

_FEWEST, _MOST = 200, 1440  # steps that a run takes unless told


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and rates; the defaults fit two cores and a few minutes.

    Attributes:
      dim: Columns of the tables of items.
      hidden: Width of the tower.
      dropout: Share of the tower's units left out of a training step.
      num_shards: Shards that each table is cut into.
      batch_size: Positions of a training step.
      num_negatives: Items drawn to score each step's targets against; the
        ones drawn twice count once.
      num_steps: Training steps in all; None: see `steps_for`.
      table_rate: Learning rate of the tables, at the start.
      tower_rate: Learning rate of the tower, at the start.
      seed: Of everything that is drawn.
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
        """Returns these settings with a number of steps.

        Unless one was asked for: four times over all positions, but enough
        for a small folder and not more than a few minutes for a large one.

        >>> Settings().steps_for(102_400).num_steps
        400
        """
        if self.num_steps is not None:
            return self
        wanted = 4 * num_positions // self.batch_size
        return dataclasses.replace(
            self, num_steps=min(max(wanted, _FEWEST), _MOST)
        )
