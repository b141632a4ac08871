"""Tests two cores on one host, in a separate process (tests/emulation)."""

import os
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.covering import but
from tests.emulation import training

SETTING = dict(num_cores=2, deadline=2.0)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding

OPTIMIZERS = {
    "sgd": lambda: tpu.SGD(0.1),
    "adagrad": lambda: tpu.Adagrad(0.1, initial_accumulator_value=0.3),
    "adagrad_momentum": lambda: tpu.AdagradMomentum(
        0.1,
        momentum=0.9,
        use_nesterov=True,
        exponent=3,
        beta2=0.9,
        epsilon=1e-3,
    ),
    "adam": lambda: tpu.Adam(0.1),
    "adam_of_all_rows": lambda: tpu.Adam(
        0.1, lazy_adam=False, sum_inside_sqrt=False
    ),
    "ftrl": lambda: tpu.FTRL(
        0.1,
        learning_rate_power=-0.6,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        beta=0.1,
    ),
    "ftrl_by_rate": lambda: tpu.FTRL(
        0.1, multiply_linear_by_learning_rate=True
    ),
    "clipped_and_decayed": lambda: tpu.Adagrad(
        0.1,
        clipvalue=0.5,
        clip_weight_min=-1,
        clip_weight_max=1.5,
        weight_decay_factor=0.01,
        multiply_weight_decay_factor_by_learning_rate=True,
    ),
    "one_by_one": lambda: tpu.SGD(0.1, use_gradient_accumulation=False),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", training.CLASSES)
@pytest.mark.parametrize(
    "name",
    but(OPTIMIZERS, "adagrad", "adam", "ftrl_by_rate", "one_by_one"),
)
def test_training_is_bitwise_equal_to_the_host_engine(name, kind):
    host = training.host_embedding(OPTIMIZERS[name])
    wanted = training.train(tf.distribute.get_strategy(), host)
    expected = training.values_of(host)
    embedding = training.tpu_embedding(kind, STRATEGY, OPTIMIZERS[name])
    inside = name in ("sgd", "adagrad", "adam")
    found = training.train(STRATEGY, embedding, inside=inside)
    for got, want in zip(found, wanted, strict=True):
        training.assert_same(got, want)
    training.assert_same(training.values_of(embedding), expected)


def one_table(rate=0.5, num_rows=4, **options):
    table = tpu.TableConfig(
        num_rows,
        2,
        initializer=tf.zeros_initializer(),
        combiner="sum",
        name="ads",
    )
    tlm.emulation.initialize_tpu_system()
    with STRATEGY.scope():
        return tpu.TPUEmbedding(
            {"shown": tpu.FeatureConfig(table, name="shown")},
            tpu.SGD(rate),
            **options,
        )


def ids_of(first, second):
    return {
        "shown": STRATEGY.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                [first, second][context.replica_id_in_sync_group], tf.int64
            )
        )
    }


def enqueue_of(embedding, **options):
    @tf.function
    def enqueue(ids):
        embedding.enqueue(ids, **options)

    return enqueue


def forward_of(embedding):
    @tf.function
    def forward():
        return STRATEGY.run(embedding.dequeue)

    return forward


def backward_of(embedding, gradient=1.0):
    @tf.function
    def backward():
        def core():
            embedding.apply_gradients({"shown": tf.fill([2, 2], gradient)})

        STRATEGY.run(core)

    return backward


def test_cores_are_a_tpu_strategy():
    assert isinstance(STRATEGY, tf.distribute.TPUStrategy)
    assert STRATEGY.num_replicas_in_sync == 2
    assert STRATEGY.extended.num_hosts == 1
    feature = STRATEGY.extended.tpu_hardware_feature
    assert feature.embedding_feature.name == "V1"
    assert tlm.emulation.enable(num_cores=2, deadline=2.0) is STRATEGY


def test_another_tpu_in_one_process_raises():
    with pytest.raises(RuntimeError, match="enabled with num_cores=2"):
        tlm.emulation.enable(num_cores=4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"num_cores": 3, "num_hosts": 2},
            ValueError,
            "multiple of `num_hosts`",
        ),
        ({"num_cores": 2.0}, TypeError, "`num_cores` must be an int"),
        ({"deadline": 0}, ValueError, "above 0"),
        ({"deadline": "1"}, TypeError, "number of seconds"),
    ],
)
def test_invalid_options_raise(options, error, words):
    with pytest.raises(error, match=words):
        tlm.emulation.enable(**options)


def test_dynamic_learning_rate_is_evaluated_at_each_step():
    rate = tf.Variable(1.0)
    embedding = one_table(rate=lambda: rate / 2)
    enqueue = enqueue_of(embedding)
    enqueue(ids_of([1, 1], [2, 1]))
    forward, backward = forward_of(embedding), backward_of(embedding)
    forward()
    backward()
    np.testing.assert_array_equal(
        training.values_of(embedding)["ads"][:, 0], [0, -1.5, -0.5, 0]
    )
    rate.assign(0.5)
    enqueue(ids_of([1, 1], [2, 1]))
    forward()
    backward()
    np.testing.assert_array_equal(
        training.values_of(embedding)["ads"][:, 0], [0, -2.25, -0.75, 0]
    )


def test_two_dynamic_rates_are_applied_to_their_tables():
    fast, slow = (lambda: tf.constant(1.0)), (lambda: tf.constant(0.25))
    tables = [
        tpu.TableConfig(
            4,
            2,
            initializer=tf.zeros_initializer(),
            name=name,
            optimizer=tpu.SGD(rate),
        )
        for name, rate in (("a", slow), ("b", fast), ("c", slow))
    ]
    tlm.emulation.initialize_tpu_system()
    with STRATEGY.scope():
        embedding = tpu.TPUEmbedding(
            [tpu.FeatureConfig(table, output_shape=[1]) for table in tables],
            None,
        )

    @tf.function
    def step(ids):
        def core():
            embedding.dequeue()
            embedding.apply_gradients([tf.ones([1, 2])] * 3)

        embedding.enqueue([ids, ids, ids])
        STRATEGY.run(core)

    step(
        STRATEGY.experimental_distribute_values_from_function(
            lambda context: tf.constant([1], tf.int64)
        )
    )
    values = training.values_of(embedding)
    assert [values[name][1, 0] for name in "abc"] == [-0.5, -2, -0.5]


def test_steps_in_a_loop_and_after_it_are_separate():
    # TensorFlow's `enqueue` ops in the loop and after it run in order, because
    # each depends on the iterator.
    embedding = one_table()
    dataset = (
        tf.data.Dataset.from_tensor_slices(
            {"shown": [0, 0, 1, 2] * 3 + [0, 3, 1, 2]}
        )
        .batch(4, drop_remainder=True)
        .repeat()
    )
    iterator = iter(
        STRATEGY.experimental_distribute_dataset(
            dataset,
            tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )
    )

    @tf.function
    def epoch(iterator):
        def train():
            embedding.dequeue()
            embedding.apply_gradients({"shown": tf.ones([2, 2])})

        def evaluate():
            return tf.reduce_sum(embedding.dequeue()["shown"])

        for _ in tf.range(3):
            embedding.enqueue(next(iterator), training=True)
            STRATEGY.run(train)
        embedding.enqueue(next(iterator), training=False)
        return STRATEGY.experimental_local_results(STRATEGY.run(evaluate))

    for epochs in range(1, 4):
        sums = epoch(iterator)
        # In each epoch, 3 steps subtract 0.5 from 2 columns of two rows,
        # because id 0 occurs twice.
        assert [one.numpy() for one in sums] == [-6.0 * epochs, -6.0 * epochs]


def test_missing_gradients_are_zeros():
    embedding = one_table()
    enqueue_of(embedding)(ids_of([0, 1], [2, 3]))
    forward_of(embedding)()

    @tf.function
    def backward():
        STRATEGY.run(lambda: embedding.apply_gradients({"shown": None}))

    backward()
    assert not training.values_of(embedding)["ads"].any()
    assert "1 updates" in tlm.emulation.report()


def test_dequeue_without_enqueue_raises_with_a_report():
    embedding = one_table()
    embedding.build(2)
    start = time.monotonic()
    with pytest.raises(tf.errors.DeadlineExceededError) as error:
        forward_of(embedding)()
    assert time.monotonic() - start > 1.5
    assert "has waited for 2 s, where a TPU would wait forever" in str(
        error.value
    )
    assert "core 1: 0 batches wait for `dequeue`" in str(error.value)


def test_a_core_without_a_batch_raises_with_its_number():
    embedding = one_table()
    embedding.build(2)

    @tf.function
    def enqueue_one(ids):
        def core(ids):
            if (
                int(
                    tf.get_static_value(
                        tf.distribute.get_replica_context().replica_id_in_sync_group
                    )
                )
                == 0
            ):
                embedding.enqueue(ids)

        STRATEGY.run(core, args=(ids,))

    enqueue_one(ids_of([0, 1], [2, 3]))
    with pytest.raises(
        tf.errors.DeadlineExceededError, match="`dequeue` of core 1 has waited"
    ):
        forward_of(embedding)()


@pytest.fixture
def far_deadline():
    """Sets a long deadline, so that a test hangs if a call must wait."""
    tlm.emulation.enable(num_cores=2, deadline=600.0)
    yield
    tlm.emulation.enable(num_cores=2, deadline=2.0)


@pytest.mark.usefixtures("far_deadline")
def test_gradients_after_a_forward_step_raise_immediately():
    embedding = one_table()
    enqueue_of(embedding, training=False)(ids_of([0, 1], [2, 3]))
    forward_of(embedding)()
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="training=False"
    ):
        backward_of(embedding)()


@pytest.mark.usefixtures("far_deadline")
@pytest.mark.parametrize("inside", [False, True])
def test_out_of_range_ids_raise_with_names(inside):
    embedding = one_table()
    embedding.build(2)

    @tf.function
    def step(ids):
        def core(ids):
            if inside:
                embedding.enqueue(ids)
            embedding.dequeue()

        if not inside:
            embedding.enqueue(ids)
        STRATEGY.run(core, args=(ids,))

    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="Feature 'shown', sample 1: id 9 is outside table 'ads' "
        "with 4 rows",
    ):
        step(ids_of([0, 1], [2, 9]))
    # If this step ran, the batch of the other core would be combined with a
    # batch of another step.
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match="no longer agree.*sample 1: id 9",
    ):
        step(ids_of([0, 1], [2, 3]))
    tlm.emulation.reset()
    enqueue_of(embedding)(ids_of([0, 1], [2, 3]))
    forward_of(embedding)()


def test_enqueue_to_a_full_queue_waits():
    embedding = one_table()
    enqueue = enqueue_of(embedding, training=False)
    for _ in range(32):
        enqueue(ids_of([0, 1], [2, 3]))
    with pytest.raises(
        tf.errors.DeadlineExceededError,
        match="`enqueue` of core .* room in the queue",
    ):
        enqueue(ids_of([0, 1], [2, 3]))


def test_a_second_embedding_raises_until_a_restart():
    embedding = one_table()
    embedding.build(2)
    with STRATEGY.scope():
        second = tpu.TPUEmbedding(
            {"f": tpu.FeatureConfig(tpu.TableConfig(4, 2, name="b"))},
            tpu.SGD(1.0),
        )
    with pytest.raises(RuntimeError, match="already initialized"):
        second.build(2)
    tlm.emulation.initialize_tpu_system()
    second.build(2)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="another embedding"
    ):
        forward_of(embedding)()


def test_enqueue_in_control_flow_inside_run_raises():
    embedding = one_table()
    embedding.build(2)

    @tf.function
    def step(ids):
        def core(ids):
            if tf.reduce_sum(ids["shown"]) >= 0:
                embedding.enqueue(ids)

        STRATEGY.run(core, args=(ids,))

    with pytest.raises(RuntimeError, match="control flow"):
        step(ids_of([0, 1], [2, 3]))


def test_inputs_computed_on_a_core_raise():
    embedding = one_table()
    embedding.build(2)

    @tf.function
    def step(ids):
        def core(ids):
            embedding.enqueue({"shown": ids["shown"] + 1})

        STRATEGY.run(core, args=(ids,))

    with pytest.raises(ValueError, match="_tpu_input_identity"):
        step(ids_of([0, 1], [1, 2]))


def test_eager_run_is_supported():
    embedding = one_table()
    embedding.build(2)

    def core(ids):
        embedding.enqueue(ids)
        activations = embedding.dequeue()
        embedding.apply_gradients({"shown": tf.ones([2, 2])})
        return activations["shown"]

    for step in range(2):
        found = STRATEGY.run(core, args=(ids_of([0, 1], [2, 2]),))
        one, two = STRATEGY.experimental_local_results(found)
        np.testing.assert_array_equal(one, np.full((2, 2), -0.5 * step))
        np.testing.assert_array_equal(two, np.full((2, 2), -1.0 * step))


def test_pipelined_lookups_are_one_step_old():
    embedding = one_table(pipeline_execution_with_tensor_core=True)
    enqueue = enqueue_of(embedding)
    forward, backward = forward_of(embedding), backward_of(embedding)
    seen = []
    for _ in range(3):
        enqueue(ids_of([0, 0], [1, 2]))
        first = STRATEGY.experimental_local_results(forward()["shown"])[0]
        seen.append(float(first[0, 0]))
        backward()
    assert seen == [0, 0, -1]
    assert training.values_of(embedding)["ads"][0, 0] == -3


def test_pipelined_training_is_bitwise_equal_to_the_host():
    pipelined = {"pipeline_execution_with_tensor_core": True}
    host = training.host_embedding(OPTIMIZERS["adagrad"], **pipelined)
    wanted = training.train(tf.distribute.get_strategy(), host, steps=range(6))
    expected = training.values_of(host)
    other = training.host_embedding(OPTIMIZERS["adagrad"])
    training.train(tf.distribute.get_strategy(), other, steps=range(6))
    # In this program, gradients do not depend on activations, so pipelining
    # does not change the tables.
    training.assert_same(training.values_of(other), expected)
    for kind in training.CLASSES:
        embedding = training.tpu_embedding(
            kind, STRATEGY, OPTIMIZERS["adagrad"], **pipelined
        )
        found = training.train(STRATEGY, embedding, steps=range(6))
        for got, want in zip(found, wanted, strict=True):
            training.assert_same(got, want)
        training.assert_same(training.values_of(embedding), expected)


def test_loading_while_steps_are_in_flight_raises():
    embedding = one_table()
    enqueue_of(embedding)(ids_of([0, 1], [2, 3]))
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=r"(?s)steps are in flight.*core 0: 1 batches",
    ):
        embedding._load_variables()


def num_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.usefixtures("far_deadline")
def test_a_restart_leaves_no_threads():
    # Each call of `train` leaves a step that waits until a long deadline.
    def train():
        embedding = one_table()
        embedding.build(2)

        @tf.function
        def dequeue():
            STRATEGY.run(embedding.dequeue)

        @tf.function
        def enqueue(ids):
            embedding.enqueue({"shown": ids}, training=False)

        waiting = threading.Thread(target=dequeue)
        waiting.start()
        until = time.monotonic() + 120
        while "waiting:" not in tlm.emulation.report():
            assert time.monotonic() < until, tlm.emulation.report()
            time.sleep(0.01)
        enqueue(
            STRATEGY.experimental_distribute_values_from_function(
                lambda _: tf.constant([0, 1])
            )
        )
        waiting.join()

    train()
    before = num_threads()
    for _ in range(6):
        train()
    until = time.monotonic() + 120
    while num_threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert num_threads() <= before


ON_HOST = tf.distribute.InputOptions(experimental_fetch_to_device=False)


@pytest.mark.parametrize("kind", training.CLASSES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("is_on_host", [False, True])
def test_inputs_on_the_tpu_raise(kind, inside, is_on_host):
    tlm.emulation.initialize_tpu_system()
    with STRATEGY.scope():
        embedding = training.CLASSES[kind](
            tpu.FeatureConfig(tpu.TableConfig(4, 2), name="shown"), tpu.SGD(0.5)
        )
    dataset = tf.data.Dataset.from_tensor_slices(
        tf.zeros([8, 1], tf.int64)
    ).batch(4, drop_remainder=True)
    batches = iter(
        STRATEGY.experimental_distribute_dataset(
            dataset, options=ON_HOST if is_on_host else None
        )
    )

    @tf.function
    def step():
        def core(ids):
            if inside:
                embedding.enqueue(ids, training=False)
            return embedding.dequeue()

        batch = next(batches)
        if not inside:
            embedding.enqueue(batch, training=False)
        return STRATEGY.run(core, args=(batch,))

    if is_on_host:
        step()
        return
    with pytest.raises(
        ValueError,
        match="on a TPU input device .*TPU:1;"
        r"[\s\S]*experimental_fetch_to_device=False",
    ):
        step()


def test_ragged_and_sparse_datasets_with_prefetch_raise():
    ragged = tf.data.Dataset.from_tensor_slices(
        tf.ragged.constant([[1, 2], [3]])
    ).batch(2, drop_remainder=True)
    for dataset in (ragged, ragged.map(lambda ids: ids.to_sparse())):
        for distribute in (
            lambda options, given=dataset: (
                STRATEGY.experimental_distribute_dataset(given, options)
            ),
            lambda options, given=dataset: (
                STRATEGY.distribute_datasets_from_function(
                    lambda _: given, options
                )
            ),
        ):
            distribute(ON_HOST)
            for options in (None, tf.distribute.InputOptions()):
                with pytest.raises(
                    ValueError,
                    match="does not support "
                    "distributed datasets with device pref",
                ):
                    distribute(options)


def test_reduce_mean_of_a_structure_returns_the_first_replica():
    batch = {
        "ids": STRATEGY.experimental_distribute_values_from_function(
            lambda context: tf.constant([context.replica_id_in_sync_group])
        )
    }
    found = STRATEGY.reduce("MEAN", batch, axis=None)["ids"]
    # The result is the value of the first replica. The mean of both replicas
    # would be 0.5.
    assert found.dtype == tf.int32
    assert found.numpy() == [0]
    with pytest.raises(ValueError, match="cannot be reduced"):
        STRATEGY.reduce("SUM", batch, axis=None)
    assert STRATEGY.reduce("SUM", batch["ids"], axis=None).numpy() == [1]


def test_jit_compile_raises():
    @tf.function(jit_compile=True)
    def program():
        return STRATEGY.run(lambda: tf.constant(1.0))

    with pytest.raises(RuntimeError, match="Leave jit_compile out"):
        program()


def test_disabled_emulation_raises():
    embedding = one_table()
    embedding.build(2)
    tlm.emulation.disable()
    tlm.emulation.disable()
    with pytest.raises(RuntimeError, match="`tlm.emulation.enable` first"):
        tlm.emulation.reset()
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="has no embedding"
    ):
        forward_of(embedding)()
    with tlm.emulation.enabled(num_cores=2, deadline=2.0) as strategy:
        assert strategy is STRATEGY
    tlm.emulation.enable(num_cores=2, deadline=2.0)
