"""Tests how a cluster of real processes handles failures."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import ROOT
from tests.ps.cluster import Cluster
from tests.ps.train import CHUNK, RATE

pytestmark = pytest.mark.slow  # Starts TensorFlow processes.

_START = 90
_LOSS_SECONDS = 30


def check(found, *, first=0):
    """Checks that every closure was applied once to every table."""
    expected = -RATE * (found["num_done"] - first)
    assert found["rows"] == [[expected] * 4] * 2, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("restarts", [8, 20])
@pytest.mark.parametrize("steps, prefetched", [(1, 0), (8, 0), (8, 1)])
def test_each_step_counts_once_if_workers_restart(
    tmp_path, restarts, steps, prefetched
):
    dice = random.Random(1)
    with Cluster(tmp_path) as cluster:
        # With these options, a closure takes most of its time after its updates
        # were sent, so workers often die at that time.
        cluster.train(
            json.dumps(
                {
                    "work": 30000,
                    "chunk": 4 * steps,
                    "steps_per_closure": steps,
                    "prefetch_steps": prefetched,
                }
            )
        )
        cluster.wait_for("DONE", _START)
        for _ in range(restarts):
            time.sleep(dice.uniform(0.1, 1))
            cluster.restart("worker", dice.randrange(2))
        cluster.wait_for(f"DONE {12 * steps}", 60)
        found = cluster.finish(60)
    assert found["num_updates"] == found["num_done"] >= 12 * steps
    check(found)
    # The servers recognize these repeated updates by their tokens and do not
    # apply them twice.
    assert found["num_repeated"] > 0


@pytest.mark.exhaustive
@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [1, 8])
def test_each_step_of_joined_layers_counts_once(tmp_path, steps):
    dice = random.Random(2)
    with Cluster(tmp_path) as cluster:
        cluster.train(
            json.dumps(
                {
                    "layers": True,
                    "work": 30000,
                    "chunk": 4 * steps,
                    "steps_per_closure": steps,
                }
            )
        )
        cluster.wait_for("DONE", _START)
        for _ in range(8):
            time.sleep(dice.uniform(0.1, 1))
            cluster.restart("worker", dice.randrange(2))
        cluster.wait_for(f"DONE {12 * steps}", 60)
        found = cluster.finish(60)
    assert found["num_updates"] == found["num_done"] >= 12 * steps
    check(found)
    assert found["num_repeated"] > 0


def test_a_lost_server_raises_with_its_address(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train()
        cluster.wait_for("DONE", _START)
        cluster.send("ps", 1)
        began = time.monotonic()
        line = cluster.wait_for("ServerLostError: ", _LOSS_SECONDS)
        assert f"ps 1 at {cluster.jobs['ps'][1]} accepts no" in line
        assert "training continues after" in line
        assert cluster.code(_LOSS_SECONDS) != 0
        assert time.monotonic() - began < _LOSS_SECONDS
        assert cluster.checkpoints()


def test_a_program_restarts_from_the_newest_checkpoint(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train(json.dumps({"on_server_loss": "restart"}))
        cluster.wait_for("DONE", _START)
        process = cluster.processes["chief", 0].pid
        cluster.restart("ps", 1)
        line = cluster.wait_for("BEGIN 4", _START + _LOSS_SECONDS)
        _, num_done, values = line.split(" ", 2)
        assert json.loads(values) == [[-RATE * int(num_done)] * 4] * 2
        cluster.wait_for(f"DONE {int(num_done) + CHUNK}", 60)
        found = cluster.finish(60)
        assert cluster.processes["chief", 0].pid == process
    assert found["num_done"] > int(num_done)
    check(found)


@pytest.mark.exhaustive
def test_a_restarted_coordinator_resumes(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train()
        cluster.wait_for("DONE", _START)
        time.sleep(0.7)
        cluster.send("chief", 0)
        cluster.train()
        line = cluster.wait_for("BEGIN", _START)
        num_done = int(line.split()[1])
        assert num_done >= CHUNK
        cluster.wait_for(f"DONE {num_done + CHUNK}", 60)
        found = cluster.finish(60)
    assert found["num_done"] > num_done
    check(found)


@pytest.mark.exhaustive
def test_an_incomplete_checkpoint_is_never_restored(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train()
        cluster.wait_for("DONE", _START)
        cluster.send("chief", 0)
        before = cluster.checkpoints()
        cluster.train(json.dumps({"slow_save": 30}))
        cluster.wait_for("WRITING", _START)
        cluster.send("chief", 0)
        half = set(cluster.checkpoints()) - set(before)
        assert [one.startswith(".being-written") for one in half] == [True]
        cluster.train()
        line = cluster.wait_for("BEGIN", _START)
        newest = max(int(one.split("-")[1]) for one in before)
        assert line.split()[1] == str(newest)
        found = cluster.finish(60)
        assert not half & set(cluster.checkpoints())
    check(found)


def test_a_stopped_server_ends_the_step_at_its_deadline(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train(json.dumps({"step_deadline": "5s"}))
        cluster.wait_for("DONE", _START)
        cluster.send("ps", 0, signal.SIGSTOP)
        line = cluster.wait_for("StepDeadlineError: ", 40)
        assert "within 5 s" in line
        assert f"ps 0 at {cluster.jobs['ps'][0]} does not answer" in line
        assert cluster.code(20) != 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "job, words, option",
    [
        ("worker", "DONE", ""),
        ("ps", "DONE", ""),
        # In this case, TensorFlow would block when it registers the traced
        # functions.
        ("worker", "READY", "--before-first-step"),
        ("worker", "DONE", "--before-save"),
        ("ps", "DONE", "--before-save"),
    ],
)
def test_a_program_exits_with_its_code_after_a_missed_deadline(
    tmp_path, job, words, option
):
    with Cluster(tmp_path) as cluster:
        log = tmp_path / "program.log"
        # The program is not forked, because forked processes skip the shutdown
        # of the interpreter.
        with open(log, "w") as file:
            program = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "tests.ps.no_answer_program",
                    str(tmp_path),
                    option,
                ],
                cwd=ROOT,
                stdout=file,
                stderr=file,
                env=cluster.environment("chief"),
            )
        try:
            deadline = time.monotonic() + _START
            while words not in log.read_text():
                assert program.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.05)
            cluster.send(job, 0, signal.SIGSTOP)
            (tmp_path / "stopped").touch()
            assert program.wait(60) == 3, log.read_text()[-3000:]
        finally:
            program.kill()
            program.wait()
        assert (
            f"{job} 0 at {cluster.jobs[job][0]} does not answer"
            in log.read_text()
        )


@pytest.mark.exhaustive
def test_a_bad_id_raises_and_training_continues(tmp_path):
    with Cluster(tmp_path) as cluster:
        cluster.train(json.dumps({"bad_closure": 30}))
        line = cluster.wait_for("REFUSED", _START)
        assert "id 9 is outside table 'a' with 8 rows" in line
        assert "Feature 'a', sample 0" in line.replace("\\", "")
        cluster.wait_for("DONE 2", 60)
        found = cluster.finish(60)
    check(found)


PLAIN = """
import json, os, tensorflow as tf
config = json.loads(os.environ["TF_CONFIG"])
{before}
server = tf.distribute.Server(
    tf.train.ClusterSpec(config["cluster"]), job_name="ps", task_index=0)
server.join()
"""
OLD = """
import tf_layoutmap._core.ops
os.environ["TF_LAYOUTMAP_PROCESS"] = json.dumps(
    {"tensorflow": tf.__version__, "tf_layoutmap": "0.0.1"})
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "before, words",
    [
        ("", "lacks the ops of tf_layoutmap"),
        (OLD, "and tf_layoutmap 0.0.1. Start it with"),
    ],
)
def test_an_incompatible_server_raises(tmp_path, before, words):
    cluster = Cluster(tmp_path, num_servers=1, num_workers=1)
    with cluster:
        cluster.send("ps", 0)
        program = tmp_path / "plain.py"
        program.write_text(PLAIN.format(before=before))
        cluster.start("ps", 0, [str(program)])
        cluster.train()
        line = cluster.wait_for("RuntimeError: The process", _START)
        assert f"ps 0 at {cluster.jobs['ps'][0]}" in line
        assert words in line
        assert "python -m tf_layoutmap.server" in line
        assert cluster.code(30) != 0


@pytest.mark.exhaustive
def test_connecting_to_a_missing_server_raises(tmp_path):
    with Cluster(tmp_path, num_servers=1, num_workers=1) as cluster:
        cluster.wait_for("serves grpc", _START, "worker", 0)
        cluster.send("ps", 0)
        cluster.train("--only-connect", module="tests.ps.no_answer_program")
        line = cluster.wait_for("no connection to", _START)
        assert f"ps 0 at {cluster.jobs['ps'][0]}" in line
        assert cluster.code(30) != 0


def test_connecting_to_a_stopped_server_raises_within_the_deadline(tmp_path):
    """Without this package, TensorFlow waits for servers without a deadline."""
    with Cluster(tmp_path, num_servers=1, num_workers=1) as cluster:
        cluster.wait_for("serves grpc", _START, "ps", 0)
        cluster.wait_for("serves grpc", _START, "worker", 0)
        cluster.send("ps", 0, signal.SIGSTOP)
        cluster.train("--only-connect", module="tests.ps.no_answer_program")
        line = cluster.wait_for("no answer from", _START)
        assert f"ps 0 at {cluster.jobs['ps'][0]}" in line
        assert "worker 0" not in line
        assert cluster.code(30) != 0
