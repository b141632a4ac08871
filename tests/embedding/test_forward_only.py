"""Functions that evaluate without saying so; names that keep steps apart."""

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
def test_a_function_that_never_applies_is_forward_only(training):
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


def test_outside_of_functions_training_is_what_was_said():
    embedding = embedding_of()
    step(embedding, apply=False)
    assert embedding.stats()["awaiting"] == [True]


def test_a_step_that_another_function_dequeues_trains():
    embedding = embedding_of()
    embedding.build()
    enqueue = tf.function(lambda: embedding.enqueue(tf.constant([1, 1])))
    finish = tf.function(lambda: embedding.apply_gradients(embedding.dequeue()))
    for _ in range(2):
        enqueue()
        finish()
    assert embedding.stats()["num_updates"] == 2


def test_names_tell_the_steps_of_one_function_apart():
    embedding = embedding_of()

    @tf.function
    def both():
        step(embedding, name="train")
        return step(embedding, name="check", apply=False)

    assert both().numpy().tolist() == [[0, 0], [0, 0]]
    both()
    assert embedding.stats()["num_updates"] == 2


def test_a_branch_that_applies_counts():
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


def test_replicas_that_never_apply_are_forward_only():
    two = strategies.mirrored(2)
    embedding = embedding_of(two)
    evaluate = tf.function(
        lambda: two.run(lambda: step(embedding, apply=False))
    )
    train = tf.function(lambda: two.run(lambda: step(embedding)))
    for function in (evaluate, train, evaluate, evaluate, train):
        function()
    assert embedding.stats()["num_updates"] == 2


def test_applying_a_forward_step_is_refused_while_tracing():
    embedding = embedding_of()
    with pytest.raises(RuntimeError, match=r"enqueue\(training=False\).*'a'"):
        tf.function(lambda: step(embedding, training=False, name="a"))()
    assert embedding.stats()["num_updates"] == 0


def test_applying_elsewhere_what_a_function_only_looked_up_says_so():
    embedding = embedding_of()
    activations = tf.function(lambda: step(embedding, apply=False))()
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="forward-only.*tf.function that dequeues it too",
    ):
        embedding.apply_gradients(tf.ones_like(activations))


def test_a_function_traced_anew_is_judged_anew():
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
