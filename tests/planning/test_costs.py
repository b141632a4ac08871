"""Tests the costs of a machine, their cache file, and the probe."""

import dataclasses
import json
import time

import pytest

import tests.strategies  # noqa: F401  (splits the CPU before the first op)
import tf_layoutmap as tlm
from tf_layoutmap.planning import budgets, costs, mesh_probe, planner, probe

TYPICAL = tlm.planning.MachineCosts.typical()


def test_costs_are_interpolated():
    one = dataclasses.replace(
        TYPICAL,
        row_seconds={10: 1.0, 20: 3.0},
        collective_latency={2: 1.0, 4: 2.0},
        collective_bytes_per_second={2: 10.0, 4: 5.0},
        gather_bytes_per_second={2: 20.0},
    )
    assert one.seconds_per_row(5) == 1.0
    assert one.seconds_per_row(15) == 2.0
    assert one.seconds_per_row(30) == 5.0
    assert one.seconds_of_rows(10, 20) == 30.0
    assert one.seconds_of_collective(100, 1) == 0.0
    assert one.seconds_of_collective(100, 2) == pytest.approx(11.0)
    assert one.seconds_of_collective(100, 3) == pytest.approx(1.5 + 15.0)
    assert one.seconds_of_gather(100, 1) == 0.0
    assert one.seconds_of_gather(100, 2) == pytest.approx(1.0 + 5.0)


def test_descending_costs_are_not_extrapolated():
    one = dataclasses.replace(TYPICAL, row_seconds={10: 3.0, 20: 1.0})
    assert one.seconds_per_row(1000) == 1.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "1", True])
def test_wrong_costs_raise(value):
    with pytest.raises(ValueError, match="`server_latency`.*positive"):
        dataclasses.replace(TYPICAL, server_latency=value)
    with pytest.raises(ValueError, match="`row_seconds`"):
        dataclasses.replace(TYPICAL, row_seconds={8: value})


def test_costs_are_equal_after_json():
    read = json.loads(json.dumps(TYPICAL.to_dict()))
    assert tlm.planning.MachineCosts.from_dict(read) == TYPICAL
    with pytest.raises(ValueError, match="fields of MachineCosts"):
        tlm.planning.MachineCosts.from_dict({"row_seconds": {}})


def test_costs_are_measured_once(tmp_path, monkeypatch):
    calls = []

    def measure(devices):
        calls.append(devices)
        return TYPICAL

    monkeypatch.setattr(probe, "measure", measure)
    path = tmp_path / "new folder" / "costs.json"
    assert planner.read_costs(path) == TYPICAL
    assert planner.read_costs(str(path)) == TYPICAL
    assert len(calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 0, "costs": {}}',
        '{"version": 2, "costs": 7}',
        '{"version": 2, "costs": {"KEY": {"row_seconds": 1}}}',
    ],
)
def test_damaged_and_older_files_are_measured_again(
    text, tmp_path, monkeypatch
):
    path = tmp_path / "costs.json"
    monkeypatch.setattr(probe, "measure", lambda devices: TYPICAL)
    devices = probe._mesh_devices()
    key = f"{costs.machine_name()}, {probe._devices_name(devices)}"
    path.write_text(text.replace("KEY", key), encoding="utf-8")
    assert planner.read_costs(path) == TYPICAL
    assert costs.read_cache(str(path), key) == TYPICAL


@pytest.mark.parametrize(
    "text, name",
    [
        (
            "processor\t: 0\nmodel name\t: A 1 @ 2\n\nprocessor\t: 1\n",
            "A 1 @ 2",
        ),
        # Neoverse N1, as Linux on aarch64 describes it.
        (
            "BogoMIPS\t: 243.75\nCPU implementer\t: 0x41\n"
            "CPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n"
            "CPU revision\t: 1\n",
            "0x41 0xd0c 0x3 1",
        ),
        ("unknown\n", "from Python"),
        (None, "from Python"),
    ],
)
def test_the_name_of_a_machine_contains_its_processor(
    text, name, tmp_path, monkeypatch
):
    """Costs of one processor are not used on another one."""
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(costs, "_CPU_INFO", file)
    monkeypatch.setattr(costs.platform, "processor", lambda: "from Python")
    assert costs.machine_name().endswith(f" CPUs, {name}")


def test_costs_of_other_machines_are_kept(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(costs.cache_text(str(path), "a", TYPICAL))
    other = dataclasses.replace(TYPICAL, table_seconds=7.0)
    path.write_text(costs.cache_text(str(path), "b", other))
    assert costs.read_cache(str(path), "a") == TYPICAL
    assert costs.read_cache(str(path), "b") == other
    assert costs.read_cache(str(path), "c") is None


def test_a_file_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "measure", lambda devices: TYPICAL)
    (tmp_path / "file").write_text("")
    assert planner.read_costs(tmp_path / "file" / "costs.json") == TYPICAL


def test_the_path_of_the_cache(monkeypatch):
    monkeypatch.setenv(costs.CACHE_VARIABLE, "/a/b.json")
    assert costs.cache_path() == "/a/b.json"
    assert costs.cache_path("/c.json") == "/c.json"
    monkeypatch.delenv(costs.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert costs.cache_path() == "/cache/tf_layoutmap/costs.json"


def test_costs_of_another_type_raise():
    with pytest.raises(TypeError, match="MachineCosts, a path, or None"):
        planner.read_costs(3)


def test_meshes_of_different_sizes_are_measured_separately(
    tmp_path, monkeypatch
):
    measured = []

    def measure(devices):
        measured.append(len(devices))
        return TYPICAL

    monkeypatch.setattr(probe, "measure", measure)
    names = [f"/job:localhost/device:CPU:{one}" for one in range(4)]
    monkeypatch.setattr(
        probe, "_mesh_devices", lambda count=None: names[:count]
    )
    for count in (2, 4, 2, None):
        planner.read_costs(tmp_path / "costs.json", count)
    assert measured == [2, 4]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_collectives_of_all_devices_are_measured():
    devices = probe._mesh_devices(4)
    found = mesh_probe.measure(devices, time.perf_counter() + 60)
    assert list(found.collective_latency) == [4, 2]
    for one in dataclasses.astuple(found):
        values = one.values() if isinstance(one, dict) else [one]
        assert all(0 < value < 1e14 for value in values)


@pytest.mark.slow
def test_the_probe_measures_a_machine_within_its_time():
    start = time.process_time()
    found = probe.measure()
    # The deadline of 10 s is for a machine without other programs.
    assert time.process_time() - start < 40
    assert list(found.row_seconds.values()) == sorted(
        found.row_seconds.values()
    )
    # 30 s per million rows would be slower than a hard disk.
    assert 1e-10 <= found.seconds_per_row(256) < 3e-5
    assert 1e8 < found.memory_bytes_per_second < 1e12
    assert 1e8 < found.flops_per_second < 1e14


@pytest.mark.parametrize(
    "size, expected",
    [("2 KiB", 2048), ("1.5MB", 1_500_000), (3, 3), ("3", 3), ("4b", 4)],
)
def test_sizes(size, expected):
    assert budgets.read_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "GiB", "-1", -1, True, 1.5, "1 XB", None])
def test_wrong_sizes_raise(size):
    with pytest.raises(ValueError, match="`memory`"):
        budgets.read_bytes(size)


def test_collectives_of_a_cluster_are_not_measured(monkeypatch):
    """All processes would have to take part."""

    class Device:
        def __init__(self, name):
            self.name = name

    devices = [
        Device(f"/job:{job}/replica:0/task:0/device:CPU:0")
        for job in ("chief", "ps", "worker")
    ]
    monkeypatch.setattr(
        probe.tf.config,
        "list_logical_devices",
        lambda kind: devices if kind == "CPU" else [],
    )
    assert probe._mesh_devices() == []
    assert len(probe._server_devices()) == 1
    assert list(probe._costs_without_mesh().collective_latency) == [2]
