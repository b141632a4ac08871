"""A `tf.variable_creator_scope` in user code can shard the tables."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import tpu_embedding_v2

import tf_layoutmap as tlm
from tests import strategies
from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.tpu import tables

tpu = tf.tpu.experimental.embedding

NUM_ROWS = 7
ROWS = (
    np.random.default_rng(1).standard_normal((NUM_ROWS, 4)).astype(np.float32)
)
HOST = "/device:CPU:0"


class Part(NamedTuple):
    """Shard shape and offset, as passed to shard-aware initializers."""

    shape: tuple
    offset: tuple


def aware(shape, dtype=tf.float32, shard_info=None):
    """Initializer that takes the full shape and the requested shard."""
    assert tuple(shape) == ROWS.shape
    if shard_info is None:
        return tf.constant(ROWS, dtype)
    (first,) = shard_info.offset[:1]
    assert tuple(shard_info.offset[1:]) == (0,)
    return tf.constant(ROWS[first : first + shard_info.shape[0]], dtype)


def strict(shape, dtype=tf.float32, *, shard_info):
    """Initializer that requires the argument `shard_info`."""
    return aware(shape, dtype, shard_info)


class TensorFlowInitializer:
    """Initializer that accepts partition_shape and partition_offset."""

    def __call__(self, shape, dtype=None, **parts):
        first = parts.get("partition_offset", (0, 0))[0]
        num_rows = parts.get("partition_shape", shape)[0]
        return tf.constant(ROWS[first : first + num_rows], dtype)


def sharding_creator(num_shards, result=list, device=HOST):
    """Returns a creator that shards variables, like user code for TPUs."""

    def create(next_creator, **keywords):
        value, (num_rows, *rest) = keywords["initial_value"], keywords["shape"]
        shards, first = [], 0
        for shard in range(num_shards):
            size = num_rows // num_shards + (shard < num_rows % num_shards)
            if (
                "shard_info" in value.func.__code__.co_varnames
                if hasattr(value.func, "__code__")
                else False
            ):
                part = functools.partial(
                    value, shard_info=Part((size, *rest), (first, 0))
                )
            else:
                part = functools.partial(
                    value.func, (size, *rest), dtype=keywords["dtype"]
                )
            first += size
            with tf.device(device):
                shards.append(
                    next_creator(
                        **{
                            **keywords,
                            "skip_mirrored_creator": True,
                            "name": f"{keywords['name']}_{shard}",
                            "shape": (size, *rest),
                            "initial_value": part,
                        }
                    )
                )
        return result(shards)

    return create


class Shards:
    def __init__(self, variables):
        self.variables = variables


def make(initializer=aware, **options):
    table = tpu.TableConfig(
        NUM_ROWS, 4, initializer, tpu.Adagrad(0.5, 0.25), "sum", "words"
    )
    return tlm.TPUEmbedding({"x": tpu.FeatureConfig(table)}, None, **options)


def rows_and_slot(embedding):
    [rows] = embedding.embedding_tables.values()
    [slots] = embedding.slot_variables.values()
    return rows, slots["accumulators"]


def trained(embedding, num_replicas=1, strategy=None):
    ids = np.array([[0, 6], [3, 3], [2, 6], [5, 1]])
    upstream = np.random.default_rng(2).standard_normal((4, 4))

    def step(ids, upstream):
        embedding.enqueue({"x": ids})
        embedding.dequeue()
        embedding.apply_gradients({"x": tf.cast(upstream, tf.float32)})

    if strategy is None:
        step(tf.constant(ids), upstream)
    else:

        def part(values):
            return strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(
                    np.split(values, num_replicas)[
                        context.replica_id_in_sync_group
                    ]
                )
            )

        strategy.run(tf.function(step), args=(part(ids), part(upstream)))
    return [one.numpy() for one in rows_and_slot(embedding)]


CREATORS = {
    "own program's": lambda: sharding_creator(3, Shards),
    "ours": lambda: tables.sharded_variable_creator([HOST] * 3),
    "TensorFlow's": lambda: tpu_embedding_v2.make_sharded_variable_creator(
        [HOST] * 3
    ),
}


@pytest.mark.parametrize("creator", CREATORS)
def test_a_creator_shards_tables_and_slots(creator):
    embedding = make()
    with tf.variable_creator_scope(CREATORS[creator]()):
        embedding.build()
    rows, slot = rows_and_slot(embedding)
    for one, name in ((rows, "words"), (slot, "words/accumulators")):
        assert isinstance(one, tlm.ShardedVariable)
        assert [part.shape[0] for part in one.variables] == [3, 2, 2]
        assert [part.name for part in one.variables] == [
            f"{name}_{shard}:0" for shard in range(3)
        ]
        assert not any(part.trainable for part in one.variables)
    np.testing.assert_array_equal(rows, ROWS)
    for found, wanted in zip(trained(embedding), trained(make())):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_creator_of_a_strategy_is_not_called(num_replicas):
    strategy = strategies.mirrored(num_replicas)
    seen = []

    def watch(next_creator, **keywords):
        seen.append((keywords["name"], tuple(keywords["shape"])))
        return next_creator(**keywords)

    with strategy.scope(), tf.variable_creator_scope(watch):
        embedding = make()
        embedding.build()
    assert seen == [("words", (7, 4)), ("words/accumulators", (7, 4))]
    for one in rows_and_slot(embedding):
        assert not isinstance(one, tf.distribute.DistributedValues)
    for found, wanted in zip(
        trained(embedding, num_replicas, strategy), trained(make())
    ):
        np.testing.assert_array_equal(found, wanted)


def test_creators_are_called_per_shard_innermost_first():
    order = []

    def named(name):
        def create(next_creator, **keywords):
            order.append(f"{name} {keywords['name']}")
            return next_creator(**keywords)

        return create

    embedding = make(partitioner=tlm.partitioners.FixedShardsPartitioner(2))
    with (
        tf.variable_creator_scope(named("outer")),
        tf.variable_creator_scope(named("inner")),
    ):
        embedding.build()
    assert order[:4] == [
        "inner words/part_0",
        "outer words/part_0",
        "inner words/part_1",
        "outer words/part_1",
    ]
    np.testing.assert_array_equal(rows_and_slot(embedding)[0], ROWS)


def test_creators_around_a_function_s_first_step_are_called():
    embedding = make()
    with tf.variable_creator_scope(sharding_creator(2, Shards)):
        tf.function(lambda: embedding.enqueue({"x": tf.constant([0])}))()
    assert len(rows_and_slot(embedding)[0].variables) == 2


@pytest.mark.parametrize(
    "initializer", [aware, strict, TensorFlowInitializer()]
)
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_a_shard_aware_initializer_gives_the_same_rows(initializer, num_shards):
    embedding = make(
        initializer,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )
    np.testing.assert_array_equal(rows_and_slot(embedding)[0], ROWS)


@pytest.mark.parametrize(
    "partitioner",
    [
        tf.distribute.experimental.partitioners.FixedShardsPartitioner(3),
        tf.distribute.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=32, max_shards=3
        ),
        tf.distribute.experimental.partitioners.MaxSizePartitioner(
            max_shard_bytes=48
        ),
    ],
    ids=["fixed", "min", "max"],
)
def test_partitioners_of_tensorflow_train_equally(partitioner):
    embedding = make(partitioner=partitioner)
    assert len(rows_and_slot(embedding)[0].variables) == 3
    for found, wanted in zip(trained(embedding), trained(make())):
        np.testing.assert_array_equal(found, wanted)


def test_creators_support_16_bit_tables():
    embedding = make(table_dtypes="bfloat16")
    with tf.variable_creator_scope(sharding_creator(3, Shards)):
        embedding.build()
    rows, slot = rows_and_slot(embedding)
    assert rows.dtype == tf.bfloat16 and slot.dtype == tf.float32
    for found, wanted in zip(
        trained(embedding), trained(make(table_dtypes="bfloat16"))
    ):
        np.testing.assert_array_equal(found, wanted)


def only_rows(creator):
    def create(next_creator, **keywords):
        if "/" in keywords["name"]:
            return next_creator(**keywords)
        return creator(next_creator, **keywords)

    return create


@pytest.mark.parametrize(
    "creator, error, match",
    [
        (
            sharding_creator(3, lambda shards: shards[0]),
            ValueError,
            r"of total shape \(7, 4\).*'words'",
        ),
        (
            only_rows(sharding_creator(3, Shards)),
            ValueError,
            r"shards of \[3, 2, 2\] rows. Received: \[7\] \(table 'words'",
        ),
        (
            sharding_creator(2, Shards, device="/device:CPU:1"),
            ValueError,
            "device of the host engine.*'words'",
        ),
        (
            lambda next_creator, **keywords: "variable",
            TypeError,
            "must return a tf.Variable.*'words'",
        ),
        (
            lambda next_creator, **keywords: tf_private.ResourceVariable(
                ROWS.astype(np.float64)
            ),
            ValueError,
            r"variables of dtype float32. Received: \['float64'\] \(table "
            r"'words'",
        ),
        (
            lambda next_creator, **keywords: next_creator(
                **{**keywords, "initial_value": ROWS[:3]}
            ),
            ValueError,
            r"shape that it passes, \(7, 4\). Received: \(3, 4\)",
        ),
    ],
    ids=["a part", "slots", "device", "no variable", "dtype", "shape"],
)
def test_unsupported_variables_of_creators_raise(creator, error, match):
    embedding = make()
    with tf.variable_creator_scope(creator), pytest.raises(error, match=match):
        embedding.build()


def test_partitioner_with_a_sharding_creator_raises():
    embedding = make(partitioner=tlm.partitioners.FixedShardsPartitioner(2))
    with (
        tf.variable_creator_scope(tables.sharded_variable_creator([HOST] * 2)),
        pytest.raises(ValueError),
    ):
        embedding.build()


def table_of(initializer):
    """Creates a table on two hosts."""
    with tf.variable_creator_scope(tables.sharded_variable_creator([HOST] * 2)):
        return tf.Variable(
            functools.partial(initializer, [3, 2]), shape=[3, 2], name="words"
        )


def test_an_initializer_of_all_rows_raises_with_table_and_host():
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    with pytest.raises(
        ValueError,
        match=f"(?s)table 'words'.*2 hosts.*shape .2, 2. on host {HOST}",
    ):
        table_of(tf.constant_initializer(rows))
    # The advice of the error.
    table = table_of(lambda shape, dtype=None: tf.constant(rows))
    np.testing.assert_array_equal(tf.concat(table.variables, 0), rows)
