"""Tests that the sweep reports each status, even if a process crashes."""

import numpy as np
import pytest

from tests.real import placement, results, sweep
from tests.real.compare import (
    DifferentError,
    difference,
    losses_differ_by,
    one_line,
)
from tests.real.results import Check, Result

STATUSES = {
    "trains": "trained",
    "replicates_an_op": "trained",
    "is_unsupported": "unsupported",
    "is_rounded": "trained",
    "differs": "differs",
    "differs_in_shape": "differs",
    "raises_without_a_message": "crashed",
    "ends_the_process": "crashed",
    "hangs": "crashed",
    "fails_without_a_mesh": "broken",
}


@pytest.fixture(scope="module")
def found():
    return {
        name: sweep.run(
            "self test", name, seconds=8 if name == "hangs" else 100
        )
        for name in STATUSES
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_status_is_reported(found):
    assert {name: result.status for name, result in found.items()} == STATUSES


@pytest.mark.slow
def test_a_result_contains_the_reason(found):
    assert found["hangs"].sentence == "fit: did not end within 8 s: "
    assert "ended with -6" in found["ends_the_process"].sentence
    assert found["is_unsupported"].sentence == (
        "make: ValueError: The LayoutMap does not fit."
    )
    assert [check.status for check in found["is_unsupported"].checks] == [
        "unsupported",
        "trained",
    ]
    assert "rounding errors explain 1.0e-05" in found["differs"].sentence
    assert found["is_rounded"].reason.startswith("rounding errors, which")
    assert found["replicates_an_op"].whole == ["Layer 'd' is replicated."]


def test_a_process_that_ends_without_done_is_a_crash():
    lines = ['START {"name": "fit"}', "what TensorFlow prints"]
    result = sweep.read("kind", "name", lines, 0)
    assert result.status == "crashed"
    assert result.sentence == "fit: ended with 0: what TensorFlow prints"


def example():
    return [
        Result("programs", "a|b", [Check("fit", difference=1e-7)]),
        Result(
            "programs",
            "c",
            [Check("fit", "unsupported", "No *op* <x>"), Check("save")],
        ),
        Result(
            "layers",
            "d",
            [
                Check("fit", "differs", "by 2", 2.0),
                Check("generate", "unsupported", "none"),
            ],
        ),
    ]


def test_results_are_counted_by_the_worst_of_their_checks():
    assert results.counts(example()) == {
        "trained": 1,
        "unsupported": 1,
        "differs": 1,
    }
    assert results.counts([Result("programs", "nothing")]) == {"crashed": 1}


def test_json_round_trip_keeps_all_fields():
    assert results.from_json(results.to_json(example())) == example()


def test_markdown_has_counts_and_escaped_messages():
    text = results.to_markdown(example())
    assert "| programs | 2 | 1 | 1 | 0 | 0 | 0 |" in text
    assert "| all | 3 | 1 | 1 | 1 | 0 | 0 |" in text
    assert "| a\\|b | trained | 1.0e-07 |  |" in text
    assert "fit: No \\*op\\* &lt;x>" in text


def test_markdown_sums_replicated_bytes():
    found = [
        Result("programs", name, [Check("fit")], replicated_bytes=size)
        for name, size in (("a", 2048), ("b", 1024), ("c", None))
    ]
    text = results.to_markdown(found)
    assert "| all | 3 | 3 | 0 | 0 | 0 | 0 | 3 |" in text
    assert "| b | trained |  | 1 |  |" in text
    assert "| c | trained |  |  |  |" in text


def test_markdown_compares_replicated_bytes():
    now = Result("kind", "a", replicated_bytes=1024)
    new = Result("kind", "b", replicated_bytes=2048)
    before = Result("kind", "a", replicated_bytes=5120)
    text = results.to_markdown([now, new], earlier=[before])
    assert "| 5 | 3 |" in text.split("## kind")[0]
    assert "| a | crashed |  | 5 | 1 |  |" in text
    assert "| b | crashed |  |  | 2 |  |" in text


@pytest.mark.parametrize(
    "warning, expected",
    [
        (
            "Operations of the train step of model 'm', so: 2 Sum in layer 'a' "
            "(b: c; 1 KiB); Split (d; 2 KiB). Results are correct.",
            "to train: 2 Sum in layer 'a' (b: c; 1 KiB); Split (d; 2 KiB)",
        ),
        ("Some of the test step of model 'm', so: Su", "to test: Su"),
        ("Layer 'd' is replicated.", "Layer 'd' is replicated."),
    ],
)
def test_markdown_has_the_operations_of_a_warning(warning, expected):
    result = Result("programs", "a", [Check("fit")], [warning])
    assert f"replicated {expected} |" in results.to_markdown([result])


def test_a_long_list_of_operations_is_truncated_after_an_entry():
    warning = "Some of the train step of model 'm', so: " + (
        "Split in 'a' (b; 1 KiB); " * 99
    )
    text = results.to_markdown(
        [Result("programs", "a", [Check("fit")], [warning])]
    )
    assert "| replicated to train: Split in 'a' (b; 1 KiB); Split" in text
    assert "; Split in 'a' (b; 1 KiB); ... |" in text


def test_write_page_replaces_tables_and_keeps_text(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n" + results.MARK + "\nold\n")
    for _ in range(2):
        results.write_page(page, example())
    assert page.read_text() == (
        "# Title\n\n" + results.MARK + "\n" + results.to_markdown(example())
    )
    page.write_text("# Title\n")
    with pytest.raises(ValueError, match="must have the line"):
        results.write_page(page, example())


def test_differences_are_relative_to_the_largest_number():
    assert difference([1.0, -4.0], [1.0, -4.4]) == pytest.approx(0.1)
    assert difference([], []) == 0
    assert difference([np.inf, 2.0], [np.inf, 3.0]) == 0.5
    with pytest.raises(DifferentError, match="infinity"):
        difference([np.inf, 2.0], [-np.inf, 2.0])
    with pytest.raises(DifferentError, match="NaN"):
        difference([1.0], [np.nan])
    with pytest.raises(DifferentError, match=r"\(1,\) instead of \(2,\)"):
        difference([1.0, 2.0], [1.0])


def test_losses_are_compared_one_by_one():
    assert losses_differ_by([100.0, 1.0], [100.0, 1.1]) == pytest.approx(0.1)
    with pytest.raises(DifferentError, match="1 losses instead of 2"):
        losses_differ_by([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="without a mesh"):
        losses_differ_by([np.nan], [np.nan])


def test_one_line_removes_addresses_and_line_breaks():
    assert one_line(TypeError("a <f at 0x7f12>\n  b")) == (
        "TypeError: a <f at 0x> b"
    )


@pytest.mark.parametrize(
    "path, shape, axes",
    [
        ("e/embeddings", (32, 6), ("model", None)),
        ("e/embeddings", (31, 6), (None, "model")),
        ("a/query/kernel", (16, 2, 8), (None, "model", None)),
        ("a/query/kernel", (16, 3, 8), (None, None, "model")),
        ("a/attention_output/kernel", (2, 8, 16), ("model", None, None)),
        ("d/kernel", (8, 32), (None, "model")),
        ("d/kernel", (32, 8), ("model", None)),
        ("d/kernel", (7, 1), None),
        ("d/bias", (8,), None),
    ],
)
def test_the_generic_map_shards_divisible_dimensions(path, shape, axes):
    assert placement.generic_axes(path, shape) == axes
