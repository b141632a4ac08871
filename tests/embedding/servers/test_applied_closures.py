"""Tests the record of applied closures and the move to the next epoch."""

from typing import Any

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.servers import key_cases, local
from tests.embedding.servers.test_key_steps import closure_of
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

tpu = tf.tpu.experimental.embedding
NUM_ROWS = 8


def ops_of(embedding):
    backend: Any = embedding._state.backend
    return backend._ops


class Program:
    """A table on two servers, and a step that updates two of its rows."""

    def __init__(self):
        with local.servers(2):
            self.embedding = tlm.TPUEmbedding(
                tpu.FeatureConfig(
                    tpu.TableConfig(
                        NUM_ROWS,
                        4,
                        initializer=tf.zeros_initializer(),
                        name="table",
                    )
                ),
                tpu.SGD(1.0),
            )
        self.embedding.build()
        self.servers = ops_of(self.embedding).servers
        self.applied = ops_of(self.embedding).applied_closures

        @tf.function
        def closure(numbers):
            ClosureTrace().begin(numbers)
            self.embedding.enqueue(tf.constant([0, NUM_ROWS - 1]))
            self.embedding.apply_gradients(
                tf.ones_like(self.embedding.dequeue())
            )

        self.closure = closure

    def run(self, epoch, number):
        self.closure(tf.constant([epoch, number], tf.int64))

    def run_on_first_server(self, epoch, number):
        """Runs a closure whose worker dies after calling the first server."""
        variables = [self.servers[1].applied, *self.servers[1].shards]
        before = [one.numpy() for one in variables]
        self.run(epoch, number)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)

    def rows(self):
        (table,) = self.embedding.embedding_tables.values()
        return [-float(table.numpy()[row][0]) for row in (0, NUM_ROWS - 1)]


@pytest.fixture
def program():
    return Program()


def test_each_server_reports_its_applied_closures(program):
    program.run(1, 0)
    program.run(1, 2)
    program.run_on_first_server(1, 1)
    assert program.rows() == [3, 2]
    assert program.applied.move_to_epoch(1, 2) == [{0, 1, 2}, {0, 2}]


def test_a_missing_closure_is_applied_in_the_next_epoch(program):
    program.run(1, 0)
    program.run_on_first_server(1, 1)
    program.applied.move_to_epoch(1, 2)
    for number in (0, 1, 1):
        program.run(2, number)
    assert program.rows() == [2, 2]
    assert program.applied.move_to_epoch(2, 3) == [{0, 1}] * 2


def test_a_late_closure_raises(program):
    program.run(1, 0)
    program.applied.move_to_epoch(1, 2)
    with pytest.raises(tf.errors.FailedPreconditionError, match="discarded"):
        program.run(1, 1)
    assert program.rows() == [1, 1]


def test_closures_of_earlier_epochs_are_not_reported(program):
    program.run(1, 0)
    program.run_on_first_server(3, 1)
    assert program.applied.move_to_epoch(3, 4) == [{1}, set()]
    for number in (0, 1):
        program.run(4, number)
    assert program.rows() == [3, 3]


def test_a_closure_applied_during_the_move_is_reported(program, monkeypatch):
    """Applies a closure while `move_to_epoch` accesses the second server."""
    program.run(1, 0)
    applied = program.servers[1].applied
    read = applied.numpy
    calls = []

    def read_and_apply_one():
        value = read()
        if not calls:
            program.run(3, 0)
        calls.append(value)
        return value

    monkeypatch.setattr(applied, "numpy", read_and_apply_one)
    monkeypatch.setattr(program.applied, "_applied", [applied])
    assert program.applied.move_to_epoch(3, 4) == [{0}]


def test_a_step_with_sent_keys_can_finish_in_the_next_epoch():
    """The step runs twice, but its keys are counted once."""
    with local.servers(2):
        distributed = key_cases.embedding({"evict": "lru"})
    host = key_cases.embedding({"evict": "lru"})
    run = closure_of(distributed)
    run(0, 0, dies=True)
    assert ops_of(distributed).applied_closures.move_to_epoch(1, 2) == [
        set(),
        set(),
    ]
    run(0, 0, epoch=2)
    key_cases.train(host, 0)
    assert key_cases.differences(distributed, host) == []
