"""The training loop, and the checkpoints it leaves on the way."""

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
    """The checkpoints of one model in one folder."""

    def __init__(self, model: Completer, folder: Path):
        """Looks into `folder`, which is made if it is not there."""
        self._model = model
        self._manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(**model.saved_parts()),
            str(folder / "checkpoints"),
            max_to_keep=2,
        )

    @property
    def latest(self) -> str | None:
        """Returns the path of the newest checkpoint, if there is one."""
        return self._manager.latest_checkpoint

    def restore(self) -> str | None:
        """Restores the newest checkpoint; returns its path, or None.

        Raises:
          DataError: It is damaged, or something of the model is not in it.
        """
        if self.latest is None:
            return None
        try:
            status = self._manager.checkpoint.restore(self.latest)
            status.assert_existing_objects_matched()
        # TensorFlow's reader raises any of these for a file cut short.
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
                "Start over with --fresh."
            ) from error
        self._model.after_restore()
        return self.latest

    def save(self, step: int) -> str:
        """Saves and returns the path."""
        self._model.before_save()
        return self._manager.save(checkpoint_number=step)


def claim_folder(folder: Path, facts: dict[str, object]) -> None:
    """Makes `folder` this model's, or refuses if it is another's.

    Args:
      folder: Where the checkpoints are to be.
      facts: What a model must share with its checkpoints.

    Raises:
      DataError: The folder holds checkpoints of a model with other facts.
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
                "start over with --fresh."
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
    """Trains until `num_steps` steps are done, in this run or before.

    Args:
      model: With the state of its newest checkpoint, or a new one.
      reader: Gives the features of positions.
      sampler: Chooses positions and negatives.
      checkpoints: Where the state goes.
      num_steps: Steps in all.
      save_every: Steps between checkpoints; the last one is always saved.

    Returns:
      Examples per second, or 0 if nothing was left to train.

    Raises:
      FloatingPointError: The loss is no number any more.
    """
    first = int(model.step)
    if first >= num_steps:
        return 0.0
    bar = keras.utils.Progbar(
        num_steps,
        unit_name="step",
        stateful_metrics=["loss", "examples/s"],
        # A log is not redrawn; a line every few seconds is enough.
        interval=0.2 if sys.stdout.isatty() else 10,
    )
    start, num_examples, loss = time.monotonic(), 0, None
    for step in range(first, num_steps):
        positions = sampler.positions(step)
        negatives, log_chance = sampler.negatives(step)
        found = model.train_step(
            to_tensors(reader.batch(positions)),
            tf.constant(reader.targets(positions)),
            tf.constant(negatives),
            tf.constant(log_chance),
        )
        num_examples += len(positions)
        found = float(found)
        if not math.isfinite(found):
            raise FloatingPointError(
                f"The loss of step {step} is {found}. Nothing after the last "
                f"checkpoint was saved ({checkpoints.latest})."
            )
        # An average that forgets, as a single batch says little.
        loss = found if loss is None else 0.98 * loss + 0.02 * found
        rate = num_examples / (time.monotonic() - start)
        if (step + 1) % save_every == 0 or step + 1 == num_steps:
            checkpoints.save(step + 1)
        bar.update(step + 1, [("loss", loss), ("examples/s", round(rate))])
    return rate
