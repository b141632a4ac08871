"""Batches, and a model that is saved on the way and taken up again."""

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
    """Returns endless batches of windows; a step decides what is in it.

    So a run that goes on sees what it would have seen without a stop.

    Args:
      training: `[num_characters]` uint8 rows.
      settings: Of the run.
      first_step: Steps already done.

    Returns:
      Pairs of `[batch_size, context]` int32: characters, and those that
      follow them.
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

    # An iterator that autotunes can take a minute to end.
    options = tf.data.Options()
    options.autotune.enabled = False
    return (
        tf.data.Dataset.range(first_step, tf.int64.max)
        .map(batch)
        .prefetch(2)
        .with_options(options)
    )


def newest(folder: Path) -> Path | None:
    """Returns the newest saved model in `folder`, if there is one."""
    return max(folder.glob("epoch-*.keras"), default=None)


def make_or_load(
    layout_map: tlm.LayoutMap, settings: Settings, num_rows: int, folder: Path
) -> keras.Model:
    """Returns a compiled model on the mesh: the newest one, or a new one.

    What was saved knows of no mesh; it is cut as `layout_map` says.

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
        # A file cut short fails in zip, JSON or HDF5, each in its own way.
        except Exception as error:
            reason = str(error).strip().splitlines() or [repr(error)]
            raise DataError(
                f"The saved model {saved} cannot be loaded: {reason[0]} "
                "Remove it to go on from the one before, or start over with "
                "--fresh."
            ) from error


def train(
    model: keras.Model,
    training: np.ndarray,
    windows: np.ndarray,
    settings: Settings,
    folder: Path,
) -> bool:
    """Trains until all epochs are done, in this run or before.

    Args:
      model: Compiled.
      training: `[num_characters]` uint8 rows.
      windows: `[num_windows, context + 1]` held-out rows.
      settings: Of the run.
      folder: Where the model is saved after each epoch.

    Returns:
      Whether there was anything left to do.
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
        # A log is not redrawn; a line an epoch is enough.
        verbose=1 if sys.stdout.isatty() else 2,
        callbacks=[
            keras.callbacks.LearningRateScheduler(settings.rate_of),
            keras.callbacks.ModelCheckpoint(folder / _NAME),
            keras.callbacks.TerminateOnNaN(),
        ],
    )
    return True
