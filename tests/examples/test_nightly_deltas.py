"""Tests the data and a run of the example of nightly deltas."""

import collections
import doctest
import re

import numpy as np
import pytest
from nightly_deltas_data import Shop

PROGRAM = "nightly_deltas.py"


def test_data_depends_on_the_arguments_only():
    shops = [Shop(1000, seed) for seed in (1, 1, 2)]
    for _ in range(2):
        first, second, other = [shop.next_day() for shop in shops]
        assert first == second
        assert first != other


def test_each_day_adds_users_and_items():
    shop = Shop(4000, seed=1)
    first = shop.next_day()
    old_items = set(shop.items)
    second = shop.next_day()
    new_items = set(shop.items) - old_items
    assert len(new_items) == second.num_new_items == 60
    assert set(first.training.items) <= old_items
    # New items are popular.
    assert np.mean([item in new_items for item in second.training.items]) > 0.1
    assert set(second.training.users) - set(first.training.users)


def test_users_of_a_city_view_similar_items():
    day = Shop(20_000, seed=1).next_day()
    views = {}
    for city, item in zip(day.training.cities, day.training.items):
        views.setdefault(city, collections.Counter())[item] += 1
    best = {
        city: {item for item, _ in counts.most_common(10)}
        for city, counts in views.items()
    }
    recall = np.mean(
        [
            item in best[city]
            for city, item in zip(day.held_out.cities, day.held_out.items)
        ]
    )
    assert recall > day.recall_of_popular(10) + 0.05


def test_examples_in_docstrings_pass():
    import nightly_deltas_data

    found = doctest.testmod(nightly_deltas_data)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.exhaustive
def test_the_server_does_not_recommend_items_without_a_row():
    server = pytest.importorskip("nightly_deltas_server")
    import contextlib
    from unittest import mock

    import tensorflow as tf

    served = mock.Mock(lookups=contextlib.nullcontext)
    served.model.user_vectors = lambda *_: tf.constant([[1.0], [-1.0]])
    served.model.item_vectors = lambda _: tf.constant([[2.0], [0.0], [1.0]])
    request = {
        "users": ["a", "b"],
        "cities": ["c", "c"],
        "candidates": ["x", "y", "z"],
        "at": 1,
    }
    for viewed, recall in (
        (["x", "z"], 1.0),
        (["z", "z"], 0.5),
        (["z", "y"], 0.0),
    ):
        found = server.answer(served, {**request, "viewed": viewed})
        assert found == {"recall": recall}


@pytest.mark.exhaustive
def test_each_delta_improves_the_served_model(start):
    ended = start("--nights=2", "--views=8000")
    assert ended.returncode == 0, ended.stderr[-3000:]
    cells = [r"(\d)", "60", r"(\d+)", r"(\d+)", r"\d+ ms", *[r"([\d.]{5})"] * 3]
    nights = re.findall("".join(rf"│ +{cell} " for cell in cells), ended.stdout)
    assert [night for night, *_ in nights] == ["1", "2"]
    for _, num_rows, num_weights, *recalls in nights:
        # The kernel and the bias of the projection.
        assert int(num_weights) == 2
        before, after, popular = map(float, recalls)
        assert int(num_rows) > 500
        assert after > before + 0.03
        assert after > popular + 0.03
