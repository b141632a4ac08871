"""Several processes of one test: free ports, a deadline, and their end."""

import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def run_clients(module: str, folder: pathlib.Path, *arguments: str,
                seconds: float, count: int = 2) -> list[dict]:
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
    processes = []
    try:
        for client, log in enumerate(logs):
            with log.open("w") as file:
                processes.append(subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                    env={**os.environ,
                         "KERAS_DISTRIBUTION_PROCESS_ID": str(client),
                         "KERAS_DISTRIBUTION_NUM_PROCESSES": str(count),
                         "KERAS_DISTRIBUTION_JOB_ADDRESSES": jobs}))
        for process, log in zip(processes, logs, strict=True):
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = "too late"
            assert code == 0, f"{code}: {log.read_text()[-3000:]}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(line.removeprefix("FOUND "))
            for log in logs for line in log.read_text().splitlines()
            if line.startswith("FOUND ")]
