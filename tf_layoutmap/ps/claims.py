"""Ensures that only one coordinator uses the servers of a cluster.

Each server stores a text that names its coordinator. A coordinator accepts
connections on a port as long as it runs, and answers with the token in this
text. Another coordinator can therefore find out whether the owner still runs,
without waiting for a timeout. If the owner has ended, its contexts are closed,
so that the servers free the memory of its tables.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.ps.processes import Process

_TOKEN = uuid.uuid4().hex
# Timeout in seconds for the connection to a coordinator, and for its answer.
_ANSWER_SECONDS = 3.0
# Timeout in seconds for closing the context of a coordinator. Freeing large
# tables takes time.
_CLOSE_SECONDS = 30.0
_CLOSE = "/tensorflow.eager.EagerService/CloseContext"

_listeners: dict[str, socket.socket] = {}


def claim(processes: Sequence[Process]) -> None:
    """Makes this process the coordinator of all servers.

    Args:
      processes: Processes of the cluster, to which this process is connected.

    Raises:
      RuntimeError: If another coordinator that still runs uses a server.
    """
    servers = [server for server in processes if server.job == "ps"]
    description = _description(servers[0])
    claimed: list[Process] = []
    try:
        for server in servers:
            _claim(server, description, processes)
            claimed.append(server)
    except BaseException:
        for server in claimed:
            _replace(server, description, "")
        raise


def _claim(server: Process, description: str, processes: Sequence[Process]):
    expected = ""
    while True:
        text = _replace(server, expected, description)
        if text in (expected, description):
            return
        owner = _read(text)
        if owner.get("token") != _TOKEN and _runs(owner):
            raise RuntimeError(
                f"The server {server.name} is used by another coordinator: "
                f"process {owner.get('process')} on host {owner.get('host')}. "
                "Two coordinators would train separate tables on the same "
                "servers. End the other coordinator, or start other servers."
            )
        if owner.get("token") != _TOKEN:
            _close_contexts(owner, processes)
        expected = text


def _replace(server: Process, expected: str, claim: str) -> str:
    """Replaces the text of a server if it is `expected`; returns the text."""
    with tf.device(server.device):
        return (
            ops.claim_process(expected=expected, claim=claim).numpy().decode()
        )


def _description(server: Process) -> str:
    """Returns the text that names this process."""
    host = _own_address(server)
    if host not in _listeners:
        _listeners[host] = _listen(host)
    return json.dumps(
        {
            "token": _TOKEN,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "address": [host, _listeners[host].getsockname()[1]],
            "context": tf_private.eager_context_id(),
        }
    )


def _own_address(server: Process) -> str:
    """Returns the address of this host in the network of a server."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection(
        (host.strip("[]"), int(port)), _ANSWER_SECONDS
    ) as connection:
        return connection.getsockname()[0]


def _listen(host: str) -> socket.socket:
    """Answers each connection with the token, in a thread."""
    listener = socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    )
    token = _TOKEN.encode()

    def answer():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.sendall(token)
                except OSError:
                    pass  # The other process has closed the connection.

    threading.Thread(target=answer, daemon=True).start()
    return listener


def _read(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _runs(owner: dict[str, Any]) -> bool:
    """Returns whether a coordinator still runs."""
    try:
        host, port = owner["address"]
        with socket.create_connection(
            (host, port), _ANSWER_SECONDS
        ) as connection:
            try:
                answer = connection.recv(
                    len(_TOKEN), socket.MSG_WAITALL
                ).decode()
            except TimeoutError:
                return True  # The process is stopped or busy.
        # Another program may use the port of a coordinator that has ended.
        return answer == owner["token"]
    except (KeyError, TypeError, ValueError, OSError):
        return False


def _close_contexts(owner: dict[str, Any], processes: Sequence[Process]):
    """Frees the variables and functions of a coordinator that has ended.

    Without this call, TensorFlow frees them ten minutes after the last call of
    the coordinator.
    """
    context = owner.get("context")
    if not isinstance(context, int):
        return
    # The fields `context_id` and `context_view_id` of `CloseContextRequest`.
    # The server ignores requests with an old view.
    request = struct.pack("<BQBQ", 0x09, context % 2**64, 0x11, 2**63 - 1)
    channels = [grpc.insecure_channel(process.address) for process in processes]
    calls = [
        channel.unary_unary(_CLOSE).future(request, timeout=_CLOSE_SECONDS)
        for channel in channels
    ]
    for call in calls:
        call.exception()  # A context that does not exist is not an error.
    for channel in channels:
        channel.close()
