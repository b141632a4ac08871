"""Starts clusters on 127.0.0.1 that run the steps of contestants."""

import contextlib
import json
import os
import pathlib
import sys
import tempfile
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
    """A process group that discards the output of its processes."""

    def pids(self, job: str) -> list[int]:
        """Returns the process ids of a job."""
        return [
            child.pid
            for name, child in self._processes.items()
            if name.startswith(job + ":")
        ]

    def say(self, text: str, name: str = "local_cluster") -> None:
        del text, name


class Cluster:
    """A context manager that runs workers, servers and a coordinator.

    Methods such as `steps` send commands to the coordinator. The docstring of
    `coordinator.py` describes the commands.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        *,
        counts: bool = False,
        package: pathlib.Path | None = None,
    ):
        """Configures the cluster.

        Args:
          num_workers: Number of workers. With 0 workers, the coordinator trains
            without a cluster.
          num_servers: Number of parameter servers; 0 without a cluster.
          counts: Whether proxies count the traffic. Workers have proxies, too,
            because servers fetch data from workers.
          package: Folder that contains the package `tf_layoutmap` of the
            processes. Default: the folder of this package.
        """
        self._package = package
        self._environment = dict(_ENVIRONMENT)
        self._sizes = {"ps": num_servers, "worker": num_workers}
        self._counts = counts
        self._proxies: list[proxy.Proxy] = []
        self._group: _Silent | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            if self._package is not None:
                # All processes use this version of the benchmarks.
                folder = pathlib.Path(
                    stack.enter_context(tempfile.TemporaryDirectory())
                )
                for name, root in [
                    ("tf_layoutmap", self._package),
                    ("benchmarks", _ROOT),
                ]:
                    (folder / name).symlink_to(root.resolve() / name)
                self._environment |= {
                    "PYTHONPATH": str(folder),
                    # Modules of the current folder are not imported.
                    "PYTHONSAFEPATH": "1",
                }
            self._coordinator = self._start(stack)
            stack.callback(self._coordinator.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def open(
        self, workload: str, distribution: str, names: Sequence[str]
    ) -> None:
        """Creates tables of contestants and deletes the previous tables."""
        self._coordinator.ask("open", workload, distribution, names)

    def steps(self, name: str, count: int) -> float:
        """Runs steps and returns their total duration in milliseconds."""
        return self._coordinator.ask("steps", name, count)

    def processor_milliseconds(self) -> dict[str, float]:
        """Returns the processor time of each job, summed over processes."""
        pids = {"coordinator": [self._coordinator.pid]}
        if self._group:
            pids |= {job: self._group.pids(job) for job in self._sizes}
        return {
            job: sum(map(_processor_milliseconds, of_job))
            for job, of_job in pids.items()
        }

    def traffic(self) -> proxy.Traffic:
        """Returns the traffic that all proxies have counted so far."""
        return sum(
            (server_proxy.traffic() for server_proxy in self._proxies),
            proxy.Traffic(),
        )

    def _start(self, stack: contextlib.ExitStack) -> process.Peer:
        environment = dict(self._environment)
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
                        **self._environment,
                        "TF_CONFIG": _tf_config(jobs, job, index),
                    },
                )
        seen = {
            job: [self._seen_at(address) for address in jobs[job]]
            for job in self._sizes
        }
        # The coordinator sends the addresses of the proxies to all workers and
        # servers, which then connect to the proxies.
        return _tf_config({**jobs, **seen}, "chief", 0)

    def _seen_at(self, address: str) -> str:
        if not self._counts:
            return address
        self._proxies.append(proxy.Proxy(address))
        return self._proxies[-1].address


def _tf_config(jobs: dict[str, list[str]], job: str, index: int) -> str:
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


def _processor_milliseconds(pid: int) -> float:
    # The parsed fields follow the program name, which is in parentheses and may
    # contain spaces.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    # User time and system time.
    ticks = sum(map(int, fields.split()[11:13]))
    return 1e3 * ticks / os.sysconf("SC_CLK_TCK")
