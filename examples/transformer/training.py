"""Trains with `fit`, saves the model each epoch, and resumes a saved model."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from completion.data.corpus import DataError

import tf_layoutmap as tlm
from transformer.model import build_model, compile_model
from transformer.settings import Settings

_NAME = "epoch-{epoch:04d}.keras"


def batches(
    training: np.ndarray, settings: Settings, first_step: int
) -> tf.data.Dataset:
    """Returns an infinite dataset of batches that depend only on the step.

    A resumed run therefore sees the same batches as an uninterrupted run.

    Args:
      training: `[num_characters]` uint8 rows.
      settings: Settings of the run.
      first_step: Number of steps that earlier runs have trained.

    Returns:
      Pairs of int32 tensors `[batch_size, context]`: characters, and the
      character that follows each of them.
    """
    text = tf.constant(training)
    places = tf.range(settings.context + 1)

    def batch(step):
        starts = tf.random.stateless_uniform(
            [settings.batch_size, 1],
            [settings.seed, step],
            maxval=len(training) - settings.context,
            dtype=tf.int32,
        )
        rows = tf.cast(tf.gather(text, starts + places), tf.int32)
        return rows[:, :-1], rows[:, 1:]

    # In TensorFlow 2.21, deleting an iterator that autotunes can take a minute.
    options = tf.data.Options()
    options.autotune.enabled = False
    return (
        tf.data.Dataset.range(first_step, tf.int64.max)
        .map(batch)
        .prefetch(2)
        .with_options(options)
    )


def newest(folder: Path) -> Path | None:
    """Returns the newest saved model in `folder`, or None."""
    return max(folder.glob("epoch-*.keras"), default=None)


def make_or_load(
    layout_map: tlm.LayoutMap, settings: Settings, num_rows: int, folder: Path
) -> keras.Model:
    """Returns the newest saved model, or a new one, compiled on the mesh.

    Saved models do not depend on a mesh. `layout_map` shards the weights when
    the model is loaded.

    Raises:
      DataError: The saved model is damaged.
    """
    saved = newest(folder)
    with tlm.layout_map_scope(layout_map):
        if saved is None:
            model = build_model(settings, num_rows)
            compile_model(model, settings)
            return model
        try:
            return keras.saving.load_model(saved)
        # The zip, JSON and HDF5 readers raise different errors for a truncated
        # file.
        except Exception as error:
            reason = str(error).strip().splitlines() or [repr(error)]
            raise DataError(
                f"The saved model {saved} cannot be loaded: {reason[0]} "
                "Remove it to resume from the previous one, or pass --fresh to "
                "train a new model."
            ) from error


def train(
    model: keras.Model,
    training: np.ndarray,
    windows: np.ndarray,
    settings: Settings,
    folder: Path,
) -> bool:
    """Trains the epochs that earlier runs have not completed.

    Args:
      model: Compiled model.
      training: `[num_characters]` uint8 rows.
      windows: `[num_windows, context + 1]` held-out rows.
      settings: Settings of the run.
      folder: Folder in which the model is saved after each epoch.

    Returns:
      Whether any epoch was trained.
    """
    done = int(model.optimizer.iterations)
    first_epoch = done // settings.steps_per_epoch
    if first_epoch >= settings.epochs:
        return False
    model.fit(
        batches(training, settings, done),
        epochs=settings.epochs,
        initial_epoch=first_epoch,
        steps_per_epoch=settings.steps_per_epoch,
        validation_data=(windows[:, :-1], windows[:, 1:]),
        validation_batch_size=settings.batch_size,
        shuffle=False,
        # Log files cannot show a progress bar, so `fit` prints a line per
        # epoch.
        verbose=1 if sys.stdout.isatty() else 2,
        callbacks=[
            keras.callbacks.LearningRateScheduler(settings.rate_of),
            keras.callbacks.ModelCheckpoint(folder / _NAME),
            keras.callbacks.TerminateOnNaN(),
        ],
    )
    return True
