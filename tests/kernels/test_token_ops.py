"""The host engine's lookups by token match the reference."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.kernels import cases
from tests.kernels.test_engine_ops import (
    DIMS,
    FEATURES,
    HYPERPARAMETERS,
    Engine,
    FailedPrecondition,
    InvalidArgument,
    inputs_of,
    random_batch,
    random_gradients,
)
from tf_layoutmap._core import ops
from tf_layoutmap.embedding.host.engine import (
    MARK_SHAPE,
    mark_of_replica,
    mark_shape,
)


class TokenEngine(Engine):
    def open(self, replica, batch, dtype=np.int64, vocabulary_steps=()):
        token = ops.open_step(
            engine=self.handle,
            replica=replica,
            vocabulary_steps=np.array(vocabulary_steps, np.int64),
            **inputs_of(batch, dtype),
        )
        return token, ops.look_up_step(
            engine=self.handle,
            replica=replica,
            token=token,
            shards=cases.handles(self.shards),
            num_features=len(FEATURES),
            dims=[DIMS[one.table] for one in FEATURES],
            max_sequence_lengths=[one.max_sequence_length for one in FEATURES],
        )

    def follow(self, replica, token, gradients):
        mark = ops.follow_step(
            engine=self.handle,
            replica=replica,
            token=token,
            gradients=gradients,
            coordinates=np.zeros([0], np.float32),
        )
        return mark_of_replica(mark, replica, self.ref.num_replicas)

    def apply_followed(self, replica, marks, **changes):
        return ops.apply_followed(
            **{
                "engine": self.handle,
                "replica": replica,
                "marks": marks,
                "hyperparameters": HYPERPARAMETERS,
                "shards": cases.handles(self.shards),
                "slots": cases.handles(self.slots),
                "rounding_steps": [],
                **changes,
            }
        )

    def kept(self):
        found = ops.describe_host_engine(self.handle)
        return found.num_open.numpy().tolist(), (
            found.num_followed.numpy().tolist()
        )


@pytest.mark.parametrize("dtype", cases.ID_TYPES)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_training_is_bitwise_identical_to_the_reference(num_replicas, dtype):
    engine = TokenEngine(num_replicas)
    for step in range(6):
        # Per call: Tuples of replica, token and token of the reference.
        opened = []
        for call in range(3):
            for r in range(num_replicas):
                batch = random_batch(step * 100 + call * 10 + r)
                token, found = engine.open(r, batch, dtype)
                its_token, expected = engine.ref.open(r, batch)
                opened.append((r, token, its_token, call))
                for one, other in zip(found, expected, strict=True):
                    cases.assert_bitwise_equal(one, other)
        marks = [-tf.zeros(mark_shape(num_replicas))] * num_replicas
        followed = []
        # Gradients are passed in reverse order, and the second lookup receives
        # no gradients.
        for r, token, its_token, call in reversed(opened):
            if call == 1:
                continue
            factor = [0.5, 0.0, 1.0][call]
            gradients = random_gradients(step * 100 + call * 10 + r)
            mark = engine.follow(r, token, gradients)
            marks[r] += factor * mark
            followed.append((its_token, factor, gradients))
        for r in reversed(range(num_replicas)):
            engine.apply_followed(r, marks[r])
        engine.ref.apply_followed(followed, HYPERPARAMETERS)
        engine.check()


def test_steps_in_order_and_steps_by_token_are_independent():
    engine = TokenEngine()
    batch, gradients = random_batch(1), random_gradients(1)
    engine.enqueue(0, inputs_of(batch))
    engine.ref.enqueue(0, True, batch)
    token, _ = engine.open(0, batch)
    its_token, _ = engine.ref.open(0, batch)
    engine.dequeue(0)
    engine.ref.dequeue(0)
    engine.apply_followed(0, engine.follow(0, token, gradients))
    engine.ref.apply_followed([(its_token, 1, gradients)], HYPERPARAMETERS)
    engine.check()
    engine.apply(0, gradients)
    engine.ref.apply(0, gradients, HYPERPARAMETERS)
    engine.check()


def test_each_lookup_in_a_loop_receives_its_gradient():
    engine = TokenEngine()
    batch, gradients = random_batch(1), random_gradients(1)
    inputs = inputs_of(batch)

    @tf.function
    def step(num_calls):
        marks = tf.zeros(MARK_SHAPE)
        for _ in tf.range(num_calls):
            token = ops.open_step(
                engine=engine.handle, replica=0, vocabulary_steps=[], **inputs
            )
            marks += engine.follow(0, token, gradients)
        engine.apply_followed(0, marks)

    for num_calls in (1, 3):
        step(tf.constant(num_calls))
        engine.ref.apply_followed(
            [
                (engine.ref.open(0, batch)[0], 1, gradients)
                for _ in range(num_calls)
            ],
            HYPERPARAMETERS,
        )
        engine.check()
    assert engine.kept() == ([4], [0])


def test_zero_marks_apply_no_update():
    engine = TokenEngine()
    engine.apply_followed(0, tf.zeros(MARK_SHAPE))
    engine.check()


def test_the_shape_of_a_mark_is_static():
    engine = TokenEngine()
    token, _ = engine.open(0, random_batch(1))
    assert engine.follow(0, token, random_gradients(1)).shape == MARK_SHAPE

    @tf.function
    def shape_while_tracing():
        mark = engine.follow(0, token, random_gradients(1))
        assert mark.shape == MARK_SHAPE
        return mark

    assert shape_while_tracing().shape == MARK_SHAPE


def test_an_expired_token_raises():
    engine = TokenEngine()
    gradients = random_gradients(1)
    token, _ = engine.open(0, random_batch(1))
    mark = engine.follow(0, token, gradients)
    for _ in range(64):
        engine.open(0, random_batch(2))
    with pytest.raises(
        FailedPrecondition,
        match=("Lookup 1 of replica 0 has expired.*64 newer.*'ads', 'words'"),
    ):
        engine.follow(0, token, gradients)
    for _ in range(2):
        engine.apply_followed(0, mark)
    engine.open(0, random_batch(3))
    with pytest.raises(FailedPrecondition, match="were already applied"):
        engine.apply_followed(0, mark)
    ops.reset_host_engine(engine.handle)
    assert engine.kept() == ([0], [0])
    assert int(engine.open(0, random_batch(1))[0]) == 67


@pytest.mark.parametrize("steps", [(0, 0), (0, 3)])
def test_the_update_ends_a_lookup_of_rows_of_keys(steps):
    engine = TokenEngine()
    gradients = random_gradients(1)
    token, _ = engine.open(0, random_batch(1), vocabulary_steps=steps)
    engine.apply_followed(0, engine.follow(0, token, gradients))
    engine.ref.apply_followed(
        [(engine.ref.open(0, random_batch(1))[0], 1, gradients)],
        HYPERPARAMETERS,
    )
    engine.check()
    assert engine.kept() == ([int(not any(steps))], [0])
    if any(steps):
        # Before the next lookup, further gradients are accepted.
        engine.follow(0, token, gradients)
        engine.open(0, random_batch(2), vocabulary_steps=steps)
        with pytest.raises(FailedPrecondition, match="has expired"):
            engine.follow(0, token, gradients)


BAD_CALLS = {
    "an unknown replica": (
        lambda e, t: e.open(1, random_batch(1)),
        "`replica` must be in",
    ),
    "an unknown token": (
        lambda e, t: e.follow(0, 7, random_gradients(1)),
        "`token` must belong to a lookup.*Received: 7",
    ),
    "vocabulary steps too few": (
        lambda e, t: e.open(0, random_batch(1), vocabulary_steps=[1]),
        "This engine has 2 tables. Received: 1 vocabulary steps",
    ),
    "a negative vocabulary step": (
        lambda e, t: e.open(0, random_batch(1), vocabulary_steps=[1, -1]),
        r"`vocabulary_steps` must be in \[0, 2\^31\). Received: -1",
    ),
    "a gradient too long": (
        lambda e, t: e.follow(0, t, random_gradients(1, num_samples=4)),
        "Feature 'clicked': its gradient must be shaped like",
    ),
    "a gradient too few": (
        lambda e, t: e.follow(0, t, random_gradients(1)[:-1]),
        "This engine has 4 features. Received: 3",
    ),
    "marks too few": (
        lambda e, t: e.apply_followed(0, tf.zeros([3, 2])),
        f"`marks` must have {math.prod(MARK_SHAPE)} values. Received: 6",
    ),
    "a learning rate that is none": (
        lambda e, t: e.apply_followed(
            0,
            e.follow(0, t, random_gradients(1)),
            hyperparameters=[
                np.array([np.nan], np.float32),
                HYPERPARAMETERS[1],
            ],
        ),
        "'ads'",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_an_invalid_call_changes_nothing(case):
    call, words = BAD_CALLS[case]
    engine = TokenEngine()
    token, _ = engine.open(0, random_batch(1))
    with pytest.raises(InvalidArgument, match=words):
        call(engine, token)
    engine.check()
