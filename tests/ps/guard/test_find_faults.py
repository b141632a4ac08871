"""Tests which processes are named if a call fails."""

import contextlib
import socket
from concurrent import futures

import grpc
import pytest

from tf_layoutmap.ps import processes
from tf_layoutmap.ps.processes import Faults, Process


@contextlib.contextmanager
def server(status):
    """Yields the address of a server with a status."""
    one = grpc.server(futures.ThreadPoolExecutor(1))
    one.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "tensorflow.WorkerService",
                {
                    "GetStatus": grpc.unary_unary_rpc_method_handler(
                        lambda request, context: status
                    )
                },
            )
        ]
    )
    port = one.add_insecure_port("127.0.0.1:0")
    one.start()
    yield f"127.0.0.1:{port}"
    one.stop(0).wait()


@pytest.fixture
def running():
    with server(b"first") as address:
        yield address


@pytest.fixture
def ended():
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    return f"127.0.0.1:{port}"


@pytest.fixture
def stopped(monkeypatch):
    monkeypatch.setattr(processes, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(processes, "_CLOSE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield f"127.0.0.1:{one.getsockname()[1]}"


def test_a_process_that_was_not_restarted_has_no_fault(running):
    (one,) = processes.with_status([Process("ps", 0, running)])
    assert one.status == b"first"
    # The status of a process can be missing, if it did not answer at first.
    both = [one, Process("worker", 0, running)]
    assert processes.find_faults(both, 5) == Faults([])


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_restarted_process_has_another_status(running, job):
    one = Process(job, 0, running, b"before")
    assert processes.find_faults([one], 5) == Faults(
        [f"{job} 0 at {running} was restarted"], has_lost_server=job == "ps"
    )


def test_an_earlier_restart_of_a_worker_is_not_the_reason(running, ended):
    worker = Process("worker", 0, running, b"before")
    lost = Process("ps", 0, ended)
    assert processes.find_faults([lost, worker], 5) == Faults(
        [f"ps 0 at {ended} accepts no connections"], has_lost_server=True
    )


def test_a_process_that_accepts_connections_may_be_stopped(running, stopped):
    one = Process("ps", 0, stopped, b"before")
    other = Process("ps", 1, running, b"first")
    assert processes.find_faults([one, other], 0.3) == Faults(
        [f"ps 0 at {stopped} does not answer"], has_stopped=True
    )


def test_a_server_that_is_restarted_during_the_check_is_lost(monkeypatch):
    """The killed process still accepted connections at the first attempt."""
    monkeypatch.setattr(processes, "_CLOSE_SECONDS", 0.0)
    one = Process("ps", 0, "127.0.0.1:1", b"before")
    answers = iter([None, b"after"])
    monkeypatch.setattr(
        processes, "_read_statuses", lambda *_: {one: next(answers)}
    )
    assert processes.find_faults([one], 5) == Faults(
        [f"{one.name} was restarted"], has_lost_server=True
    )
