"""Trains TensorFlow's TPUEmbeddingV2 on an emulated v5p or v6e.

Runs in a separate process (tests/emulation). The tables must be bitwise equal
to the tables of the host engine.
"""

import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import embedding_context_utils

import tf_layoutmap as tlm

TPU = os.environ.get("TF_LAYOUTMAP_TPU", "v5p")
SETTING = dict(num_cores=2, deadline=5.0, tpu=TPU)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding

if tf.__version__ < "2.21":
    pytest.skip(
        "TPUEmbeddingV2 of TensorFlow 2.20 supports one feature only",
        allow_module_level=True,
    )

NUM_CHIPS, NUM_SAMPLES, DIM = 2, 8, 6
CORES_PER_CHIP = {"v5p": 4, "v6e": 2}[TPU]

OPTIMIZERS = {
    "sgd": tpu.SGD(0.1),
    "adagrad": tpu.Adagrad(0.1, initial_accumulator_value=0.3),
    "adagrad_momentum": tpu.AdagradMomentum(
        0.1, momentum=0.9, exponent=3, beta2=0.9, epsilon=1e-3
    ),
    "adam": tpu.Adam(0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-3),
    "ftrl": tpu.FTRL(0.1, l1_regularization_strength=0.01, beta=0.3),
}


def config(**options):
    """Two tables that TensorFlow stacks."""
    tables = [
        tpu.TableConfig(
            num_rows,
            DIM,
            initializer=tf.constant_initializer(value),
            combiner="sum",
            name=name,
        )
        for name, num_rows, value in (("ads", 70, 0.5), ("users", 100, 0.25))
    ]
    return {
        "ad": tpu.FeatureConfig(tables[0], **options),
        "user": tpu.FeatureConfig(tables[1], **options),
    }


def embedding_of(optimizer, **settings):
    with STRATEGY.scope():
        return tpu.TPUEmbeddingV2(
            config(output_shape=[NUM_SAMPLES]),
            optimizer,
            sparse_core_embedding_config=tpu.SparseCoreEmbeddingConfig(
                **settings
            ),
        )


def batch(generator):
    """The ids of one chip; the ids of a sample are different."""
    return {
        name: tf.ragged.constant(
            [
                generator.choice(
                    num_rows, generator.integers(0, 4), replace=False
                ).tolist()
                for _ in range(NUM_SAMPLES)
            ],
            dtype=tf.int64,
            ragged_rank=1,
        )
        for name, num_rows in (("ad", 70), ("user", 100))
    }


def train_function(embedding):
    @tf.function
    def train(batches, gradients):
        def core(features, gradients):
            activations, preserved = embedding(features)
            embedding.apply_gradients(gradients, preserved)
            return activations

        return STRATEGY.run(core, (batches, gradients))

    return train


def per_replica(values):
    return STRATEGY.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def table_of(embedding, name):
    """Returns an unsharded table from the shards of all chips."""
    layout = embedding.embedding_layouts[name]
    variable = embedding.variables[layout.stacked_table_name]["parameters"]
    stack = np.concatenate([shard.numpy() for shard in variable.values])
    shards = stack.reshape(layout.num_sparse_cores, -1, stack.shape[1])
    size = layout.unsharded_padded_shape[0] // layout.num_sparse_cores
    start = layout.sparse_core_shard_row_offset
    shards = np.roll(
        shards[:, start : start + size],
        -layout.sparse_core_shard_rotation,
        axis=0,
    )
    rows = shards.transpose(1, 0, 2).reshape(-1, stack.shape[1])
    return rows[: layout.unsharded_shape[0], : layout.unsharded_shape[1]]


def steps_of(generator, num_steps):
    for _ in range(num_steps):
        batches = [batch(generator) for _ in range(NUM_CHIPS)]
        gradients = [
            {
                name: tf.constant(
                    generator.normal(size=[NUM_SAMPLES, DIM]), tf.float32
                )
                for name in ("ad", "user")
            }
            for _ in range(NUM_CHIPS)
        ]
        yield batches, gradients


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tables_equal_those_of_the_host_engine(kind):
    embedding = embedding_of(OPTIMIZERS[kind])
    train = train_function(embedding)
    host = tlm.TPUEmbedding(config(), OPTIMIZERS[kind], engine="host")
    for batches, gradients in steps_of(np.random.default_rng(0), 3):
        activations = train(per_replica(batches), per_replica(gradients))
        host.enqueue(
            {
                name: tf.concat([one[name] for one in batches], axis=0)
                for name in ("ad", "user")
            }
        )
        expected = host.dequeue()
        host.apply_gradients(
            {
                name: tf.concat([one[name] for one in gradients], axis=0)
                for name in ("ad", "user")
            }
        )
        for name, per_chip in activations.items():
            found = STRATEGY.experimental_local_results(per_chip)
            # The ids of a sample are added in another order.
            np.testing.assert_allclose(
                tf.concat(found, axis=0), expected[name], rtol=1e-5, atol=1e-6
            )
    assert list(embedding.variables) == ["ads_users"]
    for table, rows in host.embedding_tables.items():
        np.testing.assert_array_equal(
            table_of(embedding, table.name), rows.numpy()
        )


def test_a_checkpoint_restores_the_tables(tmp_path):
    embedding = embedding_of(OPTIMIZERS["adagrad"])
    train = train_function(embedding)
    (first, second) = steps_of(np.random.default_rng(1), 2)
    train(*map(per_replica, first))
    path = tf.train.Checkpoint(e=embedding).save(str(tmp_path / "file"))
    train(*map(per_replica, second))
    trained = table_of(embedding, "ads")
    restored = embedding_of(OPTIMIZERS["adagrad"])
    restored.build()
    tf.train.Checkpoint(e=restored).restore(path).assert_consumed()
    train_function(restored)(*map(per_replica, second))
    np.testing.assert_array_equal(table_of(restored, "ads"), trained)


def test_a_batch_that_exceeds_a_limit_raises_tensorflows_error():
    embedding = embedding_of(
        OPTIMIZERS["sgd"],
        max_ids_per_table={"ads_users": 1},
        max_unique_ids_per_table={"ads_users": 256},
    )
    batches, gradients = next(steps_of(np.random.default_rng(2), 1))
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="ids while the max ids per sparse core is set to be 1 for table"
        " ads_users",
    ):
        train_function(embedding)(per_replica(batches), per_replica(gradients))


def test_an_id_beyond_the_stack_raises():
    embedding = embedding_of(OPTIMIZERS["sgd"])
    batches, gradients = next(steps_of(np.random.default_rng(3), 1))
    batches[1]["user"] = tf.constant([1_000_000] * NUM_SAMPLES, tf.int64)
    batches[0]["user"] = tf.constant([1] * NUM_SAMPLES, tf.int64)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="rows of the stacked table"
    ):
        train_function(embedding)(per_replica(batches), per_replica(gradients))


def test_limits_of_inspect_ids_are_sufficient():
    batches, gradients = next(steps_of(np.random.default_rng(4), 1))
    limits = tlm.inspect_ids(
        [
            {
                name: tf.concat([one[name] for one in batches], axis=0)
                for name in ("ad", "user")
            }
        ],
        config(),
        optimizer=OPTIMIZERS["sgd"],
        sparse_cores=tlm.planning.SparseCores(
            NUM_CHIPS * CORES_PER_CHIP, CORES_PER_CHIP
        ),
    ).sparse_core_limits()
    embedding = embedding_of(
        OPTIMIZERS["sgd"],
        max_ids_per_chip_per_sample=limits.max_ids_per_chip_per_sample,
        max_ids_per_table=limits.max_ids_per_table,
        max_unique_ids_per_table=limits.max_unique_ids_per_table,
    )
    train_function(embedding)(per_replica(batches), per_replica(gradients))


def pipelined_embedding():
    with STRATEGY.scope():
        return tpu.TPUEmbeddingV2(
            config(output_shape=[NUM_SAMPLES]),
            OPTIMIZERS["adagrad"],
            pipeline_execution_with_tensor_core=True,
        )


def train_step(embedding, ids, step):
    """Trains with gradients that depend on the activations."""

    def core(ids):
        activations, preserved = embedding({"ad": ids[step], "user": ids[step]})
        embedding.apply_gradients(
            {name: 2 * rows + 1 for name, rows in activations.items()},
            preserved,
        )

    STRATEGY.run(core, (ids,))


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_pipelined_loop_equals_the_host_engine(num_steps):
    embedding = pipelined_embedding()

    @tf.function
    def train(ids):
        for step in tf.range(num_steps):
            train_step(embedding, ids, step)

    host = tlm.TPUEmbedding(
        config(),
        OPTIMIZERS["adagrad"],
        engine="host",
        pipeline_execution_with_tensor_core=True,
    )
    generator = np.random.default_rng(5)
    # The first lookup of a loop uses all updates of the loop before it.
    for _ in range(2):
        ids = generator.integers(0, 9, [NUM_CHIPS, num_steps, NUM_SAMPLES])
        train(per_replica([tf.constant(one) for one in ids]))
        for step in range(num_steps):
            of_step = tf.constant(ids[:, step].reshape([-1]))
            host.enqueue({"ad": of_step, "user": of_step})
            activations = host.dequeue()
            host.apply_gradients(
                {name: 2 * rows + 1 for name, rows in activations.items()}
            )
        for table, rows in host.embedding_tables.items():
            np.testing.assert_array_equal(
                table_of(embedding, table.name), rows.numpy()
            )


def test_pipelining_outside_of_a_loop_raises(monkeypatch):
    ids = per_replica([tf.constant([[1] * NUM_SAMPLES])] * NUM_CHIPS)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="requires a loop of steps"
    ):
        tf.function(train_step)(pipelined_embedding(), ids, 0)
    # In this context, TensorFlow does not pipeline the step.
    embedding = pipelined_embedding()
    with embedding_context_utils.SequentialEmbeddingContext():
        tf.function(train_step)(embedding, ids, 0)
    assert (table_of(embedding, "ads")[1] != 0.5).all()
    # With this flag, a TPU does not pipeline the step.
    monkeypatch.setenv(
        "TF_XLA_FLAGS", "--tf_xla_disable_full_embedding_pipelining=true"
    )
    embedding = pipelined_embedding()
    tf.function(train_step)(embedding, ids, 0)
    assert (table_of(embedding, "ads")[1] != 0.5).all()


def test_a_variable_in_a_program_gets_the_dtype_of_the_other_operand():
    with STRATEGY.scope():
        weight = tf.Variable(10)

    @tf.function
    def half():
        return STRATEGY.run(lambda: 0.5 * tf.ones([2]) * weight)

    for found in STRATEGY.experimental_local_results(half()):
        assert found.numpy().tolist() == [5.0, 5.0]


def test_shards_are_read_and_assigned_by_device():
    embedding = embedding_of(OPTIMIZERS["sgd"])
    shards = embedding.embedding_table_shards["ads_users"]
    variable = embedding.variables["ads_users"]["parameters"]
    assert [device for device, _ in shards] == [
        *STRATEGY.extended.worker_devices
    ]
    for (_, found), shard in zip(shards, variable.values, strict=True):
        np.testing.assert_array_equal(found, shard.numpy())
    variable.assign_on_device("/device:TPU:1", 3 * shards[1][1])
    np.testing.assert_array_equal(
        variable.read_from_device(shards[1][0]), 3 * shards[1][1]
    )
    np.testing.assert_array_equal(
        variable.read_from_device("/device:TPU:0"), shards[0][1]
    )
    with pytest.raises(ValueError, match="must be a core of the emulated TPU"):
        variable.read_from_device("/device:CPU:7")


@pytest.mark.parametrize("device", ["/device:TPU:1", None, "name of a CPU"])
def test_ids_are_prepared_outside_of_a_program(device):
    embedding = embedding_of(OPTIMIZERS["sgd"])
    features = batch(np.random.default_rng(8))
    if device is not None and "TPU" not in device:
        device = STRATEGY.extended.worker_devices[1]

    @tf.function
    def look_up(features):
        prepared = embedding.enqueue(features, device=device)
        return (
            STRATEGY.run(lambda one: embedding.dequeue(one)[0], (prepared,)),
            STRATEGY.run(lambda one: embedding(one)[0], (features,)),
        )

    found, expected = look_up(features)
    for name in features:
        for one, other in zip(
            STRATEGY.experimental_local_results(found[name]),
            STRATEGY.experimental_local_results(expected[name]),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)


def test_a_loop_of_steps_equals_single_steps():
    steps = list(steps_of(np.random.default_rng(6), 3))
    single, loop = [embedding_of(OPTIMIZERS["adagrad"]) for _ in range(2)]
    train = train_function(single)
    for _ in range(3):
        train(*map(per_replica, steps[0]))

    @tf.function
    def train_loop(batches, gradients):
        def core(features, gradients):
            _, preserved = loop(features)
            loop.apply_gradients(gradients, preserved)

        for _ in tf.range(3):
            STRATEGY.run(core, (batches, gradients))

    train_loop(*map(per_replica, steps[0]))
    for name in ("ads", "users"):
        np.testing.assert_array_equal(
            table_of(loop, name), table_of(single, name)
        )


def fit_with_keras_rs(strategy):
    """Returns the trained tables, by name."""
    keras = pytest.importorskip("keras")
    keras_rs = pytest.importorskip("keras_rs")
    on_host = strategy is None
    tables = {
        name: keras_rs.layers.TableConfig(
            name,
            num_rows,
            DIM,
            optimizer="adagrad",
            combiner="sum",
            initializer=keras.initializers.Constant(0.5),
            placement="auto" if on_host else "sparsecore",
        )
        for name, num_rows in (("ads", 70), ("users", 100))
    }
    size = NUM_CHIPS * NUM_SAMPLES
    features = {
        name: keras_rs.layers.FeatureConfig(
            name, tables[table], (size, 1), (size, DIM)
        )
        for name, table in (("ad", "ads"), ("user", "users"))
    }
    generator = np.random.default_rng(7)
    ids = {
        "ad": generator.integers(0, 70, [5 * size, 1]),
        "user": generator.integers(0, 100, [5 * size, 1]),
    }
    factors = generator.normal(size=[5 * size, DIM]).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((ids, factors)).batch(
        size, drop_remainder=True
    )
    options = tf.data.Options()
    options.autotune.enabled = False
    with (strategy or tf.distribute.get_strategy()).scope():
        layer = (
            tlm.layers.TPUEmbedding(features)
            if on_host
            else keras_rs.layers.DistributedEmbedding(features)
        )
        given = {
            name: keras.Input([1], dtype="int64", name=name)
            for name in features
        }
        found = layer(given)
        model = keras.Model(given, found["ad"] * found["user"])
        model.compile("sgd", lambda y, x: keras.ops.sum(x * y, axis=1))
    model.fit(dataset.with_options(options), verbose=0)
    if not on_host:
        return {name: table_of(layer._tpu_embedding, name) for name in tables}
    return {
        table.name: rows.numpy()
        for table, rows in layer.embedding.embedding_tables.items()
    }


def test_unmodified_keras_rs_equals_the_host_engine():
    found, expected = fit_with_keras_rs(STRATEGY), fit_with_keras_rs(None)
    for name, rows in expected.items():
        assert (rows != 0.5).any()
        np.testing.assert_array_equal(found[name], rows)


def test_the_class_for_an_embedding_engine_raises():
    with STRATEGY.scope():
        embedding = tpu.TPUEmbedding(config(), OPTIMIZERS["sgd"])
        with pytest.raises(
            tf.errors.FailedPreconditionError, match="use .TPUEmbeddingV2."
        ):
            embedding.build(NUM_SAMPLES)


def test_other_types_of_tpus_raise():
    with pytest.raises(RuntimeError, match="only one TPU.*0 SparseCores"):
        tlm.emulation.enable(num_cores=2)
    with pytest.raises(ValueError, match="tpu"):
        tlm.emulation.enable(num_cores=2, tpu="v5e")
    with pytest.raises(ValueError, match="power of two with tpu='v6e'"):
        tlm.emulation.enable(num_cores=3, tpu="v6e")
