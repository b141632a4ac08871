"""Short messages between the processes of one mesh, with a deadline.

They go through the key-value store of TensorFlow's coordination service, so a
process that does not answer is known by its number, which a collective
operation that never ends would not tell.
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

# Others may be writing a checkpoint, or tracing their first step.
DEADLINE_SECONDS = 600.0
# Of one call, so that a waiting program can be interrupted.
_SLICE_SECONDS = 2.0

# Kinds of messages of a process that takes no further step.
ENDED, FAILED = "ended", "failed"

# For others to fail as well, before their step is ended.
_PATIENCE_SECONDS = 10.0

_lock = threading.Lock()
_deadline_seconds = DEADLINE_SECONDS
_number = 0
# Keys of this process that are still in the store.
_own_keys: list[str] = []


class ProcessError(RuntimeError):
    """Processes of one program do not do the same, or one is missing."""


class ProcessEndedError(ProcessError):
    """Another process has no further batch."""


def set_deadline(seconds: float) -> None:
    """Sets how long a process waits for the message of another."""
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
    """Whether `mesh` is on several processes that can send messages."""
    return (
        mesh.num_local_devices() < mesh.size
        and dtensor.num_clients() > 1
        and tf_private.has_coordination()
    )


def send(kind: str, body: Any) -> int:
    """Sends to all processes, without waiting; returns the number."""
    global _number
    with _lock:
        _number += 1
        number = _number
    key = _key(number, dtensor.client_id())
    _own_keys.append(key)
    tf_private.set_cluster_value(key, json.dumps([kind, body]))
    return number


def exchange(kind: str, body: Any, what: str) -> list[Any]:
    """Sends a message and returns what all processes send, in their order.

    Args:
      kind: What the message is about.
      body: What JSON can hold.
      what: What this process is about to do, for the error.

    Raises:
      ProcessError: A process has not sent its message within the deadline,
        sends one of another kind, or says that it ended or failed.
    """
    me = dtensor.client_id()
    try:
        number = send(kind, body)
    except tf.errors.OpError as error:
        raise ProcessError(
            f"Process {me} cannot reach the others, {what}: one of them has "
            f"ended or failed ({error.message.partition(chr(10))[0]}). Start "
            "all processes again, from a checkpoint."
        ) from error
    until = time.monotonic() + _deadline_seconds
    # As the others read it.
    found = [
        [kind, json.loads(json.dumps(body))]
        if client == me
        else json.loads(_wait(number, client, until, what))
        for client in range(dtensor.num_clients())
    ]
    _forget_before(number)
    for client, (their_kind, their_body) in enumerate(found):
        if their_kind == ENDED:
            raise ProcessEndedError(
                f"Process {client} has no further batch where process {me} "
                f"is, {what}."
            )
        if their_kind == FAILED:
            raise ProcessError(
                f"Process {client} failed where process {me} is, {what}: "
                f"{their_body}"
            )
        if their_kind != kind:
            raise ProcessError(
                f"Process {client} is not where process {me} is, {what}: they "
                "run different programs, or one of them has caught an error "
                "that the other does not know of."
            )
    return [their_body for _, their_body in found]


def first_line(error: BaseException) -> str:
    """Returns class and first line of an error, for others to show."""
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line[:300]}"


def fail(why: str) -> None:
    """Tells the others that a step of this process failed.

    Where they do not fail, too, they wait in theirs for this one: it is ended.
    """
    # The process that keeps the messages may have ended already.
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
            f"Process {client} of {dtensor.num_clients()} did not come to "
            f"where process {dtensor.client_id()} is, {what}, {reason}. It "
            "has ended, hangs, or runs another program: see what it printed. "
            "tlm.distribution.set_process_checks(deadline_seconds=...) "
            "changes how long a process is waited for."
        )
        _replace(number, FAILED, sentence)
        raise ProcessError(sentence)


def _replace(number: int, kind: str, body: Any) -> None:
    """Changes an own message, for a process that reads it later.

    It must not begin a step that this process has given up.
    """
    key = _key(number, dtensor.client_id())
    # The process that keeps the messages may have ended.
    with contextlib.suppress(tf.errors.OpError):
        tf_private.delete_cluster_value(key)
        tf_private.set_cluster_value(key, json.dumps([kind, body]))


def _key(number: int, client: int) -> str:
    return f"tf_layoutmap/{number}/{client}"


def _forget_before(number: int) -> None:
    """Deletes own messages that all processes have read."""
    for key in list(_own_keys):
        if int(key.split("/")[1]) < number:
            _own_keys.remove(key)
            # As above.
            with contextlib.suppress(tf.errors.OpError):
                tf_private.delete_cluster_value(key)
