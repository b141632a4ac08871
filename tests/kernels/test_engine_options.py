"""Tests quantization, pipelining and out-of-range ids of the host engine."""

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap._core import ops

InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError


def engine_of(**changes):
    return ops.create_host_engine(
        **{
            "num_replicas": 1,
            "table_names": ["words"],
            "table_num_rows": [4],
            "table_dims": [2],
            "table_num_shards": [1],
            "table_placements": ["div"],
            "table_offsets": [0, 4],
            "table_optimizers": ["sgd"],
            "feature_names": ["x"],
            "feature_tables": [0],
            "feature_combiners": ["sum"],
            "feature_max_sequence_lengths": [0],
            **changes,
        }
    )


class Engine:
    def __init__(self, **changes):
        self.handle = engine_of(**changes)
        self.rows = tf.Variable(tf.ones([4, 2]))

    def enqueue(self, ids, training=True):
        ops.enqueue_step(
            engine=self.handle,
            replica=0,
            training=training,
            ids=[ids],
            splits=[np.zeros([0], np.int64)],
            num_samples=[len(ids)],
            weights=[np.zeros([0], np.float32)],
        )

    def dequeue(self):
        return ops.dequeue_step(
            engine=self.handle,
            replica=0,
            shards=[self.rows.handle],
            num_features=1,
            dims=[2],
            max_sequence_lengths=[0],
        )[0].numpy()

    def apply(self, gradient, rate=1.0):
        ops.apply_step(
            engine=self.handle,
            replica=0,
            gradients=[gradient],
            hyperparameters=[[rate]],
            shards=[self.rows.handle],
            slots=[],
            rounding_steps=[],
        )

    def apply_pending(self, shards=None, **options):
        ops.land_update(
            **{
                "engine": self.handle,
                "replica": 0,
                "always": True,
                "slots": [],
                "rounding_steps": [],
                "shards": [self.rows.handle] if shards is None else shards,
                **options,
            }
        )

    def is_held(self):
        return bool(ops.describe_host_engine(self.handle).held)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"table_num_buckets": [2]}, "one value and `table_limits` two"),
        ({"table_limits": [0.0, 1.0]}, "one value and `table_limits` two"),
        ({"table_num_buckets": [1], "table_limits": [0.0, 1.0]}, "num_buckets"),
        (
            {"table_num_buckets": [-2], "table_limits": [0.0, 1.0]},
            "num_buckets",
        ),
        (
            {"table_num_buckets": [2], "table_limits": [1.0, 1.0]},
            "'words'.*limit",
        ),
        ({"table_num_buckets": [2], "table_limits": [0.0, np.nan]}, "limits"),
        ({"out_of_range": "wrap"}, "wrap"),
    ],
)
def test_invalid_options_raise(changes, words):
    with pytest.raises((InvalidArgument, ValueError), match=words):
        engine_of(**changes)


def test_a_table_with_no_buckets_is_not_quantized():
    engine = Engine(table_num_buckets=[0], table_limits=[0.0, 0.0])
    engine.rows.assign([[0.3, 0.7]] * 4)
    engine.enqueue(np.array([1]), training=False)
    np.testing.assert_array_equal(engine.dequeue(), engine.rows[1:2])


def test_a_pipelined_update_is_applied_once():
    engine = Engine(pipelined=True)
    engine.apply_pending()
    engine.enqueue(np.array([1]))
    engine.dequeue()
    engine.apply([[1.0, 2.0]])
    assert engine.is_held()
    assert np.all(engine.rows.numpy() == 1)
    for _ in range(2):
        engine.apply_pending()
        assert not engine.is_held()
        assert engine.rows.numpy()[1].tolist() == [0, -1]


def test_a_forward_step_does_not_wait_for_the_pending_update():
    engine = Engine(pipelined=True)
    engine.enqueue(np.array([1]))
    engine.dequeue()
    engine.apply([[1.0, 2.0]])
    engine.enqueue(np.array([1]), training=False)
    with pytest.raises(
        FailedPrecondition, match="deferred update must be applied"
    ):
        engine.dequeue()
    engine.apply_pending(always=False)
    assert engine.dequeue().tolist() == [[0, -1]]


def test_a_failed_flush_keeps_the_pending_update():
    engine = Engine(pipelined=True)
    engine.enqueue(np.array([1]))
    engine.dequeue()
    engine.apply([[1.0, 2.0]])
    other = tf.Variable(tf.ones([3, 2]))
    for options, words in [
        ({"shards": [other.handle]}, "words"),
        ({"shards": [engine.rows.handle] * 2}, "need 1 `shards`"),
        ({"slots": [other.handle]}, "need 0 `slots`"),
        ({"replica": 1}, "`replica` must be in"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            engine.apply_pending(**options)
        assert engine.is_held()
    engine.apply_pending()
    assert engine.rows.numpy()[1].tolist() == [0, -1]


def test_an_engine_without_pipelining_has_no_pending_update():
    engine = Engine()
    engine.enqueue(np.array([1]))
    engine.dequeue()
    engine.apply([[1.0, 2.0]])
    engine.apply_pending()
    assert engine.rows.numpy()[1].tolist() == [0, -1]
    assert not engine.is_held()
