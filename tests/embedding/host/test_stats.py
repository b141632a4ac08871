"""Tests statistics of an embedding, and the handling of out-of-range ids."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

RAGGED = tf.ragged.constant([[-1, 1], [10, 2, 2], []], dtype=tf.int64)


def embedding_of(out_of_range="error", *, length=0, combiner="mean"):
    return tlm.TPUEmbedding(
        {
            "x": tpu.FeatureConfig(
                tpu.TableConfig(
                    10,
                    2,
                    lambda shape: tf.reshape(tf.range(20.0), shape),
                    combiner=combiner,
                    name="words",
                ),
                max_sequence_length=length,
            )
        },
        tpu.Adam(0.5),
        out_of_range=out_of_range,
    )


def look_up(value, *args, **options):
    embedding = embedding_of(*args, **options)
    embedding.enqueue({"x": value})
    return embedding, embedding.dequeue()["x"].numpy()[..., 0].tolist()


def test_dropped_ids_are_ignored():
    embedding, found = look_up(RAGGED, "drop")
    assert found == [2, 4, 0]
    counts = embedding.stats()["features"]["x"]
    assert counts == {
        "num_samples": 3,
        "num_ids": 5,
        "num_dropped": 2,
        "num_clipped": 0,
        "num_truncated": 0,
    }
    embedding.apply_gradients({"x": tf.ones([3, 2])})
    [rows] = embedding.embedding_tables.values()
    changed = rows.numpy()[:, 0] != np.arange(0, 20, 2)
    assert np.flatnonzero(changed).tolist() == [1, 2]


def test_clipped_ids_become_the_nearest_row():
    embedding, found = look_up(RAGGED, "clip")
    assert found[:1] + found[2:] == [1, 0]
    np.testing.assert_allclose(found[1], (18 + 4 + 4) / 3, rtol=1e-6)
    assert embedding.stats()["features"]["x"]["num_clipped"] == 2


def test_a_dropped_id_leaves_its_position_empty():
    embedding, found = look_up(RAGGED, "drop", length=2)
    assert found == [[0, 2], [0, 4], [0, 0]]
    assert embedding.stats()["features"]["x"]["num_truncated"] == 1


def test_weights_of_dropped_ids_are_dropped():
    embedding = embedding_of("drop", combiner="sum")
    embedding.enqueue(
        {"x": RAGGED},
        {"x": RAGGED.with_values(tf.constant([9.0, 2.0, 9.0, 3.0, 4.0]))},
    )
    assert embedding.dequeue()["x"].numpy()[:, 0].tolist() == [4, 28, 0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", ["ragged", "sparse"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("length", [0, 2])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("out_of_range", ["drop", "clip"])
def test_serving_handles_out_of_range_ids_equally(
    out_of_range, combiner, length, weighted, form
):
    embedding = embedding_of(out_of_range, combiner=combiner, length=length)
    ids, weights = RAGGED, None
    if weighted and not length:
        weights = ids.with_values(tf.constant([9.0, 2.0, 8.0, 3.0, 4.0]))
    if form == "sparse":
        ids = ids.to_sparse()
        weights = None if weights is None else weights.to_sparse()
    embedding.enqueue({"x": ids}, {"x": weights}, training=False)
    np.testing.assert_allclose(
        embedding({"x": ids}, {"x": weights})["x"],
        embedding.dequeue()["x"],
        rtol=1e-6,
    )


def test_serving_with_an_invalid_option_raises():
    embedding = embedding_of()
    with pytest.raises(ValueError, match="`out_of_range` must be one of"):
        tlm.serving.serving_embedding_lookup(
            {}, None, embedding.embedding_tables, {}, out_of_range="wrap"
        )


def test_out_of_range_ids_raise_by_default():
    with pytest.raises(tf.errors.InvalidArgumentError, match="id -1"):
        look_up(RAGGED)


def test_bytes_and_unique_rows_are_counted_per_table():
    embedding = embedding_of()
    embedding.build()
    assert embedding.stats()["tables"]["words"]["unique_ratio"] is None
    for _ in range(2):
        embedding.enqueue({"x": tf.constant([[1, 2], [2, 2]])})
        embedding.apply_gradients(embedding.dequeue())
    assert embedding.stats()["tables"]["words"] == {
        "num_bytes": 80,
        "num_slot_bytes": 160,
        "num_lookups": 8,
        "num_unique_rows": 4,
        "unique_ratio": 0.5,
    }
    assert embedding.stats()["features"]["x"]["num_samples"] == 4


def test_a_rejected_batch_is_not_counted():
    embedding = embedding_of()
    with pytest.raises(tf.errors.InvalidArgumentError):
        embedding.enqueue({"x": RAGGED})
    assert embedding.stats()["features"]["x"]["num_ids"] == 0
