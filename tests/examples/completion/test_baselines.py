"""Baselines, metrics and the sampler match slow references."""

import hypothesis.strategies as st
import numpy as np
import pytest
from completion.baselines import (
    BigramCounts,
    frequency_ranks,
    recall_and_mrr,
)
from completion.data.sampling import BatchSampler
from completion.data.vocabulary import ItemVocabulary
from hypothesis import given

streams = st.lists(st.integers(0, 5), min_size=2, max_size=40)


@given(stream=streams, asked=streams)
def test_bigram_ranks_match_a_sorted_list(stream, asked):
    names = [str(item) for item in range(6)]
    vocabulary = ItemVocabulary(np.array(stream), names, min_count=1)
    rows = vocabulary.row_of[np.array(stream)].astype(np.int64)
    bigrams = BigramCounts(rows[:-1], rows[1:], vocabulary)
    asked_rows = vocabulary.row_of[np.array(asked)].astype(np.int64)
    found = bigrams.ranks(asked_rows[:-1], asked_rows[1:])
    pairs = list(zip(rows[:-1], rows[1:], strict=True))
    for previous, target, rank in zip(
        asked_rows[:-1], asked_rows[1:], found, strict=True
    ):
        offers = sorted(
            range(1, vocabulary.num_rows),
            key=lambda row, before=previous: (-pairs.count((before, row)), row),
        )
        expected = offers.index(target) + 1 if target else 0
        assert rank == expected


def test_rank_by_frequency_is_the_row():
    assert frequency_ranks(np.array([1, 3, 0], np.int32)).tolist() == [1, 3, 0]


def test_rank_zero_is_a_miss_in_recall_and_mrr():
    recall, mrr = recall_and_mrr(np.array([1, 10, 11, 0]))
    assert recall == 0.5
    assert mrr == pytest.approx((1 + 1 / 10 + 1 / 11) / 4)


def test_recall_of_no_ranks_raises():
    with pytest.raises(ValueError, match="must not be empty"):
        recall_and_mrr(np.array([], np.int64))


def sampler(counts=(0, 50, 30, 20), num_negatives=2):
    return BatchSampler(
        np.arange(10, 20),
        np.array(counts),
        batch_size=4,
        num_negatives=num_negatives,
        seed=5,
    )


def test_epoch_contains_each_position_at_most_once():
    first = np.concatenate([sampler().positions(step) for step in range(2)])
    assert len(set(first.tolist())) == 8
    assert set(first.tolist()) <= set(range(10, 20))
    second = np.concatenate([sampler().positions(step) for step in (2, 3)])
    assert first.tolist() != second.tolist()


def test_batch_depends_only_on_the_step():
    one, other = sampler(), sampler()
    for step in range(6):
        one.positions(step)
    assert (one.positions(3) == other.positions(3)).all()
    assert (one.negatives(3)[0] == other.negatives(3)[0]).all()


def test_log_probability_of_a_negative_matches_its_frequency():
    drawn = sampler()
    num_steps = 4000
    seen = np.zeros(4)
    for step in range(num_steps):
        rows, log_probability = drawn.negatives(step)
        assert len(set(rows.tolist())) == len(rows)
        seen[rows] += 1 / np.exp(log_probability)
    assert seen[0] == 0
    # The bound is six standard deviations for the rarest row, whose probability
    # is above 1/3.
    assert seen[1:] / num_steps == pytest.approx(1, abs=0.14)
