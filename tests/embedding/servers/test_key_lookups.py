"""Several calls of a layer with an open vocabulary in a step on servers."""

import functools

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.servers import key_cases as cases
from tests.embedding.servers import local
from tests.embedding.servers.test_lookups import (
    apply,
    loss_of,
    optimizer_of,
    train,
)
from tf_layoutmap.embedding.servers import lookups
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

tpu = tf.tpu.experimental.embedding
POLICIES = {
    **cases.POLICIES,
    "fills_up": {"evict": "lru"},
}


def make_layer(policy, capacity=64, **options):
    layer = tlm.layers.TPUEmbedding(
        cases.feature_config(capacity),
        tpu.Adagrad(0.3),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(capacity, **policy)
        },
        **options,
    )
    layer.build()
    return layer


def both(policy, *, num_servers=2, num_shards=3, **options):
    """Returns two equal layers, one on servers and one in one process."""
    with local.servers(num_servers, num_shards):
        distributed = make_layer(policy, **options)
    return distributed, make_layer(policy, **options)


def calls_of(step, count=3, **options):
    """Returns the features and the weights of the calls of a step."""
    found = [
        cases.batch(10 * step + call, num_samples=4 - call, **options)
        for call in range(count)
    ]
    return [ids for ids, _ in found], [weights for _, weights in found]


def differences(distributed, host):
    return cases.differences(distributed.embedding, host.embedding)


def test_calls_in_a_function_equal_one_process():
    distributed, host = both({"evict": "lru"})
    for layer in (distributed, host):
        step = tf.function(
            functools.partial(train, layer, optimizer=optimizer_of(layer)),
            reduce_retracing=True,
        )
        for number in range(4):
            step(*calls_of(number, most=400))
    assert differences(distributed, host) == []


def test_a_later_call_can_depend_on_an_earlier_call():
    distributed, host = both({"evict": "lru"})
    for layer in (distributed, host):
        optimizer = optimizer_of(layer)

        @tf.function(reduce_retracing=True)
        def step(ids, layer=layer, optimizer=optimizer):
            with tf.GradientTape() as tape:
                first = layer(ids, training=True)
                # The keys of the second call are the result of the first call.
                keys = tf.cast(100 * first["text"][:, 0, :], tf.int64)
                second = layer({**ids, "text": keys}, training=True)
                loss = loss_of(first) + loss_of(second)
            apply(
                layer, tape.gradient(loss, layer.trainable_variables), optimizer
            )

        for number in range(4):
            step(cases.batch(number)[0])
    assert differences(distributed, host) == []


def test_calls_without_gradients_count_their_keys():
    distributed, host = both({"evict": "lru"})
    for layer in (distributed, host):
        for number in range(3):
            (first, second, third), _ = calls_of(number)
            with tf.GradientTape() as tape:
                layer(first, training=True)
                loss = loss_of(layer(second, training=True))
                layer(third, training=True)
            apply(layer, tape.gradient(loss, layer.trainable_variables))
    assert differences(distributed, host) == []


def closure_of(layer):
    """Returns a step that can end before its second call or its update."""
    optimizer = optimizer_of(layer)

    @tf.function(reduce_retracing=True)
    def step(numbers, first, second, num_calls):
        ClosureTrace().begin(numbers)
        with tf.GradientTape() as tape:
            loss = loss_of(layer(first, training=True))
            if num_calls > 1:
                loss += loss_of(layer(second, training=True))
        if num_calls > 2:
            apply(
                layer, tape.gradient(loss, layer.trainable_variables), optimizer
            )

    return step


def test_repeated_closures_count_each_call_once():
    distributed, host = both({"evict": "lfu", "half_life_steps": 3})
    step = closure_of(distributed)
    # The number of calls after which each run of a closure ends. A run with 3
    # applies the gradients of both calls.
    for number, runs in enumerate([[3], [1, 3], [2, 3], [1, 2, 1, 3, 3]]):
        (first, second), _ = calls_of(number, 2, most=400)
        for num_calls in runs:
            step(tf.constant([1, number], tf.int64), first, second, num_calls)
        train(host, [first, second])
        assert differences(distributed, host) == []
    assert distributed.embedding.stats()["num_repeated"] == 1


def test_a_call_that_runs_twice_in_a_closure_raises():
    distributed, _ = both({"evict": "lru"})
    ids, _ = cases.batch(0)

    @tf.function
    def step(numbers):
        ClosureTrace().begin(numbers)
        for _ in tf.range(2):
            with tf.GradientTape():
                distributed(ids)

    with pytest.raises(
        tf.errors.FailedPreconditionError, match="each lookup only once"
    ):
        step(tf.constant([1, 0], tf.int64))


@pytest.mark.exhaustive
def test_lookups_without_an_update_do_not_pin_rows_forever():
    distributed, _ = both({"evict": "lru"}, num_servers=1, num_shards=1)
    vocabulary = distributed.embedding.vocabularies["words"]

    def look_up(keys):
        ids = {
            "bag": tf.reshape(keys, [-1, 1]),
            "text": tf.reshape(keys[:1], [1, 1]),
            "ads": tf.constant([[0]]),
        }
        with tf.GradientTape():
            distributed(ids)

    # The gradients of these calls are never applied.
    for step in range(300 + lookups.MAX_LOOKUPS):
        look_up(tf.range(step, step + 2, dtype=tf.int64))
    before = vocabulary.stats()
    for step in range(400, 400 + 6 * lookups.MAX_LOOKUPS):
        look_up(tf.range(step, step + 2, dtype=tf.int64))
    assert vocabulary.stats()["num_evicted"] > before["num_evicted"]
