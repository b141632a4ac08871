"""Tests which parameter values `make test` covers with `covering` marks."""

import itertools
import types

import pytest

from tests import covering

VALUES = ["abc", "de", "fghi"]


def items_of(strength):
    """Returns the items that pytest collects for a product of parameters."""
    return [
        types.SimpleNamespace(
            parent="file",
            originalname="test",
            callspec=types.SimpleNamespace(_idlist=list(values)),
            nodeid="-".join(values),
            get_closest_marker={
                "covering": pytest.mark.covering(strength).mark
                if strength
                else None
            }.get,
            marks=(marks := []),
            add_marker=marks.append,
        )
        for values in itertools.product(*VALUES)
    ]


@pytest.mark.parametrize("strength, most", [(1, 4), (2, 13), (3, 24)])
def test_unmarked_cases_contain_all_combinations(strength, most):
    items = items_of(strength)
    covering.mark_exhaustive(items, slow=())
    kept = [item.callspec._idlist for item in items if not item.marks]
    assert len(kept) <= most
    for axes in itertools.combinations(range(3), strength):
        expected = set(itertools.product(*(VALUES[axis] for axis in axes)))
        found = {tuple(case[axis] for axis in axes) for case in kept}
        assert found == expected
    assert all(item.marks in ([], ["exhaustive"]) for item in items)


def test_items_without_parameters_are_not_marked():
    item = types.SimpleNamespace(marks=[])
    covering.mark_exhaustive([item], slow=())
    assert item.marks == []


def test_some_slow_cases_of_a_test_without_the_mark_are_kept():
    items = items_of(None)
    slow = {item.nodeid for item in items if "a" not in item.nodeid}
    covering.mark_exhaustive(items, slow)
    kept = [item for item in items if item.nodeid in slow and not item.marks]
    assert len(kept) == covering.NUM_SLOW_CASES
    assert not any(item.marks for item in items if item.nodeid not in slow)
