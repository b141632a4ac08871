"""The results of compilations become tables of a page."""

import pytest

from tests.accelerators.tpu_compiler import __main__ as program
from tests.accelerators.tpu_compiler import models, page

TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
SIZES = {"arguments": 4096, "temporaries": 2048}


def function_of(name="train", **compiled):
    facts = {
        "nodes": 1234,
        "collectives": 5,
        "int64_collectives": 1,
        "variable_bytes": 3072,
        "input_bytes": 512,
        "compiled": {
            one: compiled.get(one.partition(":")[0], SIZES)
            for one in TOPOLOGIES
        },
    }
    return page.Function(name, facts)


def model_of(*functions):
    memory = {
        "weights": 1024,
        "slot variables": 2048,
        "gradients": 1024,
        "activations": 8192,
    }
    return page.Model("CNN", memory, {"conv": "replicate"}, functions)


def text_of(*functions):
    return page.section([model_of(*functions)], TOPOLOGIES, "jax 1", {})


def test_the_tables_have_planned_and_compiled_sizes():
    text = text_of(function_of(), function_of("predict"))
    assert "2 of 2 functions were compiled for v5e:2x2, v6e:2x2." in text
    assert "| CNN | train | 1,234 | 5 | 1 | yes | yes |" in text
    assert "| CNN | train | 3 | 3 | 0.5 | 4 | 4 |" in text
    assert "| CNN | train | 1 | 8 | 2 | 2 |" in text
    # A plan predicts a training step.
    assert "| CNN | predict |  |  | 2 | 2 |" in text
    assert "| CNN | `conv`: replicate |" in text
    assert "Errors" not in text


def test_errors_are_listed_by_topology():
    failing = function_of(v6e={"error": "Unimplemented: s64"})
    text = text_of(failing, function_of("predict"))
    assert "1 of 2 functions were compiled" in text
    assert "| CNN | train | 1,234 | 5 | 1 | yes | no |" in text
    assert "| CNN | train | 3 | 3 | 0.5 | 4 | - |" in text
    assert "- CNN, train, v6e:2x2: Unimplemented: s64" in text


def test_a_function_that_xla_does_not_convert_fails_for_all_topologies():
    failing = page.Function("train", {"error": "no kernel"})
    text = text_of(failing)
    assert "0 of 1 functions" in text
    assert text.count("no kernel") == 2


def test_ops_of_sparse_cores_have_columns_for_each_tpu():
    lookup = page.Function("LookUp", {"compiled": {"v6e:2x2": SIZES}})
    update = page.Function(
        "Update", {"compiled": {"v6e:2x2": {"error": "Internal: a\nb"}}}
    )
    not_lowered = page.Function("Other", {"error": "no kernel"})
    model = page.Model("ops", {}, {}, [lookup, update, not_lowered])
    text = page.section([], TOPOLOGIES, "jax 1", {"v6e:2x2": model})
    assert "| `LookUp` | yes | yes | 2 |" in text
    assert "| `Update` | yes | no | - |" in text
    assert "| `Other` | no | no | - |" in text
    assert "- v6e:2x2: Internal: a\n- v6e:2x2: no kernel\n" in text


def test_only_the_section_of_results_is_replaced():
    before = "# Title\n\nText\n\n## Results\n\n| old |\n"
    after = page.with_section(before, "| new |\n")
    assert after == "# Title\n\nText\n\n## Results\n\n| new |\n"
    assert page.with_section(after, "| new |\n") == after
    with pytest.raises(ValueError, match="must have the heading '## Results'"):
        page.with_section("# Title\n", "| new |\n")


def test_the_page_has_a_row_for_each_model():
    text = page.PAGE.read_text()
    for name in (*models.CASES, program.STRATEGY):
        assert f"\n| {name} | train |" in text
    assert "| decoder | generate: loop_step |" in text
    for topology in program.TOPOLOGIES:
        assert topology in text
