"""What a person gets to see."""

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
    """Prints tables, and knows how long all of it has taken."""

    def __init__(self, console: Console | None = None) -> None:
        """Starts the clock."""
        # A log has no width of its own, and 80 columns break the plan.
        width = None if sys.stdout.isatty() else 100
        self._console = console or Console(width=width, highlight=False)
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line."""
        # Broken by the terminal, not here: a path can be copied.
        self._console.print(escape(text), soft_wrap=True)

    def begin(
        self, saved: str | Path | None, step: int, folder: str | Path
    ) -> None:
        """Says whose training this is: a new one, or that of an earlier run."""
        self.say(
            f"A new model, in {folder}."
            if not saved
            else f"Goes on from a model that was there, {saved}, step {step:,}."
            " --fresh starts over."
        )

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        numbers: Sequence[str] = (),
    ) -> None:
        """Prints a table; the columns named in `numbers` to the right."""
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
        """Says what was read and what of it is held out."""
        item, document = corpus.words["item"], corpus.words["document"]
        skew, top = skew_of(corpus.items, corpus.item_names)
        self.table(
            "What it read",
            ["", ""],
            [
                *corpus.facts,
                (
                    f"{item}s",
                    f"{corpus.num_positions:,}, of them "
                    f"{len(corpus.item_names):,} distinct",
                ),
                ("skew", skew),
                ("most frequent", top),
                (
                    "vocabulary",
                    f"{vocabulary.num_rows - 1:,} {item}s that the "
                    f"training {document}s have more than once",
                ),
                (
                    "held out",
                    f"{int(held_out.sum()):,} of {len(held_out):,} "
                    f"{document}s, never trained on",
                ),
                (
                    "positions",
                    f"{num_training:,} to train on, "
                    f"{num_held_out:,} held out, where {share_unknown:.1%} of "
                    "the answers are not in the vocabulary",
                ),
            ],
        )

    def plan(
        self, costs: Sequence[Mapping[str, object]], num_weights: int
    ) -> None:
        """Says what the tables are."""
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
        # Its weights, and Adam's two moments of each.
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
            f"The plan: {_megabytes(total)} MB of rows and their optimizer",
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
        """Compares the model with the baselines; says how it was counted."""
        self.table(
            f"Held-out {corpus.words['document']}s: "
            f"{num_positions:,} positions",
            ["offers", "recall@10", "MRR"],
            [
                [name, f"{recall:.3f}", f"{mrr:.3f}"]
                for name, (recall, mrr) in figures.items()
            ],
            numbers=["recall@10", "MRR"],
        )
        self.say(
            f"Every position counts. All {num_candidates:,} "
            f"{corpus.words['item']}s of the vocabulary are ranked each time; "
            "an answer that is not among them is a miss for all three."
        )

    def print_summary(self) -> None:
        """Says how long it took and how much memory."""
        # Of the largest process: the one that serves is much smaller.
        peak = max(
            resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        # Kilobytes on Linux, bytes on macOS.
        gigabytes = peak / (1 << (30 if sys.platform == "darwin" else 20))
        self.say(
            f"Took {self.elapsed():.0f} s; peak memory {gigabytes:.2f} GiB."
        )

    def elapsed(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._start


def skew_of(items: np.ndarray, item_names: list[str]) -> tuple[str, str]:
    """Returns how uneven the items are, and the most frequent ones.

    >>> skew_of(np.array([0, 1, 0, 0]), ["self", "path"])
    ('the top 1% (1) make 75% of all', 'self 3, path 1')
    """
    counts = np.bincount(items, minlength=len(item_names))
    order = np.argsort(-counts, kind="stable")
    head = max(1, len(item_names) // 100)
    share = counts[order[:head]].sum() / max(1, len(items))
    top = ", ".join(
        f"{item_names[item]} {counts[item]:,}" for item in order[:5]
    )
    return f"the top 1% ({head:,}) make {share:.0%} of all", top


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"
