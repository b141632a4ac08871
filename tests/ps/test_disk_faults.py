"""Tests that training continues if a checkpoint cannot be written.

The last complete checkpoint must not be removed.
"""

import json
import resource
import time

import pytest

from tests.ps.cluster import Cluster
from tests.ps.test_faults import check

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.

_START = 90
_OPTIONS = json.dumps({"survives": True, "save_every": "1s"})


def saved(cluster) -> list[int]:
    """Returns the closure count of each complete checkpoint."""
    return [
        int(one.removeprefix("closure-"))
        for one in cluster.checkpoints()
        if one.startswith("closure-")
    ]


def newest(cluster) -> int:
    """Returns the closure count of the newest checkpoint.

    Also checks that all checkpoints are complete.
    """
    found = cluster.checkpoints()
    assert all(one.startswith("closure-") for one in found), found
    for one in found:
        assert (cluster.folder / "checkpoints" / one / "run.json").exists()
    return max(saved(cluster))


def wait_for_newer(cluster, than: int, seconds: float):
    """Waits for a checkpoint of more than `than` closures."""
    deadline = time.monotonic() + seconds
    while max(saved(cluster), default=0) <= than:
        assert time.monotonic() < deadline, cluster.checkpoints()
        time.sleep(0.05)


def check_goes_on(cluster, at_least: int):
    """Checks that a restarted run continues from its newest checkpoint."""
    # The next checkpoint must be written before the run ends.
    wait_for_newer(cluster, at_least, 60)
    found = cluster.finish(60)
    check(found)
    cluster.processes["chief", 0].wait(30)
    assert newest(cluster) == found["num_done"] > at_least
    (cluster.folder / "stop").unlink()
    cluster.train(_OPTIONS)
    line = cluster.wait_for("BEGIN", _START)
    assert int(line.split()[1]) == found["num_done"]


@pytest.mark.exhaustive
def test_training_continues_if_a_servers_disk_is_full(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train(_OPTIONS)
        cluster.wait_for("DONE", _START)
        pid = cluster.processes["ps", 1].pid
        none = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, -1))
        line = cluster.wait_for("NOT SAVED", 60)
        assert "File too large" in line
        assert '"OSError: ' in line
        assert ".being-written" in line
        before = newest(cluster)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, none)
        check_goes_on(cluster, before)


@pytest.mark.exhaustive
def test_training_continues_if_the_folder_becomes_read_only(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train(_OPTIONS)
        cluster.wait_for("DONE", _START)
        folder = tmp_path / "checkpoints"
        folder.chmod(0o555)
        try:
            line = cluster.wait_for("NOT SAVED", 60)
            assert "PermissionError" in line
            assert str(folder) in line
            before = newest(cluster)
        finally:
            folder.chmod(0o755)
        check_goes_on(cluster, before)


@pytest.mark.exhaustive
def test_an_unwritable_checkpoint_folder_raises_at_once(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir(mode=0o555)
    with Cluster(tmp_path, num_servers=1, num_workers=1) as cluster:
        cluster.train()
        line = cluster.wait_for("PermissionError", _START)
        assert str(folder) in line
        assert cluster.code(30) != 0
