"""Tests several coordinators of the same servers."""

import json
import signal
import socket

import pytest

from tests.ps.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # Starts processes.

_PROGRAM = ["-m", "tests.ps.guard.program"]
_START = 150


def start(cluster, index, folder, **options):
    """Starts a coordinator whose TF_CONFIG does not contain its address."""
    folder.mkdir(exist_ok=True)
    jobs = {job: cluster.jobs[job] for job in ("ps", "worker")}
    cluster.start(
        "chief",
        index,
        [*_PROGRAM, str(folder), json.dumps(options)],
        TF_CONFIG=json.dumps({"cluster": jobs}),
    )


def test_servers_have_one_coordinator_at_a_time(tmp_path):
    with Cluster(tmp_path, num_servers=2, num_workers=1) as cluster:
        start(cluster, 0, tmp_path / "first", calls="all")
        cluster.wait_for("PHASE calls", _START, "chief", 0)
        start(cluster, 1, tmp_path / "second")
        line = cluster.wait_for("RuntimeError: ", _START, "chief", 1)
        assert f"ps 0 at {cluster.jobs['ps'][0]} is used by another" in line
        owner = cluster.processes["chief", 0].pid
        assert f"process {owner} on host {socket.gethostname()}" in line
        # A stopped coordinator may continue.
        cluster.send("chief", 0, signal.SIGSTOP)
        start(cluster, 2, tmp_path / "second")
        cluster.wait_for("is used by another", _START, "chief", 2)
        cluster.send("chief", 0, signal.SIGKILL)
        start(cluster, 3, tmp_path / "second")
        cluster.wait_for("ENDED 20", _START, "chief", 3)


def resident_megabytes(process):
    with open(f"/proc/{process.pid}/status") as file:
        (line,) = [one for one in file if one.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def test_servers_free_the_tables_of_coordinators_that_have_ended(tmp_path):
    # The table and its slot variable have 48 MB each. The programs end without
    # closing their contexts.
    found = []
    with Cluster(tmp_path, num_servers=1, num_workers=1) as cluster:
        for number in range(2):
            folder = tmp_path / str(number)
            start(cluster, number, folder, num_rows=3_000_000)
            cluster.wait_for("ENDED 20", _START, "chief", number)
            found.append(resident_megabytes(cluster.processes["ps", 0]))
    print("MEMORY", found)
    assert found[-1] < found[0] + 48, found
