"""Exchanges short messages between the processes of a mesh, with a deadline.

Messages are stored in the key-value store of TensorFlow's coordination service.
If a process does not respond, the error can therefore name this process. In
contrast, a collective operation would wait forever.
"""

import contextlib
import json
import numbers
import threading
import time
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks, tf_private
from tf_layoutmap.layout.mesh.device_mesh import Mesh

dtensor = tf.experimental.dtensor

# The default is long, because other processes may be writing a checkpoint or
# tracing their first step.
DEADLINE_SECONDS = 600.0
# Timeout of one wait, in seconds. The timeout is short so that the user can
# interrupt a waiting program.
_SLICE_SECONDS = 2.0

# Message kinds that a process sends if it runs no further step.
ENDED, FAILED = "ended", "failed"

# After this number of seconds, the step of other processes is aborted unless
# their step also fails.
_PATIENCE_SECONDS = 10.0

_lock = threading.Lock()
_deadline_seconds = DEADLINE_SECONDS
_number = 0
# Keys that this process has written to the store and not deleted yet.
_own_keys: list[str] = []


class ProcessError(RuntimeError):
    """Error that processes differ, or that a process is missing."""


class ProcessEndedError(ProcessError):
    """Error that another process has no further batch."""


def set_deadline(seconds: float) -> None:
    """Sets how long a process waits for a message of another process."""
    global _deadline_seconds
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, numbers.Real)
        or not 0 < seconds < float("inf")
    ):
        raise ValueError(
            checks.message(
                "deadline_seconds", "a number of seconds above 0", seconds
            )
        )
    _deadline_seconds = float(seconds)


def is_possible(mesh: Mesh) -> bool:
    """Returns whether the processes of `mesh` exchange messages."""
    return (
        mesh.num_local_devices() < mesh.size
        and dtensor.num_clients() > 1
        and tf_private.has_coordination()
    )


def send(kind: str, body: Any) -> int:
    """Sends a message without waiting for replies; returns its number."""
    global _number
    with _lock:
        _number += 1
        number = _number
    key = _key(number, dtensor.client_id())
    _own_keys.append(key)
    tf_private.set_cluster_value(key, json.dumps([kind, body]))
    return number


def exchange(kind: str, body: Any, what: str) -> list[Any]:
    """Sends a message and returns the messages of all processes.

    Args:
      kind: Kind of the message, the same in all processes.
      body: JSON-serializable value.
      what: Description of the next action of this process, for errors.

    Returns:
      The bodies of all processes, by process index.

    Raises:
      ProcessError: If a process did not send its message within the deadline,
        sent a message of another kind, or reported that it ended or failed.
    """
    me = dtensor.client_id()
    try:
        number = send(kind, body)
    except tf.errors.OpError as error:
        raise ProcessError(
            f"Process {me} cannot reach the other processes ({what}): one of "
            "them has ended or failed "
            f"({error.message.partition(chr(10))[0]}). Restart all processes "
            "from a checkpoint."
        ) from error
    until = time.monotonic() + _deadline_seconds
    # The message of this process is also converted to JSON and back, so that it
    # can be compared with the messages of other processes.
    messages = [
        [kind, json.loads(json.dumps(body))]
        if client == me
        else json.loads(_wait(number, client, until, what))
        for client in range(dtensor.num_clients())
    ]
    _forget_before(number)
    for client, (their_kind, their_body) in enumerate(messages):
        if their_kind == ENDED:
            raise ProcessEndedError(
                f"Process {client} has no further batch, while process {me} "
                f"continues ({what})."
            )
        if their_kind == FAILED:
            raise ProcessError(
                f"Process {client} failed, while process {me} continues "
                f"({what}): {their_body}"
            )
        if their_kind != kind:
            raise ProcessError(
                f"Process {client} must run the same step as process {me} "
                f"({what}). They run different programs, or one of them "
                "caught an error that the other did not receive."
            )
    return [their_body for _, their_body in messages]


def first_line(error: BaseException) -> str:
    """Returns the class and the first line of an error, for a message."""
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line[:300]}"


def report_failure(why: str) -> None:
    """Reports to the other processes that a step of this process failed.

    Another process may wait forever for this process during its step.
    Therefore, if another process does not send a message within a few seconds,
    its step is aborted.
    """
    # The process that stores the messages may have ended already.
    with contextlib.suppress(tf.errors.OpError):
        number = send(FAILED, why)
        until = time.monotonic() + _PATIENCE_SECONDS
        for client in range(dtensor.num_clients()):
            if client == dtensor.client_id():
                continue
            try:
                tf_private.cluster_value(
                    _key(number, client), max(until - time.monotonic(), 0.001)
                )
            except tf.errors.DeadlineExceededError:
                tf_private.abort_cluster(
                    f"Process {dtensor.client_id()} failed: {why}"
                )
                return


def _wait(number: int, client: int, until: float, what: str) -> str:
    while True:
        left = max(until - time.monotonic(), 0.001)
        try:
            return tf_private.cluster_value(
                _key(number, client), min(left, _SLICE_SECONDS)
            )
        except tf.errors.DeadlineExceededError:
            if time.monotonic() < until:
                continue
            reason = f"within {_deadline_seconds:g} s"
        except tf.errors.OpError as error:
            reason = (
                f"({type(error).__name__}: "
                f"{error.message.partition(chr(10))[0]})"
            )
        sentence = (
            f"Process {client} of {dtensor.num_clients()} did not respond to "
            f"process {dtensor.client_id()} ({what}) {reason}. Process "
            f"{client} has ended, hangs, or runs a different program; see its "
            "output. tlm.distribution.set_process_checks(deadline_seconds=...) "
            "sets how long a process waits."
        )
        _replace(number, FAILED, sentence)
        raise ProcessError(sentence)


def _replace(number: int, kind: str, body: Any) -> None:
    """Replaces a message that this process has sent.

    Processes that read the message later must not start the step, because this
    process does not run it.
    """
    key = _key(number, dtensor.client_id())
    # The process that stores the messages may have ended.
    with contextlib.suppress(tf.errors.OpError):
        tf_private.delete_cluster_value(key)
        tf_private.set_cluster_value(key, json.dumps([kind, body]))


def _key(number: int, client: int) -> str:
    return f"tf_layoutmap/{number}/{client}"


def _forget_before(number: int) -> None:
    """Deletes messages of this process that all processes have read."""
    for key in list(_own_keys):
        if int(key.split("/")[1]) < number:
            _own_keys.remove(key)
            # The process that stores the messages may have ended.
            with contextlib.suppress(tf.errors.OpError):
                tf_private.delete_cluster_value(key)
