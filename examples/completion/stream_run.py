"""Comparison of an open and a closed vocabulary in one pass over the data."""

from __future__ import annotations

import sys

import keras
import numpy as np

from completion import evaluation
from completion.baselines import (
    BigramCounts,
    frequency_ranks,
    recall_and_mrr,
)
from completion.data.corpus import Corpus, DataError, held_out_documents
from completion.data.features import FeatureReader
from completion.data.vocabulary import ItemVocabulary
from completion.names import TABLES, ClosedNames, OpenNames
from completion.report import Report
from completion.settings import Settings
from completion.stream import StreamLearner, batches_in_order

_HELD_OUT = 0.1
_MIN_COUNT = 2
# Batches are smaller than in other runs, because the data is read only once and
# small batches give more steps.
_BATCH = 256
_MEASURED = 512


def run(
    corpus: Corpus,
    settings: Settings,
    report: Report,
    *,
    capacity: int,
    max_held_out: int,
) -> None:
    """Trains a model per vocabulary in document order, and prints the metrics.

    Args:
      corpus: Data set.
      settings: Batch size, number of negatives, seed and maximum number of
        steps.
      report: Report to print to.
      capacity: Number of items of each open vocabulary.
      max_held_out: Maximum number of positions to measure on.

    Raises:
      DataError: The data has too few documents or positions.
    """
    held_out = held_out_documents(
        corpus.documents, fraction=_HELD_OUT, seed=settings.seed
    )
    training = corpus.positions_of(~held_out)
    test = evaluation.chosen_positions(
        corpus.positions_of(held_out), max_held_out, settings.seed
    )
    batch_size = min(_BATCH, settings.batch_size)
    if len(corpus.documents) < 2 or len(training) < batch_size:
        raise DataError(
            f"--data must contain at least two {corpus.words['document']}s and "
            f"at least {batch_size} positions to train on. Received: "
            f"{len(corpus.documents)} {corpus.words['document']}s, "
            f"{len(training)} positions."
        )
    vocabulary = ItemVocabulary(
        corpus.items[training], corpus.item_names, min_count=_MIN_COUNT
    )
    reader = FeatureReader(corpus, vocabulary, held_out)
    report.read(
        corpus,
        vocabulary,
        held_out,
        len(training),
        len(test),
        float(np.mean(reader.targets(test) == 0)),
    )
    variants = {
        "closed vocabulary": ClosedNames(vocabulary),
        "open vocabulary": OpenNames(
            corpus.item_names,
            capacity,
            admission="count",
            min_count=_MIN_COUNT,
            seed=settings.seed,
        ),
    }
    targets = reader.targets(test)
    bigrams = BigramCounts(
        reader.previous(training), reader.targets(training), vocabulary
    )
    figures = {
        "most frequent": (*recall_and_mrr(frequency_ranks(targets)), ""),
        "bigram counts": (
            *recall_and_mrr(bigrams.ranks(reader.previous(test), targets)),
            "",
        ),
    }
    stats = {}
    for name, names in variants.items():
        learner = StreamLearner(
            names,
            corpus,
            num_negatives=settings.num_negatives // 2,
            seed=settings.seed,
        )
        _train(learner, name, training, batch_size, settings.num_steps)
        figures[name] = (
            *recall_and_mrr(
                _ranks(learner, test, np.unique(corpus.items[training]))
            ),
            f"{learner.rows_used:,}",
        )
        stats = {
            table: one.stats()
            for table, one in learner.embedding.vocabularies.items()
        } or stats
    report.table(
        f"Held-out {corpus.words['document']}s: {len(test):,} positions",
        ["model", "recall@10", "MRR", "rows used"],
        [
            [name, f"{recall:.3f}", f"{mrr:.3f}", rows]
            for name, (recall, mrr, rows) in figures.items()
        ],
        numbers=["recall@10", "MRR", "rows used"],
    )
    report.say(
        "The last two rows are the same model, trained once on every position "
        f"in the order of the {corpus.words['document']}s. The closed "
        "vocabulary, which the baselines also use, requires an earlier pass to "
        f"count {corpus.words['item']}s. The open vocabulary has "
        f"{len(TABLES)} tables of {capacity:,} {corpus.words['item']}s each "
        f"and gives a row to a {corpus.words['item']} when it occurs "
        f"{_MIN_COUNT} times. It evicted "
        f"{sum(one['num_evicted'] for one in stats.values()):,} "
        f"{corpus.words['item']}s, and "
        f"{stats[TABLES[0]]['hit_rate']:.1%} of the lookups of previous "
        f"{corpus.words['item']}s found a row."
    )
    report.print_summary()


def _train(
    learner: StreamLearner,
    name: str,
    positions: np.ndarray,
    batch_size: int,
    num_steps: int | None,
) -> None:
    num_steps = min(num_steps or len(positions), len(positions) // batch_size)
    bar = keras.utils.Progbar(
        num_steps,
        unit_name=f"step, {name}",
        stateful_metrics=["loss"],
        interval=0.2 if sys.stdout.isatty() else 10,
    )
    for step, batch in zip(
        range(1, num_steps + 1), batches_in_order(positions, batch_size)
    ):
        bar.update(step, [("loss", learner.train(batch))])


def _ranks(
    learner: StreamLearner, positions: np.ndarray, among: np.ndarray
) -> np.ndarray:
    return np.concatenate(
        [
            learner.ranks(part, among)
            for part in batches_in_order(positions, _MEASURED)
        ]
    )
