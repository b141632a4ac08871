"""Settings of a run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and learning rates; a default run takes half a minute on two cores.

    Attributes:
      batch_size: Number of lines in a training step, over all replicas.
      epochs: Passes over the training lines. The model is saved after each
        pass.
      dim: Width of the embedding rows and of the bottom MLP's output.
      max_rows: Maximum number of rows of a table.
      capacity: Number of keys of each open vocabulary, or None to hash values
        to rows.
      table_rate: Learning rate of the tables' Adagrad. The rate is high because
        the loss is the mean over a batch, and each row occurs in only a few
        samples of a batch.
      rate: Learning rate of the dense layers' Adam.
      seed: Seed of all random numbers.
    """

    batch_size: int = 512
    epochs: int = 2
    dim: int = 16
    max_rows: int = 100_000
    capacity: int | None = None
    table_rate: float = 5.0
    rate: float = 2e-3
    seed: int = 7
