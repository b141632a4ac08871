"""Trains with `fit`, saves the model each epoch, and resumes a saved model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf
from completion.data.corpus import DataError

import tf_layoutmap as tlm
from clicks.criteo import Clicks, held_out_batches, training_batches
from clicks.model import build_model
from clicks.settings import Settings

_NAME = "epoch-{epoch:04d}.keras"


def newest(folder: Path) -> Path | None:
    """Returns the newest saved model in `folder`, or None."""
    return max(folder.glob("epoch-*.keras"), default=None)


def make_or_load(
    strategy: tf.distribute.Strategy,
    settings: Settings,
    table_rows: list[int] | None,
    folder: Path,
) -> keras.Model:
    """Returns the newest saved model, or a new compiled model.

    Saved models do not depend on the strategy.

    Raises:
      DataError: The saved model is damaged.
    """
    # The global seed determines the initial weights and, together with the
    # operation seeds, the order of the datasets. A resumed run must set the
    # same seed.
    keras.utils.set_random_seed(settings.seed)
    saved = newest(folder)
    with strategy.scope():
        if saved is None:
            return build_model(table_rows, settings)
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
    clicks: Clicks,
    table_rows: list[int] | None,
    settings: Settings,
    folder: Path,
) -> bool:
    """Trains the epochs that earlier runs have not completed.

    Returns:
      Whether any epoch was trained.

    Raises:
      DataError: The file has too few lines for one step.
    """
    steps = clicks.num_training // settings.batch_size
    if not steps:
        raise DataError(
            "--batch_size must be at most the number of training lines, "
            f"{clicks.num_training:,}. Received: {settings.batch_size:,}."
        )
    first_epoch = int(model.optimizer.iterations.numpy()) // steps
    if first_epoch >= settings.epochs:
        return False

    def data(make: Callable[[int, int], tf.data.Dataset]):
        if not isinstance(
            model.distribute_strategy, tf.distribute.ParameterServerStrategy
        ):
            return make(1, 0)
        return tlm.ps.Datasets(
            lambda context: make(
                context.num_input_pipelines, context.input_pipeline_id
            )
        )

    model.fit(
        data(
            lambda num_workers, worker: training_batches(
                clicks,
                table_rows,
                settings.batch_size,
                first_epoch=first_epoch,
                epochs=settings.epochs,
                seed=settings.seed,
                num_workers=num_workers,
                worker=worker,
            )
        ),
        epochs=settings.epochs,
        initial_epoch=first_epoch,
        steps_per_epoch=steps,
        validation_data=data(
            lambda num_workers, worker: held_out_batches(
                clicks, table_rows, settings.batch_size, num_workers, worker
            )
        ),
        shuffle=False,
        # Log files cannot show a progress bar, so `fit` prints a line per
        # epoch.
        verbose=1 if sys.stdout.isatty() else 2,
        callbacks=[
            keras.callbacks.ModelCheckpoint(folder / _NAME),
            keras.callbacks.TerminateOnNaN(),
        ],
    )
    return True
