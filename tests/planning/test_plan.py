"""Tests `Plan`: explanations, JSON, the HTML page, and partitioners."""

import dataclasses
import html.parser
import io
import json
import re

import pytest
from rich import console

from tests.planning.problems import problem_of, table_item
from tf_layoutmap.planning import explanations, search
from tf_layoutmap.planning.plan import Plan, Target
from tf_layoutmap.planning.problem import Choice, Item


def with_quantity(item, amount, extra=0.0):
    """Returns an item whose times, without `extra`, are linear in ids."""
    return dataclasses.replace(
        item,
        quantity="unique rows per batch",
        amount=amount,
        choices=tuple(
            dataclasses.replace(
                one, seconds_per_unit=one.seconds["rows"] / amount
            )
            for one in item.choices
        ),
    )


def tables_plan(names=("words", "users"), pins=None, budget=1000):
    items = [
        with_quantity(table_item(name, 100 + i, 1.0 + i, 4, 2.0), 1000.0)
        for i, name in enumerate(names)
    ]
    solution = search.solve(
        problem_of(
            items,
            4,
            budget,
            fixed_memory={"activations": 5},
            fixed_seconds={"compute": 0.25},
        ),
        pins,
    )
    return Plan(solution, Target("servers", {"servers": 4}), ["A note."])


def test_a_plan_has_bytes_times_and_choices():
    plan = tables_plan()
    assert sorted(plan.bytes_per_device) == [5, 5, 105, 106]
    assert plan.step_seconds == 2.25
    assert {one.split(" ")[0] for one in plan.choices.values()} == {"table"}
    assert "2 items for 4 servers" in repr(plan)


def test_a_plan_is_equal_after_json():
    plan = tables_plan(pins={"words": "rows"})
    read = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert read == plan
    assert read.html() == plan.html()
    assert read.explain("words") == plan.explain("words")
    assert str(read) == str(plan)
    with pytest.raises(ValueError, match="version 2.*Received: 7"):
        Plan.from_dict({**plan.to_dict(), "version": 7})


def test_a_plan_for_a_mesh_keeps_the_order_of_the_axes():
    plan = tables_plan()
    plan.target = Target("mesh", {"model": 2, "batch": 2})
    read = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert list(read.target.sizes.items()) == [("model", 2), ("batch", 2)]
    read.check_mesh({"batch": 2, "model": 2})
    with pytest.raises(
        ValueError, match=r"made for a mesh.*'model': 2.*used with.*'model': 4"
    ):
        read.check_mesh({"model": 4})


def test_why_contains_the_runner_up_and_the_threshold():
    plan = tables_plan()
    text = plan.explain("users")
    assert "101 B of weights" in text
    assert "1,000 unique rows per batch" in text
    assert "The runner-up is 'rows over all'" in text
    # 'users' takes v / 500 s in full. With sharded rows, it takes v / 2000 s
    # and 2 s. The device of 'words' then takes 1 s more: 3 + v / 2000.
    assert "Rows over all would be faster above 2,000 unique rows" in text
    threshold = float(
        re.search(r"above ([\d,.]+) unique", text).group(1).replace(",", "")
    )

    def seconds(amount, choice):
        ours = plan.solution.problem.items[1]
        full = amount / 500
        on_words = 1.0 + (full / 4 + 2.0 if choice == "rows" else 0.0)
        del ours
        return max(on_words, full if choice == "table" else full / 4 + 2.0)

    assert seconds(threshold * 1.01, "rows") < seconds(
        threshold * 1.01, "table"
    )
    assert seconds(threshold * 0.99, "rows") > seconds(
        threshold * 0.99, "table"
    )


def test_why_says_which_memory_is_missing():
    plan = tables_plan(budget=111)
    # With its rows over all servers, 'words' would need 25 bytes next to 106.
    text = plan.explain("words")
    assert "does not fit: 20 bytes are missing" in text
    assert "would fit with a budget of 131 bytes" in text


def test_why_mentions_pins_and_unknown_names():
    plan = tables_plan(pins={"words": "rows"})
    assert "fixed by `pins`: 'rows'" in plan.explain("words")
    with pytest.raises(ValueError, match="such as.*'words'.*'wrods'"):
        plan.explain("wrods")


def test_refused_choices_are_explained():
    item = table_item("words", 100, 1.0, 1)
    refused = dataclasses.replace(
        item.choices[-1], refused="one server has no shards"
    )
    item = dataclasses.replace(item, choices=(item.choices[0], refused))
    plan = Plan(
        search.solve(problem_of([item], 1, 1000)),
        Target("servers", {"servers": 1}),
    )
    assert (
        "The choice 'rows over all' is not possible: one server has no shards."
        in plan.explain("words")
    )


def choice_of(name, num_bytes, seconds):
    return Choice(name, "", {"weights": num_bytes}, {"rows": seconds})


def test_the_runner_up_is_the_fastest_choice_that_fits():
    choices = [
        choice_of("replicate", 100, 1.0),
        choice_of("rows", 10, 3.0),
        choice_of("columns", 50, 2.0),
        choice_of("blocks", 2000, 0.5),
        choice_of("cells", 1500, 0.7),
    ]
    item = Item("words", "table", {"words": (25, 1)}, tuple(choices))
    solution = search.solve(problem_of([item], 1, 1000))
    found = explanations.alternatives_of(solution, item)
    assert [one.name for one in found] == ["columns", "rows", "cells", "blocks"]


def test_why_finds_the_item_of_an_outer_layer():
    items = [
        Item(
            name, "mlp", {f"{name}.cell.kernel": (1,)}, (choice_of("a", 1, 1),)
        )
        for name in ("one", "two")
    ]
    items.append(
        Item("two.last", "mlp", {"two.x.y.kernel": (1,)}, items[0].choices)
    )
    plan = Plan(
        search.solve(problem_of(items, 1, 10)),
        Target("servers", {"servers": 1}),
    )
    assert "stores 'one'" in plan.explain("one.cell")
    assert "stores 'two.last'" in plan.explain("two.x")
    with pytest.raises(ValueError, match="'no'"):
        plan.explain("no")


def test_a_plan_is_a_partitioner_for_its_tables_only():
    plan = tables_plan(pins={"words": "rows"})
    assert plan((100, 1), "float32", name="words") == [4, 1]
    assert plan((101, 1), "float32", name="users") == [1, 1]
    assert plan((101, 1), "float32") == [1, 1]
    assert plan.servers_of("words") == [0, 1, 2, 3]
    assert len(plan.servers_of("users")) == 1
    with pytest.raises(ValueError, match=r"shape.*\(100, 1\).*\(7, 1\)"):
        plan((7, 1), "float32", name="words")
    with pytest.raises(ValueError, match="Received: 'wrods'"):
        plan((7, 1), "float32", name="wrods")


def test_tables_of_one_shape_need_a_name_if_their_shards_differ():
    items = [table_item(name, 100, 1.0, 2) for name in ("a", "b")]
    solution = search.solve(problem_of(items, 2, 1000), {"a": "rows"})
    solution.selected["b"] = "table on 0"
    plan = Plan(solution, Target("servers", {"servers": 2}))
    with pytest.raises(
        ValueError, match=r"different numbers of shards, \[1, 2"
    ):
        plan((100, 1), "float32")


def test_a_plan_for_other_servers_raises():
    plan = tables_plan()
    plan.check_servers(4)
    with pytest.raises(
        ValueError, match="4 servers.*with 3 servers.*num_servers=3"
    ):
        plan.check_servers(3)
    with pytest.raises(ValueError, match="4 servers.*with one process"):
        plan.check_servers(0)
    with pytest.raises(ValueError, match="`layout_map` requires.*a mesh"):
        plan.layout_map()
    plan.target = Target("mesh", {"model": 4})
    with pytest.raises(ValueError, match="`partitioner`.*a mesh"):
        plan((100, 1), "float32", name="words")


class Page(html.parser.HTMLParser):
    """Collects the tags, the attributes and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [(name, value) for name, value in attrs]

    def handle_data(self, data):
        self.text += data


def test_the_page_escapes_names_and_loads_no_files(tmp_path):
    name = '<script>alert("x")</script>'
    plan = tables_plan(names=(name, "users"))
    plan.save_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert name in page.text
    assert not {"src", "href"} & {key for key, _ in page.values}
    assert "http" not in text and "url(" not in text and "@import" not in text


def test_the_page_contains_devices_memory_times_and_reasons():
    page = Page(tables_plan().html())
    text = " ".join(page.text.split())
    assert "Plan of 2 items for 4 servers: 2.25 s per step" in text
    assert "105 B of 1000 B" in text
    assert "The runner-up is 'rows over all'" in text
    assert "A note." in text
    assert page.values.count(("class", "bar")) == 2 * page.tags.count("h3")
    # The two servers without tables are in one box.
    assert page.tags.count("h3") == 3
    assert "each of server" in text
    pinned = tables_plan(pins=dict.fromkeys(("words", "users"), "rows"))
    assert "each of the 4 servers" in Page(pinned.html()).text


def test_print_shows_all_items():
    output = io.StringIO()
    plan = tables_plan(names=("[red]words", "users"))
    plan.print(console.Console(file=output, width=200))
    assert "[red]words" in output.getvalue()
    assert "A note." in output.getvalue()
    assert "users" in str(plan)


def test_a_plan_without_a_limit_shows_no_budget():
    limited = tables_plan(budget=111)
    problem = dataclasses.replace(limited.solution.problem, is_limited=False)
    plan = Plan(
        dataclasses.replace(limited.solution, problem=problem), limited.target
    )
    shown = [str(plan), plan.html(), plan.explain("words")]
    assert all(
        "budget" in one for one in [str(limited), limited.explain("words")]
    )
    for text in shown:
        assert "budget" not in text and "does not fit" not in text
    assert "needs 20 bytes more on" in plan.explain("words")
    assert "pass `memory` of at least 131 bytes" in plan.explain("words")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_printed_plan_fits_80_columns():
    plan = tables_plan(["words", "users_of_the_service"])
    assert max(map(len, str(plan).splitlines())) <= 80
    assert "users_of_the_service" in str(plan)
