"""AUC, log loss and naive Bayes match slow, simple references."""

import hypothesis.strategies as st
import numpy as np
import pytest
from clicks.criteo import CATEGORIES
from clicks.scores import ClickRates, auc, log_loss
from hypothesis import given


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=2).filter(
        lambda lines: len({label for label, _ in lines}) == 2
    )
)
def test_auc_is_the_share_of_ordered_pairs(lines):
    clicks = [score for label, score in lines if label]
    others = [score for label, score in lines if not label]
    pairs = [
        (click > other) + 0.5 * (click == other)
        for click in clicks
        for other in others
    ]
    labels, scores = map(np.array, zip(*lines))
    assert auc(labels, scores) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_auc_of_equal_labels_raises():
    with pytest.raises(ValueError, match="must contain both 0 and 1"):
        auc(np.ones(3), np.arange(3))


def test_log_loss_is_the_mean_negative_log_likelihood():
    assert log_loss(np.array([1, 0]), np.array([0.5, 0.75])) == pytest.approx(
        (np.log(2) + np.log(4)) / 2
    )


def test_naive_bayes_smooths_the_click_rate_of_a_value():
    size = 400
    draw = np.random.default_rng(1)
    features = {name: np.zeros(size, np.int64) for name in CATEGORIES}
    features["C1"] = draw.integers(0, 2, size)
    features["numbers"] = np.zeros((size, 13), np.float32)
    labels = (draw.random(size) < np.where(features["C1"], 0.8, 0.2)) * 1.0
    probabilities = ClickRates(features, labels).probabilities(features)
    mean = labels.mean()
    for value in (0, 1):
        mine = features["C1"] == value
        # The pseudo-count adds 20 lines with the mean rate. The other columns
        # are constant and have no effect.
        rate = (labels[mine].sum() + 20 * mean) / (mine.sum() + 20)
        np.testing.assert_allclose(probabilities[mine], rate)


def test_unseen_value_does_not_change_the_prediction():
    features = {name: np.zeros(4, np.int64) for name in CATEGORIES}
    features["numbers"] = np.zeros((4, 13), np.float32)
    rates = ClickRates(features, np.array([1.0, 0, 0, 0]))
    new = {**features, "C7": np.full(4, 99)}
    np.testing.assert_allclose(rates.probabilities(new), 0.25)
