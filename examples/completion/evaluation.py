"""Metrics of the model and the baselines on held-out positions."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from completion.baselines import (
    BigramCounts,
    frequency_ranks,
    recall_and_mrr,
)
from completion.data.features import FeatureReader
from completion.data.vocabulary import ItemVocabulary
from completion.model import Completer, to_tensors

# The scores are [batch, num_rows]: 40 MB for 20,000 rows.
_BATCH = 512


def chosen_positions(
    positions: np.ndarray, limit: int, seed: int
) -> np.ndarray:
    """Returns all positions, or a sorted random sample of `limit` positions."""
    if len(positions) <= limit:
        return positions
    draw = np.random.default_rng([seed, 3])
    return np.sort(draw.choice(positions, limit, replace=False))


def compare(
    model: Completer,
    reader: FeatureReader,
    vocabulary: ItemVocabulary,
    training: np.ndarray,
    held_out: np.ndarray,
) -> dict[str, tuple[float, float]]:
    """Returns recall@10 and MRR of the model and the baselines, by name.

    Args:
      model: Trained model.
      reader: Reader of the features of positions.
      vocabulary: Vocabulary of the predicted items.
      training: Training positions, from which the baselines are counted.
      held_out: Positions of held-out documents.
    """
    targets = reader.targets(held_out)
    bigrams = BigramCounts(
        reader.previous(training), reader.targets(training), vocabulary
    )
    return {
        "most frequent": recall_and_mrr(frequency_ranks(targets)),
        "bigram counts": recall_and_mrr(
            bigrams.ranks(reader.previous(held_out), targets)
        ),
        "neural model": recall_and_mrr(model_ranks(model, reader, held_out)),
    }


def model_ranks(
    model: Completer, reader: FeatureReader, positions: np.ndarray
) -> np.ndarray:
    """Returns the rank of each target among the predictions; 0 is a miss."""
    ranks = [
        model.ranks(
            to_tensors(reader.batch(part)), tf.constant(reader.targets(part))
        ).numpy()
        for part in np.array_split(positions, -(-len(positions) // _BATCH))
    ]
    return np.concatenate(ranks).astype(np.int64)


def neighbours(
    rows: np.ndarray, asked: list[int], among: int, num_neighbours: int
) -> list[list[int]]:
    """Returns the nearest neighbours of rows by cosine similarity.

    Args:
      rows: Table, `[num_rows, dim]`.
      asked: Rows whose neighbours are returned.
      among: Possible neighbours are the rows `[1, among)`.
      num_neighbours: Number of neighbours of each row, nearest first.
    """
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    directions = rows / np.maximum(lengths, 1e-12)
    found = []
    for row in asked:
        closeness = directions[:among] @ directions[row]
        order = np.argsort(-closeness, kind="stable")
        found.append(
            [int(other) for other in order if other not in (row, 0)][
                :num_neighbours
            ]
        )
    return found
