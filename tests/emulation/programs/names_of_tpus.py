"""Tests device names and step names that user code for TPUs contains.

Runs in a separate process with four cores on two hosts (tests/emulation).
"""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.emulation import training

SETTING = dict(num_cores=4, num_hosts=2, deadline=2.0)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding
NUM_ROWS = 6
FailedPrecondition = tf.errors.FailedPreconditionError


@pytest.fixture(name="kind", params=training.CLASSES)
def fixture_kind(request):
    return request.param


def embedding_of(kind, **options):
    """Returns a table of zeros; a gradient of 1 decreases a row by 0.5."""
    tlm.emulation.initialize_tpu_system()
    with STRATEGY.scope():
        embedding = training.CLASSES[kind](
            tpu.FeatureConfig(
                tpu.TableConfig(
                    NUM_ROWS,
                    2,
                    initializer=tf.zeros_initializer(),
                    combiner="sum",
                    name="ads",
                ),
                name="shown",
            ),
            tpu.SGD(0.5),
            **options,
        )
        embedding.build(1)
    return embedding


def first_column_of(embedding):
    return training.values_of(embedding)["ads"][:, 0].tolist()


def ids_of(*ids):
    return STRATEGY.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            [ids[context.replica_id_in_sync_group]], tf.int64
        )
    )


def finish(embedding):
    def core():
        found = embedding.dequeue()
        embedding.apply_gradients(tf.ones_like(found))
        return found

    return STRATEGY.run(core)


OTHER_NAMES = {
    "of the strategy": STRATEGY.extended.worker_devices,
    "of tasks": [
        "/task:0/device:TPU:0",
        "/task:0/device:TPU:1",
        "/task:1/device:TPU:0",
        "/task:1/device:TPU:1",
    ],
    "in full": [
        f"/job:localhost/replica:0/task:{task}/device:TPU:{core}"
        for task in range(2)
        for core in range(2)
    ],
}


@pytest.mark.parametrize("names", OTHER_NAMES)
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        ("stock", True),  # TensorFlow's class requires a graph.
        ("ours", True),
        ("ours", False),
    ],
)
def test_each_device_name_enqueues_on_its_core(kind, names, compiled):
    embedding = embedding_of(kind)
    # Each core has a different gradient, so the updated rows show which core
    # enqueued which ids.
    scales = STRATEGY.experimental_distribute_values_from_function(
        lambda context: tf.fill(
            [1, 2], float(context.replica_id_in_sync_group + 1)
        )
    )
    ids = [5, 3, 2, 0]

    def enqueue():
        # The calls are not in the order of the cores.
        for core in (2, 0, 3, 1):
            embedding.enqueue(
                tf.constant([ids[core]], tf.int64),
                device=OTHER_NAMES[names][core],
            )

    (tf.function(enqueue) if compiled else enqueue)()

    @tf.function
    def backward(scales):
        def core(scale):
            embedding.dequeue()
            embedding.apply_gradients(scale)

        STRATEGY.run(core, args=(scales,))

    backward(scales)
    assert first_column_of(embedding) == [-2, 0, -1.5, -1, 0, -0.5]


def test_enqueue_per_core_trains(kind):
    embedding = embedding_of(kind)

    def per_core(context):
        core = context.replica_id_in_sync_group
        embedding.enqueue(
            tf.constant([core], tf.int64),
            device=STRATEGY.extended.worker_devices[core],
        )
        return tf.constant(0)

    @tf.function
    def step():
        STRATEGY.experimental_distribute_values_from_function(per_core)
        finish(embedding)

    for _ in range(2):
        step()
    assert first_column_of(embedding) == [-1, -1, -1, -1, 0, 0]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        # This is the name of a host, not of a core.
        ("/device:CPU:5", "[Nn]on-TPU"),
        ("/device:GPU:0", "[Nn]on-TPU"),
        ("/task:2/device:TPU:0", "tasks 0 to 1 with the cores 0 to 1"),
        ("/task:1/device:TPU:2", "tasks 0 to 1 with the cores 0 to 1"),
    ],
)
def test_devices_that_are_not_cores_raise(kind, device, words):
    embedding = embedding_of(kind)

    @tf.function
    def enqueue():
        embedding.enqueue(tf.constant([0], tf.int64), device=device)

    with pytest.raises(ValueError, match=words):
        enqueue()


def step_of(embedding, *, training, applies, name="title", enqueues=1):
    @tf.function
    def step(ids):
        def core(ids):
            for _ in range(enqueues):
                embedding.enqueue(ids, training=training, name=name)
            found = embedding.dequeue(name=name)
            if applies:
                embedding.apply_gradients(tf.ones([1, 2]), name=name)
            return found

        return STRATEGY.run(core, args=(ids,))

    return step


def test_a_named_step_without_gradients_is_forward_only(kind):
    embedding = embedding_of(kind)
    evaluate = step_of(embedding, training=True, applies=False)
    for _ in range(3):
        for value in STRATEGY.experimental_local_results(
            evaluate(ids_of(0, 1, 2, 3))
        ):
            np.testing.assert_array_equal(value, np.zeros([1, 2]))
    step_of(embedding, training=True, applies=True)(ids_of(0, 0, 2, 3))
    assert first_column_of(embedding) == [-1, 0, -0.5, -0.5, 0, 0]


def test_an_unnamed_step_requires_its_gradients(kind):
    embedding = embedding_of(kind)
    evaluate = step_of(embedding, training=True, applies=False, name=None)
    evaluate(ids_of(0, 1, 2, 3))
    with pytest.raises(FailedPrecondition, match="gradients"):
        evaluate(ids_of(0, 1, 2, 3))
    tlm.emulation.reset()


def test_a_named_step_with_gradients_ignores_training():
    embedding = embedding_of("stock")
    step_of(embedding, training=False, applies=True)(ids_of(0, 1, 2, 3))
    assert first_column_of(embedding) == [-0.5, -0.5, -0.5, -0.5, 0, 0]


def test_gradients_of_a_forward_step_raise():
    embedding = embedding_of("ours")
    with pytest.raises(RuntimeError, match="training=False"):
        step_of(embedding, training=False, applies=True)(ids_of(0, 1, 2, 3))


def test_a_step_can_span_programs_of_one_function(kind):
    embedding = embedding_of(kind)

    @tf.function
    def step(ids):
        def forward(ids):
            embedding.enqueue(ids, name="title")
            return embedding.dequeue(name="title")

        def backward():
            embedding.apply_gradients(tf.ones([1, 2]), name="title")

        found = STRATEGY.run(forward, args=(ids,))
        STRATEGY.run(backward)
        return found

    step(ids_of(0, 1, 2, 3))
    assert first_column_of(embedding) == [-0.5, -0.5, -0.5, -0.5, 0, 0]


def test_a_repeated_step_name_raises(kind):
    embedding = embedding_of(kind)
    with pytest.raises(RuntimeError, match=r"one `enqueue` .*name='title'"):
        step_of(embedding, training=True, applies=True, enqueues=2)(
            ids_of(0, 1, 2, 3)
        )


def test_named_steps_of_a_loop_train_and_evaluate(kind):
    embedding = embedding_of(kind)

    @tf.function
    def epoch(ids):
        def train(ids):
            embedding.enqueue(ids, name="train")
            embedding.dequeue(name="train")
            embedding.apply_gradients(tf.ones([1, 2]), name="train")

        def evaluate(ids):
            embedding.enqueue(ids, name="test")
            return tf.reduce_sum(embedding.dequeue(name="test"))

        for _ in tf.range(3):
            STRATEGY.run(train, args=(ids,))
        return STRATEGY.run(evaluate, args=(ids,))

    found = STRATEGY.experimental_local_results(epoch(ids_of(0, 1, 2, 2)))
    assert [float(one) for one in found] == [-3, -3, -6, -6]


def test_the_graph_of_a_named_step_is_freed():
    embedding = embedding_of("ours")
    step = step_of(embedding, training=True, applies=True)
    graph = weakref.ref(step.get_concrete_function(ids_of(0, 1, 2, 3)).graph)
    del step
    gc.collect()
    assert graph() is None
