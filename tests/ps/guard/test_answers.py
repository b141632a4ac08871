"""Tests that connections to processes that do not answer are closed."""

import contextlib
import socket
import threading
import time

import pytest

from tf_layoutmap._core import ops
from tf_layoutmap.ps import answers, waiting


@contextlib.contextmanager
def server(answers_connections):
    """Yields the address of a server that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    if answers_connections:
                        connection.sendall(b"settings")

        threading.Thread(target=accept, daemon=True).start()
        yield "127.0.0.1", listener.getsockname()[1]


def name(address):
    return f"{address[0]}:{address[1]}"


def is_closed(connection, seconds):
    """Returns whether a connection is closed within some seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(100):
            pass
    except TimeoutError:
        return False
    return True


def is_counted(count, seconds=20):
    """Returns whether a closed connection is counted within some seconds."""
    deadline = time.monotonic() + seconds
    while not count() and time.monotonic() < deadline:
        time.sleep(0.01)
    return count() > 0


def test_only_connections_to_a_silent_process_are_closed():
    with server(False) as silent, server(True) as alive:
        watch = ops.native.AnswerWatch([name(alive), name(silent)], 0.5, 0)
        with (
            socket.create_connection(silent) as first,
            socket.create_connection(alive) as second,
        ):
            assert is_closed(first, 20)
            assert not is_closed(second, 0.5)
        assert is_counted(lambda: watch.num_cuts)
        assert watch.silent[0] < 0.5 < watch.silent[1]
        watch.end()


def test_all_connections_are_closed_if_a_required_process_has_ended():
    with server(True) as ended:
        pass
    with server(True) as alive:
        watch = ops.native.AnswerWatch([name(ended), name(alive)], 0.5, 1)
        with socket.create_connection(alive) as connection:
            assert is_closed(connection, 20)
        # There was no connection to the process that has ended.
        assert watch.num_cuts == 0
        watch.end()


def test_a_separate_deadline_is_reached_first():
    with server(False) as silent:
        answers.watch([name(silent)], 0.5)
        with socket.create_connection(silent) as connection:
            with pytest.raises(waiting.LateError):
                waiting.call_with_deadline(lambda: time.sleep(9), 0.3)
            assert is_closed(connection, 20)
        assert is_counted(answers.num_closed)
        answers.stop()
        assert answers.num_closed() == 0


def test_a_shorter_deadline_begins_with_the_next_check():
    """With the first deadline, the server is checked every 5 s."""
    with server(True) as alive:
        watch = ops.native.AnswerWatch([name(alive)], 600.0, 1)
        with socket.create_connection(alive) as connection:
            time.sleep(1.0)
            watch.set_seconds(0.5)
            assert not is_closed(connection, 1.0)
        assert watch.num_cuts == 0
        watch.end()


def test_the_deadline_must_be_positive():
    with pytest.raises(ValueError, match="seconds"):
        ops.native.AnswerWatch([], 0.0, 0)
