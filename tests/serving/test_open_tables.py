"""Tests exports of tables with open vocabularies."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding


def trained(values, num_shards=1, **settings):
    """Returns an embedding with a closed table and a shared open table."""
    words = tpu.TableConfig(
        60,
        4,
        tf.random_uniform_initializer(-1.0, 1.0),
        combiner="mean",
        name="words",
    )
    ids = tpu.TableConfig(
        9,
        4,
        tf.random_uniform_initializer(-1.0, 1.0),
        combiner="sum",
        name="ids",
    )
    features = {
        "title": tpu.FeatureConfig(words),
        "text": tpu.FeatureConfig(words, max_sequence_length=2),
        "id": tpu.FeatureConfig(ids),
    }
    embedding = tlm.TPUEmbedding(
        features,
        tpu.SGD(0.5),
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(60, **settings)},
    )
    embedding.enqueue(inputs(values))
    embedding.dequeue()
    embedding.apply_gradients(
        {
            "title": tf.ones([2, 4]),
            "text": tf.ones([2, 2, 4]),
            "id": tf.ones([2, 4]),
        }
    )
    return embedding


def inputs(values):
    words = tf.ragged.constant(values)
    return {
        "title": words,
        "text": words,
        "id": tf.ragged.constant([[1, 8], [3]], dtype=tf.int64),
    }


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("oov_embedding", ["zeros", "trainable"])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(
    ("trained_ids", "served_ids"),
    [
        ([["red", "fox"], ["hen"]], [["red", "owl", "hen"], ["fox", "cat"]]),
        ([[3, -7], [2**40]], [[3, 5, 2**40], [-7, -(2**62)]]),
    ],
)
def test_exported_keys_match_training(
    tmp_path, trained_ids, served_ids, num_shards, oov_embedding
):
    embedding = trained(trained_ids, num_shards, oov_embedding=oov_embedding)
    expected = embedding(inputs(served_ids))
    assert not np.array_equal(expected["title"][0], expected["title"][1])
    for name, rows, error in (("all", "float32", 0), ("packed", "int8", 0.02)):
        folder = str(tmp_path / name)
        tlm.export(embedding, folder, row_format=rows)
        served = tf.saved_model.load(folder)
        found = served.serve(inputs(served_ids))
        for feature, activations in expected.items():
            np.testing.assert_allclose(
                found[feature], activations, atol=error + 1e-6
            )
        with open(f"{folder}/saved_model.pb", "rb") as graph:
            assert b"LayoutMap>" not in graph.read()


def test_training_after_an_export_does_not_change_its_keys(tmp_path):
    embedding = trained([["red"], ["fox"]])
    tlm.export(embedding, str(tmp_path / "one"))
    expected = embedding(inputs([["red"], ["fox"]]))["title"]
    embedding.vocabularies["words"].evict(["red", "fox"])
    served = tf.saved_model.load(str(tmp_path / "one"))
    np.testing.assert_allclose(
        served.serve(inputs([["red"], ["fox"]]))["title"], expected
    )


def test_ids_of_an_unsupported_dtype_raise(tmp_path):
    embedding = trained([["red"], ["fox"]])
    words, ids = (
        tf.RaggedTensorSpec([None, None], dtype)
        for dtype in (tf.int64, tf.int64)
    )
    with pytest.raises(ValueError, match="must be strings.*integers"):
        tlm.export(
            embedding,
            str(tmp_path / "one"),
            input_signature=[{"title": words, "text": words, "id": ids}],
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match="as those before"):
        embedding(inputs([[1], [2]]))
