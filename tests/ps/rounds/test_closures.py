"""Tests the results and errors of one closure, without a cluster."""

import pytest
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.ps import rounds


class Traced:
    """Function that raises the next of its errors in each call."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def __call__(self, iterator, numbers):
        if self.errors:
            raise self.errors.pop(0)
        return iterator, numbers


def cancelled(words):
    return tf.errors.CancelledError(None, None, words)


@pytest.fixture
def make_call(monkeypatch):
    has_failed = []
    monkeypatch.setattr(
        tf_private, "has_failed_closure", lambda coordinator: bool(has_failed)
    )

    def make(*errors):
        closure = rounds.StepClosure(None, lambda iterator: iterator)
        closure._traced = Traced(*errors)
        return closure._make_call(), has_failed

    return make


def test_a_lost_connection_is_retried_a_limited_number_of_times(
    make_call,
):
    call, _ = make_call(*[cancelled("of /job:ps/task:0")] * 4)
    for _ in range(3):
        with pytest.raises(tf.errors.CancelledError):
            call(1, 2)
    with pytest.raises(rounds.InputCancelledError, match="of /job:ps"):
        call(1, 2)
    assert call(1, 2) == (1, 2)


def test_other_cancellations_are_attributed_to_the_iterator(make_call):
    call, _ = make_call(cancelled("GetNext"))
    with pytest.raises(rounds.InputCancelledError, match="GetNext"):
        call(1, 2)


def test_a_closure_does_not_start_after_another_has_failed(make_call):
    call, has_failed = make_call(ValueError("started"))
    has_failed.append(True)
    with pytest.raises(tf.errors.CancelledError, match="Not started"):
        call(1, 2)
