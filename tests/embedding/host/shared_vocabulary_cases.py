"""Embeddings with two tables of one open vocabulary, and their checks."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.partition import FixedShardsPartitioner

tpu = tf.tpu.experimental.embedding

# The columns of the tables.
DIMS = {"wide": 1, "deep": 3}
POLICY = {
    "admission": "count",
    "min_count": 2,
    "evict": "lfu",
    "half_life_steps": 2,
}


def create(
    capacity=100,
    *,
    shared=True,
    owner="deep",
    optimizers=None,
    initializer=None,
    num_shards=1,
    on_evict=None,
    arguments=None,
    **policy,
):
    """Returns an embedding with two tables of one vocabulary, and its configs.

    If `shared` is False, each table has a separate vocabulary.
    """
    optimizers = optimizers or {"wide": tpu.SGD(0.5), "deep": tpu.Adagrad(0.1)}
    configs = {
        name: tpu.TableConfig(
            capacity,
            dim,
            combiner="sum",
            name=name,
            optimizer=optimizers[name],
            initializer=initializer or tf.random_uniform_initializer(-1.0, 1.0),
        )
        for name, dim in DIMS.items()
    }

    def vocabulary_settings():
        return tlm.vocabulary.OpenVocabulary(
            capacity, on_evict=on_evict, **policy
        )

    one = tlm.TPUEmbedding(
        {name: tpu.FeatureConfig(table) for name, table in configs.items()},
        None,
        vocabularies={
            name: owner if shared and name != owner else vocabulary_settings()
            for name in DIMS
        },
        partitioner=FixedShardsPartitioner(num_shards),
        **(arguments or {}),
    )
    one.build()
    return one, configs


def train(one, wide, deep, *, scale=0.5, shift=0.125):
    """Runs a step, and returns the activations."""
    one.enqueue({"wide": tf.constant(wide), "deep": tf.constant(deep)})
    found = one.dequeue()
    one.apply_gradients(
        {name: value * scale + shift for name, value in found.items()}
    )
    return {name: value.numpy() for name, value in found.items()}


def keys_of(rng, size=40, most=300):
    """Returns random keys."""
    return rng.zipf(1.3, size) % most * 1_000_003 - 5


def check_same(found, expected):
    """Checks that dicts of arrays are equal."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def check_occurrences(one):
    """Checks how often an embedding counts a key that both tables look up.

    Args:
      one: An embedding without keys that admits a key after three lookups.
    """
    words = one.vocabularies["deep"]
    train(one, [5, 5, 7, 7, 7], [5, 5, 7])
    assert words.contains([5, 7]).numpy().tolist() == [False, True]
    assert words.stats()["num_lookups"] == 5
    train(one, [5], [5])
    assert bool(words.contains(5))


def check_full_vocabulary(one, contents):
    """Checks that a step changes no table if the vocabulary is full.

    Args:
      one: An embedding without keys that has 8 rows and raises errors.
      contents: Function that returns all values of an embedding.
    """
    train(one, np.arange(8), np.arange(8))
    before = contents(one)
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=r"Key 100 has no free row.*\(table 'deep'\)",
    ):
        train(one, [100], [3])
    after = contents(one)
    assert after.keys() == before.keys()
    for table, value in before.items():
        np.testing.assert_equal(after[table], value, table)
