"""Addresses of a cluster's processes, and checks whether they answer."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import tensorflow as tf

from tf_layoutmap._core import ops
from tf_layoutmap.ps import handled_errors

# Timeout in seconds for a connection attempt, and for the answer of the
# process.
_CONNECT_SECONDS = 2.0
# Maximum time in seconds in which a process that was killed closes its port.
_CLOSE_SECONDS = 0.5
# Seconds between two connection attempts.
_RETRY_SECONDS = 0.2
# Every TensorFlow server answers this RPC with the names of its devices, and
# with random numbers that it draws when it starts.
_STATUS = "/tensorflow.WorkerService/GetStatus"


class Process(NamedTuple):
    """A server or a worker.

    Attributes:
      job: `"ps"` or `"worker"`.
      index: Index of the process in its job.
      address: Address, as `"host:port"`.
      status: Status when this program has connected. A process that was
        restarted has another status.
    """

    job: str
    index: int
    address: str
    status: bytes | None = None

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.job} {self.index} at {self.address}"

    @property
    def device(self) -> str:
        """Name of the first CPU device of the process."""
        return f"/job:{self.job}/replica:0/task:{self.index}/device:CPU:0"


def processes_of(jobs: Mapping[str, Sequence[str]]) -> list[Process]:
    """Returns all servers, then all workers.

    >>> [one.name for one in processes_of({"worker": ["b:2"], "ps": ["a:1"]})]
    ['ps 0 at a:1', 'worker 0 at b:2']

    Args:
      jobs: Addresses by job.
    """
    return [
        Process(job, index, address)
        for job in ("ps", "worker")
        for index, address in enumerate(jobs.get(job, ()))
    ]


def count_workers() -> int:
    """Returns the number of workers in the connected cluster."""
    devices = [
        tf.DeviceSpec.from_string(device.name)
        for device in tf.config.list_logical_devices("CPU")
    ]
    return len({device.task for device in devices if device.job == "worker"})


def listens(process: Process) -> bool:
    """Returns whether the port of a process accepts connections."""
    host, _, port = process.address.rpartition(":")
    try:
        # If the host is an IPv6 address, it is in brackets.
        with socket.create_connection(
            (host.strip("[]"), int(port)), _CONNECT_SECONDS
        ):
            return True
    except OSError:
        return False


def connection_fault(process: Process, seconds: float) -> str | None:
    """Returns why a process is unreachable; None if it is reachable.

    This check runs before TensorFlow connects, because TensorFlow connects
    without a deadline.

    Args:
      process: A server or a worker.
      seconds: Timeout for the answer of the process.
    """
    if not listens(process):
        return f"no connection to {process.name}"
    with _channel_to(process) as channel:
        try:
            answer = channel.unary_unary(_STATUS)(b"", timeout=seconds)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return (
                    f"no answer from {process.name}, but its port is open "
                    "(it may be stopped, or belong to another program)"
                )
            return (
                f"{process.name} is not a TensorFlow server ({error.details()})"
            )
    if process.device.rpartition("/")[0].encode() + b"/" not in answer:
        return f"{process.name} has another task in its cluster"
    return None


def _channel_to(process: Process) -> grpc.Channel:
    # The option avoids the global pool of connections, in which a channel
    # inherits the backoff delay of earlier channels.
    return grpc.insecure_channel(
        process.address, options=[("grpc.use_local_subchannel_pool", 1)]
    )


def _read_statuses(
    processes: Sequence[Process], seconds: float
) -> dict[Process, bytes | None]:
    """Returns the statuses of all processes, or None without an answer."""
    with contextlib.ExitStack() as stack:
        calls = [
            stack.enter_context(_channel_to(process))
            .unary_unary(_STATUS)
            .future(b"", timeout=seconds)
            for process in processes
        ]
        return {
            process: None if call.exception() else call.result()
            for process, call in zip(processes, calls)
        }


def with_status(processes: Sequence[Process]) -> list[Process]:
    """Returns the processes with their current status, for `find_faults`."""
    statuses = _read_statuses(processes, _CONNECT_SECONDS)
    return [
        process._replace(status=status) for process, status in statuses.items()
    ]


def wait_until_all_serve(
    processes: Sequence[Process],
    seconds: float,
) -> list[str]:
    """Waits for processes; returns the faults that remain after `seconds`."""
    deadline = time.monotonic() + seconds
    faults: dict[Process, str | None] = {}

    def wait(process: Process):
        while True:
            left = deadline - time.monotonic()
            faults[process] = connection_fault(
                process, max(0.1, min(_CONNECT_SECONDS, left))
            )
            if faults[process] is None or left < _RETRY_SECONDS:
                return
            time.sleep(_RETRY_SECONDS)

    threads = [
        threading.Thread(target=wait, args=(process,), daemon=True)
        for process in processes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [fault for process in processes if (fault := faults[process])]


def check_addresses(jobs: Any) -> dict[str, list[str]]:
    """Checks the addresses of a cluster in TF_CONFIG, and returns them.

    >>> check_addresses({"ps": ["a:1"], "worker": ["b:1"]})
    {'ps': ['a:1'], 'worker': ['b:1']}
    >>> check_addresses({"ps": ["a:0"]})
    Traceback (most recent call last):
    ...
    ValueError: Each address must be "host:port", with a port from 1 to 65535. \
Received: 'a:0' of 'ps'.

    Args:
      jobs: Addresses by job.

    Raises:
      ValueError: If `jobs` is not a dict of lists of distinct addresses.
    """
    if not isinstance(jobs, dict):
        raise ValueError(
            "A cluster must be a dict {job: [address, ...]}. Received: "
            f"{jobs!r}."
        )
    jobs_by_address: dict[str, str] = {}
    for job, addresses in jobs.items():
        if not isinstance(addresses, list):
            raise ValueError(
                "A cluster must be a dict {job: [address, ...]}, with a list "
                "of addresses for each job. Received: "
                f"{addresses!r} of {job!r}."
            )
        for address in addresses:
            if not _is_address(address):
                raise ValueError(
                    'Each address must be "host:port", with a port from 1 to '
                    f"65535. Received: {address!r} of {job!r}."
                )
            if address.lower() in jobs_by_address:
                raise ValueError(
                    "Each process must have a different address. Received: "
                    f"{address!r} of {jobs_by_address[address.lower()]!r} and "
                    f"of {job!r}."
                )
            jobs_by_address[address.lower()] = job
    return jobs


def _is_address(address: Any) -> bool:
    if not isinstance(address, str):
        return False
    host, _, port = address.rpartition(":")
    # The port is also checked with `isascii`, because `isdecimal` accepts
    # non-ASCII digits.
    return (
        bool(host.strip())
        and port.isascii()
        and port.isdecimal()
        and (1 <= int(port) <= 65535)
    )


def describe(process: Process) -> dict[str, str]:
    """Returns the result of the op `DescribeProcess` on a process.

    Raises:
      tf.errors.OpError: If the process is unreachable, or does not have the op.
    """
    with tf.device(process.device):
        return json.loads(ops.describe_process().numpy())


def describe_all(
    processes: Sequence[Process],
    seconds: float,
) -> dict[Process, dict[str, str] | Exception | None]:
    """Requests the descriptions of all processes in parallel.

    Returns:
      A dict with the description or the error of each process. The value is
      None if the process did not answer within `seconds`.
    """
    answers: queue.Queue[Any] = queue.Queue()

    def request(process: Process):
        try:
            with handled_errors.error_handler():
                answers.put((process, describe(process)))
        except Exception as error:  # The caller handles errors.
            answers.put((process, error))

    for process in processes:
        # The thread is a daemon, because other threads would block the exit of
        # the program.
        threading.Thread(target=request, args=(process,), daemon=True).start()
    replies: dict[Process, Any] = dict.fromkeys(processes)
    deadline = time.monotonic() + seconds
    try:
        for _ in processes:
            process, answer = answers.get(
                timeout=max(deadline - time.monotonic(), 0)
            )
            replies[process] = answer
    except queue.Empty:
        pass
    return replies


class Faults(NamedTuple):
    """Processes that are lost or do not answer.

    Attributes:
      texts: One text for each of these processes, with its name.
      has_lost_server: Whether a server accepts no connections or was restarted.
      has_stopped: Whether a process accepts connections and does not answer.
    """

    texts: list[str]
    has_lost_server: bool = False
    has_stopped: bool = False


def find_faults(processes: Sequence[Process], seconds: float) -> Faults:
    """Checks which processes are lost or do not answer.

    Args:
      processes: Result of `with_status`.
      seconds: Timeout for the answers.
    """
    statuses = _read_statuses(processes, seconds)
    silent = [process for process, status in statuses.items() if status is None]
    if silent:
        # A process that was killed closes its connections before its port. It
        # may also have been restarted during the first attempt.
        time.sleep(_CLOSE_SECONDS)
        statuses.update(_read_statuses(silent, _CONNECT_SECONDS))
    silent = [process for process in silent if statuses[process] is None]
    closed = [process for process in silent if not listens(process)]
    stopped = [process for process in silent if process not in closed]
    restarted = [
        process
        for process, status in statuses.items()
        if None not in (status, process.status) and status != process.status
    ]
    lost_servers = [
        process for process in (*closed, *restarted) if process.job == "ps"
    ]
    if closed or stopped or lost_servers:
        # Steps continue if workers are restarted, so the restart of a worker
        # may not be the reason.
        restarted = [process for process in restarted if process.job == "ps"]
    return Faults(
        [
            *(f"{process.name} accepts no connections" for process in closed),
            *(f"{process.name} was restarted" for process in restarted),
            *(f"{process.name} does not answer" for process in stopped),
        ],
        has_lost_server=bool(lost_servers),
        has_stopped=bool(stopped),
    )
