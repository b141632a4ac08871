"""Checks the parts of benchmarks that compute and draw results."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from benchmarks import growth, line_picture, serving, workloads
from benchmarks.whole_models import start_up

SVG = "{http://www.w3.org/2000/svg}"


def point(size, threads, **values):
    found = dict.fromkeys(
        ("lookup", "step", "roof.lookup", "roof.step", "create"), 1.0
    )
    return {
        "size": size,
        "threads": threads,
        **found,
        "peak": 2e6,
        "tables": 1e6,
        **values,
    }


def lines_of(chart):
    """Returns the pixels of each line of a chart."""
    root = ElementTree.fromstring(line_picture.svg([chart], "title"))
    return [
        [
            tuple(map(float, one.split(",")))
            for one in line.get("points").split()
        ]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_equal_factors_are_equal_distances_in_a_chart():
    line = line_picture.Line("a", [(1, 1), (10, 10), (1000, 1000)], 0)
    (pixels,) = lines_of(line_picture.Chart("ms", "rows", [line]))
    (x0, y0), (x1, y1), (x2, y2) = pixels
    assert x2 - x1 == pytest.approx(2 * (x1 - x0), abs=0.2)
    assert y2 - y1 == pytest.approx(2 * (y1 - y0), abs=0.2)
    # Larger values are to the right and at the top.
    assert x1 > x0 and y1 < y0


def test_all_lines_of_a_chart_share_axes():
    low = line_picture.Line("low", [(1, 1), (100, 1)], 0)
    high = line_picture.Line("high", [(1, 100), (100, 100)], 1, is_dashed=True)
    first, second = lines_of(line_picture.Chart("ms", "rows", [low, high]))
    assert [x for x, _ in first] == [x for x, _ in second]
    assert first[0][1] > second[0][1]


def test_texts_of_a_picture_are_escaped():
    line = line_picture.Line("a < b", [(1, 1), (2, 2)], 0)
    image = line_picture.svg([line_picture.Chart("ms & MB", "x", [line])], "t")
    texts = [
        one.text for one in ElementTree.fromstring(image).iter(f"{SVG}text")
    ]
    assert "a < b" in texts and "ms & MB" in texts


@pytest.mark.parametrize("sweep", growth.SWEEPS)
def test_a_sweep_changes_one_size(sweep):
    sizes = growth.SWEEPS[sweep].sizes
    assert list(sizes) == sorted(set(sizes))
    found = [growth.SWEEPS[sweep].workload(size, "uniform") for size in sizes]
    facts = {
        "rows": {one.num_rows[0] for one in found},
        "tables": {len(one.num_rows) for one in found},
        "ids": {one.most_ids for one in found},
        "dim": {one.dim for one in found},
    }
    assert facts.pop(sweep) == set(sizes)
    assert all(len(values) == 1 for values in facts.values()), facts


def test_no_table_of_a_sweep_exceeds_8_gib():
    for sweep in growth.SWEEPS.values():
        for size in sweep.sizes:
            workload = sweep.workload(size, "uniform")
            assert growth.table_bytes(workload) <= 8 * 2**30


def test_table_bytes_contain_the_slot_variable():
    workload = workloads.Workload("a", (10, 20), 8, 4, 1, 1)
    assert growth.table_bytes(workload) == 2 * (10 + 20) * 8 * 4


def test_sizes_without_enough_memory_are_skipped():
    sweep = growth.SWEEPS["dim"]

    def measure(name, size, distribution, threads):
        assert (name, distribution) == ("dim", "zipf")
        return None if size == sweep.sizes[-1] else point(size, threads)

    points = growth.run("dim", "zipf", measure)
    assert {one["size"] for one in points} == set(sweep.sizes[:-1])
    assert len(points) == len(growth.THREADS) * (len(sweep.sizes) - 1)


def test_a_process_is_not_started_without_enough_memory(monkeypatch):
    monkeypatch.setattr(growth, "_available", lambda: 2**20)
    assert growth.in_process("rows", 100_000, "uniform", 1) is None


def test_excess_finds_growth_that_is_faster_than_the_bound():
    slow = [{"peak": 8, "tables": 1}, {"peak": 9, "tables": 8}]
    assert growth.excess(slow, "peak", "tables") == 1.0
    fast = [*slow, {"peak": 36, "tables": 16}]
    assert growth.excess(fast, "peak", "tables") == 2.0


def test_charts_of_growth_show_each_number_of_threads():
    points = [
        point(size, threads, step=size / threads, peak=1e6 * size)
        for size in (8, 16)
        for threads in growth.THREADS
    ]
    times, memory = growth.charts("dim", points)
    lines = {line.name: line for line in times.lines}
    assert lines["step, 1 thread"].points == [(8, 8), (16, 16)]
    assert lines["step, 2 threads"].points == [(8, 4), (16, 8)]
    assert lines["roof of a step, 2 threads"].is_dashed
    peaks = {line.name: line.points for line in memory.lines}
    assert peaks["peak, 2 threads"] == [(8, 8), (16, 16)]
    assert peaks["tables and slot variables"] == [(8, 1), (16, 1)]


def test_start_up_compares_the_sums_of_all_parts():
    found = {
        kind: {part: [scale, 3 * scale] for part in start_up.PARTS}
        for kind, scale in (("tlm", 1.0), ("keras", 2.0))
    }
    found["memory"] = {"first write": [0.5], "second write": [0.25]}
    result = start_up.summary("dim 16", found)
    assert result["sum"] == {"tlm": 8.0, "keras": 16.0}
    assert result["tlm / keras"] == 0.5
    gigabytes = 2 * sum(workloads.CRITEO_ROWS) * 16 * 4 / 1e9
    assert result["GB/s"]["first write"] == pytest.approx(gigabytes / 0.5)
    assert result["GB/s"]["tlm"] == pytest.approx(gigabytes / 2.0)


def test_start_up_limits_the_rows_of_stock_tables():
    size = start_up.small(workloads.DLRMS["dim 16"])
    assert max(size.num_rows) == start_up.SMALL_ROWS
    assert min(size.num_rows) == min(workloads.CRITEO_ROWS)


def test_start_up_writes_memory_twice():
    seconds = start_up._write_memory(4 * 2**20)
    assert list(seconds) == ["first write", "second write"]
    assert min(seconds.values()) > 0


def test_exports_are_compared_with_fbgemm():
    times = {"p50": 4.0, "p99": 9.0}
    found = {f"int8/{size}": times for size in serving.BATCH_SIZES}
    assert serving.fbgemm_ratios(found) == {}
    for size in serving.BATCH_SIZES:
        found[f"fbgemm int8/{size}"] = {"p50": 2.0, "p99": 3.0}
    ratios = serving.fbgemm_ratios(found)
    assert ratios == dict.fromkeys(
        [f"int8/{size}" for size in serving.BATCH_SIZES],
        {"p50": 2.0, "p99": 3.0},
    )


def test_pictures_of_growth_are_in_the_documentation():
    page = (serving.pathlib.Path(__file__).parents[2] / "docs").joinpath(
        "benchmarks.md"
    )
    named = re.findall(r"images/growth_(\w+)\.svg", page.read_text("utf-8"))
    assert sorted(set(named)) == sorted(growth.SWEEPS)
    for sweep in growth.SWEEPS:
        image = page.parent / "images" / f"growth_{sweep}.svg"
        root = ElementTree.fromstring(image.read_text("utf-8"))
        charts = growth.charts(
            sweep,
            [point(size, threads) for size in (1, 2) for threads in (1, 2)],
        )
        lines = list(root.iter(f"{SVG}polyline"))
        assert len(lines) == sum(len(chart.lines) for chart in charts)
        assert all(
            np.isfinite(
                [float(x) for x in re.split("[ ,]", one.get("points"))]
            ).all()
            for one in lines
        )
