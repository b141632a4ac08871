"""Settings of a run."""

from __future__ import annotations

import dataclasses
import math


class SettingsError(Exception):
    """A size is not a multiple of the number in the message."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and rates; a default run takes two minutes on two cores.

    Attributes:
      mesh: Number of devices along the axes "batch" and "model".
      context: Number of characters in a window.
      dim: Width of the model.
      num_heads: Number of attention heads of a block.
      num_blocks: Number of blocks of attention and MLP.
      batch_size: Number of windows in a training step.
      epochs: Number of epochs. The model is saved and measured after each
        epoch.
      steps_per_epoch: Number of training steps in an epoch.
      rate: Initial learning rate.
      seed: Seed of all random numbers.
    """

    mesh: tuple[int, int] = (2, 2)
    context: int = 64
    dim: int = 64
    num_heads: int = 4
    num_blocks: int = 2
    batch_size: int = 64
    epochs: int = 8
    steps_per_epoch: int = 75
    rate: float = 3e-3
    seed: int = 7

    def rate_of(self, epoch: int) -> float:
        """Returns the learning rate of an epoch: cosine decay to 5 %.

        >>> settings = Settings(epochs=3, rate=1.0)
        >>> [round(settings.rate_of(epoch), 3) for epoch in range(3)]
        [1.0, 0.525, 0.05]
        """
        done = min(1.0, epoch / max(1, self.epochs - 1))
        return self.rate * (0.525 + 0.475 * math.cos(math.pi * done))

    def shape_facts(self) -> dict[str, int]:
        """Returns the sizes of a saved model, which do not include the mesh."""
        return {
            "context": self.context,
            "dim": self.dim,
            "heads": self.num_heads,
            "blocks": self.num_blocks,
        }

    def check(self) -> None:
        """Raises an error if the mesh does not divide the sizes evenly.

        Raises:
          SettingsError: A size is not a multiple of the size of its mesh axis.
        """
        batch, model = self.mesh
        for flag, size, devices, axis in (
            ("--batch_size", self.batch_size, batch, "batch"),
            ("--heads", self.num_heads, model, "model"),
            ("--dim", self.dim, model, "model"),
            ("--dim", self.dim, self.num_heads, "heads"),
        ):
            if size % devices:
                raise SettingsError(
                    f"{flag} must be a multiple of {devices}, "
                    + (
                        "the number of --heads"
                        if axis == "heads"
                        else f"the size of mesh axis {axis!r}"
                    )
                    + f". Received: {size}."
                )
