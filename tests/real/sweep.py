"""Runs cases in separate processes, each with a deadline."""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from tests.real import kinds
from tests.real.results import Check, Result

ROOT = pathlib.Path(__file__).parents[2]


def run(kind: str, name: str, *, seconds: float) -> Result:
    """Runs one test case in a separate process.

    Args:
      kind: Kind of the case, a key of `kinds.KINDS`.
      name: Name of the case.
      seconds: Deadline in seconds. A case that misses the deadline counts as a
        crash.

    Returns:
      The result of the case. If the process crashes or misses the deadline, the
      result contains this failure.
    """
    start = time.monotonic()
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.real.one_case", kind, name],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env={
                "TF_CPP_MIN_LOG_LEVEL": "2",
                **os.environ,
                "PYTHONPATH": str(ROOT),
                **kinds.ENVIRONMENT.get(kind, {}),
            },
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"did not end within {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    result = read(kind, name, lines, code)
    result.seconds = time.monotonic() - start
    return result


def read(kind: str, name: str, lines: list[str], code: int | str) -> Result:
    """Returns the result that a process with exit code `code` has printed."""
    result = Result(kind, name)
    running = "start"
    last = collections.deque(maxlen=8)
    done = False
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "START":
            running = json.loads(rest)["name"]
        elif word == "CHECK":
            result.checks.append(Check(**json.loads(rest)))
        elif word == "WHOLE":
            sentence = json.loads(rest)["sentence"]
            if sentence not in result.whole:
                result.whole.append(sentence)
        elif word == "REASON":
            result.reason = json.loads(rest)["sentence"]
        elif word == "REPLICATED":
            result.replicated_bytes = json.loads(rest)["bytes"]
        elif word == "DONE":
            done = True
        elif line.strip():
            last.append(line.strip())
    if code != 0 or not done:
        how = code if isinstance(code, str) else f"ended with {code}"
        result.checks.append(
            Check(running, "crashed", f"{how}: {' | '.join(last)[-500:]}")
        )
    return result
