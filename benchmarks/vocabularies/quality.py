"""What rows for names as they come are worth, on a stream that drifts.

    python -m benchmarks.vocabularies.quality

The identifiers of the standard library of the Python that runs this come file
by file, each file in its order, once. Before a batch of 256 is learned, every
fourth time, half of its positions are predicted: all names that came before,
and have a row, are ranked (`examples/completion/stream.py`). Recall@10 is of
all those positions: a name that never came before is a miss for everyone.

* `unlimited`: an open vocabulary with room for all names;
* `lru`, `lfu`: a quarter of these rows;
* `hashing`: the bytes of a quarter's rows, slot variables, keys and counts,
  as rows that names share by their hash. Names of one row have the middle
  rank of them.
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
# Of a row and Adagrad's accumulators, and of what a key takes besides.
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
    """Recall@10, MRR and the rows that were used."""
    learner = stream.StreamLearner(
        contestant, corpus, num_negatives=NUM_NEGATIVES, seed=seed
    )
    came = np.zeros(len(corpus.item_names), bool)
    ranks = []
    for number, positions in enumerate(
        stream.batches_in_order(np.arange(corpus.num_positions), BATCH)
    ):
        if number % 4 == 3:
            ranks.append(learner.ranks(positions[::2], np.flatnonzero(came)))
        learner.train(positions)
        came[corpus.items[positions]] = True
    return *recall_and_mrr(np.concatenate(ranks)), learner.rows_used


def main() -> None:
    """Measures all, and prints a table."""
    corpus = python_source.read_standard_library()
    table = rich.table.Table(
        title=f"{corpus.num_positions:,} identifiers, "
        f"{len(corpus.item_names):,} distinct; seeds {SEEDS}"
    )
    for column in ("", "rows used", "recall@10", "MRR", "of unlimited"):
        table.add_column(column, justify="right" if column else "left")
    best = None
    for name in _contestants(corpus):
        found = np.array(
            [
                # Counts of hashed rows are of one run.
                measure(corpus, _contestants(corpus)[name], seed)
                for seed in SEEDS
            ]
        )
        recall, mrr, rows = found.mean(axis=0)
        best = best or recall
        each = ", ".join(f"{one:.4f}" for one in found[:, 0])
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
