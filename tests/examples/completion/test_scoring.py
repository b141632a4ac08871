"""Scores and the sampled loss match NumPy over the full vocabulary."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from completion import scoring  # noqa: E402
from completion.data.features import ECHOES, RECENT  # noqa: E402

NUM_ROWS, DIM, NUM_SAMPLES = 30, 4, 3


@pytest.fixture(scope="module")
def case():
    draw = np.random.default_rng(0)
    recent = np.zeros((NUM_SAMPLES, RECENT), np.int32)
    recent[0, :3] = [4, 9, 2]
    recent[1, :1] = [7]
    echoes = np.zeros((NUM_SAMPLES, ECHOES), np.int32)
    echoes[0, :2] = [9, 9]
    return {
        "query": draw.normal(size=(NUM_SAMPLES, DIM)).astype(np.float32),
        "gates": draw.normal(size=(NUM_SAMPLES, RECENT + ECHOES)).astype(
            np.float32
        ),
        "candidates": draw.normal(size=(NUM_ROWS, DIM)).astype(np.float32),
        "log_shares": np.log(draw.dirichlet(np.ones(NUM_ROWS))).astype(
            np.float32
        ),
        "recent": recent,
        "echo": echoes,
        "target": np.array([9, 11, 1], np.int32),
    }


def scores_of(case):
    """Returns the scores of all rows, computed one by one."""
    scores = case["query"] @ case["candidates"].T + case["log_shares"]
    for sample in range(NUM_SAMPLES):
        for place, row in enumerate(case["recent"][sample]):
            if row:
                scores[sample, row] += case["gates"][sample, place]
                for echo in range(ECHOES):
                    if case["echo"][sample, echo] == row:
                        scores[sample, row] += case["gates"][
                            sample, RECENT + echo
                        ]
    return scores


def outputs(case):
    return {name: tf.constant(case[name]) for name in ("query", "gates")}


def loss_of(case, negatives, log_probability):
    rows = case["candidates"]
    return float(
        scoring.sampled_loss(
            outputs(case),
            {
                "target": rows[case["target"]],
                "recent": rows[case["recent"]],
                "negatives": rows[negatives],
            },
            {
                "target": tf.constant(case["target"]),
                "recent": tf.constant(case["recent"]),
                "echo": tf.constant(case["echo"]),
                "negatives": tf.constant(negatives),
            },
            tf.constant(log_probability),
            tf.constant(case["log_shares"]),
        )
    )


def full_loss(case):
    scores = scores_of(case)[:, 1:].astype(np.float64)
    own = scores[np.arange(NUM_SAMPLES), case["target"] - 1]
    return np.mean(np.log(np.exp(scores).sum(axis=1)) - own)


def test_scores_of_all_rows_except_the_unknown_row(case):
    found = scoring.score_all(
        outputs(case),
        tf.constant(case["recent"]),
        tf.constant(case["echo"]),
        tf.constant(case["candidates"]),
        tf.constant(case["log_shares"]),
    ).numpy()
    assert (found[:, 0] == np.float32(scoring.NEVER)).all()
    # The reference adds five to eight numbers near 1 in a different order.
    assert found[:, 1:] == pytest.approx(scores_of(case)[:, 1:], abs=1e-5)


def test_loss_with_all_rows_as_negatives_is_the_full_softmax_loss(case):
    negatives = np.arange(1, NUM_ROWS, dtype=np.int32)
    certain = np.zeros(len(negatives), np.float32)
    assert loss_of(case, negatives, certain) == pytest.approx(
        full_loss(case), rel=1e-5
    )


def test_loss_without_negatives_sums_over_recent_items_only(case):
    nothing = np.zeros([0], np.int32)
    scores = scores_of(case).astype(np.float64)
    expected = []
    for sample, target in enumerate(case["target"]):
        counted = {int(target), *case["recent"][sample].tolist()} - {0}
        total = np.exp(scores[sample, sorted(counted)]).sum()
        expected.append(np.log(total) - scores[sample, target])
    assert loss_of(case, nothing, nothing.astype(np.float32)) == (
        pytest.approx(np.mean(expected), rel=1e-5)
    )


@pytest.mark.exhaustive
def test_the_sum_over_drawn_negatives_is_right_on_average(case):
    """The mean of many estimates equals the sum over the vocabulary."""
    draw = np.random.default_rng(1)
    scores = np.exp(scores_of(case).astype(np.float64))
    own = scores[2, case["target"][2]]
    one = {
        name: value if name in ("candidates", "log_shares") else value[2:]
        for name, value in case.items()
    }
    sums = []
    for _ in range(300):
        drawn = np.flatnonzero(draw.random(NUM_ROWS - 1) < 0.5) + 1
        log_probability = np.full(len(drawn), np.log(0.5), np.float32)
        loss = loss_of(one, drawn.astype(np.int32), log_probability)
        sums.append(np.exp(loss) * own)
    error = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - scores[2, 1:].sum()) < 4 * error
