"""Runs a program together with a TensorFlow cluster on this machine.

    python -m tf_layoutmap.local_cluster --ps 2 --workers 2 -- python train.py

The command starts parameter servers and workers (`python -m
tf_layoutmap.server`) on 127.0.0.1. The command runs the program as the
coordinator of these processes, and sets TF_CONFIG for each process. If `--ps 0`
is passed, one copy of the program runs as each worker, as
MultiWorkerMirroredStrategy requires. Each line that a process prints is shown
with the name of the process.

When the program exits, the command terminates all other processes, and exits
with the exit code of the program. The command forwards SIGINT, SIGTERM and
SIGHUP to the program. If the command itself is terminated, even by SIGKILL, all
processes that it started are also terminated.

By default, TensorFlow logs at most one line per event. Set
TF_CPP_MIN_LOG_LEVEL=0 for the full log.

Security: see `tf_layoutmap.server`.
"""

import collections
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

# Seconds between SIGTERM and SIGKILL when processes are terminated.
PATIENCE = 10.0
# Delays in seconds before the first, the second, ... restart of a process. The
# last delay is used for all further restarts. If a process ran for more than
# SHORTEST_LIFE seconds, its next restart uses the first delay again.
SHORTEST_LIFE = 5.0
DELAYS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

# Program of a process that kills all registered process groups when its input
# pipe is closed. The operating system closes the pipe when this process is
# terminated, even by SIGKILL.
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
    """Returns unused ports of 127.0.0.1."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


class Group:
    """A group of processes that are terminated together.

    Each process is the leader of an operating system process group. The object
    is a context manager. At the end of the `with` block, all processes and
    their child processes have been terminated.
    """

    def __init__(self, hidden: re.Pattern[str] | None = None):
        """Creates a group without processes.

        Args:
          hidden: Pattern of lines that are not shown. The pattern is matched at
            the start of each line.
        """
        self._hidden = hidden
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._ending = threading.Event()
        # Processes that `wait` has seen exit, before others were terminated.
        self._exited: set[str] = set()
        # Number of consecutive early exits of each process.
        self._early_ends: collections.Counter[str] = collections.Counter()
        self._has_reported_output_error = False
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
        """Starts a process, and shows its output.

        Args:
          name: Name of the process. Each line of the output is shown with this
            name.
          command: Program and its arguments.
          environment: Full environment of the process.
          where: Address of the process, which is shown when the process starts.
          restart: Whether the process is restarted each time that it exits. The
            first restart is immediate. If the process then exits early, the
            delay before its next restart increases.

        Raises:
          OSError: If the program does not exist.
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
            self._send_to_keeper("+", process.pid)
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
        """Prints a line that begins with the name of a process.

        If the standard output fails, for example because its reader has ended
        or the disk is full, the line is lost. The method does not raise an
        error, because the threads that call it must read the output of the
        processes until the end: a process whose output is not read blocks.
        """
        with self._lock:
            try:
                print(_printable(f"[{name}] {text}"), flush=True)
            except (OSError, ValueError) as error:
                self._report_output_error(error)

    def _report_output_error(self, error: Exception) -> None:
        """Reports the first error of the standard output on standard error."""
        if self._has_reported_output_error:
            return
        self._has_reported_output_error = True
        with contextlib.suppress(OSError, ValueError):
            print(
                "[local_cluster] The standard output failed, and lines of the "
                f"processes are lost ({error}). The program continues.",
                file=sys.stderr,
                flush=True,
            )

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
        # Exits that `end` causes are not shown. The exit of the process that
        # failed is shown even if this thread reads its code after that.
        if self._ending.is_set() and name not in self._exited:
            return
        if not restart:
            self.say(f"{name} has ended {_exit_text(code)}")
            return
        if time.monotonic() - started > SHORTEST_LIFE:
            del self._early_ends[name]
        delay = DELAYS[min(self._early_ends[name], len(DELAYS) - 1)]
        self._early_ends[name] += 1
        self.say(
            f"{name} has ended {_exit_text(code)}; it restarts "
            f"{f'in {delay:g} s' if delay else 'now'}"
        )
        self._end_group(process)
        # The delay limits the load that a process causes if it always fails.
        while not self._ending.wait(delay):
            try:
                self.start(name, command, environment, where, restart)
                return
            except OSError as error:
                delay = DELAYS[-1]
                self.say(
                    f"{name} did not start ({error}); the next attempt is in "
                    f"{delay:g} s"
                )

    def wait(self, names: Sequence[str]) -> int:
        """Waits until all processes exit or one process fails.

        The method returns 0, or the exit code of the process that failed. If a
        signal terminated the process, the result is 128 plus the signal number,
        as in a shell.
        """
        waiting = list(names)
        while waiting:
            for name in list(waiting):
                code = self._processes[name].poll()
                if code is not None:
                    self._exited.add(name)
                    waiting.remove(name)
                if code:
                    return 128 - code if code < 0 else code
            time.sleep(0.05)
        return 0

    def pass_on(self, number: int, names: Sequence[str]) -> None:
        """Sends a signal to the process groups of some processes."""
        for name in names:
            self._signal(self._processes[name], number)

    def end(self) -> None:
        """Terminates all processes, after `PATIENCE` seconds by SIGKILL."""
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
            thread.join(5.0)
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.wait()
        _discard_unwritten_output()

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        # SIGKILL is also sent if the process has exited, because its child
        # processes may still run.
        self._signal(process, signal.SIGKILL)
        process.wait()
        self._send_to_keeper("-", process.pid)

    def _signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass

    def _send_to_keeper(self, word: str, group: int) -> None:
        assert self._keeper.stdin is not None
        # If the keeper was killed, the processes are not terminated after a
        # SIGKILL of this process. All other functions still work.
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(f"{word} {group}\n")
            self._keeper.stdin.flush()


def _printable(text: str) -> str:
    """Replaces characters that the encoding of the output does not contain."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _discard_unwritten_output() -> None:
    """Discards output that cannot be written.

    Otherwise, the interpreter would write it again at its shutdown, and exit
    with code 120 instead of the exit code of the program.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


def _exit_text(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {-code}"


_PS = flags.DEFINE_integer(
    "ps", 1, "Number of parameter servers; 0 for none.", lower_bound=0
)
_WORKERS = flags.DEFINE_integer(
    "workers", 1, "Number of workers.", lower_bound=1
)
_RESTART = flags.DEFINE_bool(
    "restart_workers",
    False,
    "Restarts a worker that has ended, as a scheduler of a cluster does.",
)

_HOST = "127.0.0.1"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Lines that TensorFlow's libraries log at all log levels when they are loaded.
_START_OF_TENSORFLOW = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)"
    r"|I\d{4} \S+ +\d+ port\.cc:\d+\] oneDNN"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def addresses_of(
    sizes: dict[str, int],
    ports: Sequence[int],
) -> dict[str, list[str]]:
    """Returns the addresses of all jobs with at least one process.

    >>> addresses_of({"ps": 1, "worker": 2}, [7, 8, 9])
    {'ps': ['127.0.0.1:7'], 'worker': ['127.0.0.1:8', '127.0.0.1:9']}

    Args:
      sizes: Number of processes of each job.
      ports: One port for each process.
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
    """Returns the environment variables for a process of a cluster."""
    return {
        # With this setting, a worker waits for servers that start after the
        # worker.
        "GRPC_FAIL_FAST": "use_caller",
        # If a worker fails, a coordinator logs an error for each traced
        # function that the worker does not receive. The coordinator's log level
        # hides these errors. Important errors are raised, or are logged by this
        # package.
        _LOG_LEVEL: "3" if job == "chief" else "2",
        **os.environ,
        # The output is not buffered, so that each line is shown immediately.
        "PYTHONUNBUFFERED": "1",
        "TF_CONFIG": json.dumps(
            {"cluster": cluster, "task": {"type": job, "index": index}}
        ),
    }


def run(
    command: Sequence[str], ps: int, workers: int, restart_workers: bool = False
) -> int:
    """Runs a program with a new cluster, and returns its exit code.

    Args:
      command: Program and its arguments.
      ps: Number of parameter servers. If `ps` is 0, each worker runs the
        program.
      workers: Number of workers.
      restart_workers: Whether a worker is restarted after it exits.
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
    if shutil.which(argv[1]) is None:
        sys.exit(
            "The program must be an executable file, or a command in PATH. "
            f"Received: {argv[1]!r}."
        )
    sys.exit(run(argv[1:], _PS.value, _WORKERS.value, _RESTART.value))


if __name__ == "__main__":
    app.run(main)
