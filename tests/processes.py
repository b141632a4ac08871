"""Starts several processes for one test, with timeouts and cleanup."""

import dataclasses
import json
import os
import pathlib
import subprocess
import time
import types

import pytest

from tests import forked_process
from tf_layoutmap.local_cluster import free_ports

ROOT = pathlib.Path(__file__).parents[1]


def start_workers(
    program: types.ModuleType, arguments: list[list[str]], folder: pathlib.Path
) -> list["Worker"]:
    """Starts the workers of one `MultiWorkerMirroredStrategy`.

    Args:
      program: Module to run as a script, with the package on its path.
      arguments: Arguments of each worker.
      folder: Folder for the output of the workers.
    """
    addresses = [f"localhost:{port}" for port in free_ports(len(arguments))]
    workers = []
    for index, own in enumerate(arguments):
        log = folder / f"worker_{index}.log"
        workers.append(
            Worker(
                log,
                forked_process.ForkedProcess(
                    [str(program.__file__), *own],
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
    program: types.ModuleType,
    arguments: list[list[str]],
    folder: pathlib.Path,
    seconds: float,
) -> None:
    """Runs workers until they end, and checks that none of them fails.

    Args:
      program: See `start_workers`.
      arguments: Arguments of each worker.
      folder: Folder for the output of the workers.
      seconds: Timeout of each worker in seconds.
    """
    workers = start_workers(program, arguments, folder)
    try:
        for one in workers:
            one.check(seconds)
    finally:
        for one in workers:
            one.kill()


def run_in_folder(
    folder: pathlib.Path,
    program: types.ModuleType,
    *arguments: str,
    seconds: float,
    count: int = 2,
) -> pathlib.Path:
    """Runs workers that write their results to a folder, and returns it.

    Args:
      folder: Folder for the results and the output of the workers.
      program: See `start_workers`. The first argument of each worker is
        `folder`.
      *arguments: Further arguments of each worker.
      seconds: Timeout of each worker in seconds.
      count: Number of workers.
    """
    run_workers(program, [[str(folder), *arguments]] * count, folder, seconds)
    return folder


def selected(request: pytest.FixtureRequest, argument: str) -> set[str]:
    """Returns values of an argument in the selected tests of a file.

    A module fixture can then run only the programs that these tests need.

    Args:
      request: Request of a parametrized fixture. Only tests with the current
        value of the fixture count.
      argument: Name of an argument of the tests.
    """
    return {
        item.callspec.params[argument]
        for item in request.session.items
        if item.path == request.path
        and argument in getattr(item, "callspec", _NO_ARGUMENTS).params
        and item.callspec.params.get(request.fixturename)
        == getattr(request, "param", None)
    }


_NO_ARGUMENTS = types.SimpleNamespace(params=())


@dataclasses.dataclass
class Worker:
    """A process of a test, and the file with its output."""

    log: pathlib.Path
    process: forked_process.ForkedProcess

    def wait(self, seconds: float) -> int | str:
        """Returns the exit code, or "too late" after the timeout."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "too late"

    def check(self, seconds: float) -> None:
        """Waits until the process ends, and checks that it succeeded."""
        code = self.wait(seconds)
        assert code == 0, f"{code}: {self.log.read_text()[-3000:]}"

    def kill(self) -> None:
        """Kills the process if it is still running."""
        self.process.kill()
        self.process.wait()


def stay_until_written(folder: pathlib.Path, pattern: str) -> None:
    """Keeps a worker running until both workers have written their files.

    An error in one worker also fails the collectives of the other worker. A
    worker that has received an error must not exit while the other worker still
    waits.
    """
    deadline = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)


def run_program(module: str, *arguments: str, seconds: float) -> dict:
    """Runs a program until it ends and returns its JSON results.

    Args:
      module: Module to run as `python -m module *arguments`. It prints a line
        that starts with FOUND, followed by JSON.
      arguments: Arguments of the program.
      seconds: Timeout in seconds.
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
    """Runs DTensor clients until they end.

    Args:
      module: Module to run as `python -m module *arguments`. It prints lines
        that start with FOUND, followed by JSON.
      folder: Folder for the output of the clients.
      arguments: Arguments of all clients.
      seconds: Timeout of each client in seconds.
      count: Number of processes.

    Returns:
      The results of each client, in the order of the processes.
    """
    jobs = ",".join(f"localhost:{port}" for port in free_ports(count))
    # The output is written to files, because a process with a full pipe would
    # block while this process waits for another process.
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
