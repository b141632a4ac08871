"""What can be chosen about a run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and rates; the defaults fit two cores and half a minute.

    Attributes:
      batch_size: Lines of a training step, over all replicas.
      epochs: Passes over the training lines; the model is saved after each.
      dim: Width of each row, and of what the numbers become.
      max_rows: Rows of a table at most.
      capacity: Keys of a table whose values are keys, as they come; None for
        tables of rows that values are hashed to.
      table_rate: Learning rate of the tables' Adagrad. High, because the
        gradient of a row is a few samples' share of the mean of a batch.
      rate: Learning rate of the dense layers' Adam.
      seed: Of everything that is drawn.
    """

    batch_size: int = 512
    epochs: int = 2
    dim: int = 16
    max_rows: int = 100_000
    capacity: int | None = None
    table_rate: float = 5.0
    rate: float = 2e-3
    seed: int = 7
