"""After a writer is killed at any time, its last complete delta is usable."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

import tf_layoutmap as tlm
from tests.deltas import cases

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 60


class Program:
    """The program `killed_writer.py`, killed by a timer if it hangs."""

    def __init__(self, base, directory, log):
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "tests/deltas/killed_writer.py"),
                base,
                str(directory),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.timer = threading.Timer(5 * SECONDS, self.process.kill)
        self.timer.start()
        self.child = None

    def start(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.child = int(self.process.stdout.readline())

    def wait_for(self, line):
        """Waits until a line is printed, and returns the seconds waited."""
        start = time.monotonic()
        assert self.process.stdout.readline() == f"{line}\n"
        return time.monotonic() - start

    def kill(self):
        os.kill(self.child, signal.SIGKILL)
        while (line := self.process.stdout.readline()) != "dead\n":
            assert line in ("ready\n", "written\n")
        self.child = None

    def end(self):
        self.timer.cancel()
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGKILL)
        self.process.stdin.close()
        try:
            self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, 30])
def test_a_writer_killed_many_times_leaves_complete_deltas(tmp_path, kills):
    one = cases.embedding()
    base = cases.save(one, tmp_path / "base")
    directory = tmp_path / "deltas"
    directory.mkdir()
    wait = random.Random(0)
    lengths = []
    # The time to begin and the time to write a delta are measured. The kill
    # times are fractions of these times, so they adapt to the load of the
    # machine.
    begin, write = 0.5, 0.05
    with (tmp_path / "log").open("w") as log:
        program = Program(base, directory, log)
        try:
            for kill in range(kills):
                program.start()
                if kill % 5:
                    begin = program.wait_for("ready")
                    for _ in range(wait.randint(1, 3)):
                        write = program.wait_for("written")
                # Every fifth copy is killed while it starts, or soon
                # afterwards.
                time.sleep(wait.uniform(0, write if kill % 5 else begin))
                program.kill()
                full = tlm.deltas.apply(base, directory, tmp_path / "full")
                found = len(list(directory.glob("0*")))
                for step in range(lengths[-1] if lengths else 0, found):
                    cases.train(one, step)
                lengths.append(found)
                wanted = cases.save(one, tmp_path / "wanted")
                assert cases.tensors(full) == cases.tensors(wanted), lengths
        finally:
            program.end()
    assert lengths == sorted(lengths)
    # Each copy that printed "written" has written at least one delta.
    assert lengths[-1] >= kills * 4 // 5, (tmp_path / "log").read_text()[-3000:]
