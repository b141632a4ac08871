"""Quantization rounds rows in lookups, but not in tables."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

ROWS = np.random.default_rng(3).uniform(-2, 2, [9, 19]).astype(np.float32)
IDS = [[1, 2, 1], [], [8, 0]]
LIMITS = (17, -0.7, 1.1)


def quantized(rows, num_buckets, lower, upper):
    """Applies the formula of TensorFlow's documentation in float32."""
    lower, upper = np.float32(lower), np.float32(upper)
    quantum = (upper - lower) / np.float32(num_buckets - 1)
    bucket = np.floor(
        (np.clip(rows, lower, upper) - lower) / quantum + np.float32(0.5)
    )
    return bucket * quantum + lower


def embedding_of(*, num_shards=1, length=0, combiner="sum", rows=ROWS):
    def initializer(shape, shard_info=None, dtype=None):
        del shape, dtype
        first = shard_info.offset[0]
        return rows[first : first + shard_info.shape[0]]

    tables = [
        tpu.TableConfig(
            len(rows),
            rows.shape[1],
            initializer,
            tpu.SGD(0.5),
            combiner,
            name,
            quantization_config=tpu.QuantizationConfig(*LIMITS)
            if name == "q"
            else None,
        )
        for name in ("q", "plain")
    ]
    return tlm.TPUEmbedding(
        {
            one.name: tpu.FeatureConfig(one, max_sequence_length=length)
            for one in tables
        },
        None,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )


def ids():
    ragged = tf.ragged.constant(IDS, dtype=tf.int64)
    return {"q": ragged, "plain": ragged}


def in_float32(rows, combiner):
    """Sums rows in the order of ids, as the engine does."""
    out = np.zeros([len(IDS), rows.shape[1]], np.float32)
    for sample, ids_of in enumerate(IDS):
        gain = {
            "sum": 1.0,
            "mean": 1 / max(len(ids_of), 1),
            "sqrtn": 1 / np.sqrt(max(len(ids_of), 1)),
        }[combiner]
        for id_ in ids_of:
            out[sample] += np.float32(gain) * rows[id_]
    return out


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_rows_are_rounded_before_they_are_combined(combiner, num_shards):
    embedding = embedding_of(combiner=combiner, num_shards=num_shards)
    embedding.enqueue(ids(), training=False)
    found = embedding.dequeue()
    np.testing.assert_array_equal(
        found["q"], in_float32(quantized(ROWS, *LIMITS), combiner)
    )
    np.testing.assert_array_equal(found["plain"], in_float32(ROWS, combiner))


def test_rounded_values_are_the_buckets():
    embedding = embedding_of()
    embedding.enqueue(
        {"q": np.arange(9), "plain": np.arange(9)}, training=False
    )
    found = embedding.dequeue()["q"].numpy()
    assert len(np.unique(found)) <= LIMITS[0]
    assert found.min() == np.float32(LIMITS[1])
    np.testing.assert_allclose(found.max(), LIMITS[2], rtol=1e-6)


def test_sequence_positions_are_rounded_and_padding_is_zero():
    embedding = embedding_of(length=2)
    embedding.enqueue(ids(), training=False)
    found = embedding.dequeue()["q"].numpy()
    rounded = quantized(ROWS, *LIMITS)
    np.testing.assert_array_equal(found[0], rounded[[1, 2]])
    assert not found[1].any()


@pytest.mark.parametrize("length", [0, 2])
def test_serving_rounds_bitwise_identically(length):
    embedding = embedding_of(length=length)
    embedding.enqueue(ids(), training=False)
    wanted, found = embedding.dequeue(), embedding(ids())
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_updates_apply_to_the_unrounded_rows():
    embedding = embedding_of()
    embedding.enqueue(ids())
    embedding.apply_gradients(
        tf.nest.map_structure(tf.ones_like, embedding.dequeue())
    )
    times = np.zeros([9, 1], np.float32)
    np.add.at(times, [1, 2, 1, 8, 0], 1)
    for table in embedding.embedding_tables.values():
        np.testing.assert_array_equal(
            table.numpy(), ROWS - np.float32(0.5) * times
        )


def test_nan_is_not_rounded():
    rows = ROWS.copy()
    rows[1, 0] = np.nan
    embedding = embedding_of(rows=rows)
    embedding.enqueue(ids(), training=False)
    found = embedding.dequeue()["q"].numpy()
    assert np.isnan(found[0, 0])
    assert np.isfinite(found[0, 1:]).all()
