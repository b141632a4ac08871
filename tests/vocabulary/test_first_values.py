"""Tests the distributions of the initializers of all frameworks."""

import keras
import pytest
import tensorflow as tf

from tf_layoutmap.vocabulary import first_values


def read(initializer, **arguments):
    return first_values.read_initializer(
        initializer, **{"seed": 0, "table": "words", **arguments}
    )


@pytest.mark.parametrize(
    ("initializer", "kind", "limits"),
    [
        (tf.initializers.RandomUniform(-0.5, 0.25), "uniform", (-0.5, 0.25)),
        (tf.random_normal_initializer(1.0, 0.5), "normal", (1.0, 0.5)),
        (
            tf.compat.v1.truncated_normal_initializer(0.0, 2.0),
            "truncated_normal",
            (0.0, 2.0),
        ),
        (
            keras.initializers.TruncatedNormal(0.0, 0.1),
            "truncated_normal",
            (0.0, 0.1),
        ),
        (keras.initializers.Constant(3), "constant", (3.0, 0.0)),
        (tf.ones_initializer(), "constant", (1.0, 0.0)),
        (tf.zeros, "constant", (0.0, 0.0)),
        (tf.ones, "constant", (1.0, 0.0)),
        (tf.constant_initializer(0.5), "constant", (0.5, 0.0)),
        (
            tf.tpu.experimental.embedding.TableConfig(9, 4).initializer,
            "truncated_normal",
            (0.0, 0.5),
        ),
    ],
)
def test_the_distribution_of_an_initializer_is_recognized(
    initializer, kind, limits
):
    found = read(initializer)
    assert (found.kind, found.limits) == (kind, limits)
    assert -(2**63) <= found.seed < 2**63


def test_seeds_depend_on_the_vocabulary_and_the_table():
    seeds = [
        read(tf.zeros, seed=seed, table=table).seed
        for seed in (0, 1)
        for table in ("words", "ads")
    ]
    assert len(set(seeds)) == 4
    assert read(tf.zeros).seed == seeds[0]


@pytest.mark.parametrize(
    "initializer",
    [
        lambda shape: tf.zeros(shape),
        tf.initializers.GlorotUniform(),
        tf.constant_initializer([1.0, 2.0]),
        "zeros",
        keras.initializers.RandomNormal(0.0, float("inf")),
    ],
)
def test_initializers_that_depend_on_the_full_table_raise(initializer):
    with pytest.raises(ValueError, match="of a table with an open vocabulary"):
        read(initializer)


def test_values_outside_the_16_bit_range_raise():
    with pytest.raises(ValueError, match="at most 65504.0 in magnitude"):
        read(tf.constant_initializer(1e5), dtype="float16")
    read(tf.constant_initializer(1e5), dtype="bfloat16")
