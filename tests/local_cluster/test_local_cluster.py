"""Tests the processes, output and shutdown of a cluster on this machine."""

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
from tf_layoutmap import local_cluster
from tf_layoutmap._core import requirements

# Program that starts a child process, prints its process id, and waits.
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
    # State Z is a zombie: the process has ended, but its parent has not read
    # the exit code.
    return state.rpartition(")")[2].split()[0] != "Z"


def all_ended(pids, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.05)
    return False


def start_cluster(*arguments):
    # If a shell runs the tests in the background, SIGINT is ignored, and all
    # child processes inherit this setting.
    return subprocess.Popen(
        [sys.executable, "-m", "tf_layoutmap.local_cluster", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run_cluster(*arguments, seconds=100):
    process = start_cluster(*arguments)
    try:
        printed, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, printed


def pids_in(printed):
    return [
        int(pid)
        for pid in re.findall(r"is process (\d+)|child (\d+)", printed)
        for pid in pid
        if pid
    ]


def test_addresses_and_environment_of_a_task(monkeypatch):
    cluster = local_cluster.addresses_of(
        {"chief": 1, "ps": 0, "worker": 2}, [1, 2, 3]
    )
    assert cluster == {
        "chief": ["127.0.0.1:1"],
        "worker": ["127.0.0.1:2", "127.0.0.1:3"],
    }
    monkeypatch.setenv("SOME_SETTING", "on")
    environment = local_cluster.environment_of(cluster, "worker", 1)
    assert environment["SOME_SETTING"] == "on"
    assert json.loads(environment["TF_CONFIG"]) == {
        "cluster": cluster,
        "task": {"type": "worker", "index": 1},
    }
    # An environment variable that is already set is not changed.
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert (
        local_cluster.environment_of(cluster, "chief", 0)[
            "TF_CPP_MIN_LOG_LEVEL"
        ]
        == "0"
    )
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    assert (
        local_cluster.environment_of(cluster, "chief", 0)[
            "TF_CPP_MIN_LOG_LEVEL"
        ]
        == "3"
    )
    assert len(set(local_cluster.free_ports(5))) == 5


def test_a_missing_program_ends_with_an_error():
    code, printed = run_cluster("--ps", "1")
    assert code and "A program must follow" in printed
    code, printed = run_cluster("--ps", "0", "--", "no-such-program")
    assert code and "no-such-program" in printed


# Program of each worker. When the first worker fails, the cluster ends the
# second worker. The second worker must have created its file before that.
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


def test_each_worker_runs_the_program_if_there_are_no_servers(tmp_path):
    code, printed = run_cluster(
        "--ps",
        "0",
        "--workers",
        "2",
        "--",
        sys.executable,
        "-c",
        WORKER,
        "--its_own_flag",
        str(tmp_path / "through"),
    )
    assert code == 3
    assert "[worker:0] I am worker 0 with --its_own_flag\n" in printed
    assert "[worker:1] I am worker 1 with --its_own_flag\n" in printed
    assert "[local_cluster] worker:1 has ended with exit code 3\n" in printed
    assert len(pids_in(printed)) == 2 and all_ended(pids_in(printed))


def test_the_exit_of_the_failed_process_is_shown_after_slow_output():
    lines = []

    class Slow(local_cluster.Group):
        def say(self, text, name="local_cluster"):
            # The thread that reads the output is slower than `wait`.
            if text == "I fail":
                self._ending.wait(20.0)
            lines.append(text)

    with Slow() as group:
        for name, program in [
            ("works", "import time; time.sleep(99)"),
            ("fails", "print('I fail', flush=True); raise SystemExit(3)"),
        ]:
            group.start(name, [sys.executable, "-c", program], os.environ)
        assert group.wait(["works", "fails"]) == 3
    assert lines[-2:] == ["I fail", "fails has ended with exit code 3"]


# Program of the coordinator of a cluster.
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
def test_a_program_trains_on_parameter_servers(monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    code, printed = run_cluster(
        "--ps", "1", "--workers", "1", "--", sys.executable, "-c", CHIEF
    )
    assert code == 0, printed
    # TensorFlow's log messages are not printed between the lines of the
    # program. TensorFlow 2.20 prints the information of servers at all log
    # levels.
    levels = "WE" if requirements.built_for() == "2.20" else "IWE"
    assert not re.findall(
        rf"(?m)^\[\S+\] (?:[{levels}]\d{{4}} |WARNING: All).*", printed
    )
    assert "[chief:0] the answer is 42.0 from /job:ps/" in printed
    assert re.search(r"\[ps:0\] ps:0 serves grpc://", printed)
    pids = pids_in(printed)
    assert len(pids) == 3 and all_ended(pids)


def lines_until(process, words):
    found = ""
    while words not in found:
        line = process.stdout.readline()
        assert line, found
        found += line
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
)
def test_no_process_remains_after_a_signal(number):
    process = start_cluster(
        "--ps", "0", "--workers", "2", "--", sys.executable, "-c", SLEEPER
    )
    try:
        printed = lines_until(process, "worker:0] child")
        while len(pids_in(printed)) < 4:
            printed += process.stdout.readline()
        pids = pids_in(printed)
        assert all(map(is_running, pids))
        process.send_signal(number)
        code = process.wait(30)
        assert all_ended(pids)
        # As in a shell, the exit code is 128 plus the number of the signal,
        # which was forwarded to the programs.
        assert code == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
        process.stdout.close()


def test_an_ended_process_is_restarted(capfd, monkeypatch):
    """A process that ends early is restarted after increasing delays."""
    monkeypatch.setattr(local_cluster, "DELAYS", (0.0, 0.25, 0.5))
    printed = ""
    with local_cluster.Group() as group:
        group.start(
            "one",
            [sys.executable, "-c", "print('here')"],
            dict(os.environ),
            restart=True,
        )
        group.start("two", [sys.executable, "-c", ""], dict(os.environ))
        deadline = time.monotonic() + 60
        while printed.count("[one] here") < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
            printed += capfd.readouterr().out
    printed += capfd.readouterr().out
    assert printed.count("[one] here") >= 5
    ends = re.findall(r"one has ended with exit code 0; (.*)", printed)
    assert ends[:4] == [
        "it restarts now",
        "it restarts in 0.25 s",
        "it restarts in 0.5 s",
        "it restarts in 0.5 s",
    ]
    assert printed.count("two is process") == 1


def test_hidden_lines_are_not_printed(capfd):
    with local_cluster.Group(re.compile("I0|WARNING: All")) as group:
        group.start(
            "one",
            [
                sys.executable,
                "-c",
                (
                    "print('I0 hidden'); print('seen I0'); print('WARNING: All "
                    "of')"
                ),
            ],
            dict(os.environ),
        )
        group.wait(["one"])
    printed = capfd.readouterr().out
    assert "[one] seen I0\n" in printed
    assert "hidden" not in printed
    assert "WARNING" not in printed


def test_a_longer_run_time_resets_the_delays(capfd, monkeypatch):
    monkeypatch.setattr(local_cluster, "DELAYS", (0.0, 999.0))
    monkeypatch.setattr(local_cluster, "SHORTEST_LIFE", 0.0)
    printed = ""
    with local_cluster.Group() as group:
        group.start(
            "one",
            [sys.executable, "-c", "print('here')"],
            dict(os.environ),
            restart=True,
        )
        deadline = time.monotonic() + 60
        while printed.count("[one] here") < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
            printed += capfd.readouterr().out
    assert printed.count("it restarts now") >= 2
    assert "999" not in printed


def test_shutdown_does_not_wait_for_a_restart_delay(capfd, monkeypatch):
    monkeypatch.setattr(local_cluster, "DELAYS", (999.0,))
    with local_cluster.Group() as group:
        group.start(
            "one", [sys.executable, "-c", ""], dict(os.environ), restart=True
        )
        printed = ""
        deadline = time.monotonic() + 60
        while "in 999 s" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)
            printed += capfd.readouterr().out
        began = time.monotonic()
    assert "in 999 s" in printed
    assert time.monotonic() - began < 100


def test_a_program_that_does_not_exist_raises_before_servers_start():
    with pytest.raises(SystemExit, match="executable.*'pythonn'"):
        local_cluster.main(["local_cluster", "pythonn"])
