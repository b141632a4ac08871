"""Training of the model on parameter servers with a `tlm.ps.Run`.

Workers are other processes and cannot use the Python objects of this process.
The batches are therefore written to files first, and each worker reads its
shard of the batches.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

import tf_layoutmap as tlm
from completion.data.features import FeatureReader
from completion.data.sampling import BatchSampler
from completion.model import FEATURE_SPECS, Completer

_IDS = tf.TensorSpec([None], tf.int32)
_BATCH_SPEC = {
    **{f"{name}/values": _IDS for name in FEATURE_SPECS},
    **{
        f"{name}/splits": tf.TensorSpec([None], tf.int64)
        for name in FEATURE_SPECS
    },
    "target": _IDS,
    "negatives": _IDS,
    "log_probability": tf.TensorSpec([None], tf.float32),
}
# The batches of a full epoch can take many times the disk space of the data.
_MOST_BATCHES = 500
_BATCHES, _CHECKPOINTS = FOLDERS = "batches", "checkpoints_of_servers"


def write_batches(
    reader: FeatureReader, sampler: BatchSampler, count: int, folder: Path
) -> Path:
    """Writes the batches of the first steps to a subfolder of `folder`.

    Returns:
      Path of the subfolder.
    """

    def batches():
        for step in range(min(count, _MOST_BATCHES)):
            positions = sampler.positions(step)
            negatives, log_probability = sampler.negatives(step)
            batch = {
                "target": reader.targets(positions),
                "negatives": negatives,
                "log_probability": log_probability,
            }
            for name, rows in reader.batch(positions).items():
                batch[f"{name}/values"] = rows.values
                batch[f"{name}/splits"] = rows.splits
            yield batch

    written = folder / _BATCHES
    shutil.rmtree(written, ignore_errors=True)
    # In TensorFlow 2.21, deleting an iterator that autotunes can take a minute.
    options = tf.data.Options()
    options.autotune.enabled = False
    tf.data.Dataset.from_generator(
        batches, output_signature=_BATCH_SPEC
    ).with_options(options).save(str(written))
    return written


def train(
    strategy: tf.distribute.Strategy,
    make: Callable[[], Completer],
    batches: Path,
    folder: Path,
    *,
    num_steps: int,
) -> tuple[float, str]:
    """Trains up to `num_steps` steps, including the steps of earlier runs.

    Args:
      strategy: Strategy that `tlm.ps.connect` returned.
      make: Function that creates the model. It is called in the strategy's
        scope.
      batches: Folder that `write_batches` returned.
      folder: Folder of the run, in which checkpoints are saved.
      num_steps: Total number of steps of all workers.

    Returns:
      Examples per second, or 0 if earlier runs had completed all steps, and the
      path of the newest checkpoint.
    """
    with strategy.scope():
        model = make()
    num_workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])

    def dataset_fn():
        worker = (
            tf.distribute.coordinator.experimental_get_current_worker_index()
        )
        return (
            tf.data.Dataset.load(str(batches))
            .shard(num_workers, tf.cast(worker, tf.int64))
            .repeat()
            .prefetch(4)
        )

    def step(batch):
        features = {
            name: tf.RaggedTensor.from_row_splits(
                batch[f"{name}/values"], batch[f"{name}/splits"], validate=False
            )
            for name in FEATURE_SPECS
        }
        model.take_step(
            features,
            batch["target"],
            batch["negatives"],
            batch["log_probability"],
        )
        return tf.size(batch["target"])

    folder = folder / _CHECKPOINTS
    run = tlm.ps.Run(
        strategy,
        step,
        dataset_fn,
        folder,
        objects=model.saved_parts(),
        save_every="1min",
        max_to_keep=2,
    )
    left, began = num_steps - run.num_done, time.monotonic()
    size = run.steps(until=num_steps)
    newest = folder / f"closure-{run.num_done}" / "variables"
    return (
        left * int(size) / (time.monotonic() - began)
        if left > 0 and size is not None
        else 0.0
    ), str(newest)


def read(model: Completer, checkpoint: str) -> None:
    """Restores a checkpoint of the servers into a model of this process."""
    tf.train.Checkpoint(**model.saved_parts()).read(
        checkpoint
    ).assert_existing_objects_matched()
    model.after_restore()
