"""Tests the detection of forward-only functions, and names of steps."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies

tpu = tf.tpu.experimental.embedding


def embedding_of(strategy=None):
    with (strategy or tf.distribute.get_strategy()).scope():
        return tlm.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(5, 2, tf.ones, combiner="sum", name="words")
            ),
            tpu.SGD(0.5),
        )


def step(embedding, *, name=None, apply=True, **options):
    embedding.enqueue(tf.constant([1, 1]), name=name, **options)
    activations = embedding.dequeue(name=name)
    if apply:
        embedding.apply_gradients(tf.ones_like(activations), name=name)
    return activations


def rows_of(embedding):
    [table] = embedding.embedding_tables.values()
    return table.numpy()[:2, 0].tolist()


@pytest.mark.parametrize("training", [True, tf.constant(True)])
def test_a_function_without_apply_gradients_is_forward_only(training):
    embedding = embedding_of()
    evaluate = tf.function(
        lambda: step(embedding, apply=False, training=training)
    )
    train = tf.function(lambda: step(embedding))
    for _ in range(3):
        evaluate()
        train()
        evaluate()
    assert embedding.stats()["awaiting"] == [False]
    assert embedding.stats()["num_updates"] == 3
    assert rows_of(embedding) == [1, -2]


def test_eager_steps_use_the_passed_training_value():
    embedding = embedding_of()
    step(embedding, apply=False)
    assert embedding.stats()["awaiting"] == [True]


def test_a_step_dequeued_in_another_function_trains():
    embedding = embedding_of()
    embedding.build()
    enqueue = tf.function(lambda: embedding.enqueue(tf.constant([1, 1])))
    finish = tf.function(lambda: embedding.apply_gradients(embedding.dequeue()))
    for _ in range(2):
        enqueue()
        finish()
    assert embedding.stats()["num_updates"] == 2


def test_names_separate_the_steps_of_one_function():
    embedding = embedding_of()

    @tf.function
    def both():
        step(embedding, name="train")
        return step(embedding, name="check", apply=False)

    assert both().numpy().tolist() == [[0, 0], [0, 0]]
    both()
    assert embedding.stats()["num_updates"] == 2


def test_applying_in_a_branch_makes_a_training_step():
    embedding = embedding_of()

    @tf.function
    def loop(num_steps):
        for number in tf.range(num_steps):
            embedding.enqueue(tf.constant([1, 1]), training=number > 0)
            activations = embedding.dequeue()
            if number > 0:
                embedding.apply_gradients(tf.ones_like(activations))

    loop(3)
    assert embedding.stats()["num_updates"] == 2


def test_replicas_without_apply_gradients_are_forward_only():
    two = strategies.mirrored(2)
    embedding = embedding_of(two)
    evaluate = tf.function(
        lambda: two.run(lambda: step(embedding, apply=False))
    )
    train = tf.function(lambda: two.run(lambda: step(embedding)))
    for function in (evaluate, train, evaluate, evaluate, train):
        function()
    assert embedding.stats()["num_updates"] == 2


def test_applying_a_forward_step_raises_while_tracing():
    embedding = embedding_of()
    with pytest.raises(RuntimeError, match=r"enqueue\(training=False\).*'a'"):
        tf.function(lambda: step(embedding, training=False, name="a"))()
    assert embedding.stats()["num_updates"] == 0


def test_applying_a_function_s_forward_step_eagerly_raises():
    embedding = embedding_of()
    activations = tf.function(lambda: step(embedding, apply=False))()
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="forward-only.*tf.function that dequeues it too",
    ):
        embedding.apply_gradients(tf.ones_like(activations))


def test_each_trace_of_a_function_is_checked_separately():
    embedding = embedding_of()

    @tf.function
    def maybe(train):
        return step(embedding, apply=train)

    for train in (True, False, True, False):
        maybe(train)
    assert embedding.stats()["num_updates"] == 2
    assert np.all(maybe(False).numpy() == -1)


def test_functions_are_not_kept_alive():
    embedding = embedding_of()
    for _ in range(3):
        tf.function(lambda: step(embedding))()
    gc.collect()
    assert len(embedding._state.backend._modes._calls) <= 1
