"""Tests the order of reads and updates of servers in a traced function."""

from typing import Any

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_layoutmap.embedding.servers import prefetching
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace


class Calls:
    """Records the reads and updates of a function with one server."""

    def __init__(self):
        self.order = prefetching.StepOrder(self.apply)
        self.ops = []
        self.handle = tf.constant(0)

    def apply(self, update):
        with tf.control_dependencies([update.token]):
            one = tf.constant(0, name="update")
        self.ops.append((update.plan, None))
        return [one]

    def update(self, number, may_join=True, token: Any = 0):
        plan: Any = _Plan(number)
        self.order.add(
            prefetching.Update(plan, [], [], [], tf.convert_to_tensor(token)),
            may_join=may_join,
        )

    def read(self, number) -> Any:
        update = self.order.take_for_read()
        if update is not None:
            self.ops.append((update.plan, number))
            self.order.record([tf.constant(0, name="joined")])
            return None
        with self.order.reading(0, self.handle) as handle:
            read = tf.identity(handle)
        self.ops.append((None, number))
        return read.op


class _Plan(int):
    device = ""


def begin(trace):
    return trace.begin(tf.constant([1, 0]))


# A step is a list of calls: True is a read, False is an update.
@hypothesis.given(
    st.lists(st.lists(st.booleans(), max_size=4), max_size=6),
    st.integers(0, 3),
    st.booleans(),
)
def test_joined_calls_have_the_order_of_the_program(
    steps, prefetch_steps, joins_calls
):
    with tf.Graph().as_default():
        calls = Calls()
        num_reads = num_updates = 0
        expected = []  # The number of updates before each read.
        has_own_update = []  # Whether the step updates before the read.
        trace = ClosureTrace(prefetch_steps, joins_calls=joins_calls)
        for step in steps:
            begin(trace)
            num_before = num_updates
            for is_read in step:
                if is_read:
                    calls.read(num_reads)
                    expected.append(num_updates)
                    has_own_update.append(num_updates > num_before)
                    num_reads += 1
                else:
                    calls.update(num_updates)
                    num_updates += 1
        prefetching.end_steps()
    updates = [one for one, _ in calls.ops if one is not None]
    assert updates == list(range(num_updates))
    reads = [one for _, one in calls.ops if one is not None]
    assert reads == list(range(num_reads))
    found = []
    for place, (_, read) in enumerate(calls.ops):
        if read is not None:
            before = [one for one, _ in calls.ops[: place + 1]]
            found.append(sum(one is not None for one in before))
    for num_before, num_all, has_own in zip(
        found, expected, has_own_update, strict=True
    ):
        # Only the last `prefetch_steps` updates can be missing, and only if
        # they belong to earlier steps.
        num_missed = 0 if has_own else prefetch_steps
        assert num_all - num_missed <= num_before <= num_all
    if not joins_calls:
        assert found == expected


def test_a_read_waits_for_the_update_before_the_missed_updates():
    with tf.Graph().as_default():
        calls, trace = Calls(), ClosureTrace(1)
        for number in range(3):
            begin(trace)
            calls.update(number)
        begin(trace)
        read = calls.read(0)
        names = [one.name for one in read.control_inputs]
        assert names == ["update_1"]


def test_a_read_follows_the_update_of_its_own_step():
    with tf.Graph().as_default():
        calls, trace = Calls(), ClosureTrace(1)
        for number in range(3):
            begin(trace)
            calls.update(number)
        read = calls.read(0)
        # TensorFlow orders ops with the same handle.
        assert [one.name for one in read.inputs] == [calls.handle.name]


def test_a_joined_update_keeps_the_control_dependencies_of_its_caller():
    with tf.Graph().as_default() as graph:
        calls = Calls()
        token = begin(ClosureTrace(joins_calls=True)).token
        with tf.control_dependencies([tf.no_op("check")]):
            calls.update(0, token=token)
        prefetching.end_steps()
        (token,) = graph.get_operation_by_name("update").control_inputs
        assert [one.name for one in token.control_inputs] == ["check"]


def test_an_update_that_must_not_be_joined_follows_earlier_updates():
    with tf.Graph().as_default():
        calls = Calls()
        begin(ClosureTrace(joins_calls=True))
        calls.update(0)
        calls.update(1, may_join=False)
        assert calls.ops == [(0, None), (1, None)]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_call_in_a_branch_after_a_pending_update_is_a_conflict(is_read):
    trace = ClosureTrace(joins_calls=True)

    @tf.function
    def function(condition):
        calls = Calls()

        def branch():
            if is_read:
                calls.read(0)
            else:
                calls.update(1)
            return tf.constant(0)

        begin(trace)
        tf.cond(condition, branch, lambda: tf.constant(0))
        assert not trace.is_out_of_order
        calls.update(0)
        tf.cond(condition, branch, lambda: tf.constant(0))
        prefetching.end_steps()

    function.get_concrete_function(tf.TensorSpec([], tf.bool))
    assert trace.is_out_of_order and not trace.joins_calls


def test_updates_outside_of_closures_are_created_immediately():
    with tf.Graph().as_default():
        calls = Calls()
        calls.update(0)
        assert calls.ops == [(0, None)]
    calls = Calls()
    calls.update(0)  # Eager.
    assert calls.ops == [(0, None)]
