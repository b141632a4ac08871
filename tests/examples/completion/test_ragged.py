"""Ragged arrays match nested lists."""

import doctest
import importlib

import hypothesis.strategies as st
import numpy as np
import pytest
from completion.data.ragged import Ragged
from hypothesis import given

rows_of_ids = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6)


@given(rows=rows_of_ids.filter(len), data=st.data())
def test_take_returns_the_given_rows(rows, data):
    asked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    taken = Ragged.from_lists(rows).take(np.array(asked, np.int64))
    expected = [rows[index] for index in asked]
    assert np.diff(taken.splits).tolist() == [len(row) for row in expected]
    assert taken.values.tolist() == sum(expected, [])


def test_mask_keeps_the_order_of_a_row():
    values = np.array([[1, 2, 3], [4, 5, 6]])
    mask = np.array([[True, False, True], [False, False, False]])
    assert Ragged.from_mask(values, mask).to_lists() == [[1, 3], []]


def test_array_without_rows_has_one_split():
    empty = Ragged.from_lists([])
    assert empty.values.tolist() == []
    assert empty.splits.tolist() == [0]


@pytest.mark.parametrize(
    "module",
    [
        "baselines",
        "data.corpus",
        "data.features",
        "data.ragged",
        "data.vocabulary",
        "report",
        "settings",
    ],
)
def test_examples_in_docstrings_pass(module):
    found = doctest.testmod(importlib.import_module(f"completion.{module}"))
    assert found.attempted > 0
    assert found.failed == 0
