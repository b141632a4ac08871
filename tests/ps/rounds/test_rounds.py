"""Closures of a round, by a coordinator that fails and cancels at random."""

import gc
import time
import weakref

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_layoutmap._core import tf_private
from tf_layoutmap.ps import datasets, rounds

BAD = tf.errors.InvalidArgumentError(None, None, "a bad id")
CANCELLED = tf.errors.CancelledError(None, None, "cancelled")


class Future:
    def __init__(self, number):
        self.number = number
        self.error = None


GOOD = (False, False, True, True)


class Coordinator:
    """Runs what is scheduled in `join`; two servers count a number once.

    `draw()` returns what comes of a closure: before an error, whether it
    fails; after one, whether it is cancelled; and which of the servers have
    applied it anyway, as of a worker that has died. Closures that neither fail
    nor are cancelled are applied by both.
    """

    def __init__(self, draw):
        self.draw = draw
        self.applied = [set(), set()]
        self.epoch = None
        self.num_failed = 0
        self.scheduled = []
        self.num_datasets = 0

    def create_per_worker_dataset(self, function):
        outer = self

        class Dataset(list):
            def __iter__(self):
                outer.num_datasets += 1
                return super().__iter__()

        return Dataset([function()])

    def schedule(self, epoch, number):
        assert self.epoch in (None, epoch)
        self.epoch = epoch
        future = Future(number)
        self.scheduled.append(future)
        return future

    def join(self):
        futures, self.scheduled = self.scheduled, []
        error = None
        for future in futures:
            fails, cancelled, *applies = self.draw()
            if error is None and fails:
                self.num_failed += 1
                error = future.error = (
                    fails if isinstance(fails, Exception) else BAD
                )
            elif error is not None and cancelled:
                future.error = CANCELLED
            for server, is_applied in zip(self.applied, applies, strict=True):
                if is_applied or future.error is None:
                    server.add(future.number)
        if error is not None:
            raise error


class Closure:
    """A StepClosure that uses the servers of the coordinator."""

    def __init__(self, coordinator, body):
        del body
        self.coordinator = coordinator

    def trace(self, iterator):
        next(iterator)

    def schedule(self, iterator, epoch, number):
        del iterator
        return self.coordinator.schedule(epoch, number)

    def move_to_epoch(self, epoch, next_epoch):
        assert self.coordinator.epoch == epoch
        assert not self.coordinator.scheduled
        self.coordinator.epoch = next_epoch
        return [set(one) for one in self.coordinator.applied]


@pytest.fixture
def made(monkeypatch):
    def make(draw):
        coordinator = Coordinator(draw)
        monkeypatch.setattr(
            tf.distribute.coordinator,
            "ClusterCoordinator",
            lambda strategy: coordinator,
        )
        monkeypatch.setattr(rounds, "StepClosure", Closure)
        monkeypatch.setattr(
            datasets, "check_worker_dataset_function", lambda traced: None
        )
        monkeypatch.setattr(
            tf_private, "dataset_function_of", lambda dataset: None
        )

        def wait(future):
            if future.error is not None:
                raise future.error

        monkeypatch.setattr(tf_private, "wait_for_closure", wait)
        return coordinator, rounds.Rounds(
            None,
            lambda one: None,
            lambda: tf.data.Dataset.range(1),
            num_workers=2,
            deadline=60,
            seconds=1,
        )

    return make


def drawn_from(outcomes):
    left = list(outcomes)
    return lambda: left.pop(0) if left else GOOD


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    st.lists(st.tuples(*[st.booleans()] * 4), max_size=40), st.integers(1, 12)
)
def test_what_is_done_is_what_all_servers_have_applied(made, drawn, most):
    coordinator, ours = made(drawn_from(drawn))
    ended = ours.run(most)
    assert (ended.error is not None) == (coordinator.num_failed > 0)
    first, second = coordinator.applied
    assert first == second
    assert ended.num_done == len(first)
    if coordinator.num_failed <= rounds._MAX_FAILURES:
        assert ended.num_done == min(most, 8)


def test_a_closure_that_was_cancelled_counts_though_its_next_batch_is_bad(made):
    """It had reached the servers with another batch."""
    coordinator, ours = made(
        drawn_from(
            [
                (True, False, False, False),  # Closure 0 has a bad batch.
                (False, True, True, True),  # 1 is cancelled, but was applied.
                (True, False, False, False),  # 0 again, and another bad batch.
            ]
        )
    )
    ended = ours.run(2)
    assert isinstance(ended.error, tf.errors.InvalidArgumentError)
    assert coordinator.applied == [{0, 1}, {0, 1}]
    assert ended.num_done == 2


def test_one_that_a_server_has_applied_is_completed_after_too_many_failures(
    made,
):
    bad = (True, False, False, False)
    coordinator, ours = made(
        drawn_from(
            [
                bad,
                (False, True, True, False),  # 1 has reached the first server.
                *[bad, (False, True, False, False)]
                * (rounds._MAX_FAILURES - 1),
                bad,
                (False, True, False, False),
                bad,
                bad,
                GOOD,
            ]
        )
    )
    ended = ours.run(2)
    assert isinstance(ended.error, tf.errors.InvalidArgumentError)
    assert coordinator.applied == [{1}, {1}]
    assert ended.num_done == 1


def test_a_dataset_that_has_ended_begins_again_to_complete_a_step(made):
    end = tf.errors.OutOfRangeError(None, None, "End of sequence")
    outcomes = [(end, False, True, False)]

    def draw():
        # Until workers have other iterators.
        return outcomes[0] if coordinator.num_datasets == 1 else GOOD

    coordinator, ours = made(draw)
    ended = ours.run(1)
    assert coordinator.num_datasets == 2
    assert isinstance(ended.error, ValueError)
    assert "`dataset_fn` must return an infinite dataset" in str(ended.error)
    assert coordinator.applied == [{0}, {0}]
    assert ended.num_done == 1


def test_a_step_that_cannot_be_completed_ends_the_run(made):
    coordinator, ours = made(lambda: (True, True, True, False))
    with pytest.raises(RuntimeError, match="1 steps were applied by some"):
        ours.run(1)
    assert coordinator.num_failed < 30
    for call in (ours.check_settled, lambda: ours.run(1)):
        with pytest.raises(RuntimeError, match="neither saved nor trained"):
            call()


def test_a_run_that_was_interrupted_is_not_saved(made):
    coordinator, ours = made(None)
    ours.check_settled()

    def join():
        raise KeyboardInterrupt

    coordinator.join = join
    with pytest.raises(KeyboardInterrupt):
        ours.run(3)
    with pytest.raises(RuntimeError, match="Steps of this run were inter"):
        ours.check_settled()


def test_iterators_that_were_cancelled_are_made_again(made):
    cancelled = rounds.InputCancelledError("its iterator was cancelled")
    coordinator, ours = made(drawn_from([(cancelled, False, False, False)]))
    ended = ours.run(3)
    assert (ended.num_done, ended.error) == (3, None)
    assert len(ended.values) == 3
    assert coordinator.num_datasets == 2


def test_but_not_without_end(made):
    cancelled = rounds.InputCancelledError("its iterator was cancelled")
    coordinator, ours = made(lambda: (cancelled, True, False, False))
    ended = ours.run(3)
    assert ended.error is cancelled
    assert coordinator.num_failed <= rounds._MAX_FAILURES + 1


def test_a_step_that_always_fails_ends(made):
    coordinator, ours = made(lambda: (True, True, False, False))
    ended = ours.run(5)
    assert isinstance(ended.error, tf.errors.InvalidArgumentError)
    assert ended.num_done == 0
    assert coordinator.num_failed <= rounds._MAX_FAILURES + 1


def test_an_error_of_no_closure_ends_the_round(made):
    coordinator, ours = made(None)

    def join():
        for server in coordinator.applied:
            server.add(coordinator.scheduled[0].number)
        for future in coordinator.scheduled:
            future.error = CANCELLED
        coordinator.scheduled.clear()
        raise BAD

    coordinator.join = join
    ended = ours.run(3)
    assert type(ended.error) is type(BAD)
    assert ended.error.message == BAD.message
    assert ended.num_done == 1


def test_an_error_keeps_no_closure_alive(made):
    """Objects on workers are freed without a garbage collection."""
    coordinator, ours = made(
        drawn_from([(True, False, False, False), (False, True, True, True)])
    )
    alive = weakref.WeakSet()
    schedule = coordinator.schedule

    def note(epoch, number):
        future = schedule(epoch, number)
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
    (dataset,) = ours.dataset
    assert dataset.options().autotune.enabled is bool(asked)
    assert list(dataset.as_numpy_iterator()) == [0, 1, 2]
