"""Lookups that no tape records add no keys to an open vocabulary."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
KNOWN = tf.constant([[7, 0], [13, 2**40]], tf.int64)
KEYS = tf.constant([[7, 5], [2**40, 0]], tf.int64)


def tpu_layer(num_shards=1):
    return tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(tpu.TableConfig(64, 2, combiner="sum", name="words")),
        tpu.SGD(0.5),
        partitioner=tlm.partition.FixedShardsPartitioner(num_shards),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(64)},
    )


def sharded_layer(num_shards, mask=False):
    return tlm.layers.ShardedEmbedding(
        tlm.vocabulary.OpenVocabulary(64),
        2,
        num_shards=num_shards,
        optimizer="sgd",
        mask_zero=mask,
    )


def num_keys(layer):
    (vocabulary,) = layer.embedding.vocabularies.values()
    return len(vocabulary.keys())


def apply(layer, tape, loss):
    weights = layer.trainable_variables
    keras.optimizers.SGD(1.0).apply_gradients(
        zip(tape.gradient(loss, weights), weights)
    )


def train(layer, keys=KNOWN):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(keys))
    apply(layer, tape, loss)


def test_training_true_without_a_tape_adds_no_keys():
    layer = tpu_layer()
    call = tf.function(lambda keys: layer(keys, training=True))
    layer(KEYS, training=True)
    call(KEYS)
    # A concrete function has only one trace, so `training=True` declares that a
    # tape will record its calls. Other calls of the function are not affected.
    concrete = call.get_concrete_function(KEYS)
    call(KEYS)
    assert num_keys(layer) == 0
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(concrete(KEYS))
    apply(layer, tape, loss)
    assert num_keys(layer) == 4
    call(KEYS + 1)
    assert num_keys(layer) == 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("form", ["vectorized_map", "xla"])
def test_lookups_in_other_forms_return_the_same_rows(form, num_shards, mask):
    layer = sharded_layer(num_shards, mask)
    train(layer)
    expected = layer(KEYS)
    found = (
        tf.vectorized_map(layer, KEYS)
        if form == "vectorized_map"
        else tf.function(layer, jit_compile=True)(KEYS)
    )
    np.testing.assert_array_equal(found, expected)
    assert bool(tf.reduce_any(found[1, 1] != 0)) != mask
    assert num_keys(layer) == 4 - mask


def test_a_tpu_embedding_in_vectorized_map_returns_the_same_rows():
    layer = tpu_layer(num_shards=2)
    train(layer)
    found = tf.vectorized_map(lambda keys: layer(keys[tf.newaxis])[0], KEYS)
    np.testing.assert_allclose(found, layer(KEYS), rtol=1e-6)
