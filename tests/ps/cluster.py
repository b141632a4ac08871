"""Cluster of local processes that a test can kill and restart."""

import json
import os
import pathlib
import signal
import time

from tests.forked_process import ForkedProcess
from tests.processes import ROOT
from tf_layoutmap.local_cluster import free_ports

_SERVER = ["-m", "tf_layoutmap.server"]


class Cluster:
    """Servers, workers and a coordinator, which run during a `with` block."""

    def __init__(
        self, folder: pathlib.Path, num_servers: int = 2, num_workers: int = 2
    ):
        ports = free_ports(num_servers + num_workers + 1)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.folder = folder
        self.jobs = {
            "ps": addresses[:num_servers],
            "worker": addresses[num_servers:-1],
            "chief": addresses[-1:],
        }
        self.processes: dict[tuple[str, int], ForkedProcess] = {}
        self.num_started = 0

    def __enter__(self):
        for job in ("ps", "worker"):
            for index in range(len(self.jobs[job])):
                self.start(job, index)
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, job: str, index: int = 0, command=None, **environment):
        """Starts a process; an earlier process of this name must have ended."""
        self.num_started += 1
        log = self.log(job, index)
        self.processes[job, index] = ForkedProcess(
            command or _SERVER,
            log,
            cwd=ROOT,
            as_user=True,
            env={**self.environment(job, index), **environment},
        )

    def environment(self, job: str, index: int = 0) -> dict[str, str]:
        """Returns the environment variables of a process."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "GRPC_FAIL_FAST": "use_caller",
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CONFIG": json.dumps(
                {"cluster": self.jobs, "task": {"type": job, "index": index}}
            ),
        }

    def train(self, *arguments: str, module: str = "tests.ps.train"):
        """Starts the coordinator."""
        self.start(
            "chief", 0, ["-m", module, str(self.folder), *map(str, arguments)]
        )

    def log(self, job: str, index: int = 0) -> pathlib.Path:
        return self.folder / f"{job}_{index}.log"

    def send(self, job: str, index: int, number: int = signal.SIGKILL):
        self.processes[job, index].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[job, index].wait()

    def wait_for(
        self, words: str, seconds: float, job: str = "chief", index: int = 0
    ) -> str:
        """Waits for a line that contains `words`, and returns this line."""
        deadline = time.monotonic() + seconds
        while True:
            text = self.log(job, index).read_text(errors="replace")
            for line in text.splitlines(keepends=True):
                if words in line and line.endswith("\n"):
                    return line
            ended = self.processes[job, index].poll()
            assert time.monotonic() < deadline and ended is None, (
                f"No {words!r} within {seconds} s (ended: {ended}): "
                f"{text[-3000:]}"
            )
            time.sleep(0.05)

    def restart(self, job: str, index: int, seconds: float = 60):
        """Restarts a server or worker, and waits until it serves again."""
        self.send(job, index)
        self.start(job, index)
        self.wait_for("serves grpc", seconds, job, index)

    def finish(self, seconds: float) -> dict:
        """Makes the coordinator stop training, and returns its results."""
        (self.folder / "stop").touch()
        found = self.wait_for("FOUND ", seconds)
        return json.loads(found.partition("FOUND ")[2])

    def code(self, seconds: float) -> int:
        """Waits until the coordinator exits, and returns its exit code."""
        return self.processes["chief", 0].wait(seconds)

    def checkpoints(self) -> list[str]:
        return sorted(
            one.name for one in (self.folder / "checkpoints").iterdir()
        )
