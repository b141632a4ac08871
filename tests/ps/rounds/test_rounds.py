"""Tests rounds with a coordinator that fails and cancels closures."""

import gc
import time
import weakref

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_layoutmap._core import tf_private
from tf_layoutmap.ps import datasets, rounds, step_closure

BAD = tf.errors.InvalidArgumentError(None, None, "a bad id")
CANCELLED = tf.errors.CancelledError(None, None, "cancelled")


class Future:
    def __init__(self, numbers):
        self.numbers = numbers
        self.error = None


GOOD = (False, False, True, True)


class Coordinator:
    """Coordinator that runs scheduled closures in `join`.

    Two servers count each step number once. `draw()` returns the outcome of a
    closure as a tuple of four or five values. The first value is whether the
    closure fails if no closure has failed before. The second value is whether
    the closure is cancelled if another closure has failed. The next two values
    are whether each server has applied the closure although the closure failed
    or was cancelled, as if its worker had died afterwards. Both servers apply
    closures that neither fail nor are cancelled. If a closure has several
    steps, the fifth value selects the step that fails. Both servers have
    applied the earlier steps.
    """

    def __init__(self, draw):
        self.draw = draw
        self.applied = [set(), set()]
        self.epoch = None
        self.num_failed = 0
        self.scheduled = []
        self.num_datasets = 0
        self.kept = []
        # Closures of more steps do not join the lookups of layers.
        self.max_joined_steps = rounds.MAX_STEPS
        self.strategy = tf.distribute.get_strategy()

    def create_per_worker_dataset(self, function):
        outer = self

        class Dataset(list):
            def __iter__(self):
                outer.num_datasets += 1
                return super().__iter__()

        return Dataset([function()])

    def schedule(self, epoch, numbers):
        assert self.epoch in (None, epoch)
        self.epoch = epoch
        future = Future(list(numbers))
        self.scheduled.append(future)
        return future

    def join(self):
        futures, self.scheduled = self.scheduled, []
        error = None
        for future in futures:
            fails, cancelled, *applies = self.draw()
            last = applies.pop() if len(applies) > 2 else 0
            last %= len(future.numbers)
            if error is None and fails:
                self.num_failed += 1
                error = future.error = (
                    fails if isinstance(fails, Exception) else BAD
                )
            elif error is not None and cancelled:
                future.error = CANCELLED
            for server, is_applied in zip(self.applied, applies, strict=True):
                if future.error is None:
                    server.update(future.numbers)
                else:
                    server.update(future.numbers[: last + is_applied])
        if error is not None:
            raise error


class Closure:
    """Stand-in for StepClosure that calls the servers of the coordinator."""

    def __init__(self, coordinator, body, max_steps, **options):
        del body, options
        self.coordinator = coordinator
        self.max_steps = max_steps
        self.joins_layers = max_steps <= coordinator.max_joined_steps

    def trace(self, iterator):
        next(iterator, None)

    def num_copies(self, max_steps):
        return max_steps + 1

    def schedule(self, iterator, epoch, numbers, keeps_result):
        del iterator
        assert 1 <= len(numbers) <= self.max_steps
        # The other closures of the run join the lookups of layers.
        assert self.joins_layers
        self.coordinator.kept.extend(numbers[-1:] if keeps_result else [])
        return step_closure.ScheduledCall(
            self.coordinator.schedule(epoch, numbers), []
        )

    def move_to_epoch(self, epoch, next_epoch):
        assert self.coordinator.epoch == epoch
        assert not self.coordinator.scheduled
        self.coordinator.epoch = next_epoch
        return [set(one) for one in self.coordinator.applied]


@pytest.fixture
def make_rounds(monkeypatch):
    def make(draw, steps_per_closure=1, chosen=None):
        coordinator = Coordinator(draw)
        monkeypatch.setattr(
            tf.distribute.coordinator,
            "ClusterCoordinator",
            lambda strategy: coordinator,
        )
        monkeypatch.setattr(step_closure, "StepClosure", Closure)
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
        if chosen is not None:
            steps_per_closure = None
            monkeypatch.setattr(
                rounds.AutomaticSteps, "choose", lambda *_: chosen
            )
        return coordinator, rounds.Rounds(
            None,
            lambda one: None,
            lambda: tf.data.Dataset.range(1),
            num_workers=2,
            deadline=60,
            seconds=1,
            steps_per_closure=steps_per_closure,
        )

    return make


def drawn_from(outcomes):
    remaining = list(outcomes)
    return lambda: remaining.pop(0) if remaining else GOOD


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    st.lists(st.tuples(*[st.booleans()] * 4, st.integers(0, 4)), max_size=40),
    st.integers(1, 12),
    st.integers(1, 5),
    st.booleans(),
)
def test_exactly_the_done_steps_are_applied_by_all_servers(
    make_rounds, drawn, most, steps_per_closure, is_automatic
):
    coordinator, tested = make_rounds(
        drawn_from(drawn),
        steps_per_closure,
        steps_per_closure if is_automatic else None,
    )
    ended = tested.run(most)
    assert (ended.error is not None) == (coordinator.num_failed > 0)
    first, second = coordinator.applied
    assert first == second
    assert ended.num_done == len(first)
    if coordinator.num_failed <= rounds._MAX_FAILURES:
        expected = min(most, 8 * steps_per_closure)
        if is_automatic and steps_per_closure > 1:
            # Without automatic numbers, a round has 8 closures at first.
            size = max(8, 2 * steps_per_closure)
            unit = 2 * steps_per_closure
            expected = most if most <= size else size - size % unit
        assert ended.num_done == expected


def test_a_failed_closure_repeats_only_the_steps_that_were_not_applied(
    make_rounds,
):
    calls = []
    coordinator, tested = make_rounds(
        # Step 2 of the second closure, with number 6, fails on one server.
        drawn_from([GOOD, (True, False, True, False, 2)]),
        4,
    )
    schedule = coordinator.schedule
    coordinator.schedule = lambda epoch, numbers: (
        calls.append(list(numbers)),
        schedule(epoch, numbers),
    )[1]
    ended = tested.run(10)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [6, 7]]
    assert ended.num_done == 10
    assert ended.error.message == BAD.message
    assert coordinator.applied == [set(range(10))] * 2


def test_the_result_of_a_closure_is_the_result_of_its_last_step(make_rounds):
    coordinator, tested = make_rounds(drawn_from([]), 4)
    ended = tested.run(10)
    assert coordinator.kept == [9]
    assert [
        None if one is None else one.future.numbers[-1] for one in ended.values
    ] == [None, None, None, 3, None, None, None, 7, None, 9]


def test_a_cancelled_closure_counts_if_it_was_applied_and_its_next_batch_is_bad(
    make_rounds,
):
    """The closure was applied in an earlier run, with another batch."""
    coordinator, tested = make_rounds(
        drawn_from(
            [
                (True, False, False, False),  # Closure 0 has a bad batch.
                # Closure 1 is cancelled, but was applied.
                (False, True, True, True),
                # Closure 0 runs again, with another bad batch.
                (True, False, False, False),
            ]
        )
    )
    ended = tested.run(2)
    assert isinstance(ended.error, tf.errors.InvalidArgumentError)
    assert coordinator.applied == [{0, 1}, {0, 1}]
    assert ended.num_done == 2


def test_a_partially_applied_closure_is_completed_after_too_many_failures(
    make_rounds,
):
    bad = (True, False, False, False)
    coordinator, tested = make_rounds(
        drawn_from(
            [
                bad,
                # Closure 1 has been applied by the first server.
                (False, True, True, False),
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
    ended = tested.run(2)
    assert isinstance(ended.error, tf.errors.InvalidArgumentError)
    assert coordinator.applied == [{1}, {1}]
    assert ended.num_done == 1


def test_an_ended_dataset_restarts_to_complete_a_step(make_rounds):
    end = tf.errors.OutOfRangeError(None, None, "End of sequence")
    outcomes = [(end, False, True, False)]

    def draw():
        # The closure fails until the workers have new iterators.
        return outcomes[0] if coordinator.num_datasets == 1 else GOOD

    coordinator, tested = make_rounds(draw)
    ended = tested.run(1)
    assert coordinator.num_datasets == 2
    assert isinstance(ended.error, ValueError)
    assert "`dataset_fn` must return an infinite dataset" in str(ended.error)
    assert coordinator.applied == [{0}, {0}]
    assert ended.num_done == 1


def test_a_step_that_cannot_be_completed_ends_the_run(make_rounds):
    coordinator, tested = make_rounds(lambda: (True, True, True, False))
    with pytest.raises(RuntimeError, match="1 steps were applied by some"):
        tested.run(1)
    assert coordinator.num_failed < 30
    for call in (tested.check_settled, lambda: tested.run(1)):
        with pytest.raises(RuntimeError, match="neither saved nor trained"):
            call()


def test_saving_an_interrupted_run_raises(make_rounds):
    coordinator, tested = make_rounds(None)
    tested.check_settled()

    def join():
        raise KeyboardInterrupt

    coordinator.join = join
    with pytest.raises(KeyboardInterrupt):
        tested.run(3)
    with pytest.raises(RuntimeError, match="Steps of this run were inter"):
        tested.check_settled()


def test_cancelled_iterators_are_created_again(make_rounds):
    cancelled = step_closure.InputCancelledError("its iterator was cancelled")
    coordinator, tested = make_rounds(
        drawn_from([(cancelled, False, False, False)])
    )
    ended = tested.run(3)
    assert (ended.num_done, ended.error) == (3, None)
    assert len(ended.values) == 3
    assert coordinator.num_datasets == 2


def test_cancelled_iterators_are_created_a_limited_number_of_times(make_rounds):
    cancelled = step_closure.InputCancelledError("its iterator was cancelled")
    coordinator, tested = make_rounds(lambda: (cancelled, True, False, False))
    ended = tested.run(3)
    assert ended.error is cancelled
    assert coordinator.num_failed <= rounds._MAX_FAILURES + 1


def test_a_step_that_always_fails_ends_the_round(make_rounds):
    coordinator, tested = make_rounds(lambda: (True, True, False, False))
    ended = tested.run(5)
    assert isinstance(ended.error, tf.errors.InvalidArgumentError)
    assert ended.num_done == 0
    assert coordinator.num_failed <= rounds._MAX_FAILURES + 1


def test_an_error_without_a_closure_ends_the_round(make_rounds):
    coordinator, tested = make_rounds(None)

    def join():
        for server in coordinator.applied:
            server.update(coordinator.scheduled[0].numbers)
        for future in coordinator.scheduled:
            future.error = CANCELLED
        coordinator.scheduled.clear()
        raise BAD

    coordinator.join = join
    ended = tested.run(3)
    assert type(ended.error) is type(BAD)
    assert ended.error.message == BAD.message
    assert ended.num_done == 1


def test_an_error_keeps_no_closure_alive(make_rounds):
    """Objects on workers must be freed without a garbage collection."""
    coordinator, tested = make_rounds(
        drawn_from([(True, False, False, False), (False, True, True, True)])
    )
    alive = weakref.WeakSet()
    schedule = coordinator.schedule

    def record(epoch, number):
        future = schedule(epoch, number)
        alive.add(future)
        return future

    coordinator.schedule = record
    gc.disable()
    try:
        ended = tested.run(8)
        assert isinstance(ended.error, tf.errors.InvalidArgumentError)
        deadline = time.monotonic() + 20
        while alive and time.monotonic() < deadline:
            # The thread that watches the closures may need time to end.
            time.sleep(0.01)
        assert not alive
    finally:
        gc.enable()


@pytest.mark.parametrize("is_enabled", [None, True, False])
def test_worker_datasets_autotune_only_if_enabled(make_rounds, is_enabled):
    """Autotuning is off by default, because it can block a worker."""
    _, tested = make_rounds(None)
    options = tf.data.Options()
    if is_enabled is not None:
        options.autotune.enabled = is_enabled
    tested._dataset_fn = lambda: tf.data.Dataset.range(3).with_options(options)
    (dataset,) = tested.dataset
    assert dataset.options().autotune.enabled is bool(is_enabled)
    assert list(dataset.as_numpy_iterator()) == [0, 1, 2]


def test_the_number_of_steps_grows_when_a_trace_pays():
    tested = rounds.AutomaticSteps(num_workers=2, deadline=60)
    tested.add_trace(4)
    tested.add_round(100, 3.0)
    assert tested.choose(1000) == 1
    tested.add_round(1000, 3.0)
    assert tested.choose(1000) == rounds.AUTOMATIC_STEPS
    # Each worker has at least two closures.
    assert tested.choose(40) == 10
    assert tested.choose(3) == 1


@pytest.mark.parametrize(
    "deadline, num_workers, num_steps, expected",
    [
        (600, 1, 100, 12),  # Steps of 20 ms: 0.25 s.
        (600, 2, 100, 6),  # Steps of 40 ms.
        (4, 1, 100, 5),  # 1/40 of the deadline.
        (600, 1, 5, 1),  # Steps of 0.4 s.
        (600, 64, 1 << 20, 4),  # 512 steps are in flight.
    ],
)
def test_a_closure_is_much_shorter_than_a_round_and_the_deadline(
    deadline, num_workers, num_steps, expected
):
    tested = rounds.AutomaticSteps(num_workers, deadline)
    tested.add_trace(0.1)
    tested.add_round(num_steps, 2.0)
    assert tested.choose(1 << 20) == expected


def test_all_closures_of_a_run_join_the_same_layers(make_rounds):
    """A repeated step finds the records of the servers only in this case."""
    coordinator, tested = make_rounds(drawn_from([]), chosen=4)
    coordinator.max_joined_steps = 3
    sizes = []
    schedule = coordinator.schedule
    coordinator.schedule = lambda epoch, numbers: (
        sizes.append(len(numbers)),
        schedule(epoch, numbers),
    )[1]
    for _ in range(3):
        assert tested.run(100).num_done
        coordinator.applied, coordinator.epoch = [set(), set()], None
    assert set(sizes) == {1}


def test_an_automatic_number_of_steps_leaves_single_steps_to_the_end(
    make_rounds, monkeypatch
):
    groups = []
    coordinator, tested = make_rounds(drawn_from([]), chosen=1)
    schedule = coordinator.schedule
    coordinator.schedule = lambda epoch, numbers: (
        groups.append(len(numbers)),
        schedule(epoch, numbers),
    )[1]
    assert tested.run(20).num_done == 8
    assert groups == [1] * 8
    groups.clear()
    coordinator.applied, coordinator.epoch = [set(), set()], None
    monkeypatch.setattr(rounds.AutomaticSteps, "choose", lambda *_: 4)
    ended = tested.run(13)
    # Both workers have one closure of 4 steps.
    assert ended.num_done == 13
    assert groups == [4, 4, 1, 1, 1, 1, 1]
    assert [
        one.future.numbers[-1] for one in ended.values if one is not None
    ] == [3, 7, 8, 9, 10, 11, 12]
    assert coordinator.applied == [set(range(13))] * 2
    # If another round follows, a round has closures of equal sizes only.
    groups.clear()
    coordinator.applied, coordinator.epoch = [set(), set()], None
    assert tested.run(100).num_done % 8 == 0
    assert set(groups) == {4}
