"""A cluster on this machine: its processes, what they print, and their end."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.processes import ROOT
from tf_layoutmap.local_cluster import __main__ as local_cluster
from tf_layoutmap.local_cluster import processes

# Starts a process of its own, says which, and waits.
SLEEPER = textwrap.dedent("""
    import subprocess, sys, time
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(99)"])
    print("child", child.pid, flush=True)
    time.sleep(99)
""")


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie waits for its parent only.
    return state.rpartition(")")[2].split()[0] != "Z"


def gone(pids, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.05)
    return False


def started(*arguments):
    # A shell that runs the tests in the background has SIGINT ignored, and all
    # processes inherit that.
    return subprocess.Popen(
        [sys.executable, "-m", "tf_layoutmap.local_cluster", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def ended(*arguments, seconds=100):
    process = started(*arguments)
    try:
        printed, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, printed


def pids_in(printed):
    return [int(pid) for pid in re.findall(
        r"is process (\d+)|child (\d+)", printed) for pid in pid if pid]


def test_addresses_and_tasks(monkeypatch):
    cluster = local_cluster.addresses_of(
        {"chief": 1, "ps": 0, "worker": 2}, [1, 2, 3])
    assert cluster == {"chief": ["127.0.0.1:1"],
                       "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    monkeypatch.setenv("SOME_SETTING", "on")
    environment = local_cluster.environment_of(cluster, "worker", 1)
    assert environment["SOME_SETTING"] == "on"
    assert json.loads(environment["TF_CONFIG"]) == {
        "cluster": cluster, "task": {"type": "worker", "index": 1}}
    assert len(set(processes.free_ports(5))) == 5


def test_a_program_is_refused_that_is_not_there():
    code, printed = ended("--ps", "1")
    assert code and "A program must follow" in printed
    code, printed = ended("--ps", "0", "--", "no-such-program")
    assert code and "no-such-program" in printed


# Runs as every worker. The one that fails ends the other, which has to be
# through.
WORKER = textwrap.dedent("""
    import json, os, pathlib, sys, time
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    print("I am", task["type"], task["index"], "with", sys.argv[1])
    through = pathlib.Path(sys.argv[2])
    if task["index"] == 0:
        through.touch()
    while not through.exists():
        time.sleep(0.01)
    sys.exit(3 * task["index"])
""")


def test_without_servers_each_worker_is_the_program(tmp_path):
    code, printed = ended("--ps", "0", "--workers", "2", "--", sys.executable,
                          "-c", WORKER, "--its_own_flag",
                          str(tmp_path / "through"))
    assert code == 3
    assert "[worker:0] I am worker 0 with --its_own_flag\n" in printed
    assert "[worker:1] I am worker 1 with --its_own_flag\n" in printed
    assert "[local_cluster] worker:1 has ended with exit code 3\n" in printed
    assert len(pids_in(printed)) == 2 and gone(pids_in(printed))


# Runs as the coordinator of a real cluster.
CHIEF = textwrap.dedent("""
    import sys
    import tensorflow as tf
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(1.0)
    result = coordinator.schedule(tf.function(lambda: variable + 41))
    print("the answer is", result.fetch(), "from", variable.device)
""")


@pytest.mark.slow
def test_a_program_trains_on_parameter_servers():
    code, printed = ended("--ps", "2", "--workers", "1", "--", sys.executable,
                          "-c", CHIEF)
    assert code == 0, printed
    assert "[chief:0] the answer is 42.0 from /job:ps/" in printed
    assert re.search(r"\[ps:1\] ps:1 serves grpc://", printed)
    pids = pids_in(printed)
    assert len(pids) == 4 and gone(pids)


def lines_until(process, words):
    found = ""
    while words not in found:
        line = process.stdout.readline()
        assert line, found
        found += line
    return found


@pytest.mark.parametrize("number", [
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_however_it_ends_nothing_is_left(number):
    process = started("--ps", "0", "--workers", "2", "--", sys.executable,
                      "-c", SLEEPER)
    try:
        printed = lines_until(process, "worker:0] child")
        while len(pids_in(printed)) < 4:
            printed += process.stdout.readline()
        pids = pids_in(printed)
        assert all(map(is_running, pids))
        process.send_signal(number)
        code = process.wait(30)
        assert gone(pids)
        # As in a shell: what was passed on has ended the programs.
        assert code == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
        process.stdout.close()


def test_who_has_ended_is_started_again(capfd):
    ended_once = "import sys, time; print('here'); time.sleep(1.5)"
    with processes.Group() as group:
        group.start("one", [sys.executable, "-u", "-c", ended_once],
                    dict(os.environ), restart=True)
        # Ends too early to be worth it.
        group.start("two", [sys.executable, "-c", ""], dict(os.environ),
                    restart=True)
        deadline = time.monotonic() + 20
        printed = ""
        while printed.count("[one] here") < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            printed += capfd.readouterr().out
    assert printed.count("one is process") == 2
    assert printed.count("two is process") == 1
