"""What can be chosen about a run."""

from __future__ import annotations

import dataclasses


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
      num_steps: Training steps in all.
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
    num_steps: int = 720
    table_rate: float = 0.4
    tower_rate: float = 2e-3
    seed: int = 7
