"""Initial values are bitwise identical to the values on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests import initial_values
from tests.layout import meshes

CASES = {f"{c.library} {c.name}": c for c in initial_values.cases()}
MESHES = {
    "2x2": {"a": 2, "b": 2},
    "4x1": {"a": 4, "b": 1},
    "1x2": {"a": 1, "b": 2},
}


# Each case compares 8 shapes and dtypes with 3 layouts on 3 meshes.
@pytest.mark.covering(1, 10)
@pytest.mark.parametrize("name", CASES)
def test_values_on_a_mesh_match_one_device(name):
    found = initial_values.on_meshes(
        CASES[name],
        {one: meshes.mesh_of(**sizes) for one, sizes in MESHES.items()},
    )
    assert found == []


@pytest.mark.covering(1, 10)
@pytest.mark.parametrize("name", CASES)
def test_values_in_shards_match_one_device(name):
    assert initial_values.in_shards(CASES[name]) == []


@pytest.mark.exhaustive
def test_the_page_has_the_results_of_this_module():
    text = initial_values.PAGE.read_text()
    table = text.split(initial_values.START)[1].split(initial_values.END)[0]
    assert table == initial_values.to_markdown()


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("library", initial_values.LIBRARIES)
def test_global_seeds_are_used_as_on_one_device(library, num_shards):
    kinds = initial_values.LIBRARIES[library]

    def values(make):
        keras.utils.set_random_seed(11)
        tf_keras.utils.set_random_seed(11)
        # Two calls show that the random state advances in the same way.
        return [make(kinds.RandomNormal()) for _ in range(2)]

    wanted = values(lambda one: one((10, 3), dtype="float32").numpy())
    found = values(
        lambda one: tlm.ShardedVariable.create(
            one, (10, 3), num_shards=num_shards
        ).numpy()
    )
    np.testing.assert_array_equal(found, wanted)


def test_a_seed_generator_advances_once_per_table():
    generator = keras.random.SeedGenerator(5)
    tlm.ShardedVariable.create(
        keras.initializers.RandomUniform(seed=generator), (8, 2), num_shards=4
    )
    alone = keras.random.SeedGenerator(5)
    keras.initializers.RandomUniform(seed=alone)((8, 2))
    np.testing.assert_array_equal(generator.state.numpy(), alone.state.numpy())


def test_a_subclass_with_other_values_is_called_once_for_the_full_table():
    class Shifted(keras.initializers.RandomUniform):
        calls = 0

        def __call__(self, shape, dtype=None):
            type(self).calls += 1
            return super().__call__(shape, dtype) + 10

    table = tlm.ShardedVariable.create(Shifted(seed=1), (9, 2), num_shards=3)
    assert Shifted.calls == 1
    np.testing.assert_array_equal(table.numpy(), Shifted(seed=1)((9, 2)))


def test_large_counters_carry_into_the_next_word():
    # The generator's counter is near the end of its first 64-bit word.
    from tf_layoutmap._core import random_tensors

    values = random_tensors.RandomTensor(
        (64, 8),
        "truncated_normal",
        tf.constant([2**64 - 5, 3, 9], tf.uint64),
        tf.constant(1.0),
        tf.constant(0.0),
    )
    wanted = tf.raw_ops.StatelessTruncatedNormalV2(
        shape=(64, 8),
        key=tf.constant([9], tf.uint64),
        counter=tf.constant([2**64 - 5, 3], tf.uint64),
        alg=1,
        dtype=tf.float32,
    )
    for block in (
        values.block((32, 0), (32, 8)),
        values._block_by_tensorflow((32, 0), (32, 8), 1),
    ):
        np.testing.assert_array_equal(block, wanted[32:])
