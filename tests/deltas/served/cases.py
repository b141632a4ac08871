"""Embeddings, exports and deltas for tests of served models."""

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.host import open_table_cases
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.partition import FixedShardsPartitioner

tpu = tf.tpu.experimental.embedding
# The open table has 104 rows for 300 keys, so it evicts keys and admits them
# again in other rows.
CAPACITY, NUM_KINDS, DIM = 100, 40, 8


def embedding(
    *, num_shards=1, oov_embedding="zeros", settings=None, **arguments
):
    """Returns an embedding with an open table and two closed tables.

    The tables `words` and `kinds` have equal dims, so an export stores them in
    one variable. The rows of `colors` are too short for packing.
    """
    words = tpu.TableConfig(
        CAPACITY,
        DIM,
        combiner="sum",
        name="words",
        initializer=tf.random_uniform_initializer(-1.0, 1.0),
    )
    kinds = tpu.TableConfig(
        NUM_KINDS,
        DIM,
        combiner="sum",
        name="kinds",
        initializer=tf.random_uniform_initializer(-1.0, 1.0, seed=1),
    )
    colors = tpu.TableConfig(
        5, 3, combiner="sum", name="colors", initializer=tf.ones
    )
    found = tlm.TPUEmbedding(
        {
            "word": tpu.FeatureConfig(words),
            "kind": tpu.FeatureConfig(kinds),
            "color": tpu.FeatureConfig(colors),
        },
        tpu.Adagrad(0.25),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(
                CAPACITY,
                ttl_steps=6,
                oov_embedding=oov_embedding,
                **(settings or {}),
            )
        },
        partitioner=FixedShardsPartitioner(num_shards),
        **arguments,
    )
    found.build()
    return found


def train(one, step, strings=False):
    """Runs a training step whose batch depends only on the step number."""
    rng = np.random.default_rng(step)
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 8))])
    words = rng.zipf(1.3, splits[-1]) % 300 + step * 3
    words = open_table_cases.ragged(words, splits)
    one.enqueue(
        {
            "word": tf.strings.as_string(words) if strings else words,
            "kind": tf.constant(rng.integers(0, NUM_KINDS, 3)),
            "color": tf.constant([step % 5]),
        }
    )
    one.dequeue()
    one.apply_gradients(
        {
            "word": tf.constant(rng.normal(size=[8, DIM]), tf.float32),
            "kind": tf.constant(rng.normal(size=[3, DIM]), tf.float32),
            "color": tf.ones([1, 3]),
        }
    )


def save(one, path):
    """Saves a checkpoint and returns its prefix."""
    return tf.train.Checkpoint(embedding=one).save(str(path))


def signature(strings=False):
    return [
        {
            "word": tf.TensorSpec([None], tf.string if strings else tf.int64),
            "kind": tf.TensorSpec([None], tf.int64),
            "color": tf.TensorSpec([None], tf.int64),
        }
    ]


def inputs(strings=False):
    """Returns more keys than the vocabulary has rows, and all rows."""
    words = tf.range(400, dtype=tf.int64)
    return {
        "word": tf.strings.as_string(words) if strings else words,
        "kind": tf.range(NUM_KINDS, dtype=tf.int64),
        "color": tf.range(5, dtype=tf.int64),
    }


def export(one, path, row_format="float32", *, strings=False, **arguments):
    """Exports the embedding and returns the path as a str."""
    tlm.export(
        one, path, row_format, input_signature=signature(strings), **arguments
    )
    return str(path)


def stored(path):
    """Returns the bytes of all variables of a SavedModel."""
    reader = storage.open_checkpoint(f"{path}/variables/variables")
    return {
        key: np.asarray(reader.get_tensor(key)).tobytes()
        for key in reader.get_variable_to_shape_map()
    }


def in_memory(served):
    """Returns the bytes of all tables and keys of a loaded export."""
    return {
        f"{name}/{number}/.ATTRIBUTES/VARIABLE_VALUE": one.numpy().tobytes()
        for name in ("tables", "keys")
        for number, one in enumerate(getattr(served, name))
    }


def assert_same_tables(found, wanted):
    """Asserts that all tables and keys in `found` are equal in `wanted`."""
    assert found
    for name, value in found.items():
        assert value == wanted[name], name


def base_and_writer(one, folder):
    """Saves the base, and returns its prefix and a writer of deltas."""
    base = save(one, folder / "base")
    return base, tlm.deltas.DeltaWriter(one, folder / "deltas", base=base)
