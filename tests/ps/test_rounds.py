"""Closures of a round, by a coordinator that fails and cancels at random."""

import gc
import time
import weakref

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_layoutmap import _tf_private
from tf_layoutmap.ps import rounds

BAD = tf.errors.InvalidArgumentError(None, None, "a bad id")
CANCELLED = tf.errors.CancelledError(None, None, "cancelled")


class Future:
    def __init__(self, number):
        self.number = number
        self.error = None


class Coordinator:
    """Runs what is scheduled in `join`; servers count a number once.

    `draw()` says what comes of a closure before an error: "fails", also with
    what a worker that has died had applied; and after it: it was through,
    or cancelled before or after servers had applied it.
    """

    def __init__(self, draw):
        self.draw = draw
        self.applied = set()
        self.num_failed = 0
        self.scheduled = []

    def create_per_worker_dataset(self, function):
        return [function()]

    def schedule(self, function, args):
        del function
        _, numbers = args
        future = Future(int(numbers[1]))
        self.scheduled.append(future)
        return future

    def join(self):
        futures, self.scheduled = self.scheduled, []
        error = None
        for future in futures:
            fails, applies, cancelled = self.draw()
            if error is None and fails:
                self.num_failed += 1
                error = future.error = BAD
            elif error is not None and cancelled:
                future.error = CANCELLED
            if applies or future.error is None:
                self.applied.add(future.number)
        if error is not None:
            raise error


@pytest.fixture
def made(monkeypatch):
    def make(draw):
        coordinator = Coordinator(draw)
        monkeypatch.setattr(tf.distribute.coordinator, "ClusterCoordinator",
                            lambda strategy: coordinator)

        def wait(future):
            if future.error is not None:
                raise future.error

        monkeypatch.setattr(_tf_private, "wait_for_closure", wait)
        return coordinator, rounds.Rounds(
            None, lambda one: None, list, num_workers=2, deadline=60,
            seconds=1)
    return make


@hypothesis.settings(suppress_health_check=[
    hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    st.lists(st.tuples(*[st.booleans()] * 3), max_size=40),
    st.integers(1, 12))
def test_what_is_done_is_what_servers_have_applied(made, drawn, most):
    left = list(drawn)
    coordinator, ours = made(
        lambda: left.pop() if left else (False, True, False))
    ended = ours.run(most)
    assert (ended.error is not None) == (coordinator.num_failed > 0)
    if coordinator.num_failed <= rounds._MOST_FAILURES:
        assert ended.num_done == len(coordinator.applied) == min(most, 8)


def test_a_closure_that_was_cancelled_counts_though_its_next_batch_is_bad(
        made):
    """It had reached the servers with another batch."""
    outcomes = [
        (True, False, False),  # Closure 0 has a bad batch.
        (False, True, True),   # 1 is cancelled, but was applied.
        (True, False, False),  # 0 again, and the second worker's bad batch.
        (True, False, False),
    ]
    coordinator, ours = made(
        lambda: outcomes.pop(0) if outcomes else (False, True, False))
    ended = ours.run(2)
    assert isinstance(ended.error, tf.errors.InvalidArgumentError)
    assert ended.num_done == len(coordinator.applied) == 2


def test_a_step_that_always_fails_ends(made):
    coordinator, ours = made(lambda: (True, False, True))
    ended = ours.run(5)
    assert isinstance(ended.error, tf.errors.InvalidArgumentError)
    assert ended.num_done == 0
    assert coordinator.num_failed <= rounds._MOST_FAILURES + 5


def test_an_error_of_no_closure_is_raised(made):
    coordinator, ours = made(lambda: (False, False, False))

    def join():
        for future in coordinator.scheduled:
            future.error = CANCELLED
        coordinator.scheduled.clear()
        raise BAD

    coordinator.join = join
    with pytest.raises(tf.errors.InvalidArgumentError, match="a bad id"):
        ours.run(3)


def test_an_error_keeps_no_closure_alive(made):
    """What they hold on workers goes with them, not when garbage is looked for.
    """
    outcomes = [(True, False, False), (False, True, True)]
    coordinator, ours = made(
        lambda: outcomes.pop(0) if outcomes else (False, True, False))
    alive = weakref.WeakSet()
    schedule = coordinator.schedule

    def note(function, args):
        future = schedule(function, args)
        alive.add(future)
        return future

    coordinator.schedule = note
    gc.disable()
    try:
        ended = ours.run(8)
        assert isinstance(ended.error, tf.errors.InvalidArgumentError)
        deadline = time.monotonic() + 20
        while alive and time.monotonic() < deadline:
            time.sleep(0.01)  # Until the thread that watched them has ended.
        assert not alive
    finally:
        gc.enable()


@pytest.mark.parametrize("asked", [None, True, False])
def test_datasets_of_workers_autotune_only_if_asked_to(made, asked):
    """A worker that deletes an iterator which does can stand still by it."""
    _, ours = made(None)
    options = tf.data.Options()
    if asked is not None:
        options.autotune.enabled = asked
    ours._dataset_fn = lambda: tf.data.Dataset.range(3).with_options(options)
    dataset, = ours.dataset
    assert dataset.options().autotune.enabled is bool(asked)
    assert list(dataset.as_numpy_iterator()) == [0, 1, 2]
