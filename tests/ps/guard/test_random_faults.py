"""Kills and stops processes at random times, in each phase of a program.

Each round has two faults. The first fault is in `build`, while a checkpoint is
restored, or while the first step is traced. The program must restart, or end
with one error and then start again. The second fault is in one of four calls
that are not steps. All four calls must raise one error that names the process.
"""

import json
import random
import signal
import time

import pytest

from tests.ps.cluster import Cluster
from tests.ps.guard import program

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # Starts processes.

NUM_ROUNDS = 20
PHASES = ("build", "restore", "trace")
CALLS = (
    *("stats", "statistics of keys", "keys", "lookup", "evict", "write"),
    *("export of keys", "resize", "numpy", "assign", "DeltaWriter.write"),
    *("export", "read", "save", "Run", "build"),
)
ERRORS = {
    signal.SIGKILL: "ServerLostError",
    signal.SIGSTOP: "StepDeadlineError",
}
_START = 90
_DEADLINE = 10
# Maximum time of an error after its deadline. Its message contains the
# processes that do not answer within 5 s.
_MORE_SECONDS = 10


def start(cluster, **options):
    cluster.train(
        json.dumps(
            {
                "deadline": f"{_DEADLINE}s",
                "on_server_loss": "restart",
                **options,
            }
        ),
        module="tests.ps.guard.program",
    )


def wait_for_calls(cluster, seconds):
    """Returns whether the calls begin; False if the program ends before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if "PHASE calls" in cluster.log("chief").read_text():
            return True
        if cluster.processes["chief", 0].poll() is not None:
            return False
        time.sleep(0.1)
    raise AssertionError(cluster.log("chief").read_text()[-3000:])


def stop_and_continue(cluster, job, index, **options):
    """Stops a process until the program has ended, and starts it again."""
    began = time.monotonic()
    cluster.send(job, index, signal.SIGSTOP)
    # A worker that is stopped between two steps may not be required.
    calls_begin = wait_for_calls(cluster, _START)
    seconds = time.monotonic() - began
    cluster.send(job, index, signal.SIGCONT)
    if calls_begin:
        return
    # The exit of the program takes time, too.
    assert seconds < _DEADLINE + 2 * _MORE_SECONDS
    text = cluster.log("chief").read_text()
    error = [one for one in text.splitlines() if "Error: " in one][-1]
    assert "StepDeadlineError: " in error, text[-3000:]
    assert f"{job} {index} at {cluster.jobs[job][index]}" in error
    start(cluster, **options)


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_each_fault_ends_in_recovery_or_one_error(tmp_path, seed):
    dice = random.Random(seed)
    phase = PHASES[seed % 3]
    first, second = (list(ERRORS)[seed // 3**n % 2] for n in (1, 2))
    options = {
        "calls": dice.sample(CALLS, 4),
        "num_builds": 20 if phase == "build" else 1,
        "until": 40,
    }
    with Cluster(tmp_path, num_workers=1) as cluster:
        if phase == "restore":
            start(cluster)
            cluster.wait_for("ENDED", _START)
            cluster.code(30)
        start(cluster, **options)
        cluster.wait_for(f"PHASE {phase}", _START)
        time.sleep(dice.uniform(0, 0.8))
        job, index = dice.choice([("ps", 0), ("ps", 1), ("worker", 0)])
        if first == signal.SIGKILL:
            cluster.restart(job, index)
        else:
            stop_and_continue(cluster, job, index, **options)
        cluster.wait_for("PHASE calls", 2 * _START)
        time.sleep(dice.uniform(0, 2))
        index = dice.randrange(2)
        cluster.send("ps", index, second)
        line = cluster.wait_for("FOUND ", _START)
        names = [f"ps {index} at {cluster.jobs['ps'][index]}"]
        if (job, first) == ("worker", signal.SIGKILL):
            # Only steps reconnect to a worker that was restarted.
            names.append(f"worker 0 at {cluster.jobs['worker'][0]} was restart")
    found = json.loads(line.partition("FOUND ")[2])
    print("ROUND", seed, phase, first.name, job, second.name, found)
    assert len(found) == 4
    for call, (error, seconds) in found.items():
        assert any(name in error for name in names), (call, error)
        assert error.startswith(
            "ServerLostError: "
            if "was restarted" in error
            else f"{ERRORS[second]}: "
        ), (call, error)
        assert seconds < program.CALL_SECONDS + _MORE_SECONDS, (call, seconds)
