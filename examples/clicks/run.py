"""The run from beginning to end, in the order a person reads it."""

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
    NUM_FACTS,
    Clicks,
    held_out_batches,
    look_through,
    read_lines,
)
from clicks.generating import generate, planted_chances
from clicks.model import TABLES, chances_of
from clicks.scores import ClickRates, auc, log_loss
from clicks.settings import Settings

_NUM_ASKED = 500
# Sums run in another order in an exported graph.
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
    """Reads or makes the data, trains, measures, exports and shows.

    Raises:
      DataError: The data cannot be used, the folder belongs to another
        model, or the saved model is damaged.
    """
    strategy = tlm.ps.connect() if cluster else _strategy(replicas)
    folder = Path(model_dir or _cache_folder(data)).expanduser()
    path = Path(data).expanduser() if data else folder / "generated.txt"
    if data is None:
        generate(path, max_lines, settings.seed)
        report.say(
            "No --data was given: what follows is made up. The lines have "
            "the format of Criteo's, their values are skewed as Zipf's law "
            f"has it, and clicks are drawn from planted chances ({path})."
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
            f"Nothing left to train: --epochs={settings.epochs}. "
            "--fresh starts over."
        )
    if cluster:
        # What servers have written, read by one process.
        model = training.make_or_load(
            tf.distribute.get_strategy(), settings, table_rows, folder
        )
    planted = planted_chances(path) if data is None else None
    if is_open:
        _show_keys(report, model, clicks)
    compare(report, model, clicks, table_rows, settings, planted)
    serve(report, model, clicks, table_rows, folder)
    report.print_summary()


def compare(
    report: Report,
    model: keras.Model,
    clicks: Clicks,
    table_rows: list[int] | None,
    settings: Settings,
    planted: np.ndarray | None,
) -> None:
    """Compares the model with rates by counting, on held-out lines."""
    held_out = held_out_batches(clicks, table_rows, settings.batch_size)
    # Counts are by row, whatever the model takes.
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
        "one rate for all": np.full(len(labels), rates.mean),
        "click rates of values": rates.chances(features),
        "the model": chances_of(model, held_out),
    }
    if planted is not None:
        figures["the planted chances"] = planted[
            clicks.num_training : clicks.num_lines
        ]
    report.table(
        f"Held-out lines: the last {clicks.num_held_out:,}",
        ["foretold by", "AUC", "nats"],
        [
            [
                name,
                f"{auc(labels, chances):.4f}",
                f"{log_loss(labels, chances):.4f}",
            ]
            for name, chances in figures.items()
        ],
        numbers=["AUC", "nats"],
    )
    ahead = auc(labels, figures["the model"]) - auc(
        labels, figures["click rates of values"]
    )
    report.say(
        (
            "AUC is the chance that a click scores above a line without one. "
            "Click rates of values are added up as if no value knew of another "
            "(naive Bayes). "
        )
        + (
            "No model can score above the planted chances. "
            if planted is not None
            else ""
        )
        + (
            f"The model is {ahead:.4f} ahead of the click rates."
            if ahead > 0
            else "The model is not ahead of the click rates yet: train it "
            "longer, or on more lines."
        )
    )


def serve(
    report: Report,
    model: keras.Model,
    clicks: Clicks,
    table_rows: list[int] | None,
    folder: Path,
) -> None:
    """Exports, and holds the answers of another process against our own.

    Raises:
      RuntimeError: They differ.
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
    own = served.chances(tf.constant(asked)).numpy()
    answers = serving.ask_elsewhere(target, asked)
    difference = np.abs(answers - own).max()
    if not difference <= _TOLERANCE:
        raise RuntimeError(
            "The exported model must answer as the trained one does, to "
            f"{_TOLERANCE}. Received: a difference of {difference}."
        )
    report.say(
        f"Exported to {target}, {size / 1e6:.1f} MB: from lines of "
        f"{NUM_FACTS} facts to chances. A process without tf_layoutmap "
        f"answered {len(asked)} held-out lines equally (largest difference "
        f"{difference:.0e})."
    )


def forget(folder: Path) -> None:
    """Removes the models a run has left in `folder`, and nothing else."""
    for saved in folder.glob("epoch-*.keras"):
        saved.unlink()
    (folder / FACTS).unlink(missing_ok=True)


def _show_data(report, clicks):
    facts = clicks.num_lines * NUM_FACTS
    widest = int(np.argmax(clicks.num_distinct))
    report.table(
        "What it read",
        ["", ""],
        [
            (
                "lines",
                f"{clicks.num_lines:,}, of them "
                f"{clicks.num_clicks / clicks.num_lines:.1%} with a click",
            ),
            ("blank", f"{clicks.num_blanks / facts:.1%} of {facts:,} facts"),
            (
                "distinct values",
                f"{sum(clicks.num_distinct):,} in "
                f"{len(CATEGORIES)} categories; {CATEGORIES[widest]} has most, "
                f"{clicks.num_distinct[widest]:,}",
            ),
            ("to train on", f"{clicks.num_training:,} lines"),
            (
                "held out",
                f"the last {clicks.num_held_out:,}: lines are in the "
                "order of time",
            ),
        ],
    )


def _show_plan(report, model, replicas, cluster):
    found = model.get_layer(TABLES).embedding.stats()
    stats = found["tables"].values()
    servers = f"in shards on {len(found.get('servers', ()))} servers"
    num_weights = (
        sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
        - 1
    )
    rows = [
        [
            "26 tables",
            f"{sum(one['num_bytes'] for one in stats) / 1e6:.1f}",
            f"{sum(one['num_slot_bytes'] for one in stats) / 1e6:.1f}",
            "Adagrad, of each table",
            servers if cluster else "once, on the host",
        ],
        [
            "two towers",
            f"{4 * num_weights / 1e6:.1f}",
            f"{8 * num_weights / 1e6:.1f}",
            "Adam, by Keras",
            "on the servers"
            if cluster
            else "once"
            if replicas == 1
            else f"in each of {replicas} replicas",
        ],
    ]
    report.table(
        "The plan",
        ["weights", "MB", "MB of optimizer", "optimizer", "held"],
        rows,
        numbers=["MB", "MB of optimizer"],
    )


def _show_keys(report, model, clicks):
    vocabularies = model.get_layer(TABLES).embedding.vocabularies
    stats = [one.stats() for one in vocabularies.values()]

    def total(name):
        return f"{sum(one[name] for one in stats):,}"

    lookups = sum(one["num_lookups"] for one in stats)
    known = sum(one["num_known"] for one in stats)
    report.table(
        "Values as they came: nothing was hashed to a number of rows",
        ["", ""],
        [
            (
                "distinct values of the training lines",
                f"{sum(clicks.num_distinct):,}",
            ),
            ("values with a row", total("num_keys")),
            ("rows", total("num_rows")),
            (
                "lookups that found a row",
                f"{known / lookups:.1%}" if lookups else "none yet",
            ),
            ("values that gave their row away", total("num_evicted")),
        ],
    )


def _arrays(batches):
    """All features and labels as numpy arrays."""
    # An iterator that autotunes can take a minute to end.
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
    # Splits the CPU, which TensorFlow does only before its first op.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    return tf.distribute.MirroredStrategy(
        [f"CPU:{replica}" for replica in range(replicas)]
    )


def _cache_folder(data: str | None) -> Path:
    """Returns a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        cache = tempfile.gettempdir()  # There is no home.
    label = (
        "generated"
        if data is None
        else (Path(data).expanduser().resolve().name)
    )
    return Path(cache, "tf_layoutmap", "dlrm", label)
