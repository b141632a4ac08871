"""Measures predictions with open vocabularies on a non-stationary stream.

    python -m benchmarks.vocabularies.quality

The stream consists of the names in Python's standard library, file by file, in
a single pass with batches of 256 names. The model of
`examples/completion/stream.py` trains on all batches. For every fourth batch,
the model first predicts half of the names in the batch, and then trains on the
batch. For each prediction, the model ranks all names that have occurred before
and have a row. The result is recall@10, as the mean over all predictions. A
name that has not occurred before counts as a miss. Contestants:

* `unlimited`: an open vocabulary with rows for all names.
* `lru`, `lfu`: an open vocabulary with a quarter of the rows of `unlimited`.
* `hashing`: a table without keys, whose rows are selected by hashes of the
  names. The table takes as many bytes as the rows, slot variables, keys and
  counts of `lru`. Names that share a row get their mean rank.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import rich.console
import rich.table

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

from completion import names, stream
from completion.baselines import recall_and_mrr
from completion.data import python_source
from completion.data.corpus import Corpus

BATCH = 256
NUM_NEGATIVES = 512
SEEDS = (7, 8, 9)
# Size of a row with its accumulators of Adagrad, and size of a key with its
# count, in bytes.
ROW_BYTES, KEY_BYTES = 2 * 4 * stream.DIM, 16


def _contestants(corpus: Corpus) -> dict[str, object]:
    all_names = corpus.item_names
    quarter = len(all_names) // 4
    lru = names.OpenNames(all_names, quarter, evict="lru")
    num_bytes = lru.vocabularies["next"].num_rows * (ROW_BYTES + KEY_BYTES)
    return {
        "unlimited": names.OpenNames(all_names, int(len(all_names) / 0.75)),
        "lru": lru,
        "lfu": names.OpenNames(all_names, quarter, evict="lfu"),
        "hashing": names.HashedNames(all_names, num_bytes // ROW_BYTES),
    }


def measure(
    corpus: Corpus, contestant: object, seed: int
) -> tuple[float, float, int]:
    """Returns recall@10, mean reciprocal rank and the number of used rows."""
    learner = stream.StreamLearner(
        contestant, corpus, num_negatives=NUM_NEGATIVES, seed=seed
    )
    seen = np.zeros(len(corpus.item_names), bool)
    ranks = []
    for number, positions in enumerate(
        stream.batches_in_order(np.arange(corpus.num_positions), BATCH)
    ):
        if number % 4 == 3:
            ranks.append(learner.ranks(positions[::2], np.flatnonzero(seen)))
        learner.train(positions)
        seen[corpus.items[positions]] = True
    return *recall_and_mrr(np.concatenate(ranks)), learner.rows_used


def main() -> None:
    """Measures all contestants and prints the results as a table."""
    corpus = python_source.read_standard_library()
    table = rich.table.Table(
        title=f"{corpus.num_positions:,} identifiers, "
        f"{len(corpus.item_names):,} distinct; seeds {SEEDS}"
    )
    for column in ("", "rows used", "recall@10", "MRR", "/ unlimited"):
        table.add_column(column, justify="right" if column else "left")
    best = None
    for name in _contestants(corpus):
        scores = np.array(
            [
                # A hashed vocabulary contains counts that a run changes, so
                # each run gets a new vocabulary.
                measure(corpus, _contestants(corpus)[name], seed)
                for seed in SEEDS
            ]
        )
        recall, mrr, rows = scores.mean(axis=0)
        best = best or recall
        each = ", ".join(f"{value:.4f}" for value in scores[:, 0])
        table.add_row(
            name,
            f"{rows:,.0f}",
            f"{recall:.4f} ({each})",
            f"{mrr:.4f}",
            f"{recall / best:.4f}",
        )
    rich.console.Console(width=110).print(table)


if __name__ == "__main__":
    main()
