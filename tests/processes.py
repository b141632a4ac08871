"""Several processes of one test: a deadline, and their end."""

import dataclasses
import json
import os
import pathlib
import subprocess
import time

from tests import forked_process
from tf_layoutmap.local_cluster import free_ports

ROOT = pathlib.Path(__file__).parents[1]


def start_workers(
    program: pathlib.Path, arguments: list[list[str]], folder: pathlib.Path
) -> list["Worker"]:
    """Starts the workers of one `MultiWorkerMirroredStrategy`.

    Args:
      program: Is run as a script, with the package on its path.
      arguments: Of each worker.
      folder: For what they print.
    """
    addresses = [f"localhost:{port}" for port in free_ports(len(arguments))]
    workers = []
    for index, own in enumerate(arguments):
        log = folder / f"worker_{index}.log"
        workers.append(
            Worker(
                log,
                forked_process.ForkedProcess(
                    [str(program), *own],
                    log,
                    env={
                        **os.environ,
                        "PYTHONPATH": str(ROOT),
                        "TF_CONFIG": json.dumps(
                            {
                                "cluster": {"worker": addresses},
                                "task": {"type": "worker", "index": index},
                            }
                        ),
                    },
                ),
            )
        )
    return workers


def run_workers(
    program: pathlib.Path,
    arguments: list[list[str]],
    folder: pathlib.Path,
    seconds: float,
) -> None:
    """Runs workers to their end, which must be one without an error.

    Args:
      program: As of `start_workers`, like the two that follow.
      arguments: Of each worker.
      folder: For what they print.
      seconds: Deadline of each.
    """
    workers = start_workers(program, arguments, folder)
    try:
        for one in workers:
            one.check(seconds)
    finally:
        for one in workers:
            one.kill()


@dataclasses.dataclass
class Worker:
    """A process of a test, and the file with what it prints."""

    log: pathlib.Path
    process: forked_process.ForkedProcess

    def wait(self, seconds: float) -> int | str:
        """Returns its exit code, or "too late"."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "too late"

    def check(self, seconds: float) -> None:
        """Waits for its end without an error."""
        code = self.wait(seconds)
        assert code == 0, f"{code}: {self.log.read_text()[-3000:]}"

    def kill(self) -> None:
        """Ends it, if it still runs."""
        self.process.kill()
        self.process.wait()


def stay_until_written(folder: pathlib.Path, pattern: str) -> None:
    """Keeps a worker of two until both have written what they were told.

    An error is told by a collective. Who has heard it may not end while the
    other still listens.
    """
    deadline = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)


def run_program(module: str, *arguments: str, seconds: float) -> dict:
    """Runs a program to its end; returns what it found.

    Args:
      module: Is run as `python -m module *arguments`; prints a line that begins
        with FOUND and goes on in JSON.
      arguments: For it.
      seconds: Its deadline.
    """
    done = forked_process.run(
        ["-m", module, *arguments], cwd=ROOT, seconds=seconds
    )
    found = _found_in(done.stdout)
    assert found, done.stderr[-3000:]
    return found[0]


def _found_in(printed: str) -> list[dict]:
    return [
        json.loads(line.removeprefix("FOUND "))
        for line in printed.splitlines()
        if line.startswith("FOUND ")
    ]


def run_clients(
    module: str,
    folder: pathlib.Path,
    *arguments: str,
    seconds: float,
    count: int = 2,
) -> list[dict]:
    """Runs DTensor clients to their end.

    Args:
      module: Is run as `python -m module *arguments`; prints lines that begin
        with FOUND and go on in JSON.
      folder: For what they print.
      arguments: For all of them.
      seconds: Deadline of each.
      count: Number of processes.

    Returns:
      What they found, in the order of the processes.
    """
    jobs = ",".join(f"localhost:{port}" for port in free_ports(count))
    # To files: nobody reads a pipe while the other process is waited for.
    logs = [folder / f"log_{client}" for client in range(count)]
    clients = []
    try:
        for client, log in enumerate(logs):
            clients.append(
                Worker(
                    log,
                    forked_process.ForkedProcess(
                        ["-m", module, *arguments],
                        log,
                        cwd=ROOT,
                        env={
                            **os.environ,
                            "KERAS_DISTRIBUTION_PROCESS_ID": str(client),
                            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(count),
                            "KERAS_DISTRIBUTION_JOB_ADDRESSES": jobs,
                        },
                    ),
                )
            )
        for one in clients:
            one.check(seconds)
    finally:
        for one in clients:
            one.kill()
    return [found for log in logs for found in _found_in(log.read_text())]
