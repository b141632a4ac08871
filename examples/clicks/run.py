"""The steps of a run: data, training, metrics and export."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from completion.report import Report
from completion.training import FACTS, claim_folder

import tf_layoutmap as tlm
from clicks import serving, training
from clicks.criteo import (
    CATEGORIES,
    NUM_FEATURES,
    Clicks,
    held_out_batches,
    look_through,
    read_lines,
)
from clicks.generating import generate, true_probabilities
from clicks.model import TABLES, predict_probabilities
from clicks.scores import ClickRates, auc, log_loss
from clicks.settings import Settings

_NUM_ASKED = 500
# The exported graph adds numbers in a different order, so results are rounded
# differently.
_TOLERANCE = 1e-5


def run(
    report: Report,
    settings: Settings,
    *,
    data: str | None,
    model_dir: str | None,
    fresh: bool,
    max_lines: int,
    replicas: int,
    cluster: bool = False,
) -> None:
    """Runs the example: reads data, trains, measures and exports a model.

    Args:
      report: Report to print to.
      settings: Sizes and learning rates.
      data: File in the format of `train.txt`, or None to generate one.
      model_dir: Folder of the saved models, or None for the default folder.
      fresh: Whether to remove the saved models of `model_dir` first.
      max_lines: Maximum number of lines to read, or to generate.
      replicas: Number of logical CPUs that share each batch.
      cluster: Whether to train on the cluster of `TF_CONFIG`.

    Raises:
      DataError: The data is invalid, the folder contains a different model, or
        the saved model is damaged.
    """
    strategy = tlm.ps.connect() if cluster else _strategy(replicas)
    folder = Path(model_dir or _cache_folder(data)).expanduser()
    path = Path(data).expanduser() if data else folder / "generated.txt"
    if data is None:
        generate(path, max_lines, settings.seed)
        report.say(
            "--data is not set: the data is synthetic. Its lines have Criteo's "
            "format, the values follow Zipf's law, and the clicks are drawn "
            f"from known probabilities ({path})."
        )
    clicks = look_through(path, max_lines)
    counted_rows = clicks.table_rows(settings.max_rows)
    is_open = settings.capacity is not None
    table_rows = None if is_open else counted_rows
    _show_data(report, clicks)

    if fresh:
        forget(folder)
    claim_folder(
        folder,
        {
            "dim": settings.dim,
            "rows": counted_rows,
            **({"capacity": settings.capacity} if is_open else {}),
        },
    )
    saved = training.newest(folder)
    model = training.make_or_load(strategy, settings, table_rows, folder)
    _show_plan(report, model, replicas, cluster)
    report.begin(saved, int(model.optimizer.iterations.numpy()), folder)
    if not training.train(model, clicks, table_rows, settings, folder):
        report.say(
            f"Training is complete: --epochs={settings.epochs}. "
            "Pass --fresh to train a new model."
        )
    if cluster:
        # This process loads the model that was trained and saved on the
        # cluster.
        model = training.make_or_load(
            tf.distribute.get_strategy(), settings, table_rows, folder
        )
    truth = true_probabilities(path) if data is None else None
    if is_open:
        _show_keys(report, model, clicks)
    compare(report, model, clicks, table_rows, settings, truth)
    serve(report, model, clicks, table_rows, folder)
    report.print_summary()


def compare(
    report: Report,
    model: keras.Model,
    clicks: Clicks,
    table_rows: list[int] | None,
    settings: Settings,
    truth: np.ndarray | None,
) -> None:
    """Compares the model with baselines on the held-out lines."""
    held_out = held_out_batches(clicks, table_rows, settings.batch_size)
    # The baseline hashes values to rows, even if the model uses open
    # vocabularies.
    counted_rows = clicks.table_rows(settings.max_rows)
    features, labels = _arrays(
        held_out_batches(clicks, counted_rows, settings.batch_size)
    )
    rates = ClickRates(
        *_arrays(
            tf.data.TextLineDataset(str(clicks.path))
            .take(clicks.num_training)
            .batch(4096)
            .map(lambda lines: read_lines(lines, counted_rows))
        )
    )
    figures = {
        "constant rate": np.full(len(labels), rates.mean),
        "naive Bayes": rates.probabilities(features),
        "DLRM": predict_probabilities(model, held_out),
    }
    if truth is not None:
        figures["true probabilities"] = truth[
            clicks.num_training : clicks.num_lines
        ]
    report.table(
        f"Held-out lines: the last {clicks.num_held_out:,}",
        ["model", "AUC", "log loss"],
        [
            [
                name,
                f"{auc(labels, probabilities):.4f}",
                f"{log_loss(labels, probabilities):.4f}",
            ]
            for name, probabilities in figures.items()
        ],
        numbers=["AUC", "log loss"],
    )
    gain = auc(labels, figures["DLRM"]) - auc(labels, figures["naive Bayes"])
    report.say(
        (
            "AUC is the probability that a line with a click scores above a "
            "line without one. Log loss is in nats. Naive Bayes adds the "
            "evidence of each value and ignores interactions. "
        )
        + (
            "No model can be better than the true probabilities. "
            if truth is not None
            else ""
        )
        + (
            f"The AUC of DLRM is {gain:.4f} above naive Bayes."
            if gain > 0
            else "The AUC of DLRM is not above naive Bayes yet: train it for "
            "more epochs, or on more lines."
        )
    )


def serve(
    report: Report,
    model: keras.Model,
    clicks: Clicks,
    table_rows: list[int] | None,
    folder: Path,
) -> None:
    """Exports the model and compares its predictions in another process.

    Raises:
      RuntimeError: The predictions differ.
    """
    served = serving.Served(model, table_rows)
    target = folder / "saved_model"
    size = serving.export(served, target)
    with clicks.path.open("rb") as file:
        lines = [
            line.rstrip(b"\r\n").partition(b"\t")[2]
            for line, _ in zip(file, range(clicks.num_lines))
        ]
    asked = lines[clicks.num_training :][:_NUM_ASKED]
    own = served.probabilities(tf.constant(asked)).numpy()
    answers = serving.ask_elsewhere(target, asked)
    difference = np.abs(answers - own).max()
    if not difference <= _TOLERANCE:
        raise RuntimeError(
            "The exported and the trained model must have equal predictions "
            f"within {_TOLERANCE}. Received: a difference of "
            f"{difference}."
        )
    report.say(
        f"Exported to {target}, {size / 1e6:.1f} MB: a model from lines of "
        f"{NUM_FEATURES} features to click probabilities. A process without "
        f"tf_layoutmap predicted the same for {len(asked)} held-out lines "
        f"(largest difference {difference:.0e})."
    )


def forget(folder: Path) -> None:
    """Removes the models of earlier runs from `folder`; keeps other files."""
    for saved in folder.glob("epoch-*.keras"):
        saved.unlink()
    (folder / FACTS).unlink(missing_ok=True)


def _show_data(report, clicks):
    num_fields = clicks.num_lines * NUM_FEATURES
    widest = int(np.argmax(clicks.num_distinct))
    report.table(
        "Data",
        ["", ""],
        [
            (
                "lines",
                f"{clicks.num_lines:,}, "
                f"{clicks.num_clicks / clicks.num_lines:.1%} with a click",
            ),
            (
                "blank",
                f"{clicks.num_blanks / num_fields:.1%} of {num_fields:,} "
                "features",
            ),
            (
                "distinct values",
                f"{sum(clicks.num_distinct):,} in "
                f"{len(CATEGORIES)} categories; {CATEGORIES[widest]} has the "
                f"most, {clicks.num_distinct[widest]:,}",
            ),
            ("training", f"the first {clicks.num_training:,} lines"),
            (
                "held out",
                f"the last {clicks.num_held_out:,} lines; lines are ordered "
                "by time",
            ),
        ],
    )


def _show_plan(report, model, replicas, cluster):
    found = model.get_layer(TABLES).embedding.stats()
    stats = found["tables"].values()
    servers = f"sharded over {len(found.get('servers', ()))} servers"
    num_weights = (
        sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
        - 1
    )
    rows = [
        [
            "26 tables",
            f"{sum(one['num_bytes'] for one in stats) / 1e6:.1f}",
            f"{sum(one['num_slot_bytes'] for one in stats) / 1e6:.1f}",
            "Adagrad of each table",
            servers if cluster else "one copy, on the host",
        ],
        [
            "bottom and top MLP",
            f"{4 * num_weights / 1e6:.1f}",
            f"{8 * num_weights / 1e6:.1f}",
            "Adam of Keras",
            "on the servers"
            if cluster
            else "one copy"
            if replicas == 1
            else f"replicated on {replicas} replicas",
        ],
    ]
    report.table(
        "Model",
        ["weights", "MB", "optimizer MB", "optimizer", "placement"],
        rows,
        numbers=["MB", "optimizer MB"],
    )


def _show_keys(report, model, clicks):
    vocabularies = model.get_layer(TABLES).embedding.vocabularies
    stats = [one.stats() for one in vocabularies.values()]

    def total(name):
        return f"{sum(one[name] for one in stats):,}"

    lookups = sum(one["num_lookups"] for one in stats)
    known = sum(one["num_known"] for one in stats)
    report.table(
        "Open vocabularies: values are keys and are not hashed",
        ["", ""],
        [
            (
                "distinct values in training",
                f"{sum(clicks.num_distinct):,}",
            ),
            ("values with a row", total("num_keys")),
            ("rows", total("num_rows")),
            (
                "lookups of values with a row",
                f"{known / lookups:.1%}" if lookups else "none yet",
            ),
            ("evicted values", total("num_evicted")),
        ],
    )


def _arrays(batches):
    """Returns all features and labels as numpy arrays."""
    # In TensorFlow 2.21, deleting an iterator that autotunes can take a minute.
    options = tf.data.Options()
    options.autotune.enabled = False
    batches = batches.with_options(options)
    features, labels = zip(*batches.as_numpy_iterator(), strict=True)
    return (
        {
            name: np.concatenate([one[name] for one in features])
            for name in features[0]
        },
        np.concatenate(labels)[:, 0],
    )


def _strategy(replicas):
    if replicas == 1:
        return tf.distribute.get_strategy()
    # TensorFlow can split the CPU only before it runs its first operation.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    return tf.distribute.MirroredStrategy(
        [f"CPU:{replica}" for replica in range(replicas)]
    )


def _cache_folder(data: str | None) -> Path:
    """Returns a folder in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        # The path is relative if the user has no home directory.
        cache = tempfile.gettempdir()
    label = (
        "generated"
        if data is None
        else (Path(data).expanduser().resolve().name)
    )
    return Path(cache, "tf_layoutmap", "dlrm", label)
