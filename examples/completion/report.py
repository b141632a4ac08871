"""The printed report of an example."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from completion.data.corpus import Corpus
from completion.data.vocabulary import ItemVocabulary


class Report:
    """A printer of texts and tables that measures the elapsed time."""

    def __init__(self, console: Console | None = None) -> None:
        """Starts the clock."""
        # For a log file, Rich would use 80 columns, which is too narrow for the
        # tables.
        width = None if sys.stdout.isatty() else 100
        self._console = console or Console(width=width, highlight=False)
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a paragraph."""
        # The terminal wraps long lines, so that users can copy paths from the
        # output.
        self._console.print(escape(text), soft_wrap=True)

    def begin(
        self, saved: str | Path | None, step: int, folder: str | Path
    ) -> None:
        """Prints whether the run trains a new model or resumes one."""
        self.say(
            f"Training a new model in {folder}."
            if not saved
            else f"Resuming from {saved}, step {step:,}. Pass --fresh to train "
            "a new model."
        )

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        numbers: Sequence[str] = (),
    ) -> None:
        """Prints a table; the columns in `numbers` are right-aligned."""
        table = Table(
            title=escape(title),
            title_justify="left",
            title_style="bold",
            header_style="bold",
            show_header=any(columns),
        )
        for column in columns:
            table.add_column(
                column,
                justify="right" if column in numbers else "left",
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(escape(str(cell)) for cell in row))
        self._console.print(table)

    def read(
        self,
        corpus: Corpus,
        vocabulary: ItemVocabulary,
        held_out: np.ndarray,
        num_training: int,
        num_held_out: int,
        share_unknown: float,
    ) -> None:
        """Prints a description of the data."""
        item, document = corpus.words["item"], corpus.words["document"]
        skew, top = skew_of(corpus.items, corpus.item_names)
        self.table(
            "Data",
            ["", ""],
            [
                *corpus.facts,
                (
                    f"{item}s",
                    f"{corpus.num_positions:,}, "
                    f"{len(corpus.item_names):,} distinct",
                ),
                ("skew", skew),
                ("most frequent", top),
                (
                    "vocabulary",
                    f"{vocabulary.num_rows - 1:,} {item}s that occur more than "
                    f"once in the training {document}s",
                ),
                (
                    "held out",
                    f"{int(held_out.sum()):,} of {len(held_out):,} {document}s",
                ),
                (
                    "positions",
                    f"{num_training:,} for training, {num_held_out:,} held "
                    f"out; {share_unknown:.1%} of the held-out targets are not "
                    "in the vocabulary",
                ),
            ],
        )

    def plan(
        self, costs: Sequence[Mapping[str, object]], num_weights: int
    ) -> None:
        """Prints the tables and the tower of the model."""
        rows = [
            [
                cost["table"],
                cost["features"],
                f"{cost['rows']:,}",
                cost["dim"],
                cost["shards"],
                _megabytes(cost["bytes"]),
                cost["optimizer"],
            ]
            for cost in costs
        ]
        total = sum(cost["bytes"] for cost in costs)
        # Adam keeps two moments of each weight.
        rows.append(
            [
                "Keras tower",
                f"{num_weights:,} weights",
                "",
                "",
                "",
                _megabytes(3 * 4 * num_weights),
                "Adam",
            ]
        )
        self.table(
            f"Model: {_megabytes(total)} MB of tables and their optimizer",
            ["table", "features", "rows", "dim", "shards", "MB", "optimizer"],
            rows,
            numbers=["rows", "dim", "shards", "MB"],
        )

    def comparison(
        self,
        figures: Mapping[str, tuple[float, float]],
        num_positions: int,
        corpus: Corpus,
        num_candidates: int,
    ) -> None:
        """Prints the metrics of the model and the baselines."""
        self.table(
            f"Held-out {corpus.words['document']}s: "
            f"{num_positions:,} positions",
            ["model", "recall@10", "MRR"],
            [
                [name, f"{recall:.3f}", f"{mrr:.3f}"]
                for name, (recall, mrr) in figures.items()
            ],
            numbers=["recall@10", "MRR"],
        )
        self.say(
            f"Each model ranks all {num_candidates:,} {corpus.words['item']}s "
            "of the vocabulary at every position. A target outside of the "
            "vocabulary is a miss for all models."
        )

    def print_summary(self) -> None:
        """Prints the elapsed time and the peak memory."""
        # Peak memory of this process or of its largest child process, whichever
        # is larger.
        peak = max(
            resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        # `ru_maxrss` is in kilobytes on Linux and in bytes on macOS.
        gigabytes = peak / (1 << (30 if sys.platform == "darwin" else 20))
        self.say(
            f"Took {self.elapsed():.0f} s; peak memory {gigabytes:.2f} GiB."
        )

    def elapsed(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._start


def skew_of(items: np.ndarray, item_names: list[str]) -> tuple[str, str]:
    """Returns texts that describe the skew and the most frequent items.

    >>> skew_of(np.array([0, 1, 0, 0]), ["self", "path"])
    ('the top 1% (1) are 75% of all', 'self 3, path 1')
    """
    counts = np.bincount(items, minlength=len(item_names))
    order = np.argsort(-counts, kind="stable")
    head = max(1, len(item_names) // 100)
    share = counts[order[:head]].sum() / max(1, len(items))
    top = ", ".join(
        f"{item_names[item]} {counts[item]:,}" for item in order[:5]
    )
    return f"the top 1% ({head:,}) are {share:.0%} of all", top


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"
