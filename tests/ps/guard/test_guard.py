"""Tests the errors of calls that a guard makes."""

import os
import threading
import time

import pytest
import tensorflow as tf

from tf_layoutmap.ps import exits, guard, lost_calls, processes, waiting

LOST = tf.errors.UnavailableError(None, None, "Socket closed\n\t [[node]]")


@pytest.fixture
def make_guard(monkeypatch):
    """Returns a function that creates a guard, for faults of processes."""
    monkeypatch.setattr(exits, "leave_cluster", lambda: None)
    monkeypatch.setattr(os, "environ", {})

    def make(*faults, restarts_program=False):
        monkeypatch.setattr(
            processes, "find_faults", lambda *_: processes.Faults(*faults)
        )
        return guard.Guard(
            [], 3.0, lambda: (7, "Start."), restarts_program=restarts_program
        )

    return make


def fail():
    raise LOST


@pytest.mark.parametrize(
    "faults, kind, words",
    [
        (
            (["ps 1 was restarted"], True),
            waiting.ServerLostError,
            "server was lost or restarted: ps 1 was restarted. Its variables",
        ),
        (
            (["worker 2 accepts no connections"],),
            waiting.ServerLostError,
            "A worker was lost or restarted: worker 2 accepts no connections.",
        ),
        (
            (["ps 1 does not answer"], False, True),
            waiting.StepDeadlineError,
            "ended within 3 s. ps 1 does not answer. Start.",
        ),
        (
            ([],),
            waiting.ServerLostError,
            r"but all processes answer now \(Socket closed\). Start.",
        ),
    ],
)
def test_an_error_says_what_was_lost(make_guard, faults, kind, words):
    with pytest.raises(kind, match=words):
        make_guard(*faults).call(fail)


def test_an_error_of_another_thread_is_not_explained_again(make_guard):
    error = lost_calls.error_of(waiting.ServerLostError, "ps 1 is lost", LOST)

    def function():
        raise error

    with pytest.raises(waiting.ServerLostError) as found:
        make_guard(["ps 2 was restarted"], True).call(function)
    assert found.value is error


def test_two_threads_do_not_restart_the_program_at_the_same_time(
    make_guard, monkeypatch
):
    active, most = [], []

    def restart(message):
        assert "ps 1 was restarted" in message
        active.append(message)
        most.append(len(active))
        time.sleep(0.2)  # `os.execv` does not return.
        active.pop()

    monkeypatch.setattr(guard, "_restart_program", restart)
    one = make_guard(["ps 1 was restarted"], True, restarts_program=True)

    def run():
        with pytest.raises(waiting.ServerLostError):
            one.call(fail)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]
