"""Trains a TPUEmbedding under the strategies of tf.distribute."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tf_layoutmap.embedding import replicas

tpu = tf.tpu.experimental.embedding
FailedPrecondition = tf.errors.FailedPreconditionError


def embedding_under(strategy):
    with strategy.scope():
        return tlm.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(10, 2, tf.ones, combiner="sum", name="words")
            ),
            tpu.SGD(0.5),
        )


def rows_of(embedding):
    [table] = embedding.embedding_tables.values()
    return table.numpy()[:, 0].tolist()


def per_replica(strategy, values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def apply_ones(embedding):
    embedding.apply_gradients(tf.ones_like(embedding.dequeue()))


@pytest.fixture
def two():
    return strategies.mirrored(2)


def test_gradients_of_replicas_are_summed_in_one_update(two):
    embedding = embedding_under(two)
    embedding.enqueue(per_replica(two, [[1, 2], [2, 3]]))
    two.run(apply_ones, args=(embedding,))
    # Gradients of replicas are summed, not averaged.
    assert rows_of(embedding)[:5] == [1, 0.5, 0, 0.5, 1]
    assert embedding.stats()["num_updates"] == 1


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_one_replica_of_a_process_is_the_last(num_replicas):
    with strategies.mirrored(num_replicas).scope():
        found = replicas.Replicas()
    is_last = [found.is_last_here(one) for one in range(num_replicas)]
    assert is_last == [False] * (num_replicas - 1) + [True]


def test_training_on_a_distributed_dataset(two):
    embedding = embedding_under(two)
    dataset = tf.data.Dataset.from_tensor_slices(
        tf.ragged.constant([[1], [2, 2], [3], []], dtype=tf.int64)
    ).batch(4)

    @tf.function
    def epoch(batches):
        for batch in batches:
            embedding.enqueue(batch)
            two.run(apply_ones, args=(embedding,))

    epoch(two.experimental_distribute_dataset(dataset.repeat(2)))
    assert rows_of(embedding)[:5] == [1, 0, -1, 0, 1]


def test_a_step_can_be_enqueued_per_device(two):
    embedding = embedding_under(two)
    for replica in (1, 0):
        embedding.enqueue(
            tf.constant([1 + replica]), device=f"/device:CPU:{replica}"
        )
    two.run(apply_ones, args=(embedding,))
    assert rows_of(embedding)[:4] == [1, 0.5, 0.5, 1]


def test_invalid_device_raises(two):
    embedding = embedding_under(two)
    with pytest.raises(ValueError, match="`device` must name one device"):
        embedding.enqueue(tf.constant([1]), device="/device:CPU:3")
    with pytest.raises(ValueError, match=r"inside `strategy.run`"):
        two.run(
            lambda: embedding.enqueue(tf.constant([1]), device="/device:CPU:0")
        )


@pytest.mark.parametrize(
    "strategy", [None, tf.distribute.OneDeviceStrategy("/device:CPU:1")]
)
def test_a_single_replica_accepts_its_device_only(strategy):
    embedding = embedding_under(strategy or tf.distribute.get_strategy())
    own, other = ("CPU:0", "CPU:1") if strategy is None else ("CPU:1", "CPU:0")
    embedding.enqueue(tf.constant([1]), device=f"/device:{own}")
    assert embedding.dequeue().shape == [1, 2]
    with pytest.raises(ValueError, match=f"must name one device.*{own}"):
        embedding.enqueue(tf.constant([1]), device=f"/device:{other}")


def test_values_of_one_replica_raise_outside_of_run(two):
    with pytest.raises(ValueError, match="each of the 2 replicas"):
        embedding_under(two).enqueue(tf.constant([1]))


def test_dequeue_and_apply_outside_of_run_raise(two):
    embedding = embedding_under(two)
    embedding.build()
    with pytest.raises(RuntimeError, match="`dequeue` must be called inside"):
        embedding.dequeue()
    with pytest.raises(RuntimeError, match="`apply_gradients` must be called"):
        embedding.apply_gradients(tf.ones([1, 2]))


def test_an_embedding_of_another_scope_raises_in_run(two):
    embedding = embedding_under(tf.distribute.get_strategy())
    with pytest.raises(RuntimeError, match=r"create it in `strategy.scope"):
        two.run(lambda: embedding.enqueue(tf.constant([1])))


def test_different_training_values_poison_until_reset(two):
    embedding = embedding_under(two)

    def enqueue():
        context = tf.distribute.get_replica_context()
        embedding.enqueue(
            tf.constant([1]),
            training=tf.equal(context.replica_id_in_sync_group, 0),
        )

    with pytest.raises(FailedPrecondition, match="same `training`"):
        two.run(enqueue)
    with pytest.raises(FailedPrecondition, match="Call `reset`"):
        two.run(embedding.dequeue)
    assert "replica 1" in embedding.stats()["poisoned"]
    embedding.reset()
    embedding.enqueue(per_replica(two, [[1], [1]]))
    two.run(apply_ones, args=(embedding,))
    assert rows_of(embedding)[:2] == [1, 0]


def test_a_replica_ahead_of_the_update_raises(two):
    embedding = embedding_under(two)

    def two_steps():
        for _ in range(2):
            embedding.enqueue(tf.constant([1]))
            apply_ones(embedding)

    with pytest.raises(
        FailedPrecondition, match=r"still waits for .* another replica"
    ):
        two.run(two_steps)
    embedding.reset()
    assert set(rows_of(embedding)) == {1}


def test_bad_ids_of_one_replica_poison_the_step(two):
    embedding = embedding_under(two)
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 99"):
        embedding.enqueue(per_replica(two, [[1], [99]]))
    with pytest.raises(
        FailedPrecondition, match="replica 1 failed to enqueue step 0"
    ):
        embedding.enqueue(per_replica(two, [[1], [1]]))


def test_forward_steps_of_replicas_are_independent(two):
    embedding = embedding_under(two)
    for ids in ([[1], [2, 2]], [[3, 3, 3], [4]]):
        embedding.enqueue(per_replica(two, ids), training=False)
    sizes = [
        [
            len(one)
            for one in two.experimental_local_results(
                two.run(embedding.dequeue)
            )
        ]
        for _ in range(2)
    ]
    assert sizes == [[1, 2], [3, 1]]


def test_four_replicas_train():
    four = strategies.mirrored(4)
    embedding = embedding_under(four)
    embedding.enqueue(per_replica(four, [[1]] * 4))
    tf.function(lambda: four.run(apply_ones, args=(embedding,)))()
    assert rows_of(embedding)[:2] == [1, -1]


@pytest.mark.parametrize("inside", [False, True])
def test_one_device_strategy_trains(inside):
    strategy = tf.distribute.OneDeviceStrategy("/cpu:1")
    embedding = embedding_under(strategy)

    @tf.function
    def step(ids):
        if inside:
            strategy.run(embedding.enqueue, args=(ids,))
        else:
            embedding.enqueue(ids)
        strategy.run(apply_ones, args=(embedding,))

    step(tf.constant([1]))
    assert rows_of(embedding)[:2] == [1, 0.5]


def test_unsupported_strategies_raise_with_their_name():
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with pytest.raises(NotImplementedError, match=r"Received: .*Strategy"):
        embedding_under(central)


def test_deleting_the_embedding_frees_the_engine():
    for _ in range(3):
        embedding = embedding_under(tf.distribute.get_strategy())
        embedding.enqueue(np.array([1]))
        del embedding


def test_loops_over_steps_are_around_strategy_run(two):
    embedding = embedding_under(two)
    embedding.build()

    def step():
        embedding.enqueue(tf.constant([1]))
        apply_ones(embedding)

    def steps():
        for _ in tf.range(2):
            step()

    with pytest.raises(RuntimeError, match=r"call `strategy.run` inside th"):
        tf.function(lambda: two.run(steps))()

    @tf.function
    def loop():
        for _ in tf.range(2):
            two.run(step)

    loop()
    assert rows_of(embedding)[:2] == [1, -1]


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_learning_rate_is_called_once_per_step(num_replicas, in_function):
    """All replicas use the value of one call, as if there were one replica."""
    strategy = strategies.mirrored(num_replicas)
    calls = tf.Variable(0.0)
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(4, 2, tf.zeros, None, "sum", "words")
            ),
            tpu.SGD(lambda: calls.assign_add(1.0)),
        )

    def step():
        embedding.enqueue(tf.constant([1]))
        apply_ones(embedding)

    def steps():
        strategy.run(step)
        strategy.run(step)

    (tf.function(steps) if in_function else steps)()
    assert calls.numpy() == 2
    # The rate is 1 in the first step and 2 in the second step.
    assert rows_of(embedding) == [0, -3 * num_replicas, 0, 0]


def test_a_learning_rate_of_a_layer_is_called_once_per_step():
    import keras

    strategy = strategies.mirrored(2)
    calls = tf.Variable(0.0)
    with strategy.scope():
        table = tpu.TableConfig(4, 2, tf.zeros, None, "sum", "words")
        layer = tlm.layers.TPUEmbedding(
            tpu.FeatureConfig(table), tpu.SGD(lambda: calls.assign_add(1.0))
        )
        inputs = keras.Input([1], dtype="int64")
        model = keras.Model(inputs, keras.ops.sum(layer(inputs), axis=-1))
        model.compile("sgd", loss=lambda y, x: x)
    model.fit(np.ones([4, 1], np.int64), np.zeros([4]), batch_size=2, verbose=0)
    assert calls.numpy() == 2
    rows = layer.embedding.embedding_tables[table].numpy()
    np.testing.assert_allclose(rows[1], [-3.0, -3.0])


def test_a_tensor_that_all_replicas_pass_has_a_value_for_each_of_them():
    strategy = strategies.mirrored(2)
    shared = tf.constant([1.0, 2.0])
    lengths = []

    def merge(strategy, *tensors):
        lengths.extend(
            len(replicas.values_of(strategy, tensor)) for tensor in tensors
        )

    def run():
        context = tf.distribute.get_replica_context()
        number = context.replica_id_in_sync_group
        context.merge_call(merge, args=(shared, shared + float(number)))

    strategy.run(run)
    assert lengths == [2, 2]
