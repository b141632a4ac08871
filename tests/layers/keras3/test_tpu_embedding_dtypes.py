"""Tests `tlm.layers.TPUEmbedding` with tables of 16-bit rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.layers.keras3 import test_tpu_embedding_replicas as models

tpu = tf.tpu.experimental.embedding

DTYPES = ["bfloat16", "float16"]


def make(dtype, **options):
    return lambda: models.Product(
        models.make_layer(table_dtypes=dtype, rounding_seed=3, **options)
    )


def functional(dtype, num_shards=1, optimizer=None):
    inputs = {
        "title": keras.Input([3], dtype="int64", name="title"),
        "body": keras.Input([2], dtype="int64", name="body"),
        "user": keras.Input([], dtype="int64", name="user"),
    }
    found = models.make_layer(
        optimizer,
        table_dtypes=dtype,
        rounding_seed=3,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )(inputs)
    return keras.Model(
        inputs, found["title"] * found["user"] + found["body"][:, 0]
    )


def one_replica():
    return tf.distribute.get_strategy()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_replicas_and_shards_is_bitwise_equal(dtype):
    expected = models.embedding_of(models.fit(one_replica(), make(dtype)))
    for num_replicas, num_shards in [(2, 1), (1, 3)]:
        found = models.embedding_of(
            models.fit(
                strategies.mirrored(num_replicas),
                make(
                    dtype,
                    partitioner=tlm.partitioners.FixedShardsPartitioner(
                        num_shards
                    ),
                ),
            )
        )
        models.assert_same(found, expected)
    for rows in expected.embedding_tables.values():
        assert rows.dtype == tf.as_dtype(dtype)


def test_training_is_close_to_tables_of_32_bit_rows():
    found = models.values_of(
        models.embedding_of(models.fit(one_replica(), make("bfloat16")))
    )
    expected = models.values_of(models.with_one_replica())
    for name in ("words", "users"):
        # bfloat16 has 8 bits of precision, and each of the 6 steps rounds
        # once.
        np.testing.assert_allclose(
            found[name].astype(np.float32), expected[name], atol=0.05
        )
        assert np.any(found[name].astype(np.float32) != expected[name])


def test_each_table_can_have_a_different_dtype():
    layer = models.make_layer(table_dtypes={"users": "float16"})
    assert {
        table.name: rows.dtype.name
        for table, rows in layer.embedding_tables.items()
    } == {"words": "float32", "users": "float16"}
    x, _ = models.batches(1)
    for training in (False, True):
        found = layer(x, training=training)
        assert {one.dtype for one in found.values()} == {tf.float32}


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_a_saved_model_resumes_bitwise_equal(dtype, suffix, tmp_path):
    model = models.compiled(
        one_replica(), lambda: functional(dtype, num_shards=3)
    )
    x, y = models.batches()
    models.train(model, x, y)
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(path)
        again = keras.models.load_model(
            path, custom_objects={"weighted_sum": models.weighted_sum}
        )
    else:
        model.save_weights(path)
        again = models.compiled(one_replica(), lambda: functional(dtype))
        again.load_weights(path)
    for one in (model, again):
        models.train(one, x, y)
    models.assert_same(models.embedding_of(again), models.embedding_of(model))
    rows = models.embedding_of(again).embedding_tables
    assert {one.dtype for one in rows.values()} == {tf.as_dtype(dtype)}


@pytest.mark.parametrize(
    "saved, found",
    [("bfloat16", "float16"), ("bfloat16", None), (None, "float16")],
)
def test_a_file_of_another_dtype_raises(saved, found, tmp_path):
    path = str(tmp_path / "model.weights.h5")
    functional(saved).save_weights(path)
    model = functional(found)
    before = models.values_of(models.embedding_of(model))
    with pytest.raises(ValueError, match="'embedding' must hold.*parameters"):
        model.load_weights(path)
    for name, rows in models.values_of(models.embedding_of(model)).items():
        np.testing.assert_array_equal(rows, before[name])


@pytest.mark.parametrize(
    "optimizer",
    [
        tlm.optimizers.RowwiseAdagrad(0.5, clipvalue=1.0),
        tlm.optimizers.LAMB(0.5, weight_decay_factor=0.25),
    ],
    ids=["row-wise", "LAMB"],
)
def test_a_saved_model_keeps_the_rules_of_the_host_engine(optimizer, tmp_path):
    model = models.compiled(
        one_replica(), lambda: functional("bfloat16", optimizer=optimizer)
    )
    x, y = models.batches()
    model.save(str(tmp_path / "model.keras"))
    again = keras.models.load_model(
        str(tmp_path / "model.keras"),
        custom_objects={"weighted_sum": models.weighted_sum},
    )
    for one in (model, again):
        models.train(one, x, y)
    models.assert_same(models.embedding_of(again), models.embedding_of(model))


@pytest.mark.slow
def test_an_exported_model_returns_the_results_of_predict(tmp_path):
    model = models.fit(one_replica(), lambda: functional("bfloat16"))
    x, _ = models.batches(1)
    model.export(str(tmp_path / "m"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    np.testing.assert_array_equal(
        loaded.serve(tf.nest.map_structure(tf.constant, x)),
        model.predict(x, verbose=0),
    )


def test_an_invalid_table_dtype_raises():
    with pytest.raises(ValueError, match="`table_dtypes`.*'users'"):
        models.make_layer(table_dtypes={"users": "int8"})
