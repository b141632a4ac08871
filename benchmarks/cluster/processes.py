"""Runs a cluster on 127.0.0.1 and the coordinator that trains on it."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from benchmarks.cluster import proxy
from benchmarks.peers import process
from tf_layoutmap import local_cluster

_ROOT = pathlib.Path(__file__).parents[2]
_ENVIRONMENT = {
    "PYTHONPATH": str(_ROOT),
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONUNBUFFERED": "1",
}


class _Silent(local_cluster.Group):
    """Keeps to itself what its processes print."""

    def pids(self, job: str) -> list[int]:
        """Returns the processes of a job."""
        return [
            one.pid
            for name, one in self._processes.items()
            if name.startswith(job + ":")
        ]

    def say(self, text: str, name: str = "local_cluster") -> None:
        del text, name


class Cluster:
    """Workers, servers and a coordinator; all end with the `with` block.

    Its commands are those of `coordinator.py`.
    """

    def __init__(
        self, num_workers: int, num_servers: int, *, counts: bool = False
    ):
        """Says what to start.

        Args:
          num_workers: 0 for the coordinator alone, without a cluster.
          num_servers: The same.
          counts: Whether a proxy is before each server and worker: servers
            take from workers what those send them.
        """
        self._sizes = {"ps": num_servers, "worker": num_workers}
        self._counts = counts
        self._proxies: list[proxy.Proxy] = []
        self._group: _Silent | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            self._coordinator = self._start(stack)
            stack.callback(self._coordinator.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def open(
        self, workload: str, distribution: str, names: Sequence[str]
    ) -> None:
        """Makes the tables of contestants, in place of those before."""
        self._coordinator.ask("open", workload, distribution, names)

    def steps(self, name: str, count: int) -> float:
        """Takes steps of a contestant; returns their milliseconds."""
        return self._coordinator.ask("steps", name, count)

    def processor_milliseconds(self) -> dict[str, float]:
        """Returns what each job has taken so far, all its processes."""
        pids = {"coordinator": [self._coordinator.pid]}
        if self._group:
            pids |= {job: self._group.pids(job) for job in self._sizes}
        return {
            job: sum(map(_processor_milliseconds, of_job))
            for job, of_job in pids.items()
        }

    def traffic(self) -> proxy.Traffic:
        """Returns what has gone to and from servers and workers so far."""
        return sum((one.traffic() for one in self._proxies), proxy.Traffic())

    def _start(self, stack: contextlib.ExitStack) -> process.Peer:
        environment = dict(_ENVIRONMENT)
        if self._sizes["worker"]:
            environment["TF_CONFIG"] = self._start_servers(stack)
        return process.Peer(
            sys.executable, "benchmarks.cluster.coordinator", environment
        )

    def _start_servers(self, stack: contextlib.ExitStack) -> str:
        group = self._group = stack.enter_context(_Silent())
        ports = iter(local_cluster.free_ports(sum(self._sizes.values()) + 1))
        jobs = {
            job: [f"127.0.0.1:{next(ports)}" for _ in range(size)]
            for job, size in {**self._sizes, "chief": 1}.items()
        }
        for job in self._sizes:
            for index in range(self._sizes[job]):
                group.start(
                    f"{job}:{index}",
                    [sys.executable, "-m", "tf_layoutmap.server"],
                    {
                        **os.environ,
                        **_ENVIRONMENT,
                        "TF_CONFIG": _tf_config(jobs, job, index),
                    },
                )
        seen = {
            job: [self._seen_at(one) for one in jobs[job]]
            for job in self._sizes
        }
        # Processes of a cluster reach each other where the coordinator does.
        return _tf_config({**jobs, **seen}, "chief", 0)

    def _seen_at(self, address: str) -> str:
        if not self._counts:
            return address
        self._proxies.append(proxy.Proxy(address))
        return self._proxies[-1].address


def _tf_config(jobs: dict[str, list[str]], job: str, index: int) -> str:
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


def _processor_milliseconds(pid: int) -> float:
    # After the name of the program, which may have spaces in it.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    ticks = sum(map(int, fields.split()[11:13]))  # of user and system
    return 1e3 * ticks / os.sysconf("SC_CLK_TCK")
