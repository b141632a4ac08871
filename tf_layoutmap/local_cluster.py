"""Processes that are shown, watched and ended together."""

# DOC-MERGE: A cluster of this machine's own processes around a program.
#
#     python -m tf_layoutmap.local_cluster --ps 2 --workers 2 -- python train.py
#
# Starts parameter servers and workers (`python -m tf_layoutmap.server`) on
# 127.0.0.1, and the program as their coordinator, all with their TF_CONFIG. With
# `--ps 0` the program runs once as each worker, as MultiWorkerMirroredStrategy
# wants it. What a process prints is shown with its name in front.
#
# When the program ends, all others are ended, and its exit code is the exit code;
# SIGINT, SIGTERM and SIGHUP are passed on to it. However this process ends, by
# SIGKILL too, no other is left behind.
#
# TensorFlow's own log is cut down to one line per event, unless
# TF_CPP_MIN_LOG_LEVEL is set; 0 is for all of it.
#
# Security: see `tf_layoutmap.server`.
#
import collections
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

# Seconds from the request to end until processes are killed.
PATIENCE = 10.0
# A process that ends again within so many seconds is started again later each
# time, at most after as many seconds as the last number says.
SHORTEST_LIFE = 5.0
DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

# Ends the process groups that it is told of, once nobody tells it any more:
# the pipe is closed when the process at its other end has ended, by any signal.
_KEEPER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    word, number = line.split()
    (groups.add if word == "+" else groups.discard)(int(number))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


def free_ports(count: int) -> list[int]:
    """Returns ports of 127.0.0.1 that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Group:
    """Processes, each the leader of a process group.

    Use it as a context manager: at its end none of them is left, nor what they
    have started themselves.
    """

    def __init__(self, hidden: re.Pattern[str] | None = None):
        """Starts with no process.

        Args:
          hidden: Lines of processes that begin like this are not shown.
        """
        self._hidden = hidden
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._ending = threading.Event()
        # How often a process has ended early, without a longer life since.
        self._early_ends: collections.Counter[str] = collections.Counter()
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", _KEEPER],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        where: str = "",
        restart: bool = False,
    ) -> None:
        """Starts a process, and shows what it prints.

        Args:
          name: Is put in front of each line.
          command: The program and its arguments.
          environment: All of its environment.
          where: Its address, which is shown.
          restart: Whether it is started again whenever it ends; at once the
            first time, and after a growing delay while it ends early.

        Raises:
          OSError: There is no such program.
        """
        with self._lock:
            if self._ending.is_set():
                return
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes[name] = process
            self._tell_keeper("+", process.pid)
        at = f" at {where}" if where else ""
        self.say(f"{name}{at} is process {process.pid}")
        thread = threading.Thread(
            target=self._follow,
            daemon=True,
            args=(name, process, command, environment, where, restart),
        )
        self._threads.append(thread)
        thread.start()

    def say(self, text: str, name: str = "local_cluster") -> None:
        """Prints a line of a process."""
        with self._lock:
            print(f"[{name}] {text}", flush=True)

    def _follow(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        command: Sequence[str],
        environment: Mapping[str, str],
        where: str,
        restart: bool,
    ) -> None:
        started = time.monotonic()
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            if self._hidden is None or not self._hidden.match(text):
                self.say(text, name)
        code = process.wait()
        if self._ending.is_set():
            return
        if not restart:
            self.say(f"{name} has ended {_how(code)}")
            return
        if time.monotonic() - started > SHORTEST_LIFE:
            del self._early_ends[name]
        delay = DELAYS[min(self._early_ends[name], len(DELAYS) - 1)]
        self._early_ends[name] += 1
        self.say(
            f"{name} has ended {_how(code)}; it is started again "
            f"{f'in {delay:g} s' if delay else 'now'}"
        )
        self._end_group(process)
        # A process that cannot run must not keep the machine busy.
        if not self._ending.wait(delay):
            self.start(name, command, environment, where, restart)

    def wait(self, names: Sequence[str]) -> int:
        """Waits for these processes; returns the first exit code but 0.

        Of a process that a signal has ended it is 128 and the number of the
        signal, as in a shell. Once one of them has failed, none is waited for.
        """
        waiting = list(names)
        while waiting:
            for name in list(waiting):
                code = self._processes[name].poll()
                if code is not None:
                    waiting.remove(name)
                if code:
                    return 128 - code if code < 0 else code
            time.sleep(0.05)
        return 0

    def pass_on(self, number: int, names: Sequence[str]) -> None:
        """Sends a signal to the groups of these processes."""
        for name in names:
            self._signal(self._processes[name], number)

    def end(self) -> None:
        """Ends all processes: asks them to, and kills them after `PATIENCE`."""
        with self._lock:
            self._ending.set()
            processes = list(self._processes.values())
        for process in processes:
            self._signal(process, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            self._end_group(process)
        for thread in self._threads:
            thread.join(1.0)
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        # What it has started itself may have outlived it.
        self._signal(process, signal.SIGKILL)
        process.wait()
        self._tell_keeper("-", process.pid)

    def _signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass

    def _tell_keeper(self, word: str, group: int) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{word} {group}\n")
        self._keeper.stdin.flush()


def _how(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {-code}"


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
