"""Compares initializers, regularizers and constraints with `Embedding`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

# `make test` does not run each case with each version of Keras.
pytestmark = pytest.mark.covering(1)

tf_keras = pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras"
)

KERAS = {
    "keras": (keras, tlm.layers.ShardedEmbedding),
    "tf_keras": (tf_keras, tlm.layers.tf_keras.ShardedEmbedding),
}
ROWS, DIM = 11, 3
VALUES = np.random.default_rng(3).normal(size=[ROWS, DIM]).astype(np.float32)
IDS = np.array([[0, 3], [3, 10], [3, 7], [0, 0]])
# The ids of a batch do not repeat, because Keras optimizers square each
# gradient of a repeated row separately.
DISTINCT = np.array([[0, 3], [5, 10], [3, 7], [0, 1]])


@pytest.fixture(params=KERAS)
def keras_version(request):
    return KERAS[request.param]


def seeded_table(library, layer_class, make, shape=(ROWS, DIM), **options):
    library.utils.set_random_seed(7)
    layer = layer_class(*shape, embeddings_initializer=make(library), **options)
    layer.build([None])
    return layer


INITIALIZERS = {
    "uniform": lambda k: "uniform",
    "normal": lambda k: "normal",
    "truncated": lambda k: "truncated_normal",
    "seeded uniform": lambda k: k.initializers.RandomUniform(-1, 2, seed=3),
    "seeded normal": lambda k: k.initializers.RandomNormal(1.0, 0.5, seed=4),
    "seeded truncated": lambda k: k.initializers.TruncatedNormal(
        1.0, 0.5, seed=5
    ),
    "glorot": lambda k: "glorot_uniform",
    "orthogonal": lambda k: "orthogonal",
    "constant": lambda k: k.initializers.Constant(3.0),
    "zeros": lambda k: "zeros",
}


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initial_values_equal_embedding_for_any_number_of_shards(
    keras_version, name
):
    library, sharded = keras_version
    make = INITIALIZERS[name]
    for shape, num_shards in (
        ((ROWS, DIM), 1),
        ((ROWS, DIM), 3),
        ((50, 4), 8),
        ((13, 5), 13),
        ((1001, 33), 5),
    ):
        expected = seeded_table(library, library.layers.Embedding, make, shape)
        for optimizer in (None, "sgd"):
            layer = seeded_table(
                library,
                sharded,
                make,
                shape,
                num_shards=num_shards,
                optimizer=optimizer,
            )
            np.testing.assert_array_equal(
                layer.embeddings.numpy(), np.asarray(expected.weights[0])
            )


@pytest.mark.parametrize("name", ["uniform", "normal", "truncated"])
def test_shards_are_initialized_without_the_full_table(
    keras_version, name, monkeypatch
):
    library, sharded = keras_version
    kind = type(library.initializers.get(INITIALIZERS[name](library)))

    def fail(self, shape, dtype=None, **kwargs):
        raise AssertionError(f"asked for {shape}")

    monkeypatch.setattr(kind, "__call__", fail)
    seeded_table(library, sharded, INITIALIZERS[name], num_shards=4)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_initial_values_of_other_dtypes_equal_embedding(keras_version, dtype):
    library, sharded = keras_version
    expected, layer = (
        seeded_table(library, one, INITIALIZERS["uniform"], dtype=dtype, **more)
        for one, more in (
            (library.layers.Embedding, {}),
            (sharded, {"num_shards": 4}),
        )
    )
    np.testing.assert_array_equal(
        layer.embeddings.numpy(), np.asarray(expected.weights[0])
    )


def test_a_seed_generator_advances_once_per_table():
    tables = []
    for make in (
        keras.layers.Embedding,
        lambda *a, **k: tlm.layers.ShardedEmbedding(*a, num_shards=3, **k),
    ):
        initializer = keras.initializers.RandomNormal(
            seed=keras.random.SeedGenerator(5)
        )
        for _ in range(2):
            layer = make(ROWS, DIM, embeddings_initializer=initializer)
            layer.build()
            tables.append(
                np.asarray(
                    layer.embeddings.numpy()
                    if hasattr(layer, "num_shards")
                    else layer.weights[0]
                )
            )
    np.testing.assert_array_equal(tables[0], tables[2])
    np.testing.assert_array_equal(tables[1], tables[3])
    assert not np.array_equal(tables[0], tables[1])


# In the following tests, the model's optimizer trains the table, and the result
# is compared with `Embedding`.


def values_of(library):
    return (
        library.initializers.Constant(VALUES)
        if (library is tf_keras)
        else (lambda shape, dtype=None: VALUES)
    )


def by_shard(shard_info):
    start = shard_info.offset[0]
    return VALUES[start : start + shard_info.shape[0]]


def trained(library, layer, optimizer, **compile_options):
    inputs = library.Input([2], dtype="int64")
    model = library.Model(inputs, layer(inputs))
    model.compile(
        optimizer,
        loss=lambda y, x: tf.reduce_sum(x * y, [1, 2]),
        **compile_options,
    )
    y = np.arange(24, dtype=np.float32).reshape(4, 2, 3) / 8
    model.fit(DISTINCT, y, batch_size=2, epochs=2, verbose=0, shuffle=False)
    return model.evaluate(DISTINCT, y, batch_size=4, verbose=0)


RULES = {
    "l2": lambda k: {"embeddings_regularizer": k.regularizers.L2(0.25)},
    "own": lambda k: {"embeddings_regularizer": lambda w: tf.reduce_max(w)},
    "orthogonal": lambda k: {
        "embeddings_regularizer": k.regularizers.OrthogonalRegularizer(
            0.25, mode="columns"
        )
    },
    "columns": lambda k: {"embeddings_constraint": k.constraints.MaxNorm(1.0)},
    "rows": lambda k: {"embeddings_constraint": k.constraints.UnitNorm(axis=1)},
    "both": lambda k: {
        "embeddings_constraint": "non_neg",
        "embeddings_regularizer": "l1",
    },
}
OPTIMIZERS = {
    "sgd": lambda k: k.optimizers.SGD(0.125, momentum=0.5),
    "adam": lambda k: k.optimizers.Adam(0.125),
}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_rules_equal_embedding_for_any_number_of_shards(
    keras_version, rule, optimizer
):
    assert_as_embedding(*keras_version, RULES[rule], OPTIMIZERS[optimizer])


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("rule", ["rows", "own"])
def test_rules_of_one_shard_equal_embedding(keras_version, rule):
    assert_as_embedding(
        *keras_version, RULES[rule], OPTIMIZERS["adam"], num_shards=1
    )


@pytest.mark.exhaustive
def test_rules_apply_under_legacy_optimizers():
    sharded = tlm.layers.tf_keras.ShardedEmbedding
    make = lambda k: k.optimizers.legacy.Adam(0.125)  # noqa: E731
    assert_as_embedding(tf_keras, sharded, RULES["l2"], make)
    # As in `tf_keras.layers.Embedding`, a constraint on a sparse gradient
    # raises an error.
    layer = sharded(ROWS, DIM, num_shards=3, embeddings_constraint="non_neg")
    with pytest.raises(RuntimeError, match="constraint function on a sparse"):
        trained(tf_keras, layer, make(tf_keras))


def assert_as_embedding(library, sharded, rule, make_optimizer, num_shards=3):
    options = rule(library)
    unsharded = library.layers.Embedding(
        ROWS, DIM, embeddings_initializer=values_of(library), **options
    )
    expected = trained(library, unsharded, make_optimizer(library))
    layer = sharded(
        ROWS,
        DIM,
        num_shards=num_shards,
        embeddings_initializer=by_shard,
        **options,
    )
    found = trained(library, layer, make_optimizer(library))
    # Sums over shards and rows are computed in a different order.
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(
        layer.embeddings.numpy(), np.asarray(unsharded.weights[0]), atol=2e-6
    )
    assert not np.allclose(layer.embeddings.numpy(), VALUES)


# In the following tests, the layers have an optimizer. They apply regularizers
# and constraints only to rows of the batch.


def test_a_self_trained_table_regularizes_each_row_once_per_call(
    keras_version,
):
    library, sharded = keras_version
    layer = sharded(
        ROWS,
        DIM,
        num_shards=3,
        embeddings_initializer=by_shard,
        optimizer=tf.tpu.experimental.embedding.SGD(0.5),
        embeddings_regularizer=library.regularizers.L2(0.25),
    )
    inputs = library.Input([2], dtype="int64")
    model = library.Model(inputs, layer(inputs))
    model.compile("sgd", loss=lambda y, x: 0.0 * tf.reduce_sum(x, [1, 2]))
    y = np.zeros([4, 2, 3], np.float32)
    distinct = np.unique(IDS)
    loss = model.evaluate(IDS, y, verbose=0)
    np.testing.assert_allclose(
        loss, 0.25 * (VALUES[distinct] ** 2).sum(), rtol=1e-6
    )
    model.fit(IDS, y, batch_size=4, verbose=0)
    expected = VALUES.copy()
    # The gradient of the regularizer is 2 * 0.25 * row, and the learning rate
    # is 0.5.
    expected[distinct] *= 0.75
    np.testing.assert_allclose(layer.embeddings.numpy(), expected, rtol=1e-6)


def test_a_self_trained_table_constrains_only_rows_of_the_step(keras_version):
    library, sharded = keras_version
    layer = sharded(
        ROWS,
        DIM,
        num_shards=3,
        embeddings_initializer=by_shard,
        optimizer="adagrad",
        embeddings_constraint=library.constraints.UnitNorm(axis=1),
    )
    trained(library, layer, "sgd")
    found = layer.embeddings.numpy()
    distinct = np.unique(DISTINCT)
    np.testing.assert_allclose(
        np.linalg.norm(found[distinct], axis=1), 1, rtol=1e-5
    )
    others = np.setdiff1d(np.arange(ROWS), distinct)
    np.testing.assert_array_equal(found[others], VALUES[others])


@pytest.mark.parametrize("axis", [0, [0, 1], -2])
def test_constraints_across_rows_raise_if_a_table_trains_itself(
    keras_version, axis
):
    library, sharded = keras_version
    with pytest.raises(ValueError, match="treat each row independently"):
        sharded(
            ROWS,
            DIM,
            optimizer="sgd",
            embeddings_constraint=library.constraints.MaxNorm(1.0, axis),
        )


@pytest.mark.parametrize(
    "argument", ["embeddings_regularizer", "embeddings_constraint"]
)
def test_an_invalid_rule_raises(keras_version, argument):
    library, sharded = keras_version
    with pytest.raises((TypeError, ValueError), match="3|nonsense"):
        sharded(ROWS, DIM, **{argument: 3})
    with pytest.raises((TypeError, ValueError), match="nonsense"):
        sharded(ROWS, DIM, **{argument: "nonsense"})


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_rules_are_saved_with_the_layer(keras_version, optimizer, tmp_path):
    library, sharded = keras_version
    layer = sharded(
        ROWS,
        DIM,
        num_shards=3,
        optimizer=optimizer,
        embeddings_regularizer=library.regularizers.L2(0.25),
        embeddings_constraint=library.constraints.UnitNorm(axis=1),
    )
    inputs = library.Input([2], dtype="int64")
    model = library.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    again = library.models.load_model(tmp_path / "model.keras").layers[-1]
    assert isinstance(again.embeddings_regularizer, library.regularizers.L2)
    assert again.embeddings_constraint.axis == 1
    assert again.get_config() == layer.get_config()
    plain = {
        name: value
        for name, value in layer.get_config().items()
        if name not in ("embeddings_regularizer", "embeddings_constraint")
    }
    # These entries are optional.
    assert sharded.from_config(plain).embeddings_regularizer is None
