"""AUC of the model of `examples/dlrm.py` before and after its export.

    python -m benchmarks.whole_models.exported_auc

For each seed, the program trains the model on the synthetic data of
`examples/dlrm.py`, with the default settings. The program then computes the
exact AUC on held-out samples: the probability that a sample with a click has a
higher score than a sample without a click. Exported models are loaded and
called in the same way as in a server.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf

import tf_layoutmap as tlm

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

from clicks import criteo, generating, training
from clicks.scores import auc
from clicks.settings import Settings

NUM_LINES = 120_000  # The default number of `examples/dlrm.py`.
SEEDS = (7, 8, 9)
KINDS = ("float32", "float16", "int8", "int4")


def measure(seed: int, folder: pathlib.Path) -> dict[str, float]:
    """Returns the AUC for each dtype of exported rows.

    The key `"trained"` is the AUC of the model before the export.
    """
    settings = Settings(seed=seed)
    path = folder / "lines.txt"
    generating.generate(path, NUM_LINES, settings.seed)
    clicks = criteo.look_through(path, NUM_LINES)
    table_rows = clicks.table_rows(settings.max_rows)
    model = training.make_or_load(
        tf.distribute.get_strategy(), settings, table_rows, folder
    )
    training.train(model, clicks, table_rows, settings, folder)
    batches = list(
        criteo.held_out_batches(clicks, table_rows, settings.batch_size)
    )
    labels = np.concatenate([label.numpy()[:, 0] for _, label in batches])

    def auc_of(logits_of) -> float:
        return auc(
            labels,
            np.concatenate(
                [
                    np.asarray(logits_of(features))[:, 0]
                    for features, _ in batches
                ]
            ),
        )

    aucs = {"trained": auc_of(lambda features: model(features))}
    for kind in KINDS:
        tlm.export(model, folder / kind, kind)
        # `loaded` owns the variables of `serve`, and must therefore exist while
        # `serve` is called.
        loaded = tf.saved_model.load(folder / kind)
        aucs[kind] = auc_of(loaded.serve)
    return aucs


def main() -> None:
    """Measures all seeds and prints the results as a table."""
    table = rich.table.Table(title=f"AUC on {NUM_LINES:,} synthetic lines")
    for column in ("seed", "trained", *KINDS):
        table.add_column(column, justify="right")
    for seed in SEEDS:
        keras.utils.clear_session()
        with tempfile.TemporaryDirectory() as folder:
            aucs = measure(seed, pathlib.Path(folder))
        table.add_row(
            str(seed),
            f"{aucs['trained']:.6f}",
            *(
                f"{aucs[kind]:.6f} ({aucs[kind] - aucs['trained']:+.6f})"
                for kind in KINDS
            ),
        )
    rich.console.Console(width=110).print(table)


if __name__ == "__main__":
    main()
