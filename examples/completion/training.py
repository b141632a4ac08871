"""The training loop and its checkpoints."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import keras
import tensorflow as tf

from completion.data.corpus import DataError
from completion.data.features import FeatureReader
from completion.data.sampling import BatchSampler
from completion.model import Completer, to_tensors

FACTS = "model.json"


class Checkpoints:
    """Writes and restores the checkpoints of one model in one folder."""

    def __init__(self, model: Completer, folder: Path):
        """Opens the checkpoints in `folder`, which is created if missing."""
        self._model = model
        self._manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(**model.saved_parts()),
            str(folder / "checkpoints"),
            max_to_keep=2,
        )

    @property
    def latest(self) -> str | None:
        """Path of the newest checkpoint, or None."""
        return self._manager.latest_checkpoint

    def restore(self) -> str | None:
        """Restores the newest checkpoint and returns its path, or None.

        Raises:
          DataError: The checkpoint is damaged, or lacks a part of the model.
        """
        if self.latest is None:
            return None
        try:
            status = self._manager.checkpoint.restore(self.latest)
            status.assert_existing_objects_matched()
        # TensorFlow's reader may raise any of these errors for a truncated
        # file.
        except (
            tf.errors.OpError,
            ValueError,
            IndexError,
            RuntimeError,
            AssertionError,
        ) as error:
            reason = str(error).strip().splitlines()[0]
            raise DataError(
                f"The checkpoint {self.latest} cannot be restored: {reason} "
                "Pass --fresh to train a new model."
            ) from error
        self._model.after_restore()
        return self.latest

    def save(self, step: int) -> str:
        """Writes a checkpoint and returns its path."""
        self._model.before_save()
        return self._manager.save(checkpoint_number=step)


def claim_folder(folder: Path, facts: dict[str, object]) -> None:
    """Creates `folder` and records the model whose checkpoints it contains.

    Args:
      folder: Folder of the checkpoints.
      facts: Properties that must be equal for the model and its checkpoints.

    Raises:
      DataError: The folder contains checkpoints of a model with different
        properties.
    """
    path = folder / FACTS
    if path.exists():
        found = json.loads(path.read_text())
        differing = [
            name
            for name in sorted({*facts, *found})
            if facts.get(name) != found.get(name)
        ]
        if differing:
            name = differing[0]
            raise DataError(
                f"--model_dir must be empty or hold the same model. Received: "
                f"{str(folder)!r}, whose {name} is {found.get(name)!r}; this "
                f"run's is {facts.get(name)!r}. Choose another folder, or "
                "pass --fresh to train a new model."
            )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1))


def train(
    model: Completer,
    reader: FeatureReader,
    sampler: BatchSampler,
    checkpoints: Checkpoints,
    *,
    num_steps: int,
    save_every: int,
) -> float:
    """Trains up to `num_steps` steps, including the steps of earlier runs.

    Args:
      model: New model, or a model restored from its newest checkpoint.
      reader: Reader of the features of positions.
      sampler: Sampler of positions and negatives.
      checkpoints: Object that writes the checkpoints.
      num_steps: Total number of steps.
      save_every: Steps between checkpoints. The last step is always saved.

    Returns:
      Examples per second, or 0 if earlier runs had completed all steps.

    Raises:
      FloatingPointError: The loss is not finite.
    """
    first = int(model.step)
    if first >= num_steps:
        return 0.0
    bar = keras.utils.Progbar(
        num_steps,
        unit_name="step",
        stateful_metrics=["loss", "examples/s"],
        # Log files cannot show a progress bar, so a line is printed every 10
        # seconds.
        interval=0.2 if sys.stdout.isatty() else 10,
    )
    start, num_examples, loss = time.monotonic(), 0, None
    for step in range(first, num_steps):
        positions = sampler.positions(step)
        negatives, log_probability = sampler.negatives(step)
        found = model.train_step(
            to_tensors(reader.batch(positions)),
            tf.constant(reader.targets(positions)),
            tf.constant(negatives),
            tf.constant(log_probability),
        )
        num_examples += len(positions)
        found = float(found)
        if not math.isfinite(found):
            raise FloatingPointError(
                f"The loss must be finite. Received: {found} (step {step}). "
                f"The last checkpoint is {checkpoints.latest}."
            )
        # The moving average is printed, because the loss of a batch is noisy.
        loss = found if loss is None else 0.98 * loss + 0.02 * found
        rate = num_examples / (time.monotonic() - start)
        if (step + 1) % save_every == 0 or step + 1 == num_steps:
            checkpoints.save(step + 1)
        bar.update(step + 1, [("loss", loss), ("examples/s", round(rate))])
    return rate
