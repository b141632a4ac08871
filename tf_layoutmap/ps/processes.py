"""The processes of a cluster: where they are, and whether they answer."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap import _ops

# Of one attempt to reach a port.
_CONNECT_SECONDS = 2.0


class Process(NamedTuple):
    """A server or a worker.

    Attributes:
      job: `"ps"` or `"worker"`.
      index: Its task.
      address: `"host:port"`.
    """

    job: str
    index: int
    address: str

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.job} {self.index} at {self.address}"

    @property
    def device(self) -> str:
        """Its first CPU."""
        return f"/job:{self.job}/replica:0/task:{self.index}/device:CPU:0"


def processes_of(jobs: Mapping[str, Sequence[str]]) -> list[Process]:
    """Returns servers, then workers.

    >>> [one.name for one in processes_of({"worker": ["b:2"], "ps": ["a:1"]})]
    ['ps 0 at a:1', 'worker 0 at b:2']

    Args:
      jobs: Addresses by job.
    """
    return [Process(job, index, address) for job in ("ps", "worker")
            for index, address in enumerate(jobs.get(job, ()))]


def count_workers() -> int:
    """How many workers the cluster has that this process is connected to."""
    devices = [tf.DeviceSpec.from_string(one.name) for one in
               tf.config.list_logical_devices("CPU")]
    return len({one.task for one in devices if one.job == "worker"})


def listens(process: Process) -> bool:
    """Whether its port accepts connections."""
    host, _, port = process.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_SECONDS):
            return True
    except OSError:
        return False


def wait_until_all_listen(
    processes: Sequence[Process], seconds: float,
) -> list[Process]:
    """Returns those whose ports are not open after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        missing = [one for one in processes if not listens(one)]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.2)


def describe(process: Process) -> dict[str, str]:
    """Returns what a process says of itself; see `DescribeProcess`.

    Raises:
      tf.errors.OpError: It cannot be reached, or lacks the op.
    """
    with tf.device(process.device):
        return json.loads(_ops.describe_process().numpy())


def ask_all(
    processes: Sequence[Process], seconds: float,
) -> dict[Process, dict[str, str] | Exception | None]:
    """Asks all processes at the same time.

    Returns:
      What each says of itself, or its error; None if it said nothing within
      so many seconds.
    """
    answers: queue.Queue[Any] = queue.Queue()

    def ask(process: Process):
        try:
            answers.put((process, describe(process)))
        except Exception as error:  # Whatever it is, it is told.
            answers.put((process, error))

    for one in processes:
        # A call that never returns must not keep the program from ending.
        threading.Thread(target=ask, args=(one,), daemon=True).start()
    found: dict[Process, Any] = dict.fromkeys(processes)
    deadline = time.monotonic() + seconds
    try:
        for _ in processes:
            process, answer = answers.get(
                timeout=max(deadline - time.monotonic(), 0))
            found[process] = answer
    except queue.Empty:
        pass
    return found


def silent(processes: Sequence[Process], seconds: float) -> list[str]:
    """Returns what is wrong with those that do not answer, with addresses."""
    closed = [one for one in processes if not listens(one)]
    wrong = [f"{one.name} accepts no connections" for one in closed]
    answers = ask_all(
        [one for one in processes if one not in closed], seconds)
    return wrong + [
        f"{process.name} gives no answer"
        for process, answer in answers.items()
        if answer is None or isinstance(answer, tf.errors.OpError)]
