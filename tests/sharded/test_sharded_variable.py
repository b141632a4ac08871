"""A table with many shards is used like one `tf.Variable`."""

import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.sharded.tables import make_table
from tf_layoutmap.sharded import ShardedVariable


def test_attributes_describe_the_unsharded_table(values):
    table = make_table(values, [4, 6], trainable=False)
    assert table.shape == (10, 2) and table.dtype == tf.float32
    assert table.name == "emb" and not table.trainable
    assert table.partition.offsets == (0, 4, 10)
    assert table.device == table.variables[0].device
    assert len(table.devices) == 2
    assert [shard.shape[0] for shard in table] == [4, 6]
    assert (
        "'emb' shape=(10, 2) dtype=float32 axis=0 "
        "placement='offsets' sizes=(4, 6)" in repr(table)
    )


@pytest.mark.parametrize(
    "options, sizes",
    [
        ({}, [10]),
        ({"num_shards": 4}, [3, 3, 2, 2]),
        ({"num_shards": 99}, [1] * 10),
        ({"partitioner": tlm.partitioners.MaxSizePartitioner(40)}, [5, 5]),
    ],
)
def test_create_shards_an_array(values, options, sizes):
    table = ShardedVariable.create(values, name="ads", **options)
    assert [shard.shape[0] for shard in table] == sizes
    assert [shard.name for shard in table] == [
        f"ads/part_{i}:0" for i in range(len(sizes))
    ]
    np.testing.assert_array_equal(table.numpy(), values)


@pytest.mark.parametrize(
    "dtype",
    [
        tf.float16,
        tf.bfloat16,
        tf.float64,
        tf.int8,
        tf.int64,
        tf.bool,
        tf.complex64,
    ],
)
def test_every_variable_dtype_round_trips(dtype):
    full = tf.cast(tf.reshape(tf.range(12), [6, 2]) % 5, dtype)
    table = ShardedVariable.create(full, num_shards=4)
    assert table.dtype == dtype
    for found, wanted in [
        (table.sparse_read([5, 0]), [5, 0]),
        (table[::-2], slice(None, None, -2)),
    ]:
        np.testing.assert_array_equal(found, full.numpy()[wanted])
    np.testing.assert_array_equal(table.numpy(), full)


def test_strings_are_looked_up_and_updated():
    table = ShardedVariable.create(
        np.array(["a", "b", "c", "d", "e"]), num_shards=2
    )
    table.scatter_update(tf.IndexedSlices(["x", "y"], [4, 0]))
    assert table.sparse_read([4, 3, 0]).numpy().tolist() == [b"x", b"d", b"y"]
    assert table.numpy().tolist() == [b"y", b"b", b"c", b"d", b"x"]


@pytest.mark.parametrize("placement", ["div", "mod"])
@pytest.mark.parametrize("takes", ["dtype", "shape", "any keyword"])
def test_an_initializer_without_shard_support_matches_one_table(
    takes, placement
):
    rows = np.arange(10.0).reshape(5, 2)
    shapes = []

    def initializer(shape, dtype=tf.float64):
        shapes.append(tuple(shape))
        return tf.constant(rows[: shape[0]], dtype)

    table = ShardedVariable.create(
        {
            "dtype": initializer,
            "shape": lambda shape: initializer(shape),
            "any keyword": lambda shape, **unused: initializer(shape),
        }[takes],
        [5, 2],
        tf.float64,
        num_shards=2,
        placement=placement,
    )
    np.testing.assert_array_equal(table, rows)
    assert set(shapes) == {(5, 2)}
    assert takes == "any keyword" or len(shapes) == 1


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.GlorotUniform(seed=1),
        keras.initializers.Orthogonal(seed=1),
        tf.keras.initializers.VarianceScaling(seed=1),
        tf.initializers.Orthogonal(seed=1),
        tf.initializers.Identity(),
        keras.initializers.Constant(np.arange(18.0).reshape(9, 2)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_shape_dependent_initializers_receive_the_full_shape(initializer):
    np.testing.assert_array_equal(
        ShardedVariable.create(initializer, [9, 2], num_shards=3),
        initializer((9, 2), dtype="float32"),
    )


def test_each_random_number_is_used_once():
    numbers = np.random.default_rng(3)
    table = ShardedVariable.create(
        lambda shape: numbers.normal(size=shape), [6, 2], num_shards=3
    )
    np.testing.assert_array_equal(
        table, np.random.default_rng(3).normal(size=(6, 2)).astype("float32")
    )


def test_a_callable_with_shard_arguments_receives_its_shard():
    def by_info(shard_info):
        return tf.fill(shard_info.shape, float(shard_info.offset[0]))

    def by_partition(shape, dtype, partition_shape, partition_offset):
        assert tuple(shape) == (5, 2)
        return tf.fill(partition_shape, tf.cast(partition_offset[0], dtype))

    for initializer in (by_info, by_partition):
        table = ShardedVariable.create(initializer, [5, 2], num_shards=2)
        assert table.numpy()[:, 0].tolist() == [0, 0, 0, 3, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.keras.initializers.RandomUniform(seed=7),
        lambda: tf.keras.initializers.RandomNormal(),
        lambda: tf.random_normal_initializer(seed=7),
        lambda: tf.random_uniform_initializer(),
    ],
    ids=["keras-seeded", "keras", "tf-seeded", "tf"],
)
def test_shards_do_not_repeat_random_rows(make):
    rows = ShardedVariable.create(make(), [64, 3], num_shards=4).numpy()
    assert len(np.unique(rows[:, 0])) == 64


def test_a_seeded_initializer_is_reproducible():
    def make():
        return ShardedVariable.create(
            tf.keras.initializers.RandomNormal(seed=5), [9, 2], num_shards=3
        ).numpy()

    np.testing.assert_array_equal(make(), make())


def test_one_shard_is_initialized_like_one_variable():
    table = ShardedVariable.create(
        tf.keras.initializers.GlorotUniform(seed=5), [9, 2]
    )
    np.testing.assert_array_equal(
        table.numpy(), tf.keras.initializers.GlorotUniform(seed=5)((9, 2))
    )


def test_operators_and_conversions_use_the_full_table(values, sizes):
    table = make_table(values, sizes)
    np.testing.assert_array_equal(table * 2 - 1, values * 2 - 1)
    np.testing.assert_array_equal(1 - table, 1 - values)
    np.testing.assert_array_equal(values + table, values + values)
    np.testing.assert_array_equal(table == values, np.ones((10, 2), bool))
    np.testing.assert_array_equal(
        tf.matmul(table, [[1.0], [2.0]]), values @ [[1], [2]]
    )
    np.testing.assert_array_equal(np.asarray(table), values)
    assert np.asarray(table, np.float64).dtype == np.float64
    with tf.name_scope("my_embedding_lookup"):
        np.testing.assert_array_equal(
            tf.function(lambda: tf.convert_to_tensor(table))(), values
        )


def test_a_module_tracks_the_shards(values):
    module = tf.Module()
    module.table = make_table(values, [4, 6])
    assert [v.ref() for v in module.trainable_variables] == [
        v.ref() for v in module.table.variables
    ]


def test_a_function_accepts_tables_as_arguments(values):
    traces = []

    @tf.function
    def step(table, ids):
        traces.append(table.name)
        table.scatter_add(tf.IndexedSlices(tf.ones([2, 2]), ids))
        return tf.nn.embedding_lookup(table, ids)

    for sizes, num_traces in [([4, 6], 1), ([4, 6], 1), ([3, 3, 4], 2)]:
        table = make_table(values, sizes)
        np.testing.assert_array_equal(
            step(table, tf.constant([9, 0])), values[[9, 0]] + 1
        )
        np.testing.assert_array_equal(
            table.numpy() - values,
            np.isin(np.arange(10), [0, 9])[:, None] * np.ones([1, 2]),
        )
        assert len(traces) == num_traces
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="Id 10 .* table 'emb'"
    ):
        step(table, tf.constant([9, 10]))


def test_a_function_returns_a_table_as_its_value(values):
    table = make_table(values, [4, 6])
    step = tf.function(
        lambda: table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [9]))
    )
    found = step()
    assert isinstance(found, tf.Tensor)
    np.testing.assert_array_equal(found[9], values[9] + 1)


def test_a_deep_copy_is_a_separate_table(values):
    import copy

    table = make_table(values, [4, 6])
    ref = copy.deepcopy(table)
    ref.assign_add(np.ones((10, 2)))
    np.testing.assert_array_equal(table.numpy(), values)
    np.testing.assert_array_equal(ref.numpy(), values + 1)


@pytest.mark.parametrize(
    "variables, error, words",
    [
        ([], TypeError, "non-empty list of"),
        (lambda: tf.Variable([1.0]), TypeError, "non-empty list of"),
        (lambda: [tf.constant([1.0])], TypeError, "non-empty list of"),
        (
            lambda: [tf.Variable([1.0]), tf.Variable([1])],
            ValueError,
            "same dtype",
        ),
        (
            lambda: [tf.Variable([[1.0]]), tf.Variable([[1.0, 2.0]])],
            ValueError,
            "same shapes except for the first",
        ),
        (lambda: [tf.Variable(1.0)], ValueError, "at least one axis"),
        (
            lambda: [tf.Variable([1.0]), tf.Variable([1.0], trainable=False)],
            ValueError,
            "have the same `trainable`",
        ),
        (lambda: [tf.Variable([1.0])] * 2, ValueError, "twice"),
    ],
)
def test_variables_that_do_not_form_a_table_raise(variables, error, words):
    with pytest.raises(error, match=words):
        ShardedVariable(variables() if callable(variables) else variables)


@pytest.mark.parametrize(
    "value, described",
    [
        (
            tf.zeros([99, 2]),
            r"EagerTensor of shape \(99, 2\) and dtype float32",
        ),
        (np.zeros([99, 2]), r"ndarray of shape \(99, 2\) and dtype float64"),
        (
            tf.Variable([[1.0]]),
            r"one tf.Variable of shape \(1, 1\), not in a list",
        ),
    ],
)
def test_a_value_in_place_of_variables_raises_and_suggests_create(
    value, described
):
    with pytest.raises(
        TypeError,
        match=(
            f"non-empty list of .* Received: {described} .*"
            "ShardedVariable.create"
        ),
    ):
        ShardedVariable(value)


@pytest.mark.parametrize(
    "options", [{"shape": [4, 2]}, {"num_shards": 2}, {"partitioner": None}]
)
def test_arguments_of_create_raise_and_suggest_create(options):
    with pytest.raises(
        TypeError,
        match=(
            f"takes existing variables as shards.*Received: {[*options][0]}. "
            "Use ShardedVariable.create"
        ),
    ):
        ShardedVariable(tf.zeros([4, 2]), **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        ShardedVariable([tf.Variable([1.0])], colour=1)
    assert list(inspect.signature(ShardedVariable).parameters) == [
        "variables",
        "name",
        "axis",
        "placement",
    ]


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(initial_value=tf.zeros), ValueError, "`shape` must be given"),
        (
            dict(initial_value=tf.zeros, shape=[]),
            ValueError,
            "at least one axis",
        ),
        (dict(initial_value=tf.zeros, shape=[None, 2]), ValueError, "fully"),
        (
            dict(initial_value=np.zeros((4, 2)), shape=[5, 2]),
            ValueError,
            "the shape of `initial_value`",
        ),
        (dict(initial_value=lambda: 0, shape=[4]), TypeError, "take a shape"),
        (
            dict(initial_value=lambda shape: tf.zeros([1]), shape=[4]),
            ValueError,
            r"a value of the requested shape, \(4,\).*\(1,\)",
        ),
        (
            dict(
                initial_value=np.zeros(4),
                partitioner=tlm.partitioners.FixedShardsPartitioner(2),
            ),
            ValueError,
            "not both",
        ),
        (dict(initial_value=np.zeros(4), num_shards=0), ValueError, "positive"),
        (
            dict(initial_value="uniform", shape=[4]),
            TypeError,
            r"such as tf.keras.initializers.get\('uniform'\)",
        ),
        (dict(initial_value=np.zeros(4), name=3), TypeError, "`name`"),
    ],
)
def test_create_raises_for_invalid_options(options, error, words):
    with pytest.raises(error, match=words):
        ShardedVariable.create(**{"num_shards": 2, **options})


def test_mirrored_variables_raise(values):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with (
        strategy.scope(),
        pytest.raises(
            TypeError, match=r"copies on several replicas.*emb/part_0.*'emb'"
        ),
    ):
        ShardedVariable.create(values, num_shards=2, name="emb")


def test_create_raises_for_an_unsupported_axis(values):
    with pytest.raises(ValueError, match=r"axis 0 only.*\[1, 2\]"):
        ShardedVariable.create(values, partitioner=lambda shape, dtype: [1, 2])
    with pytest.raises(TypeError, match="must return a list.*Received: 3 "):
        ShardedVariable.create(values, partitioner=lambda shape, dtype: 3)


def test_only_a_table_of_one_element_converts_to_bool(values):
    for one in (0.0, 3.0):
        table = ShardedVariable.create([[one]])
        assert bool(table) == bool(one) and len(table) == 1
    for several in (make_table(values, [4, 6]), make_table(values[:0], [0])):
        with pytest.raises(ValueError, match="one element.*table 'emb'"):
            bool(several)


@pytest.mark.parametrize("verb", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("shape", [(9, 2), (11, 2), (10,), (10, 3)])
def test_assigning_a_mismatched_shape_raises_and_writes_nothing(
    values, verb, shape
):
    table = make_table(values, [4, 3, 3])
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"table 'emb' must have shape (10, 2). Received: shape {shape}"
        ),
    ):
        getattr(table, verb)(np.ones(shape, np.float32))
    unknown = tf.function(
        lambda value: getattr(table, verb)(value) is None,
        input_signature=[tf.TensorSpec(None, tf.float32)],
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"table \\'emb"):
        unknown(np.ones(shape, np.float32))
    np.testing.assert_array_equal(table.numpy(), values)


def test_numpy_in_a_function_raises(values):
    table = make_table(values, [10])
    with pytest.raises(NotImplementedError, match="outside of tf.function"):
        tf.function(table.numpy)()
    with pytest.raises(ValueError, match="copy=False"):
        table.__array__(copy=False)


def test_conversion_to_another_dtype_raises(values):
    with pytest.raises(ValueError, match="must be float32.*float64"):
        tf.convert_to_tensor(make_table(values, [10]), tf.float64)


def test_a_table_without_devices_is_on_the_callers_device():
    with tf.device("CPU:1"):
        table = ShardedVariable.create(
            tf.zeros_initializer(), [5, 2], num_shards=2
        )
        from_array = ShardedVariable.create(np.zeros([5, 2], np.float32))
    assert [one[-5:] for one in table.devices] == ["CPU:1", "CPU:1"]
    assert [one[-5:] for one in from_array.devices] == ["CPU:1"]
