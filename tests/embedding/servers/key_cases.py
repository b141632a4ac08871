"""Creates and trains embeddings with open vocabularies."""

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.embedding import tables

tpu = tf.tpu.experimental.embedding

POLICIES = {
    "lru": {"evict": "lru"},
    "lfu": {"evict": "lfu", "half_life_steps": 2},
    "ttl": {"evict": "none", "ttl_steps": 2},
    "count": {"admission": "count", "min_count": 2},
    "probability": {"admission": "probability", "probability": 0.5},
    "unknown_row": {"evict": "none", "oov_embedding": "trainable"},
    "unknown_row_by_count": {
        "admission": "count",
        "min_count": 3,
        "oov_embedding": "trainable",
    },
}


def feature_config(capacity):
    """Returns features of the open table `words` and the closed table `ads`."""
    words = tpu.TableConfig(
        capacity,
        3,
        combiner="mean",
        name="words",
        initializer=tf.random_uniform_initializer(-1.0, 1.0),
    )
    ads = tpu.TableConfig(
        9,
        2,
        combiner="sum",
        name="ads",
        initializer=tf.constant_initializer(0.25),
    )
    return {
        "bag": tpu.FeatureConfig(words, name="bag"),
        "text": tpu.FeatureConfig(words, max_sequence_length=2, name="text"),
        "ads": tpu.FeatureConfig(ads, name="ads"),
    }


def embedding(policy, optimizer=None, *, capacity=64, **options):
    """Returns a built embedding with one open and one closed table."""
    built = tlm.TPUEmbedding(
        feature_config(capacity),
        optimizer or tpu.Adagrad(0.3),
        rounding_seed=5,
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(capacity, **policy)
        },
        **options,
    )
    built.build()
    return built


def batch(step, *, most=120, num_samples=6, strings=False):
    random = np.random.default_rng(step)

    def ragged(below):
        sizes = random.integers(0, 6, num_samples)
        return tf.RaggedTensor.from_row_lengths(
            random.integers(0, below, sizes.sum()), sizes
        )

    def keys():
        found = ragged(most)
        # A few keys are frequent, and most keys are rare.
        values = found.values**2 // most * 1_000_003 - 7
        return found.with_values(
            tf.strings.as_string(values) if strings else values
        )

    bag = keys()
    weights = bag.with_values(
        tf.constant(random.uniform(0.5, 2, bag.values.shape[0]), tf.float32)
    )
    return (
        {"bag": bag, "text": keys(), "ads": ragged(9)},
        {"bag": weights, "text": None, "ads": None},
    )


def gradients(activations):
    """Returns gradients that depend on the activations."""
    return {name: tf.sin(7 * one) + 0.1 for name, one in activations.items()}


def step_of(one):
    """Returns a training step in which only the feature `bag` has weights."""

    @tf.function(reduce_retracing=True)
    def step(ids, weights):
        one.enqueue(ids, {"bag": weights, "text": None, "ads": None})
        activations = one.dequeue()
        one.apply_gradients(gradients(activations))
        return activations

    return step


def train(one, step, packed=False, **options):
    """Runs a training step eagerly and returns the activations."""
    inputs = batch(step, **options)
    one.enqueue(*(tlm.pack(*inputs) if packed else inputs))
    activations = one.dequeue()
    one.apply_gradients(gradients(activations))
    return activations


def values(one):
    """Returns all variables of a checkpoint as bytes, by table and name."""
    found = {}
    for table, by_name in one._variables.items():
        for name, variable in by_name.items():
            full = np.asarray(variable.numpy())
            if name == tables.PARAMETERS and table == "words":
                # Rows without a key are not compared, because their values are
                # arbitrary.
                has_key = one._variables[table]["vocabulary_keys"].numpy()
                keep = np.append(has_key.ravel() != -(2**63), True)
                full = full[keep]
            found[f"{table}/{name}"] = full.tobytes()
    return found


def differences(first, second):
    """Returns the names of variables that are not bitwise equal."""
    first_values, second_values = values(first), values(second)
    assert set(first_values) == set(second_values)
    return [
        name for name, one in first_values.items() if one != second_values[name]
    ]
