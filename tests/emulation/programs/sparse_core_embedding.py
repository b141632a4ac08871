"""Trains `tlm.TPUEmbeddingV2` on an emulated v5p or v6e.

Runs in a separate process (tests/emulation). The tables must be bitwise equal
to the tables of the host engine.
"""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.emulation import training
from tests.layers.base import test_keras_rs_configs as keras_rs_configs

TPU = os.environ.get("TF_LAYOUTMAP_TPU", "v5p")
SETTING = dict(num_cores=2, deadline=5.0, tpu=TPU)
STRATEGY = tlm.emulation.enable(**SETTING)
ONE = tf.distribute.get_strategy()

tpu = tf.tpu.experimental.embedding

NUM_CHIPS, NUM_SAMPLES = 2, 8
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
# The first two tables are stacked. Each value contains the combiner, the number
# of rows and the dim.
TABLES = {
    "ads": ("sum", 70, 6),
    "users": ("mean", 100, 6),
    "words": ("sqrtn", 9, 12),
}
# Each value contains the table, the form of the input, and whether the feature
# has weights.
FEATURES = {
    "ad": ("ads", "ragged", False),
    "shown": ("ads", "dense", True),
    "user": ("users", "sparse", True),
    "word": ("words", "ragged", False),
}


def rows_of(name):
    _, num_rows, dim = TABLES[name]
    generator = np.random.default_rng(num_rows)
    return generator.normal(size=(num_rows, dim)).astype(np.float32)


def initializer_of(name):
    def initializer(shape, dtype=None, shard_info=None):
        del shape, dtype
        rows = rows_of(name)
        first = shard_info.offset[0]
        return rows[first : first + shard_info.shape[0]]

    def unsharded(shape):
        assert tuple(shape) == rows_of(name).shape
        return rows_of(name)

    return unsharded if name == "ads" else initializer


def config(num_samples, initializer_of=initializer_of):
    tables = {
        name: tpu.TableConfig(
            num_rows,
            dim,
            initializer=initializer_of(name),
            combiner=combiner,
            name=name,
        )
        for name, (combiner, num_rows, dim) in TABLES.items()
    }
    return {
        name: tpu.FeatureConfig(tables[table], output_shape=[num_samples])
        for name, (table, _, _) in FEATURES.items()
    }


def embedding_on(strategy, optimizer):
    with strategy.scope():
        return tlm.TPUEmbeddingV2(
            config(NUM_CHIPS * NUM_SAMPLES // strategy.num_replicas_in_sync),
            optimizer,
        )


def ragged(values, lengths, dtype):
    return tf.RaggedTensor.from_row_lengths(tf.constant(values, dtype), lengths)


def inputs_of(generator, num_samples=NUM_CHIPS * NUM_SAMPLES):
    """Returns ids, weights and gradients, whose sums are exact in float32."""
    ids, weights, gradients = {}, {}, {}
    for name, (table, form, has_weights) in FEATURES.items():
        _, num_rows, dim = TABLES[table]
        lengths = (
            np.ones(num_samples, int)
            if form == "dense"
            else generator.choice([0, 1, 4], num_samples)
        )
        # The ids of a sample are different.
        values = [
            generator.choice(num_rows, length, replace=False)
            for length in lengths
        ]
        ids[name] = ragged(np.concatenate(values), lengths, tf.int64)
        # The weights of a sample are equal.
        weights[name] = ragged(
            np.repeat(generator.choice([0.5, 2.0], num_samples), lengths),
            lengths,
            tf.float32,
        )
        if form == "dense":
            ids[name], weights[name] = ids[name].values, weights[name].values
        if form == "sparse":
            ids[name] = ids[name].to_sparse()
            weights[name] = weights[name].to_sparse()
        if not has_weights:
            weights[name] = None
        gradients[name] = tf.constant(
            generator.integers(-8, 9, [num_samples, dim]) / 8, tf.float32
        )
    return ids, weights, gradients


def split(value):
    """Returns the samples of each chip."""
    if value is None:
        return None
    size = NUM_SAMPLES
    parts = (
        tf.sparse.split(sp_input=value, num_split=NUM_CHIPS, axis=0)
        if isinstance(value, tf.SparseTensor)
        else [value[chip * size : (chip + 1) * size] for chip in range(2)]
    )
    return per_replica(parts)


def per_replica(parts):
    return STRATEGY.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def step_on(strategy, embedding):
    @tf.function(reduce_retracing=True)
    def step(ids, weights, gradients):
        def core(ids, weights, gradients):
            activations, preserved = embedding(ids, weights)
            embedding.apply_gradients(gradients, preserved)
            return activations

        return strategy.run(core, (ids, weights, gradients))

    return step


def train(embedding, num_steps=3, seed=0):
    """Trains; returns the activations of all steps, in global order."""
    strategy = embedding._state.replicas.strategy
    step = step_on(strategy, embedding)
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(num_steps):
        arguments = inputs_of(generator)
        if strategy is STRATEGY:
            arguments = [
                {name: split(value) for name, value in part.items()}
                for part in arguments
            ]
        activations = step(*arguments)
        found.append(
            {
                name: np.concatenate(
                    [
                        part.numpy()
                        for part in strategy.experimental_local_results(value)
                    ]
                )
                for name, value in activations.items()
            }
        )
    return found


def values_of(embedding):
    return {
        f"{table}/{name}": variable.numpy()
        for table, by_name in embedding._variables_of_tables().items()
        for name, variable in by_name.items()
    }


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tables_equal_those_of_the_host_engine(kind):
    embedding = embedding_on(STRATEGY, OPTIMIZERS[kind])
    assert isinstance(embedding, tlm.TPUEmbeddingV2)
    assert isinstance(embedding, tpu.TPUEmbeddingV2)
    host = embedding_on(ONE, OPTIMIZERS[kind])
    assert not isinstance(host, tpu.TPUEmbeddingV2)
    for found, expected in zip(train(embedding), train(host), strict=True):
        for name, value in expected.items():
            # The ids of a sample are added in another order.
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    assert list(embedding.variables) == ["ads_users", "words"]
    training.assert_same(values_of(embedding), values_of(host))
    for name, rows in embedding.get_embedding_tables().items():
        assert (rows.numpy() != rows_of(name)).any()


def test_initial_rows_are_rows_of_their_ids():
    embedding = embedding_on(STRATEGY, OPTIMIZERS["adagrad"])
    for name, rows in embedding.get_embedding_tables().items():
        np.testing.assert_array_equal(rows, rows_of(name))
    slots = embedding.slot_variables
    assert [table.name for table in slots] == list(TABLES)
    assert all(
        (slot["accumulators"].numpy() == np.float32(0.3)).all()
        for slot in slots.values()
    )


def test_the_stock_class_reads_the_checkpoint(tmp_path):
    embedding = embedding_on(STRATEGY, OPTIMIZERS["adagrad"])
    train(embedding)
    path = tf.train.Checkpoint(e=embedding).save(str(tmp_path / "ours"))
    with STRATEGY.scope():
        stock = tpu.TPUEmbeddingV2(
            config(NUM_SAMPLES, lambda _: tf.ones_initializer()),
            OPTIMIZERS["adagrad"],
        )
    stock.build()
    tf.train.Checkpoint(e=stock).restore(path).assert_consumed()
    again = tf.train.Checkpoint(e=stock).save(str(tmp_path / "stock"))
    # The checkpoint is restored when the variables are created.
    restored = embedding_on(STRATEGY, OPTIMIZERS["adagrad"])
    status = tf.train.Checkpoint(e=restored).restore(again)
    restored.build()
    status.assert_consumed()
    training.assert_same(values_of(restored), values_of(embedding))


def test_tables_can_be_assigned():
    embedding = embedding_on(STRATEGY, OPTIMIZERS["adagrad"])
    embedding.build()
    before = values_of(embedding)
    users = embedding._variables_of_tables()["users"]["parameters"]
    users.assign(rows_of("users") + 1)
    before["users/parameters"] = rows_of("users") + 1
    training.assert_same(values_of(embedding), before)
    with pytest.raises(ValueError, match=r"\(100, 6\).*\(6, 100\).*'users'"):
        users.assign(np.ones((6, 100)))


def small(strategy=STRATEGY, optimizer=None, dim=6, num_features=2, **options):
    """Two features of two stacked tables of ones."""
    samples = NUM_CHIPS * NUM_SAMPLES // strategy.num_replicas_in_sync
    with strategy.scope():
        return tlm.TPUEmbeddingV2(
            [
                tpu.FeatureConfig(
                    tpu.TableConfig(64, dim, tf.ones, name=f"table{index}"),
                    output_shape=[samples],
                )
                for index in range(num_features)
            ],
            optimizer or tpu.SGD(1.0),
            **options,
        )


def run(function, *arguments):
    return tf.function(lambda *args: STRATEGY.run(function, args))(*arguments)


@pytest.mark.parametrize(
    "number, dtype",
    [(64, tf.int32), (10**6, tf.int64), (-1, tf.int32), (2**33 + 1, tf.int64)],
)
def test_an_id_that_is_not_a_row_of_its_table_raises(number, dtype):
    embedding = small()
    ids = [tf.zeros([NUM_SAMPLES], tf.int32)] * 2
    ids[1] = tf.concat([[number], tf.zeros([NUM_SAMPLES - 1], dtype)], 0)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"1\\?': ids must be in \[0, 64\).*table1",
    ):
        run(embedding.embedding_lookup, ids)
    with pytest.raises(TypeError, match="float32"):
        run(embedding.embedding_lookup, [tf.zeros([NUM_SAMPLES])] * 2)


@pytest.mark.parametrize("dim", [6, 8])
def test_a_gradient_of_none_is_zeros(dim):
    embedding = small(dim=dim)

    def core(ids, gradient):
        _, preserved = embedding([ids, ids])
        embedding.apply_gradients([gradient, None], preserved)

    run(core, tf.range(NUM_SAMPLES), tf.ones([NUM_SAMPLES, dim]))
    found = embedding.get_embedding_tables()
    assert (found["table0"].numpy()[:NUM_SAMPLES] == 1 - NUM_CHIPS).all()
    assert (found["table1"].numpy() == 1).all()


def test_a_gradient_of_another_shape_raises():
    embedding = small()

    def core(ids):
        _, preserved = embedding([ids, ids])
        embedding.apply_gradients([tf.ones([6, NUM_SAMPLES])] * 2, preserved)

    with pytest.raises(ValueError, match=r"shape \(6, 8\).*\(8, 6\)"):
        run(core, tf.range(NUM_SAMPLES))


def test_a_step_contains_several_lookups():
    embedding = small()

    def core(ids):
        _, first = embedding([ids, ids])
        _, second = embedding([ids + 8, ids])
        ones = [tf.ones([NUM_SAMPLES, 6])] * 2
        embedding.apply_gradients(ones, second)
        found, _ = embedding([ids + 8, ids])
        embedding.apply_gradients(ones, first)
        return found

    found = run(core, tf.range(NUM_SAMPLES))
    for part in STRATEGY.experimental_local_results(found[1]):
        assert (part.numpy() == 1 - NUM_CHIPS).all()
    tables = embedding.get_embedding_tables()
    assert (tables["table0"].numpy()[:16] == 1 - NUM_CHIPS).all()
    assert (tables["table1"].numpy()[:8] == 1 - 2 * NUM_CHIPS).all()


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (
            tpu.SGD(1.0, clip_weight_min=0.0),
            "`clip_weight_min` of SGD.*'table0'",
        ),
        (tpu.SGD(1.0, clip_weight_max=0.0), "`clip_weight_max` of SGD"),
        (tpu.Adagrad(1.0, clipvalue=1.0), "`clip_gradient_min` of Adagrad"),
        (
            tpu.Adagrad(1.0, use_gradient_accumulation=False),
            "`use_gradient_accumulation` of Adagrad must be True",
        ),
        (tpu.Adam(1.0, lazy_adam=False), "`lazy_adam` of Adam must be True"),
        (tpu.SGD(1.0, weight_decay_factor=0.1), "`weight_decay_factor`"),
    ],
)
def test_settings_that_sparse_cores_ignore_raise(optimizer, words):
    with pytest.raises(NotImplementedError, match=words):
        small(optimizer=optimizer)
    # The host engine supports these settings.
    small(ONE, optimizer).build()
    small(STRATEGY, optimizer, engine="host").build()


def test_invalid_configurations_raise():
    table = tpu.TableConfig(64, 8, tf.ones, name="words")

    def make(optimizer=OPTIMIZERS["sgd"], shape=(8,), **options):
        with STRATEGY.scope():
            return tlm.TPUEmbeddingV2(
                [tpu.FeatureConfig(table, output_shape=shape)],
                optimizer,
                **options,
            )

    with pytest.raises(ValueError, match="`output_shape` of each.*'0'"):
        make(shape=None)
    with pytest.raises(
        ValueError,
        match=rf"multiple of the {CORES_PER_CHIP} SparseCores.*: 9 samples",
    ):
        make(shape=[9])
    with pytest.raises(ValueError, match="optimizer of each table.*None"):
        make(optimizer=None)
    with pytest.raises(ValueError, match="optimizer of each table.*LAMB"):
        make(optimizer=tlm.optimizers.LAMB(1.0))
    with pytest.raises(ValueError, match="`out_of_range` must be 'error'"):
        make(out_of_range="drop")
    with pytest.raises(TypeError, match="unexpected keyword.*'shards'"):
        make(shards=3)
    with pytest.raises(ValueError, match=r"\['words'\]. Received: \['word'\]"):
        make(
            sparse_core_embedding_config=tpu.SparseCoreEmbeddingConfig(
                max_ids_per_table={"word": 3}
            )
        )

    class Subclass(tlm.TPUEmbeddingV2):
        pass

    with STRATEGY.scope(), pytest.raises(NotImplementedError, match="subclass"):
        Subclass([tpu.FeatureConfig(table)], tpu.SGD(1.0))
    with pytest.raises(AttributeError, match="do not support `watch_changes`"):
        make()._state.backend.watch_changes()


def test_more_than_four_sparse_cores_per_chip_raise(monkeypatch):
    monkeypatch.setattr(STRATEGY.extended, "sparse_cores_per_chip", 8)
    with pytest.raises(NotImplementedError, match="at most 4 SparseCores.*: 8"):
        small()


def test_an_overflow_names_inspect_ids(caplog):
    with STRATEGY.scope():
        embedding = tlm.TPUEmbeddingV2(
            [
                tpu.FeatureConfig(
                    tpu.TableConfig(64, 8, tf.ones, name="words"),
                    output_shape=[512 * CORES_PER_CHIP],
                )
            ],
            tpu.SGD(1.0),
        )
    assert "tlm.inspect_ids(...).sparse_core_limits()" in caplog.text
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"(?s)ids while the max ids per sparse core is set to be 256 for"
        r" table words.*tlm.inspect_ids.sparse_core_limits",
    ):
        run(
            embedding.embedding_lookup,
            [tf.zeros([512 * CORES_PER_CHIP], tf.int32)],
        )


def test_limits_of_tables_are_limits_of_their_stack():
    embedding = small(
        sparse_core_embedding_config=tpu.SparseCoreEmbeddingConfig(
            max_ids_per_table={"table0": 3, "table1": 4},
            max_unique_ids_per_table={"table0_table1": 5},
        )
    )
    assert embedding._table_to_max_ids_per_sparse_core == {"table0_table1": 7}
    assert embedding._table_to_max_unique_ids_per_sparse_core == {
        "table0_table1": 5
    }


def test_the_limits_of_a_batch_are_the_smallest_that_suffice():
    ids, _, _ = inputs_of(np.random.default_rng(4), NUM_SAMPLES)
    optimizer = OPTIMIZERS["sgd"]
    arguments = dict(
        features=ids,
        feature_config=config(NUM_SAMPLES),
        num_tpu_chips=NUM_CHIPS,
        num_sc_per_chip=CORES_PER_CHIP,
        optimizer=optimizer,
    )
    limits = tlm.TPUEmbeddingV2.compute_sparse_core_stats(**arguments)
    found = embedding_on(STRATEGY, optimizer).compute_sparse_core_stats(
        **arguments
    )
    assert found == limits
    # TensorFlow 2.20 supports one feature only.
    if tf.__version__ >= "2.21":
        found = tpu.TPUEmbeddingV2.compute_sparse_core_stats(**arguments)
        assert found == limits

    def look_up(missing):
        max_ids, max_unique_ids = (
            {name: max(limit - missing, 1) for name, limit in by_stack.items()}
            for by_stack in limits
        )
        with STRATEGY.scope():
            embedding = tlm.TPUEmbeddingV2(
                config(NUM_SAMPLES),
                optimizer,
                sparse_core_embedding_config=tpu.SparseCoreEmbeddingConfig(
                    max_ids_per_table=max_ids,
                    max_unique_ids_per_table=max_unique_ids,
                ),
            )
        return run(embedding.embedding_lookup, ids)

    look_up(0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is set to be"):
        look_up(1)


def test_the_host_engine_beside_the_tpu_trains_equally():
    host = embedding_on(ONE, OPTIMIZERS["adagrad"])
    train(host)
    with STRATEGY.scope():
        beside = tlm.TPUEmbeddingV2(
            config(NUM_SAMPLES), OPTIMIZERS["adagrad"], engine="host"
        )
    train(beside)
    training.assert_same(values_of(beside), values_of(host))


# The layer.

BATCH = NUM_CHIPS * NUM_SAMPLES


def model_on(strategy, columns=1):
    samples = [BATCH // strategy.num_replicas_in_sync]
    tables = [
        tpu.TableConfig(
            num_rows,
            8,
            initializer=keras.initializers.RandomNormal(seed=num_rows),
            combiner="sum",
            name=f"table{num_rows}",
        )
        for num_rows in (40, 23)
    ]
    with strategy.scope():
        layer = tlm.layers.TPUEmbedding(
            {
                name: tpu.FeatureConfig(table, output_shape=samples)
                for name, table in zip(("title", "user"), tables)
            },
            "adagrad",
            name="embedding",
            sparse_core_embedding_config=tpu.SparseCoreEmbeddingConfig(
                disable_table_stacking=True
            ),
        )
        given = {
            "title": keras.Input([columns], dtype="int64", name="title"),
            "user": keras.Input([], dtype="int64", name="user"),
        }
        found = layer(given)
        model = keras.Model(given, found["title"] * found["user"])
        model.compile("sgd", lambda y, x: keras.ops.sum(x * y, axis=1))
    return model, layer


def batches(columns=1, size=5 * BATCH):
    generator = np.random.default_rng(2)
    options = tf.data.Options()
    options.autotune.enabled = False
    return (
        tf.data.Dataset.from_tensor_slices(
            (
                {
                    # The ids of a sample are different.
                    "title": np.stack(
                        [
                            generator.choice(40, columns, replace=False)
                            for _ in range(size)
                        ]
                    ),
                    "user": generator.integers(0, 23, size),
                },
                generator.normal(size=(size, 8)).astype(np.float32),
            )
        )
        .batch(BATCH, drop_remainder=True)
        .with_options(options)
    )


@pytest.mark.parametrize("columns", [1, 2])
def test_a_layer_trains_as_on_the_host(columns, tmp_path):
    host, expected = model_on(ONE, columns)
    start = {
        name: rows.numpy()
        for name, rows in expected.get_embedding_tables().items()
    }
    host.fit(batches(columns), verbose=0)
    model, layer = model_on(STRATEGY, columns)
    assert isinstance(layer.embedding, tpu.TPUEmbeddingV2)
    model.fit(batches(columns), verbose=0)

    def tables_of(layer):
        return {
            name: rows.numpy()
            for name, rows in layer.get_embedding_tables().items()
        }

    training.assert_same(tables_of(layer), tables_of(expected))
    assert all(
        (rows != start[name]).any() for name, rows in tables_of(layer).items()
    )
    ids = batches(columns).map(lambda x, y: x)
    np.testing.assert_array_equal(
        model.predict(ids, verbose=0), host.predict(ids, verbose=0)
    )
    training.assert_same(tables_of(layer), tables_of(expected))
    # Keras files do not depend on the runtime.
    model.save_weights(tmp_path / "tpu.weights.h5")
    host.save_weights(tmp_path / "host.weights.h5")
    host.fit(batches(columns), verbose=0)
    trained = tables_of(expected)
    host.load_weights(tmp_path / "tpu.weights.h5")
    training.assert_same(tables_of(expected), tables_of(layer))
    model.load_weights(tmp_path / "host.weights.h5")
    model.fit(batches(columns), verbose=0)
    training.assert_same(tables_of(layer), trained)


def test_configs_of_keras_rs_contain_limits_and_shapes():
    table = keras_rs_configs.TableConfig(
        "words", 10, 2, "ones", "sgd", "sum", "sparsecore", 7, 5
    )
    with STRATEGY.scope():
        layer = tlm.layers.TPUEmbedding(
            {
                "title": keras_rs_configs.FeatureConfig(
                    "title", table, (BATCH, 3), (BATCH, 2)
                )
            }
        )
        layer.build()
    assert layer.embedding._table_to_max_ids_per_sparse_core == {"words": 7}
    assert layer.embedding._table_to_max_unique_ids_per_sparse_core == {
        "words": 5
    }
    found = run(
        layer, {"title": tf.reshape(tf.range(3 * NUM_SAMPLES) % 10, [-1, 3])}
    )
    for part in STRATEGY.experimental_local_results(found["title"]):
        np.testing.assert_array_equal(part, 3 * np.ones([NUM_SAMPLES, 2]))
    with STRATEGY.scope(), pytest.raises(ValueError, match="multiple of.*2"):
        tlm.layers.TPUEmbedding(
            keras_rs_configs.FeatureConfig("title", table, (9, 3), (9, 2))
        )


def test_a_layer_is_called_once_per_step():
    _, layer = model_on(STRATEGY)

    def core():
        with tf.GradientTape() as tape:
            loss = 0.0
            for _ in range(2):
                found = layer(
                    {
                        "title": tf.zeros([NUM_SAMPLES, 1], tf.int64),
                        "user": tf.zeros([NUM_SAMPLES], tf.int64),
                    }
                )
                loss += tf.reduce_sum(found["title"])
        return tape.gradient(loss, layer.trainable_variables[0])

    with pytest.raises(RuntimeError, match="must be called once"):
        run(core)


def test_the_samples_of_all_features_are_counted_for_stacks():
    # TensorFlow's class counts only the samples of the first feature.
    num_samples = [8, 2**16, 2**16]

    def stacks_of(cls):
        with STRATEGY.scope():
            embedding = cls(
                [
                    tpu.FeatureConfig(
                        tpu.TableConfig(64, 128, name=f"table{index}"),
                        output_shape=[number],
                    )
                    for index, number in enumerate(num_samples)
                ],
                tpu.SGD(1.0),
            )
        return {
            layout.stacked_table_name
            for layout in embedding.embedding_layouts.values()
        }

    assert stacks_of(tlm.TPUEmbeddingV2) == {"table0", "table1", "table2"}
    if tf.__version__ >= "2.21":
        assert stacks_of(tpu.TPUEmbeddingV2) == {"table0_table1_table2"}
