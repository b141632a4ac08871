"""Tests the planner's search against all selections of small problems."""

import dataclasses
import random
import re
import time
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.planning.problems import brute_force, problem_of, table_item
from tf_layoutmap.planning import explanations, local_search, search
from tf_layoutmap.planning.problem import Choice, Item

# The selected plan of a small problem takes at most this factor of the time of
# the best plan, if the search may not compare all plans.
FACTOR = 1.4


@st.composite
def problems(draw):
    num_devices = draw(st.integers(1, 3))
    items = [
        table_item(
            f"t{index}",
            draw(st.integers(0, 12)),
            draw(st.integers(0, 12)),
            num_devices,
            draw(st.sampled_from([0.0, 0.5, 3.0])),
        )
        for index in range(draw(st.integers(0, 5)))
    ]
    return problem_of(
        items,
        num_devices,
        draw(st.integers(0, 30)),
        fixed_memory={"weights": draw(st.integers(0, 3))},
        fixed_seconds={"compute": draw(st.integers(0, 3))},
    )


@st.composite
def problems_with_servers(draw):
    """Problems whose devices share processors, or are called one by one."""
    return dataclasses.replace(
        draw(problems()),
        use_seconds={"latency": draw(st.sampled_from([0, 1, 5]))},
        sum_share=draw(st.sampled_from([0.0, 0.4, 0.7, 1.0])),
    )


@st.composite
def problems_with_shared_costs(draw):
    seconds = st.integers(-4, 6)
    items = []
    for index in range(draw(st.integers(1, 5))):
        choices = [
            Choice(
                str(number),
                "",
                {"weights": draw(st.integers(0, 6))},
                {"compute": draw(st.integers(0, 6))},
                causes=tuple(
                    name for name in ("one", "two") if draw(st.booleans())
                ),
                seconds_if={
                    name: {"collectives": draw(seconds)}
                    for name in ("one", "two")
                },
            )
            for number in range(draw(st.integers(1, 3)))
        ]
        items.append(Item(f"i{index}", "matrix", {}, tuple(choices)))
    return problem_of(
        items,
        draw(st.integers(1, 3)),
        draw(st.integers(0, 20)),
        shared_costs={
            name: {"collectives": draw(seconds)} for name in ("one", "two")
        },
    )


def check_budgets(solution):
    for used, budget in zip(solution.memory(), solution.problem.budgets):
        assert sum(used.values()) <= budget


def check_is_solved_exactly(problem, **tolerance):
    best = brute_force(problem)
    if best == float("inf"):
        with pytest.raises(search.PlanDoesNotFitError):
            search.solve(problem)
        return
    solution = search.solve(problem)
    check_budgets(solution)
    assert solution.step_seconds == pytest.approx(best, rel=1e-9, **tolerance)


@hypothesis.given(problems())
def test_small_problems_are_solved_exactly(problem):
    check_is_solved_exactly(problem)


@hypothesis.given(
    st.one_of(problems_with_servers(), problems_with_shared_costs())
)
def test_shared_costs_and_used_devices_are_minimized(problem):
    check_is_solved_exactly(problem, abs=1e-9)


@hypothesis.given(
    st.one_of(problems_with_servers(), problems_with_shared_costs())
)
def test_other_choices_have_the_time_of_a_step_with_them(problem):
    try:
        solution = search.solve(problem)
    except search.PlanDoesNotFitError:
        return
    for item in problem.items:
        for other in explanations.alternatives_of(solution, item):
            selected = {**solution.selected, item.name: other.name}
            expected = dataclasses.replace(solution, selected=selected)
            assert other.step_seconds == pytest.approx(expected.step_seconds)


@hypothesis.given(problems_with_shared_costs())
def test_the_local_search_includes_shared_costs(problem):
    best = brute_force(problem)
    hypothesis.assume(best < float("inf"))
    with mock.patch.object(local_search, "EXACT_COMBINATIONS", 0):
        try:
            solution = search.solve(problem)
        except search.PlanDoesNotFitError:
            return
    check_budgets(solution)
    selection = [
        dataclasses.replace(item, choices=(solution.choice_of(item),))
        for item in problem.items
    ]
    only = dataclasses.replace(problem, items=tuple(selection))
    assert solution.step_seconds == pytest.approx(brute_force(only), abs=1e-9)


@hypothesis.given(problems())
def test_the_search_of_large_problems_is_close_to_the_best_plan(problem):
    best = brute_force(problem)
    with mock.patch.object(local_search, "EXACT_COMBINATIONS", 0):
        try:
            solution = search.solve(problem)
        except search.PlanDoesNotFitError as error:
            assert error.missing_bytes > 0
            # If plans fit, the search may miss them only if memory is short.
            assert best == float("inf") or _is_tight(problem)
            return
    check_budgets(solution)
    assert best <= solution.step_seconds * (1 + 1e-9)
    assert solution.step_seconds <= FACTOR * best + 1e-9 or _is_tight(problem)


def _is_tight(problem):
    """Returns whether less than two fifths of the memory remain free."""
    least = sum(
        min(
            sum(choice.memory.values())
            * (1 if choice.devices else len(problem.devices))
            for choice in item.choices
        )
        for item in problem.items
    )
    free = sum(problem.budgets) - len(problem.devices) * sum(
        problem.fixed_memory.values()
    )
    return least > 0.6 * free


def test_one_huge_table_is_sharded():
    items = [table_item("huge", 1000, 1.0, 4, 5.0)]
    items += [table_item(f"t{one}", 10, 1.0, 4, 5.0) for one in range(8)]
    solution = search.solve(problem_of(items, 4, 300))
    assert solution.selected["huge"] == "rows over all"
    assert {
        name.split(" ")[0]
        for item, name in solution.selected.items()
        if item != "huge"
    } == {"table"}


def test_one_hot_table_is_sharded_if_its_server_would_be_the_slowest():
    items = [table_item("hot", 10, 40.0, 4, 0.1)]
    items += [table_item(f"t{one}", 10, 1.0, 4, 0.1) for one in range(8)]
    solution = search.solve(problem_of(items, 4, 1000))
    assert solution.selected["hot"] == "rows over all"
    assert solution.step_seconds == pytest.approx(10 + 0.1 + 2)


@pytest.mark.parametrize("budget, fits", [(100, True), (99, False)])
def test_memory_may_be_short_by_one_byte(budget, fits):
    problem = problem_of(
        [table_item("a", 100, 1.0, 1), table_item("b", 0, 1.0, 1)], 1, budget
    )
    if fits:
        assert sum(search.solve(problem).memory()[0].values()) == budget
        return
    with pytest.raises(
        search.PlanDoesNotFitError, match="1 bytes are missing"
    ) as caught:
        search.solve(problem)
    assert caught.value.missing_bytes == 1
    assert caught.value.device == "server 0"


def test_equal_tables_are_distributed_equally():
    items = [table_item(f"t{one}", 10, 1.0, 4, 1.0) for one in range(40)]
    solution = search.solve(problem_of(items, 4, 100))
    assert [sum(one.values()) for one in solution.memory()] == [100] * 4
    assert solution.step_seconds == 10


def random_tables(count, num_devices, seed=0):
    rng = random.Random(seed)
    return [
        table_item(
            f"t{one}",
            int(10 ** rng.uniform(4, 9)),
            rng.uniform(1e-5, 1e-3),
            num_devices,
            5e-5,
        )
        for one in range(count)
    ]


def test_1000_tables_take_less_than_two_seconds_of_processor_time():
    items = random_tables(1000, 8)
    total = sum(one.choices[0].memory["weights"] for one in items)
    problem = problem_of(items, 8, int(1.02 * total / 8))
    start = time.process_time()
    solution = search.solve(problem)
    # The limit is larger than 2 s, because the machine may be slow.
    assert time.process_time() - start < 6
    check_budgets(solution)
    best = sum(one.choices[0].seconds["rows"] for one in items) / 8
    assert solution.step_seconds < 1.01 * best


def test_names_and_order_of_different_tables_do_not_matter():
    items = random_tables(200, 4)
    total = sum(one.choices[0].memory["weights"] for one in items)
    budget = int(1.05 * total / 4)
    first = search.solve(problem_of(items, 4, budget))
    new_names = {
        one.name: f"n{(index * 77) % 200}" for index, one in enumerate(items)
    }
    renamed = [
        dataclasses.replace(one, name=new_names[one.name]) for one in items
    ]
    random.Random(1).shuffle(renamed)
    second = search.solve(problem_of(renamed, 4, budget))
    assert second.selected == {
        new_names[name]: choice for name, choice in first.selected.items()
    }


def mesh_item(name, sharded_seconds=1.0, num_bytes=80):
    return Item(
        name,
        "matrix",
        {f"{name}/kernel": (num_bytes, 1)},
        (
            Choice("replicate", "replicated", {"weights": num_bytes}, {}),
            Choice(
                "rows over model",
                "with its rows over 'model'",
                {"weights": num_bytes // 8},
                {"collectives": sharded_seconds},
            ),
            Choice(
                "columns over model",
                "with its columns over 'model'",
                {"weights": num_bytes // 8},
                {"collectives": 2 * sharded_seconds},
                refused="would be replicated by DTensor",
            ),
        ),
    )


def test_the_cheapest_items_of_a_mesh_are_sharded():
    items = [mesh_item(f"m{one}", 1.0 + one) for one in range(30)]
    # 10 items are sharded: 20 * 80 + 10 * 10.
    solution = search.solve(problem_of(items, 8, 1700))
    assert [
        name
        for name, choice in solution.selected.items()
        if choice.startswith("rows")
    ] == [f"m{one}" for one in range(10)]


@pytest.mark.parametrize(
    "pin", ["rows", "rows over model"], ids=["word", "name"]
)
def test_pins_select_choices(pin):
    problem = problem_of([mesh_item("a"), mesh_item("b")], 8, 1000)
    solution = search.solve(problem, {"b": pin})
    assert solution.selected == {"a": "replicate", "b": "rows over model"}
    assert solution.pins == {"b": pin}
    by_weight = search.solve(problem, {"b/kernel": pin})
    assert by_weight.selected == solution.selected


@pytest.mark.parametrize(
    "pins, words",
    [
        ({"wrods": "rows"}, r"names of items.*'words'.*Received: 'wrods'"),
        ({"words": "row"}, r"choice of 'words'.*'rows over model'.*'row'"),
        (
            {"words": "rows", "words/kernel": "replicate"},
            r"one choice per item.*'rows'.*'replicate'.*about 'words'",
        ),
        (
            {"words": "columns"},
            r"'columns' for 'words'.*would be replicated by DTensor",
        ),
    ],
)
def test_wrong_pins_raise_by_name(pins, words):
    problem = problem_of([mesh_item("words"), mesh_item("users")], 8, 1000)
    with pytest.raises(ValueError, match=words):
        search.solve(problem, pins)


def test_pins_above_the_budget_raise_by_name():
    problem = problem_of([mesh_item("words"), mesh_item("users")], 8, 100)
    assert search.solve(problem).selected
    with pytest.raises(
        search.PlanDoesNotFitError,
        match=r"60 bytes are missing.*without the pins 'words': 'replicate', "
        r"'users': 'replicate', or without one of them",
    ):
        search.solve(problem, {"words": "replicate", "users": "replicate"})


def test_the_error_contains_what_would_fit():
    def problem(num_devices):
        return problem_of(
            [table_item(f"t{one}", 90, 1.0, num_devices) for one in range(3)],
            num_devices,
            50,
        )

    def suggest():
        yield f"{search.fewest(problem, 2)} servers"

    with pytest.raises(
        search.PlanDoesNotFitError, match="What would fit: 6 servers"
    ):
        search.solve(problem(2), suggest=suggest)


def test_repeated_names_raise():
    with pytest.raises(ValueError, match="unique names.*'a'"):
        search.solve(problem_of([mesh_item("a"), mesh_item("a")], 2, 1000))


def test_messages_name_the_largest_item():
    problem = problem_of(
        [table_item("small", 10, 1.0, 2), table_item("big", 100, 1.0, 2)], 2, 20
    )
    with pytest.raises(search.PlanDoesNotFitError) as caught:
        search.solve(problem)
    assert re.search(
        r"largest item there is 'big', which needs 50 bytes with its rows over "
        r"all devices",
        str(caught.value),
    )
