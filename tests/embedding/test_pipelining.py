"""With pipelined execution, lookups do not see the previous step's update."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies

tpu = tf.tpu.experimental.embedding

NUM_ROWS = 7
FailedPrecondition = tf.errors.FailedPreconditionError


def embedding_of(strategy=None, *, optimizer=None, pipelined=True):
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        return tlm.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(
                    NUM_ROWS, 2, tf.ones, combiner="sum", name="words"
                )
            ),
            optimizer or tpu.Adagrad(0.5, initial_accumulator_value=0.25),
            pipeline_execution_with_tensor_core=pipelined,
        )


class Reference:
    """Reference whose lookups see all updates except the most recent update."""

    def __init__(self):
        self.rows = np.ones([NUM_ROWS, 2], np.float32)
        self.slots = np.full([NUM_ROWS, 2], 0.25, np.float32)
        self.held = None

    def step(self, ids, gradients):
        found = self.rows[ids]
        self.flush()
        self.held = ids, gradients
        return found

    def flush(self):
        if self.held is None:
            return
        ids, gradients = self.held
        self.held = None
        for row in np.unique(ids):
            total = np.zeros(2, np.float32)
            for gradient in gradients[ids == row]:
                total = total + gradient
            self.slots[row] += total * total
            self.rows[row] -= np.float32(0.5) * total / np.sqrt(self.slots[row])


def batches(num_steps):
    rng = np.random.default_rng(5)
    return [
        (
            rng.integers(0, NUM_ROWS, 4),
            rng.integers(-3, 4, [4, 2]).astype(np.float32),
        )
        for _ in range(num_steps)
    ]


def rows_of(embedding):
    [table] = embedding.embedding_tables.values()
    return table.numpy()


def train(embedding, ids, gradients):
    embedding.enqueue(ids)
    found = embedding.dequeue()
    embedding.apply_gradients(tf.convert_to_tensor(gradients))
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_ahead", [0, 2])
def test_lookups_see_all_updates_except_the_last(num_ahead, compiled):
    embedding, reference = embedding_of(), Reference()
    embedding.build()

    def finish(gradients):
        found = embedding.dequeue()
        embedding.apply_gradients(gradients)
        return found

    finish = tf.function(finish) if compiled else finish
    steps = batches(12)
    queue = list(steps)
    for _ in range(num_ahead):
        embedding.enqueue(queue.pop(0)[0])
    for ids, gradients in steps:
        if queue:
            embedding.enqueue(queue.pop(0)[0])
        np.testing.assert_array_equal(
            finish(tf.constant(gradients)), reference.step(ids, gradients)
        )
    reference.flush()
    np.testing.assert_array_equal(rows_of(embedding), reference.rows)


def test_disjoint_steps_match_unpipelined_training():
    tables = []
    for pipelined in (False, True):
        embedding = embedding_of(pipelined=pipelined)
        for row in range(NUM_ROWS):
            train(embedding, np.array([row]), [[1.0, row]])
        tables.append(rows_of(embedding))
    np.testing.assert_array_equal(*tables)


def test_replicas_miss_the_update_of_the_same_step():
    two = strategies.mirrored(2)
    embedding, reference = embedding_of(two), Reference()

    @tf.function
    def step(ids, gradients):
        def replica_step():
            replica = (
                tf.distribute.get_replica_context().replica_id_in_sync_group
            )
            part = slice(2 * replica, 2 * replica + 2)
            return train(embedding, ids[part], gradients[part])

        return tf.concat(
            two.experimental_local_results(two.run(replica_step)), 0
        )

    for ids, gradients in batches(8):
        np.testing.assert_array_equal(
            step(ids, gradients), reference.step(ids, gradients)
        )
    reference.flush()
    np.testing.assert_array_equal(rows_of(embedding), reference.rows)


def test_forward_only_step_sees_every_update():
    embedding, reference = embedding_of(), Reference()
    for ids, gradients in batches(3):
        train(embedding, ids, gradients)
        reference.step(ids, gradients)
    reference.flush()
    evaluate = tf.function(
        lambda training: (
            embedding.enqueue(np.arange(NUM_ROWS), training=training),
            embedding.dequeue(),
        )[1]
    )
    np.testing.assert_array_equal(evaluate(tf.constant(False)), reference.rows)
    assert not embedding.stats()["held"]


def test_pending_update_uses_the_rate_of_its_step():
    rate = tf.Variable(0.5)
    embedding = embedding_of(optimizer=tpu.SGD(lambda: rate))
    train(embedding, np.array([1]), [[1.0, 1.0]])
    rate.assign(100.0)
    assert embedding.stats()["held"]
    assert rows_of(embedding)[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "read",
    [
        lambda embedding, path: tf.train.Checkpoint(embedding=embedding).write(
            str(path / "ckpt")
        ),
        lambda embedding, path: embedding.embedding_tables,
        lambda embedding, path: embedding.slot_variables,
        lambda embedding, path: embedding(tf.constant([1])),
        lambda embedding, path: embedding.flush(),
        lambda embedding, path: embedding.reset(),
        lambda embedding, path: tf.saved_model.save(embedding, str(path / "m")),
    ],
)
def test_reading_the_tables_applies_the_pending_update(read, tmp_path):
    embedding = embedding_of()
    train(embedding, np.array([1]), [[1.0, 1.0]])
    assert embedding.stats()["held"]
    read(embedding, tmp_path)
    stats = embedding.stats()
    assert (stats["held"], stats["num_updates"]) == (False, 1)


def test_restore_is_not_overwritten_by_a_pending_update(tmp_path):
    embedding = embedding_of()
    embedding.build()
    path = tf.train.Checkpoint(embedding=embedding).write(
        str(tmp_path / "ckpt")
    )
    train(embedding, np.array([1]), [[1.0, 1.0]])
    tf.train.Checkpoint(embedding=embedding).read(path).assert_consumed()
    embedding.flush()
    assert np.all(rows_of(embedding) == 1)


def test_flush_works_without_pipelining():
    embedding = embedding_of(pipelined=False)
    with pytest.raises(RuntimeError, match="call `enqueue` or `build`"):
        embedding.flush()
    train(embedding, np.array([1]), [[1.0, 1.0]])
    embedding.flush()
    assert not embedding.stats()["held"]


def test_invalid_rate_raises_in_apply_gradients():
    embedding = embedding_of(optimizer=tpu.SGD(lambda: np.nan))
    embedding.enqueue(np.array([1]))
    embedding.dequeue()
    with pytest.raises(tf.errors.InvalidArgumentError, match="learning rate"):
        embedding.apply_gradients(tf.ones([1, 2]))
    assert not embedding.stats()["held"]


def test_a_prefetched_step_is_returned_unless_a_table_was_updated():
    def dequeued(*, flush, prefetch=True):
        embedding = embedding_of()
        for ids in ([0, 1], [1, 2]):
            embedding.enqueue(tf.constant(ids))
        embedding.dequeue()
        engine = embedding._state.backend.engine
        if prefetch:
            engine.prefetch(0)
        embedding.apply_gradients(tf.ones([2, 2]))
        if flush:
            embedding.flush()
        else:
            # Only a lookup that ran before can miss an assignment.
            [table] = embedding._variables.values()
            table["parameters"].assign(tf.zeros([NUM_ROWS, 2]))
        return embedding.dequeue().numpy()

    np.testing.assert_array_equal(dequeued(flush=False), np.ones([2, 2]))
    np.testing.assert_array_equal(
        dequeued(flush=False, prefetch=False), np.zeros([2, 2])
    )
    found = dequeued(flush=True)
    np.testing.assert_array_equal(found[1], [1, 1])
    assert (found[0] < 1).all()  # The update of the first step.


def test_prefetching_does_not_change_results():
    plain, prefetched = embedding_of(), embedding_of()
    steps = batches(6)
    for embedding in (plain, prefetched):
        embedding.enqueue(tf.constant(steps[0][0]))
    for number, (_, gradients) in enumerate(steps):
        found = []
        for embedding in (plain, prefetched):
            if number + 1 < len(steps):
                embedding.enqueue(tf.constant(steps[number + 1][0]))
            found.append(embedding.dequeue().numpy())
            if embedding is prefetched:
                engine = embedding._state.backend.engine
                engine.apply_pending()
                engine.prefetch(0)
            embedding.apply_gradients(tf.constant(gradients))
        np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(rows_of(plain), rows_of(prefetched))


def test_reset_discards_a_prefetched_step():
    embedding = embedding_of()
    for ids in ([0, 1], [1, 2]):
        embedding.enqueue(tf.constant(ids))
    embedding.dequeue()
    embedding._state.backend.engine.prefetch(0)
    embedding.reset()
    embedding.enqueue(tf.constant([3, 4, 5]))
    assert embedding.dequeue().shape == [3, 2]
