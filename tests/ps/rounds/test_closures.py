"""Tests the results and errors of one closure, without a cluster."""

import pytest
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.servers import closure_trace
from tf_layoutmap.ps import step_closure


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

    def make(*errors, remote=None, **options):
        closure = step_closure.StepClosure(
            None, lambda iterator: iterator, **options
        )
        return closure._make_call(Traced(*errors), remote), has_failed

    return make


def test_a_lost_connection_is_retried_a_limited_number_of_times(
    make_call,
):
    remote = []
    call, _ = make_call(*[cancelled("of /job:ps/task:0")] * 4, remote=remote)
    for _ in range(3):
        with pytest.raises(tf.errors.CancelledError):
            call(1, 2)
    with pytest.raises(step_closure.InputCancelledError, match="of /job:ps"):
        call(1, 2)
    assert remote == []
    assert call(1, 2) is None
    assert remote == [(1, 2)]


def test_a_result_that_is_not_kept_is_released(make_call):
    call, _ = make_call()
    assert call(1, 2) is None


def test_joined_results_are_returned_to_the_coordinator(make_call):
    remote = []
    call, _ = make_call(remote=remote, joins_results=True)
    assert call(1, 2) == (1, 2)
    assert remote == []


def test_other_cancellations_are_attributed_to_the_iterator(make_call):
    call, _ = make_call(cancelled("GetNext"))
    with pytest.raises(step_closure.InputCancelledError, match="GetNext"):
        call(1, 2)


def test_a_closure_does_not_start_after_another_has_failed(make_call):
    call, has_failed = make_call(ValueError("started"))
    has_failed.append(True)
    with pytest.raises(tf.errors.CancelledError, match="Not started"):
        call(1, 2)


def traced_steps(max_steps, num_steps, monkeypatch, **limits):
    """Returns the batch and the token of each step of a call."""
    for name, limit in limits.items():
        monkeypatch.setattr(step_closure, name, limit)

    def body(iterator):
        batch = tf.cast(next(iterator), tf.float64)
        token = tf.cast(closure_trace.token_to_fetch()[:2], tf.float64)
        return tf.concat([[batch], token], axis=0)

    closure = step_closure.StepClosure(
        None, body, max_steps, joins_results=True
    )
    numbers = tf.constant([[9, 100 + one] for one in range(num_steps)])
    iterator = iter(tf.data.Dataset.range(1000))
    function = (
        closure._all_steps if num_steps == max_steps else closure._some_steps
    )
    results = tf.function(function)(iterator, numbers)
    return results.numpy().reshape(-1, 3).tolist()


@pytest.mark.parametrize(
    "max_steps, num_steps",
    [(1, 1), (2, 2), (3, 1), (3, 2), (3, 3), (7, 7), (8, 8), (9, 9), (20, 20)],
)
def test_a_closure_runs_each_step_once_in_order(
    max_steps, num_steps, monkeypatch
):
    expected = [[one, 9, 100 + one] for one in range(num_steps)]
    assert traced_steps(max_steps, num_steps, monkeypatch) == expected
    # Groups of two steps run in a loop.
    assert (
        traced_steps(max_steps, num_steps, monkeypatch, _MAX_GROUP=2)
        == expected
    )
    # Groups have one step.
    assert (
        traced_steps(max_steps, num_steps, monkeypatch, _MAX_GROUP_OPS=1)
        == expected
    )


def test_the_number_of_copies_of_a_step_is_limited():
    for max_steps in (1, 16, 17, 18, 25, 200):
        num_traces = 0

        def body(iterator):
            nonlocal num_traces
            del iterator
            num_traces += 1

        closure = step_closure.StepClosure(None, body, max_steps)
        tf.function(closure._all_steps).get_concrete_function(
            tf.constant(0), tf.zeros([max_steps, 2], tf.int64)
        )
        assert num_traces <= 2 * step_closure._MAX_GROUP + 1


@pytest.mark.exhaustive
def test_a_large_step_has_fewer_copies_also_if_its_ops_are_in_branches():
    def body(iterator):
        del iterator
        bodies.append(1)
        return tf.cond(
            tf.random.uniform([]) < 1.0,
            lambda: tf.add_n([tf.random.uniform([]) for _ in range(1000)]),
            lambda: tf.constant(0.0),
        )

    bodies = []
    closure = step_closure.StepClosure(None, body, 100)
    tf.function(closure._all_steps).get_concrete_function(
        tf.constant(0), tf.zeros([100, 2], tf.int64)
    )
    ops_per_step = 2000  # At least two ops for each random value.
    assert len(bodies) <= 1 + 2 * (step_closure._MAX_GROUP_OPS // ops_per_step)


class Optional:
    """Body whose result is the batch and the step number; -1 if it waits."""

    def begin(self):
        pass

    def __call__(self, iterator):
        return self.run_or_wait(iterator.get_next_as_optional())

    def run(self, batch):
        number = closure_trace.token_to_fetch()[1]
        return tf.cast(tf.stack([batch, number]), tf.float64)

    def run_or_wait(self, batch):
        return tf.cond(
            batch.has_value(),
            lambda: self.run(batch.get_value()),
            lambda: tf.constant([-1.0, -1.0], tf.float64),
        )


@pytest.mark.parametrize("max_group", [1, 8])
@pytest.mark.parametrize("max_steps", [2, 7])
def test_a_closure_runs_a_step_for_each_batch_until_the_dataset_ends(
    max_steps, max_group, monkeypatch
):
    monkeypatch.setattr(step_closure, "_MAX_GROUP", max_group)
    closure = step_closure.StepClosure(
        None, Optional(), max_steps, joins_results=True
    )
    function = tf.function(closure._all_steps)
    num_batches = 2 * max_steps - 1
    iterator = iter(tf.data.Dataset.range(num_batches))
    results = []
    for first in (0, max_steps, 2 * max_steps):
        numbers = [[1, first + place] for place in range(max_steps)]
        result = function(iterator, tf.constant(numbers, tf.int64))
        results += result.numpy().reshape(-1, 2).tolist()
    steps = [[number, number] for number in range(num_batches)]
    assert results == steps + [[-1, -1]] * (3 * max_steps - num_batches)


@pytest.mark.parametrize("max_ops", [4000, 200, 60])
def test_the_expected_number_of_copies_is_about_the_traced_number(
    max_ops, monkeypatch
):
    monkeypatch.setattr(step_closure, "_MAX_GROUP_OPS", max_ops)

    class Counting(Optional):
        num_traces = 0

        def run(self, batch):
            self.num_traces += 1
            values = [tf.cast(batch, tf.float64)] * 20
            return tf.stack([tf.add_n([tf.abs(value) for value in values])])

    body = Counting()
    iterator = iter(tf.data.Dataset.range(100))
    short, long = (
        step_closure.StepClosure(None, body, steps, joins_results=True)
        for steps in (1, 16)
    )
    short._traced[1] = tf.function(short._all_steps).get_concrete_function(
        iterator, tf.TensorSpec([1, 2], tf.int64)
    )
    body.num_traces = 0
    tf.function(long._all_steps).get_concrete_function(
        iterator, tf.TensorSpec([16, 2], tf.int64)
    )
    # The first step of a longer closure has fewer ops than a closure of one.
    ratio = short.num_copies(16) / body.num_traces
    assert 0.5 <= ratio <= 2
