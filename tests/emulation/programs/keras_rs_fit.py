"""Runs unmodified keras-rs with `placement="sparsecore"` on emulated TPUs.

Runs in a separate process with the number of cores that the environment sets
(tests/emulation). Expected values come from the same model with tf_layoutmap's
layer on the host.
"""

import os

import h5py
import keras
import keras_rs
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.covering import but
from tests.emulation import training

NUM_CORES = int(os.environ.get("TF_LAYOUTMAP_NUM_CORES", "2"))
SETTING = dict(num_cores=NUM_CORES, deadline=20.0)
STRATEGY = tlm.emulation.enable(**SETTING)
ONE = tf.distribute.get_strategy()

BATCH, NUM_STEPS = 8, 20
OPTIMIZERS = {
    "by_name": lambda: "adagrad",
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(
        0.5, initial_accumulator_value=0.25, clipvalue=0.125
    ),
    "adam": lambda: keras.optimizers.Adam(0.125, weight_decay=0.25),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.5, l1_regularization_strength=0.01, beta=0.1
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    ),
}


def configs(optimizer, placement, columns=1):
    tables = {
        name: keras_rs.layers.TableConfig(
            name,
            num_rows,
            4,
            optimizer=optimizer(),
            combiner=combiner,
            initializer=keras.initializers.RandomNormal(seed=num_rows),
            placement=placement,
        )
        for name, num_rows, combiner in (
            ("words", 23, "sum"),
            ("users", 7, "mean"),
        )
    }
    return {
        feature: keras_rs.layers.FeatureConfig(
            feature, tables[table], (BATCH, columns), (BATCH, 4)
        )
        for feature, table in (
            ("title", "words"),
            ("body", "words"),
            ("user", "users"),
        )
    }


def layer_of(strategy, optimizer, columns=1):
    if strategy is ONE:
        return tlm.layers.TPUEmbedding(
            configs(optimizer, "auto", columns), name="embedding"
        )
    return keras_rs.layers.DistributedEmbedding(
        configs(optimizer, "sparsecore", columns), name="embedding"
    )


def head(found):
    """Combines features by elementwise ops, without sums over samples."""
    return found["title"] * found["user"] + found["body"]


def inputs():
    return {
        name: keras.Input([1], dtype="int64", name=name)
        for name in ("title", "body", "user")
    }


def functional(layer):
    given = inputs()
    return keras.Model(given, head(layer(given)))


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.embedding = layer

    def call(self, inputs, training=None):
        return head(self.embedding(inputs, training=training))


def weighted_sum(y, x):
    return keras.ops.sum(x * y, axis=1)


def make(strategy, optimizer, model=functional, **options):
    if strategy is STRATEGY:
        tlm.emulation.initialize_tpu_system()
    with strategy.scope():
        table_optimizer = OPTIMIZERS[optimizer]()
        layer = layer_of(strategy, lambda: table_optimizer)
        built = model(layer)
        # keras-rs evaluates a schedule at the `iterations` of the table
        # optimizer. This counter is only incremented if the model is compiled
        # with the same optimizer.
        built.compile(
            table_optimizer if optimizer == "schedule" else "sgd",
            weighted_sum,
            metrics=["mae"],
            **options,
        )
    return built, layer


def batches(num_steps=NUM_STEPS):
    rng = np.random.default_rng(3)
    size = num_steps * BATCH
    return tf.data.Dataset.from_tensor_slices(
        (
            {
                "title": rng.integers(0, 23, (size, 1)),
                "body": rng.integers(0, 23, (size, 1)),
                "user": rng.integers(0, 7, (size, 1)),
            },
            rng.standard_normal((size, 4)).astype(np.float32),
        )
    ).batch(BATCH, drop_remainder=True)


def tables_of(layer):
    is_ours = isinstance(layer, tlm.layers.TPUEmbedding)
    found = training.values_of(
        layer.embedding if is_ours else layer._tpu_embedding
    )
    # keras-rs also saves the optimizer's `iterations`, which is not a variable
    # of a table.
    found.pop("schedule_updates", None)
    return found


def on_host(dataset):
    return STRATEGY.experimental_distribute_dataset(
        dataset,
        options=tf.distribute.InputOptions(experimental_fetch_to_device=False),
    )


@pytest.mark.parametrize(
    "optimizer",
    but(OPTIMIZERS, "sgd", "adagrad", "ftrl", "adam", "schedule"),
)
def test_fit_is_bitwise_equal_to_the_host_engine(optimizer):
    host, wanted = make(ONE, optimizer)
    start = tables_of(wanted)
    host.fit(batches(), verbose=0)
    model, layer = make(STRATEGY, optimizer)
    model.fit(batches(), verbose=0)
    training.assert_same(tables_of(layer), tables_of(wanted))
    assert not np.any(tables_of(wanted)["users"] == start["users"])
    np.testing.assert_allclose(
        model.evaluate(batches(2), verbose=0),
        host.evaluate(batches(2), verbose=0),
        rtol=1e-5,
    )
    ids = batches(2).map(lambda x, y: x)
    np.testing.assert_array_equal(
        model.predict(ids, verbose=0), host.predict(ids, verbose=0)
    )
    training.assert_same(tables_of(layer), tables_of(wanted))


def test_fit_accepts_a_dataset_on_the_host():
    host, wanted = make(ONE, "adagrad")
    host.fit(batches(), verbose=0)
    model, layer = make(STRATEGY, "adagrad")
    model.fit(on_host(batches()), steps_per_epoch=NUM_STEPS, verbose=0)
    training.assert_same(tables_of(layer), tables_of(wanted))


def test_a_subclassed_model_requires_a_built_layer():
    model, layer = make(STRATEGY, "adagrad", Subclassed)
    with pytest.raises(RuntimeError, match="Unable to automatically build"):
        model.fit(batches(), verbose=0)
    model, layer = make(STRATEGY, "adagrad", Subclassed)
    with STRATEGY.scope():
        layer.build(
            {
                name: (BATCH // NUM_CORES, 1)
                for name in ("title", "body", "user")
            }
        )
    model.fit(batches(), verbose=0)
    host, wanted = make(ONE, "adagrad", Subclassed)
    host.fit(batches(), verbose=0)
    training.assert_same(tables_of(layer), tables_of(wanted))


def ragged_batches():
    def make_ragged(x, y):
        # Each sample has zero to two ids.
        return {
            name: tf.RaggedTensor.from_tensor(
                tf.concat([ids, ids // 2], axis=1), lengths=tf.range(BATCH) % 3
            )
            for name, ids in x.items()
        }, y

    return batches().map(make_ragged)


def custom_loop(strategy, layer):
    optimizer = keras.optimizers.SGD(0.0)

    @tf.function
    def epoch(batches):
        def core(x, y):
            with tf.GradientTape() as tape:
                found = layer(x, training=True)
                loss = tf.reduce_sum(head(found) * y)
            weights = layer.trainable_variables
            gradients = tape.gradient(loss, weights)
            if strategy is ONE:
                # tf_layoutmap's layer, which is used without a TPU, updates its
                # tables in this call.
                optimizer.apply(gradients, weights)

        for x, y in batches:
            strategy.run(core, args=(x, y))

    epoch(ragged_batches() if strategy is ONE else on_host(ragged_batches()))


@pytest.mark.exhaustive
def test_a_custom_loop_supports_ragged_inputs():
    tables = []
    for strategy in (ONE, STRATEGY):
        if strategy is STRATEGY:
            tlm.emulation.initialize_tpu_system()
        with strategy.scope():
            layer = layer_of(strategy, OPTIMIZERS["adagrad"], columns=2)
            if strategy is STRATEGY:
                layer.build(
                    {
                        name: (BATCH // NUM_CORES, 2)
                        for name in ("title", "body", "user")
                    }
                )
        custom_loop(strategy, layer)
        tables.append(tables_of(layer))
    training.assert_same(tables[1], tables[0])


def test_fit_with_ragged_inputs_raises():
    model, _ = make(STRATEGY, "adagrad")
    with pytest.raises(
        ValueError,
        match="TPUStrategy does not support "
        "distributed datasets with device prefetch",
    ):
        model.fit(ragged_batches(), verbose=0)


def test_a_checkpoint_of_the_embedding_contains_the_tables(tmp_path):
    model, layer = make(STRATEGY, "adagrad")
    model.fit(batches(), verbose=0)
    path = tf.train.Checkpoint(e=layer._tpu_embedding).write(
        str(tmp_path / "it")
    )
    wanted = tables_of(layer)
    model.fit(batches(), verbose=0)
    tf.train.Checkpoint(e=layer._tpu_embedding).read(path)
    training.assert_same(tables_of(layer), wanted)


def test_keras_files_do_not_contain_the_tables(tmp_path):
    # keras-rs documents this limitation. This test fails if a later version
    # removes it.
    model, layer = make(STRATEGY, "adagrad")
    model.fit(batches(2), verbose=0)
    model.save_weights(tmp_path / "it.weights.h5")
    with h5py.File(tmp_path / "it.weights.h5") as file:
        sizes = []
        file.visititems(lambda _, one: sizes.append(getattr(one, "size", 0)))
    assert max(sizes) <= 1
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "it"))
    assert all(
        np.prod(shape) <= 1 for _, shape in tf.train.list_variables(path)
    )


def test_fit_with_jit_compile_raises():
    model, _ = make(STRATEGY, "adagrad", jit_compile=True)
    with pytest.raises(RuntimeError, match="Leave jit_compile out"):
        model.fit(batches(), verbose=0)
