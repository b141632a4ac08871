"""Trains a two-tower model on string ids, and updates a served model nightly.

    python examples/nightly_deltas.py
    python examples/nightly_deltas.py --nights=6 --views=20000

The data is synthetic and generated in memory; nothing is downloaded. Each day,
new users and new items appear. Their ids are strings, and the tables have open
vocabularies, so no list of ids is created in advance. The model is trained with
a sampled softmax with logQ correction: the negatives are sampled from the items
that have a row.

A separate process serves the model and does not load tf_layoutmap. The program
exports the model after the first day. After each later day, it writes a delta
that contains the changed rows, keys and dense weights, and the serving process
applies the delta while it runs. The program then measures how often the item
that a user views next is among the ten items that the served model recommends.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import IO, Any, cast

from absl import app, flags, logging

# TensorFlow reads this variable when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from completion.report import Report

_NIGHTS = flags.DEFINE_integer("nights", 3, "Number of deltas.", lower_bound=1)
_VIEWS = flags.DEFINE_integer(
    "views", 12_000, "Views of items per day.", lower_bound=1000
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", 4, "Number of passes over the views of a day.", lower_bound=1
)
_NEGATIVES = flags.DEFINE_integer(
    "negatives", 200, "Negatives in a training step.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 7, "Seed of all draws.", lower_bound=0)

_AT = 10
_SERVER = pathlib.Path(__file__).with_name("nightly_deltas_server.py")


class Server:
    """A serving process, which reads requests from a pipe."""

    def __init__(self, model: pathlib.Path, folder: pathlib.Path):
        """Starts the process.

        Args:
          model: SavedModel to serve.
          folder: New folder for the modules of the process.
        """
        import tf_layoutmap as tlm

        # The serving process requires only TensorFlow, NumPy and this folder.
        package = pathlib.Path(tlm.__file__).parent
        shutil.copytree(package / "deltas" / "served", folder / "served_deltas")
        shutil.copy(_SERVER, folder)
        self._process = subprocess.Popen(
            [sys.executable, folder / _SERVER.name, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        cast("IO[str]", self._process.stdin).close()
        self._process.wait()

    def ask(self, **request: Any) -> Any:
        """Sends a request and returns the answer.

        Raises:
          RuntimeError: If the process has ended.
        """
        stdin = cast("IO[str]", self._process.stdin)
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer = cast("IO[str]", self._process.stdout).readline()
        if not answer:
            raise RuntimeError(
                f"The serving process ended with code {self._process.wait()}."
            )
        return json.loads(answer)


def run(report: Report, folder: pathlib.Path, **options: int) -> None:
    """Trains, exports, and updates the served model after each day.

    Args:
      report: Prints the results.
      folder: Empty folder for all files.
      **options: The flags.
    """
    # The imports take seconds. They follow the flag checks, so that invalid
    # flags are reported without delay.
    import keras
    import tensorflow as tf
    from nightly_deltas_data import Shop
    from nightly_deltas_model import TwoTower, export, train

    import tf_layoutmap as tlm

    keras.utils.set_random_seed(options["seed"])
    shop = Shop(options["views"], options["seed"])
    model = TwoTower(options["negatives"], options["seed"])
    first = shop.next_day()
    train(model, first, options["epochs"])

    base = tf.train.Checkpoint(model=model).save(str(folder / "base"))
    writer = tlm.deltas.DeltaWriter(model, str(folder / "deltas"), base=base)
    export(model, str(folder / "model"))
    writer.mark_export(str(folder / "model"))

    def recall(views: Any) -> float:
        return server.ask(
            users=views.users,
            cities=views.cities,
            viewed=views.items,
            candidates=shop.items,
            at=_AT,
        )["recall"]

    nights = []
    with Server(folder / "model", folder / "server") as server:
        today = recall(first.held_out)
        for night in range(1, options["nights"] + 1):
            views = shop.next_day()
            train(model, views, options["epochs"])
            delta = writer.write()
            before = recall(views.held_out)
            applied = server.ask(deltas=str(folder / "deltas"))
            assert applied["sequence"] == delta.meta.sequence
            nights.append(
                {
                    "night": night,
                    "new items": views.num_new_items,
                    "changed rows": sum(
                        table["num_rows"]
                        for table in delta.meta.tables.values()
                    ),
                    # Optimizers have further variables.
                    "changed weights": sum(
                        weight["is_changed"] and not weight["is_state"]
                        for weight in delta.meta.weights.values()
                    ),
                    "time to apply": f"{1000 * applied['seconds']:.0f} ms",
                    "before": f"{before:.3f}",
                    "after": f"{recall(views.held_out):.3f}",
                    "most popular": f"{views.recall_of_popular(_AT):.3f}",
                }
            )
        loads_package = server.ask(loaded="tf_layoutmap")["is_loaded"]
    assert not loads_package, "the serving process has loaded tf_layoutmap"
    stats = model.items.vocabulary.stats()
    report.table(
        "Training",
        ["", ""],
        [
            ("items that have a row", f"{stats['num_keys']:,}"),
            ("rows", f"{stats['num_rows']:,}"),
            (
                f"recall@{_AT} of the first day, in the serving process",
                f"{today:.3f}",
            ),
        ],
    )
    report.table(
        f"Each night: recall@{_AT} of views of the day that were held out, in "
        "the serving process before and after it applies the delta",
        list(nights[0]),
        [list(night.values()) for night in nights],
        numbers=list(nights[0]),
    )
    report.print_summary()


def main(argv: list[str]) -> None:
    """Runs the program in a temporary folder."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        run(
            Report(),
            pathlib.Path(folder),
            nights=_NIGHTS.value,
            views=_VIEWS.value,
            epochs=_EPOCHS.value,
            negatives=_NEGATIVES.value,
            seed=_SEED.value,
        )


if __name__ == "__main__":
    app.run(main)
