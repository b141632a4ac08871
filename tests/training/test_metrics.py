"""Compares the metric of trained models with stock Keras.

Each way to train a table is compared with stock `Embedding` layers on the same
small problem: the AUC on other samples differs by at most 0.01, and every
trainable weight moves. A default that hardly trains a table fails here.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
VERSIONS = {"keras": keras, "tf_keras": tf_keras}
# The ids of users and items, and the number of columns of a table.
SIZES = {"users": 80, "items": 40}
DIM = 4
BATCH, EPOCHS = 512, 4


@functools.cache
def samples():
    """Returns ids and labels: 2,048 samples to train, and 4,096 to test."""
    rng = np.random.default_rng(5)
    users, items = (rng.normal(size=size) for size in SIZES.values())
    ids = np.stack(
        [rng.integers(0, size, 6144) for size in SIZES.values()], axis=1
    )
    logits = 2 * (users[ids[:, 0]] + items[ids[:, 1]])
    labels = rng.random(6144) < 1 / (1 + np.exp(-logits))
    return ids.astype(np.int64), labels.astype("f")[:, None]


def auc(model):
    """Returns the area under the ROC curve on the test samples."""
    ids, labels = samples()
    scores = np.asarray(model(ids[2048:]))[:, 0]
    order = np.argsort(np.argsort(scores)) + 1
    is_one = labels[2048:, 0] == 1
    ones, zeros = np.sum(is_one), np.sum(~is_one)
    return (order[is_one].sum() - ones * (ones + 1) / 2) / (ones * zeros)


def model_of(version, tables):
    """Returns a model of tables, which take a column of ids each."""
    ids = version.Input([2], dtype="int64")
    rows = [table(ids[:, number]) for number, table in enumerate(tables)]
    both = version.layers.Concatenate()(rows)
    return version.Model(ids, version.layers.Dense(1)(both))


def stock_tables(version):
    return [
        version.layers.Embedding(size, DIM, name=name)
        for name, size in SIZES.items()
    ]


def sharded(version, optimizer, with_keys=False):
    layers = tlm.layers if version is keras else tlm.layers.tf_keras
    return [
        layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(128) if with_keys else size,
            DIM,
            optimizer=optimizer() if callable(optimizer) else optimizer,
            name=name,
        )
        for name, size in SIZES.items()
    ]


# The ways to train tables. Each function gets the version and the optimizer and
# returns a compiled model.


def compiled(version, optimizer, model):
    model.compile(
        optimizer,
        version.losses.BinaryCrossentropy(from_logits=True),
        # Tracing would take most of the time; `loop` traces its steps.
        run_eagerly=True,
    )
    return model


def stock(version, optimizer):
    return compiled(
        version, optimizer, model_of(version, stock_tables(version))
    )


def replaced(version, optimizer):
    model = stock(version, optimizer)
    assert len(tlm.layers.shard_embeddings(model, min_rows=1).replaced) == 2
    return model


def replaced_before_compile(version, optimizer):
    model = model_of(version, stock_tables(version))
    tlm.layers.shard_embeddings(model, min_rows=1)
    return compiled(version, optimizer, model)


def created_in_scope(version, optimizer):
    with tlm.layers.sharded_embeddings(min_rows=1):
        model = model_of(version, stock_tables(version))
    return compiled(version, optimizer, model)


def with_tables(optimizer, **options):
    def make(version, model_optimizer):
        tables = sharded(version, optimizer, **options)
        return compiled(version, model_optimizer, model_of(version, tables))

    return make


def features(version, optimizer):
    layers = tlm.layers if version is keras else tlm.layers.tf_keras
    ids = version.Input([2], dtype="int64")
    config = {
        name: tpu.FeatureConfig(
            tpu.TableConfig(
                size,
                DIM,
                tf.random_uniform_initializer(-0.05, 0.05, seed=size),
                combiner="sum",
                name=name,
            )
        )
        for name, size in SIZES.items()
    }
    rows = layers.TPUEmbedding(config, tpu.Adagrad(2.0))(
        {name: ids[:, n : n + 1] for n, name in enumerate(SIZES)}
    )
    both = version.layers.Concatenate()([rows[name] for name in SIZES])
    model = version.Model(ids, version.layers.Dense(1)(both))
    return compiled(version, optimizer, model)


WAYS = {
    "shard_embeddings": replaced,
    "shard_embeddings before compile": replaced_before_compile,
    "sharded_embeddings": created_in_scope,
    "ShardedEmbedding, model": with_tables("model"),
    "ShardedEmbedding, None": with_tables(None),
    "ShardedEmbedding, Adagrad": with_tables(lambda: tpu.Adagrad(2.0)),
    "OpenVocabulary, Adagrad": with_tables(
        lambda: tpu.Adagrad(2.0), with_keys=True
    ),
    "TPUEmbedding, Adagrad": features,
}


def schedule(version):
    return version.optimizers.schedules.CosineDecay(0.3, 16)


def loss_scaled(version):
    adam = version.optimizers.Adam(0.2)
    if version is keras:
        return keras.optimizers.LossScaleOptimizer(adam)
    return tf_keras.mixed_precision.LossScaleOptimizer(adam)


OPTIMIZERS = {
    "adam": lambda v: v.optimizers.Adam(0.2),
    "adamw": lambda v: v.optimizers.AdamW(0.2, weight_decay=0.01),
    "momentum": lambda v: v.optimizers.SGD(2.0, momentum=0.9),
    "adagrad": lambda v: v.optimizers.Adagrad(2.0),
    "schedule": lambda v: v.optimizers.Adam(schedule(v)),
    "ema": lambda v: v.optimizers.Adam(0.2, use_ema=True, ema_momentum=0.5),
    "clipping": lambda v: v.optimizers.Adam(0.2, global_clipnorm=0.1),
    "loss scaling": loss_scaled,
}


def fit(version, model):
    ids, labels = samples()
    model.fit(
        ids[:2048], labels[:2048], batch_size=BATCH, epochs=EPOCHS, verbose=0
    )


def loop(version, model):
    """Trains with a tape, in a `tf.function`."""
    loss_of = version.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(ids, training=True))
            if hasattr(model.optimizer, "get_scaled_loss"):
                loss = model.optimizer.get_scaled_loss(loss)
            elif version is keras:
                loss = model.optimizer.scale_loss(loss)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        if hasattr(model.optimizer, "get_unscaled_gradients"):
            gradients = model.optimizer.get_unscaled_gradients(gradients)
        model.optimizer.apply_gradients(zip(gradients, weights))

    ids, labels = samples()
    rng = np.random.default_rng(1)
    for _ in range(EPOCHS):
        for batch in rng.permutation(2048).reshape(-1, BATCH):
            step(ids[batch], labels[batch])
    model.optimizer.finalize_variable_values(model.trainable_variables)


LOOPS = {"fit": fit, "loop": loop}


def weights_of(model):
    """Returns all trained weights and tables by name."""
    found = {}
    for layer in model.layers:
        if hasattr(layer, "embedding_tables"):
            found |= {
                one.name: rows.numpy()
                for one, rows in layer.embedding_tables.items()
            }
        elif hasattr(layer, "embeddings"):
            found[layer.name] = np.asarray(layer.embeddings)
        else:
            for number, one in enumerate(layer.trainable_variables):
                found[f"{layer.name}/{number}"] = one.numpy()
    return found


def trained(way, version, optimizer, run):
    """Returns the metric; raises if a weight did not move."""
    version.utils.set_random_seed(7)
    model = way(version, OPTIMIZERS[optimizer](version))
    before = weights_of(model)
    run(version, model)
    after = weights_of(model)
    same = [
        name for name in before if np.array_equal(before[name], after[name])
    ]
    assert len(before) == 4 and not same, same
    return auc(model)


@functools.cache
def expected(version, optimizer, run):
    return trained(stock, VERSIONS[version], optimizer, LOOPS[run])


@pytest.mark.filterwarnings("ignore:use_ema")
@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("way", WAYS)
def test_the_metric_equals_stock(way, version, optimizer, run):
    found = trained(WAYS[way], VERSIONS[version], optimizer, LOOPS[run])
    reference = expected(version, optimizer, run)
    print(f"{way}, {version}, {optimizer}, {run}: {found:.4f} {reference:.4f}")
    assert reference > 0.8
    assert abs(found - reference) < 0.01
