"""Tests the budget of a plan for a mesh without `memory`."""

import pytest

from tests.planning.problems import problem_of
from tf_layoutmap.planning import budgets, search
from tf_layoutmap.planning.problem import Choice, Item


def item(name, replicated, *sharded):
    """Returns an item with a replicated choice and sharded choices."""
    return Item(
        name,
        "matrix",
        {name: (replicated,)},
        (
            Choice("replicate", "", {"weights": replicated}, {"compute": 0.1}),
            *sharded,
        ),
    )


def sharded(name, num_bytes, seconds, **options):
    return Choice(
        name, "", {"weights": num_bytes}, {"compute": seconds}, **options
    )


def default_of(items, pins=None, **fixed):
    """Returns the default budget, and the choices that are then selected."""
    problem = problem_of(items, 2, 0, **fixed)
    memory = budgets.default_memory(problem, pins or {}, 1e-2)
    problem = problem_of(items, 2, memory, **fixed)
    return memory, search.solve(problem, pins).selected


def test_large_items_are_sharded_and_small_items_are_replicated():
    memory, selected = default_of(
        [
            item("large", 1000, sharded("rows", 500, 1.0)),
            item("small", 9, sharded("rows", 4, 1.0)),
        ],
        fixed_memory={"activations": 7},
    )
    assert memory == 500 + 9 + 7
    assert selected == {"large": "rows", "small": "replicate"}


def test_shared_costs_count():
    """The choice with the shortest time of an item can slow other items."""
    items = [
        item(
            "first",
            1000,
            sharded("columns", 500, 1.0, causes=("exchange",)),
            sharded("rows", 600, 2.0),
        ),
        item("second", 1000, sharded("rows", 500, 1.0)),
    ]
    memory, selected = default_of(
        items, shared_costs={"exchange": {"collectives": 5.0}}
    )
    assert memory == 1100
    assert selected == {"first": "rows", "second": "rows"}
    memory, selected = default_of(
        items, shared_costs={"exchange": {"collectives": 0.5}}
    )
    assert memory == 1000
    assert selected == {"first": "columns", "second": "rows"}


def test_pinned_items_and_refused_choices():
    items = [
        item("pinned", 1000, sharded("rows", 500, 1.0)),
        item("refused", 300, sharded("rows", 150, 1.0, refused="of tests")),
    ]
    memory, selected = default_of(items, {"pinned": "replicate"})
    assert memory == 1300
    assert selected == {"pinned": "replicate", "refused": "replicate"}
    with pytest.raises(ValueError, match="pins"):
        default_of(items, {"unknown": "replicate"})
