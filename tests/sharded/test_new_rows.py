"""Initial values of large tables match TensorFlow's initializers."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import peak_memory
from tf_layoutmap.sharded import new_rows

tpu = tf.tpu.experimental.embedding
DEFAULT = type(tpu.TableConfig(4, 2).initializer)

INITIALIZERS = {
    "uniform": lambda seed: tf.random_uniform_initializer(-0.3, 0.7, seed),
    "uniform from 0": lambda seed: tf.random_uniform_initializer(0, 5, seed),
    "of 0 and 1": lambda seed: tf.random_uniform_initializer(0, 1, seed),
    "normal": lambda seed: tf.random_normal_initializer(0.0, 0.3, seed),
    "truncated": lambda seed: DEFAULT(1.5, 0.3, seed),
}
CONSTANTS = [
    tf.zeros_initializer(),
    tf.ones_initializer(),
    tf.constant_initializer(2.5),
    tf.constant_initializer(3),
]


@pytest.mark.parametrize("seed", [None, 7, 0])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initial_values_are_bitwise_identical(name, seed, monkeypatch):
    monkeypatch.setattr(new_rows, "_LEAST_SIZE", 1)
    drawn = []
    for ours in (False, True):
        tf.random.set_seed(3)
        initializer = INITIALIZERS[name](seed)
        # Initializers without a seed draw different values in each call.
        # `set_seed` therefore precedes each of the two lists.
        drawn.append(
            [
                new_rows.draw(initializer, (1001, 3), tf.float32)
                if ours
                else initializer((1001, 3), dtype=tf.float32)
                for _ in range(3)
            ]
        )
    for one, other in zip(*drawn, strict=True):
        np.testing.assert_array_equal(
            one.numpy().view(np.int32), other.numpy().view(np.int32)
        )
    assert (seed is None) == bool(np.any(drawn[1][0] != drawn[1][1]))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_other_dtypes_are_bitwise_identical(name, dtype, monkeypatch):
    monkeypatch.setattr(new_rows, "_LEAST_SIZE", 1)
    shape = (401, 3)
    initializer = INITIALIZERS[name](4)
    np.testing.assert_array_equal(
        tf.cast(new_rows.draw(initializer, shape, dtype), tf.float64),
        tf.cast(initializer(shape, dtype=dtype), tf.float64),
    )


@pytest.mark.parametrize("initializer", CONSTANTS)
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32])
def test_constant_initializers_match(initializer, dtype, monkeypatch):
    monkeypatch.setattr(new_rows, "_LEAST_SIZE", 1)
    drawn = new_rows.draw(initializer, (5, 3), dtype)
    assert drawn.dtype == dtype
    np.testing.assert_array_equal(drawn, initializer((5, 3), dtype=dtype))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_initial_values_match_for_any_number_of_shards(num_shards, monkeypatch):
    def rows():
        tf.random.set_seed(5)
        embedding = tlm.TPUEmbedding(
            tpu.FeatureConfig(
                tpu.TableConfig(
                    50, 4, tf.random_uniform_initializer(seed=2), name="t"
                )
            ),
            tpu.SGD(0.1),
            partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        )
        embedding.build()
        return np.asarray(next(iter(embedding.embedding_tables.values())))

    wanted = rows()
    monkeypatch.setattr(new_rows, "_LEAST_SIZE", 1)
    np.testing.assert_array_equal(rows(), wanted)


def test_other_initializers_are_called_directly(monkeypatch):
    monkeypatch.setattr(new_rows, "_LEAST_SIZE", 1)
    for initializer in (
        tf.constant_initializer([[1.0, 2.0]] * 4),
        tf.initializers.Identity(),
        lambda shape: tf.ones(shape),
    ):
        assert new_rows.draw(initializer, (4, 2), tf.float32) is None
    assert new_rows.draw(tf.ones_initializer(), (4, 2), tf.int32) is None
    uniform = tf.random_uniform_initializer()
    # The server may run TensorFlow's own binary, which does not have this
    # package's ops.
    with tf.device("/job:ps/replica:0/task:1/device:CPU:0"):
        assert new_rows.draw(uniform, (4, 2), tf.float32) is None
    traced = tf.function(
        lambda: tf.constant(new_rows.draw(uniform, (4, 2), tf.float32) is None)
    )
    assert traced()
    monkeypatch.undo()
    assert new_rows.draw(uniform, (4, 2), tf.float32) is None


@pytest.mark.skipif(
    not peak_memory.is_available(), reason="counts memory as Linux does"
)
def test_drawing_allocates_memory_for_one_table():
    shape = (1 << 18, 64)  # 64 MiB
    extra = peak_memory.extra_bytes(
        lambda: new_rows.draw(
            tf.random_uniform_initializer(), shape, tf.float32
        )
    )
    assert extra < 1.5 * 4 * shape[0] * shape[1]


@pytest.mark.parametrize("least_size", [1, 1 << 22])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-(2**63), tf.int64), (5, tf.int64), (0, tf.int32), (-7, tf.int32)],
)
def test_integer_fills_match_tensorflow(value, dtype, least_size, monkeypatch):
    monkeypatch.setattr(new_rows, "_LEAST_SIZE", least_size)
    found = new_rows.fill((101, 8), value, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.full([101, 8], value))
    # Updating a variable that was initialized with the result must not change
    # the result.
    variable = tf.Variable(found)
    variable[3, 1].assign(9)
    assert variable.numpy()[3, 1] == 9 and found.numpy()[3, 1] == value
