"""Tests the data, the metrics and a small run of the two-tower example."""

import doctest
import re

import numpy as np
import pytest
from two_tower_data import generate

PROGRAM = "two_tower.py"


def make_shop(seed=1):
    return generate(num_users=50, num_items=40, views_per_user=6, seed=seed)


def test_data_depends_on_the_arguments_only():
    first, second, other = make_shop(), make_shop(), make_shop(seed=2)
    np.testing.assert_array_equal(first.training.items, second.training.items)
    np.testing.assert_array_equal(
        first.held_out.purchases, second.held_out.purchases
    )
    assert (first.training.items != other.training.items).any()


def test_last_view_of_each_user_is_held_out():
    shop = make_shop()
    assert shop.held_out.users.tolist() == list(range(50))
    for user, item in zip(shop.held_out.users, shop.held_out.items):
        seen = shop.training.items[shop.training.users == user]
        assert len({*seen.tolist(), item}) == 6


def test_purchase_rate_matches_the_true_probabilities():
    shop = generate(num_users=400, num_items=200, views_per_user=10, seed=3)
    views = shop.training
    # The bound is four standard deviations of a mean of 3,600 draws.
    assert abs(np.mean(views.purchases) - np.mean(views.probabilities)) < (
        4 * 0.5 / len(views) ** 0.5
    )


def test_default_data_is_about_one_megabyte():
    shop = generate(num_users=3000, num_items=1500, views_per_user=16, seed=7)
    assert shop.num_bytes < 1.1e6


def test_items_viewed_in_training_are_not_retrieved():
    model = pytest.importorskip("two_tower_model")
    shop = make_shop()
    users = np.array([7, 3])
    best = model.best_items(shop, users, np.zeros([2, 40]), 35)
    for user, items in zip(users, best):
        seen = shop.training.items[shop.training.users == user]
        assert not {*seen.tolist()} & {*items.tolist()}


def test_another_view_of_the_same_item_is_not_a_negative_example():
    model = pytest.importorskip("two_tower_model")
    vectors = np.ones([3, 2], np.float32)
    log_shares = np.array([0.0, -1.0, 0.0], np.float32)
    logits = model.InBatchLogits()(
        vectors, vectors, np.array([5, 6, 5]), log_shares
    )
    hidden = -1e9
    np.testing.assert_allclose(
        logits, [[2, 3, hidden], [2, 3, 2], [hidden, 3, 2]]
    )


@pytest.mark.exhaustive
def test_training_prints_its_progress():
    model = pytest.importorskip("two_tower_model")
    keras = model.keras
    user = keras.Input([1], name="user")
    small = keras.Model({"user": user}, keras.layers.Dense(1)(user))
    small.compile("sgd", "mse")
    lines = []
    model.train(
        small,
        {"user": np.ones([64, 1], np.float32)},
        np.ones([64, 1], np.float32),
        steps=12,
        batch_size=8,
        seed=1,
        say=lines.append,
    )
    steps = [re.findall(r"step (\d+) of 12: loss \d\.\d{3}", x) for x in lines]
    assert steps == [["2"], ["4"], ["6"], ["8"], ["10"], ["12"]]


@pytest.mark.parametrize("module", ["two_tower_data", "two_tower_model"])
def test_examples_in_docstrings_pass(module):
    found = doctest.testmod(pytest.importorskip(module))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_both_models_beat_their_baselines(start):
    ended = start("--users=1200", "--items=400", "--steps=300")
    assert ended.returncode == 0, ended.stderr[-3000:]
    values = {
        name.strip(): float(value)
        for name, value in re.findall(
            r"│ ([a-z ]+?) +│ +([\d.]{5}) ", ended.stdout
        )
    }
    assert values["two towers"] > 1.2 * values["most popular items"]
    assert (
        values["purchase rate of each item"] + 0.02
        < values["ranking model"]
        < values["true probabilities"]
    )
