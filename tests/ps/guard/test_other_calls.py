"""Tests calls that are not steps, on a cluster that loses a process."""

import json
import random
import signal
import time

import pytest

from tests.ps.cluster import Cluster
from tests.ps.guard import program

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.

_PROGRAM = "tests.ps.guard.program"
_START = 90
# Maximum time of an error. The message contains the processes that do not
# answer within 5 s.
_SECONDS = program.CALL_SECONDS + 5 + 5


def start(cluster, **options):
    cluster.train(json.dumps(options), module=_PROGRAM)


def test_each_call_raises_an_error_with_the_name_of_a_stopped_server(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        start(cluster, calls="all")
        cluster.wait_for("PHASE calls", _START)
        cluster.send("ps", 1, signal.SIGSTOP)
        (tmp_path / "lost").touch()
        line = cluster.wait_for("FOUND ", 90)
        address = cluster.jobs["ps"][1]
    found = json.loads(line.partition("FOUND ")[2])
    for name, (error, seconds) in found.items():
        assert error.startswith("StepDeadlineError: "), (name, error)
        assert f"ps 1 at {address} does not answer" in error, (name, error)
        assert "program again" in error, (name, error)
        assert seconds < _SECONDS, (name, seconds)
    assert len(found) >= 16


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["ps", "worker"])
@pytest.mark.parametrize("phase", ["build", "restore", "trace"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("seed", range(3))
def test_a_program_that_loses_a_process_ends_with_one_error(
    tmp_path, job, phase, number, seed
):
    """The process is lost at a random time after the phase begins."""
    delay = random.Random(f"{job} {phase} {number} {seed}").uniform(0, 0.8)
    with Cluster(tmp_path, num_workers=1) as cluster:
        if phase == "restore":
            start(cluster)
            cluster.wait_for("ENDED", _START)
            cluster.code(30)
        start(cluster, deadline="5s", num_builds=40 if phase == "build" else 1)
        cluster.wait_for(f"PHASE {phase}", _START)
        time.sleep(delay)
        cluster.send(job, 0, number)
        cluster.code(_START)
        text = cluster.log("chief").read_text()
        if "ENDED" in text:
            return  # The process was not needed any more.
        lines = [one for one in text.splitlines() if "Error: " in one]
        assert "ServerLostError: " in lines[-1] or (
            "StepDeadlineError: " in lines[-1]
        ), text[-3000:]
        assert f"{job} 0 at {cluster.jobs[job][0]}" in lines[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["ps", "worker"])
@pytest.mark.parametrize("phase", ["build", "restore", "trace"])
def test_a_program_restarts_after_the_loss_of_a_process(tmp_path, job, phase):
    delay = random.Random(f"{job} {phase}").uniform(0, 0.8)
    with Cluster(tmp_path, num_workers=1) as cluster:
        options = {"on_server_loss": "restart"}
        if phase == "restore":
            start(cluster)
            cluster.wait_for("ENDED", _START)
            cluster.code(30)
        start(cluster, num_builds=40 if phase == "build" else 1, **options)
        cluster.wait_for(f"PHASE {phase}", _START)
        time.sleep(delay)
        cluster.restart(job, 0)
        assert cluster.wait_for("ENDED", 2 * _START) == "ENDED 20\n"
        assert cluster.code(30) == 0
