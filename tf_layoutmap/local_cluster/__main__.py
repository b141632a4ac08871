"""A cluster of this machine's own processes around a program.

    python -m tf_layoutmap.local_cluster --ps 2 --workers 2 -- python train.py

Starts parameter servers and workers (`python -m tf_layoutmap.server`) on
127.0.0.1, and the program as their coordinator, all with their TF_CONFIG. With
`--ps 0` the program runs once as each worker, as MultiWorkerMirroredStrategy
wants it. What a process prints is shown with its name in front.

When the program ends, all others are ended, and its exit code is the exit code;
SIGINT, SIGTERM and SIGHUP are passed on to it. However this process ends, by
SIGKILL too, no other is left behind.

TensorFlow's own log is cut down to one line per event, unless
TF_CPP_MIN_LOG_LEVEL is set; 0 is for all of it.

Security: see `tf_layoutmap.server`.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence

from absl import app, flags

from tf_layoutmap.local_cluster.processes import Group, free_ports

_PS = flags.DEFINE_integer(
    "ps", 1, "How many parameter servers; 0 for none.", lower_bound=0
)
_WORKERS = flags.DEFINE_integer(
    "workers", 1, "How many workers.", lower_bound=1
)
_RESTART = flags.DEFINE_bool(
    "restart_workers",
    False,
    "Starts a worker again that has ended, as the "
    "system of a real cluster does.",
)

_HOST = "127.0.0.1"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# What TensorFlow's libraries log when they are loaded, at any level.
_START_OF_TENSORFLOW = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)"
    r"|I\d{4} \S+ +\d+ port\.cc:\d+\] oneDNN"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def addresses_of(
    sizes: dict[str, int],
    ports: Sequence[int],
) -> dict[str, list[str]]:
    """Returns the addresses of all jobs that have processes.

    >>> addresses_of({"ps": 1, "worker": 2}, [7, 8, 9])
    {'ps': ['127.0.0.1:7'], 'worker': ['127.0.0.1:8', '127.0.0.1:9']}

    Args:
      sizes: How many processes each job has.
      ports: One for each process.
    """
    rest = iter(ports)
    return {
        job: [f"{_HOST}:{next(rest)}" for _ in range(size)]
        for job, size in sizes.items()
        if size
    }


def environment_of(
    cluster: dict[str, list[str]], job: str, index: int
) -> dict[str, str]:
    """Returns the environment of one process: this one's, and its task."""
    return {
        # A worker must wait for servers that start later than it.
        "GRPC_FAIL_FAST": "use_caller",
        # A coordinator logs each traced function that a dead worker does not
        # get as an error; what matters is raised, or logged by this package.
        _LOG_LEVEL: "3" if job == "chief" else "2",
        **os.environ,
        # What is printed is shown when it is printed.
        "PYTHONUNBUFFERED": "1",
        "TF_CONFIG": json.dumps(
            {"cluster": cluster, "task": {"type": job, "index": index}}
        ),
    }


def run(
    command: Sequence[str], ps: int, workers: int, restart_workers: bool = False
) -> int:
    """Runs a program with a cluster of its own; returns its exit code.

    Args:
      command: The program and its arguments.
      ps: How many parameter servers; with 0, each worker runs the program.
      workers: How many workers.
      restart_workers: Whether a worker that has ended is started again.
    """
    sizes = (
        {"chief": 1, "ps": ps, "worker": workers} if ps else {"worker": workers}
    )
    cluster = addresses_of(sizes, free_ports(sum(sizes.values())))
    server = [sys.executable, "-m", "tf_layoutmap.server"]
    shows_all = os.environ.get(_LOG_LEVEL) == "0"
    with Group(None if shows_all else _START_OF_TENSORFLOW) as group:
        programs: list[str] = []
        for job, addresses in cluster.items():
            for index, address in enumerate(addresses):
                is_program = job == "chief" or not ps
                programs += [f"{job}:{index}"] if is_program else []
                group.start(
                    f"{job}:{index}",
                    command if is_program else server,
                    environment_of(cluster, job, index),
                    where=address,
                    restart=restart_workers and job == "worker" and bool(ps),
                )
        for number in _SIGNALS:
            signal.signal(
                number, lambda number, _: group.pass_on(number, programs)
            )
        return group.wait(programs)


def main(argv: list[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError(
            "A program must follow: python -m tf_layoutmap.local_cluster "
            "--ps 2 --workers 2 -- python train.py. Received: none."
        )
    sys.exit(run(argv[1:], _PS.value, _WORKERS.value, _RESTART.value))


if __name__ == "__main__":
    app.run(main)
