"""What can be chosen about a run."""

from __future__ import annotations

import dataclasses
import math


class SettingsError(Exception):
    """Sizes that do not go together; says which and what would."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and rates; the defaults fit two cores and three minutes.

    Attributes:
      mesh: Devices along the axes "batch" and "model".
      context: Characters the model sees at once.
      dim: Width of the model.
      num_heads: Attention heads of a block.
      num_blocks: Blocks of attention and MLP.
      batch_size: Windows of a training step.
      epochs: How often the model is saved and measured.
      steps_per_epoch: Training steps from one to the next.
      rate: The highest learning rate.
      seed: Of everything that is drawn.
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
        """Returns the learning rate of an epoch: half a wave down to 5 %.

        >>> settings = Settings(epochs=3, rate=1.0)
        >>> [round(settings.rate_of(epoch), 3) for epoch in range(3)]
        [1.0, 0.525, 0.05]
        """
        done = min(1.0, epoch / max(1, self.epochs - 1))
        return self.rate * (0.525 + 0.475 * math.cos(math.pi * done))

    def shape_facts(self) -> dict[str, int]:
        """Returns what a saved model must agree with; not the mesh."""
        return {
            "context": self.context,
            "dim": self.dim,
            "heads": self.num_heads,
            "blocks": self.num_blocks,
        }

    def check(self) -> None:
        """Raises unless the sizes fit the mesh.

        Raises:
          SettingsError: A size that the mesh has to divide is not divisible.
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
