"""Embeddings for tests of deltas, and training steps that change them."""

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.host import open_table_cases
from tf_layoutmap.partition import FixedShardsPartitioner

tpu = tf.tpu.experimental.embedding
# The open table counts keys in a sketch before it admits them. The table has
# 104 rows for 300 keys, so it evicts keys.
SETTINGS = {"admission": "count", "min_count": 2, "ttl_steps": 6}


def embedding(*, num_shards=1, optimizer=None, capacity=100, **arguments):
    """Returns an embedding with the tables `words` (open) and `kinds`."""
    words = tpu.TableConfig(
        capacity,
        3,
        combiner="sum",
        name="words",
        initializer=tf.random_uniform_initializer(-1.0, 1.0),
    )
    kinds = tpu.TableConfig(
        40,
        2,
        combiner="sum",
        name="kinds",
        initializer=tf.constant_initializer(np.arange(80).reshape(40, 2) / 8),
    )
    found = tlm.TPUEmbedding(
        {"word": tpu.FeatureConfig(words), "kind": tpu.FeatureConfig(kinds)},
        optimizer or tpu.Adam(0.25),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(capacity, **SETTINGS)
        },
        partitioner=FixedShardsPartitioner(num_shards),
        **arguments,
    )
    found.build()
    return found


def train(one, step):
    """Runs a training step whose batch depends only on the step number."""
    rng = np.random.default_rng(step)
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 8))])
    words = rng.zipf(1.3, splits[-1]) % 300 + step * 3
    one.enqueue(
        {
            "word": open_table_cases.ragged(words, splits),
            "kind": tf.constant(rng.integers(0, 40, 3)),
        }
    )
    one.dequeue()
    one.apply_gradients(
        {
            "word": tf.constant(rng.integers(-4, 5, [8, 3]), tf.float32),
            "kind": tf.constant(rng.integers(-4, 5, [3, 2]), tf.float32),
        }
    )


def tensors(path):
    """Returns all tensors of a checkpoint as bytes, except save counters."""
    reader = tf.train.load_checkpoint(path)
    return {
        key: np.asarray(reader.get_tensor(key)).tobytes()
        for key in reader.get_variable_to_shape_map()
        if not key.startswith(("save_counter", "_CHECKPOINTABLE"))
    }


def save(one, path):
    """Saves a checkpoint and returns its prefix."""
    return tf.train.Checkpoint(embedding=one).save(str(path))
